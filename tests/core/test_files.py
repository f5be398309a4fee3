from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oneflare.core.files import load_state, read_json, remove_partial, save_state, write_bytes
from oneflare.core.seeds import derive, numpy_generator, torch_generator
from oneflare.errors import RunError

LEAVES = st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.floats(allow_nan=False) | st.text(max_size=5)
NESTS = st.recursive(
    LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@given(value=NESTS)
def test_state_round_trips(tmp_path_factory, value):
    path = tmp_path_factory.mktemp("state") / "state"
    tensor = torch.randn(3, dtype=torch.float64)
    save_state(path, {"value": value, "tensor": tensor})
    again = load_state(path)
    assert again["value"] == value
    assert torch.equal(again["tensor"], tensor)


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "file"
    write_bytes(path, b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RunError, match=r"file cannot be written \(No space left on device\); make room"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_leftovers_of_a_killed_process_are_cleared(tmp_path):
    leftover = tmp_path / "clients" / ".upload.safetensors.abc.partial"
    leftover.parent.mkdir()
    leftover.write_bytes(b"half")
    remove_partial(tmp_path)
    assert not leftover.exists()


def test_damaged_files_are_named(tmp_path):
    (tmp_path / "x.json").write_text("{")
    with pytest.raises(RunError, match=r"x\.json is not valid JSON"):
        read_json(tmp_path / "x.json")
    (tmp_path / "state").write_bytes(b"\x00" * 20)
    with pytest.raises(RunError, match="is damaged"):
        load_state(tmp_path / "state")


def test_streams_are_named_by_purpose():
    assert derive(0, "a", 1) == derive(0, "a", 1)
    assert len({derive(0, "a", 1), derive(1, "a", 1), derive(0, "b", 1), derive(0, "a", 11), derive(0, "a/1")}) >= 4
    assert torch.equal(
        torch.rand(3, generator=torch_generator(1, "x")), torch.rand(3, generator=torch_generator(1, "x"))
    )
    assert numpy_generator(1, "x").random() != numpy_generator(1, "y").random()
