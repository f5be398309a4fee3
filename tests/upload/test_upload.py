from __future__ import annotations

import json
import re
import struct
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oneflare.data import ImageSpec
from oneflare.errors import MemberFault, UploadError
from oneflare.nn import initial_network
from oneflare.upload import MANIFEST, Agreement, Contents, Contract, SentForm, read_upload, read_weights, write_upload
from shared import forge, load_all, parts

SPEC = {"name": "conv4", "width": 2, "dim": 8}
NETWORK = initial_network(SPEC, ImageSpec.default(1, 8), 4, seed=0)
CONTRACT = Contract.of(
    NETWORK,
    Agreement(
        federation="f" * 64,
        method="flare",
        encoder=SPEC,
        anchors={"name": "etf", "scale": 1.0, "seed": 0},
        image=ImageSpec.default(1, 8),
        classes=("a", "b", "c", "d"),
    ),
)
COUNTS = torch.tensor([3, 0, 5, 1])


def write(path, epoch=7, **form):
    write_upload(path, NETWORK, CONTRACT, Contents(client=2, counts=COUNTS, epoch=epoch), SentForm(**form))
    return path


@pytest.fixture
def file(tmp_path):
    return write(tmp_path / "upload.safetensors")


def rebuild(path, header, body):
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)


def refused(path, match):
    with pytest.raises(UploadError, match=match) as caught:
        read_upload(path, CONTRACT)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)


def test_round_trip(file):
    upload = read_upload(file, CONTRACT)
    assert (upload.client, upload.samples) == (2, 9)
    assert torch.equal(upload.prototypes, NETWORK.prototypes)
    assert torch.equal(upload.counts, COUNTS.double())
    for name, tensor in NETWORK.encoder.state_dict().items():
        assert torch.equal(upload.weights()[name], tensor)
    assert upload.fields == {"weights", "prototypes", "counts"}
    assert not list(file.parent.glob("*.partial"))


def test_same_content_same_bytes(file, tmp_path):
    assert file.read_bytes() == write(tmp_path / "again.safetensors").read_bytes()


def test_bfloat16_halves_the_weights_and_stays_close(file, tmp_path):
    small = write(tmp_path / "small.safetensors", dtype="bfloat16")
    upload = read_upload(small, CONTRACT)
    for name, tensor in NETWORK.encoder.state_dict().items():
        assert torch.allclose(upload.weights()[name].double(), tensor.double(), rtol=2**-8)
    assert torch.equal(upload.prototypes, NETWORK.prototypes)


def test_int8_quarters_the_weights_and_stays_within_half_a_step(tmp_path):
    tiny = read_upload(write(tmp_path / "tiny.safetensors", dtype="int8"), CONTRACT)
    weights = tiny.weights()
    stored = load_all(tmp_path / "tiny.safetensors")
    for name, tensor in NETWORK.encoder.state_dict().items():
        if tensor.ndim < 2:
            assert torch.equal(weights[name], tensor), name
            continue
        assert stored[f"encoder.{name}"].dtype == torch.int8
        step = tensor.flatten(1).abs().amax(1) / 127
        assert ((weights[name] - tensor).flatten(1).abs() <= step[:, None] * 0.501).all()
    assert torch.equal(tiny.prototypes, NETWORK.prototypes)


def test_int8_tensors_need_their_scales(tmp_path):
    path = write(tmp_path / "upload.safetensors", dtype="int8")
    forge(path, {"encoder.layers.0.weight#scale": None})
    refused(path, "scale is missing")
    path = write(tmp_path / "upload.safetensors", dtype="int8")
    forge(path, {"encoder.layers.0.weight#scale": torch.ones(3)})
    refused(path, "has shape")
    path = write(tmp_path / "plain.safetensors")
    forge(path, {"encoder.layers.1.weight": torch.ones(2, dtype=torch.int8)})
    refused(path, "has type 'I8'")


def test_counts_can_be_withheld_or_noised(tmp_path):
    withheld = read_upload(write(tmp_path / "a.safetensors", counts="withheld"), CONTRACT)
    assert withheld.counts is None
    assert "counts" not in withheld.fields
    assert "counts" not in load_all(tmp_path / "a.safetensors")
    noised = read_upload(write(tmp_path / "b.safetensors", counts="noised", epsilon=0.1), CONTRACT)
    assert not torch.equal(noised.counts, COUNTS.double())
    assert (noised.counts >= 0).all()
    assert noised.samples != 9


@given(position=st.floats(0, 1), bit=st.integers(0, 7))
def test_any_flipped_bit_is_noticed(tmp_path_factory, position, bit):
    path = write(tmp_path_factory.mktemp("flip") / "upload.safetensors")
    content = bytearray(path.read_bytes())
    content[min(int(position * len(content)), len(content) - 1)] ^= 1 << bit
    path.write_bytes(content)
    with pytest.raises(UploadError) as caught:
        read_upload(path, CONTRACT)
    assert "\n" not in str(caught.value)


@given(share=st.floats(0, 0.999))
def test_any_truncation_is_noticed(tmp_path_factory, share):
    path = write(tmp_path_factory.mktemp("cut") / "upload.safetensors")
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(UploadError):
        read_upload(path, CONTRACT)


def test_damage_is_named(file, tmp_path):
    refused(tmp_path / "nowhere", "no such file")
    header, body = parts(file)
    original = file.read_bytes()
    file.write_bytes(struct.pack("<Q", 1 << 60) + original[8:])
    refused(file, "header is damaged")
    rebuild(file, header, body[:-1])
    refused(file, "not a valid safetensors file")
    rebuild(file, header, bytes([body[0] ^ 1]) + body[1:])
    refused(file, "does not match its digest")
    rebuild(file, {key: value for key, value in header.items() if key != "__metadata__"}, body)
    refused(file, "no OneFlare manifest")
    file.write_bytes(original)
    with pytest.raises(UploadError, match="exceed the limit"):
        read_upload(file, CONTRACT, size_limit=100)


def test_what_was_verified_does_not_follow_the_file(file):
    """Whoever sent a file may still write to it: tensors that were handed out are copies."""
    original = file.read_bytes()
    upload = read_upload(file, CONTRACT)
    weights, again = upload.weights(), read_weights(file, upload.digest)
    expected = {name: tensor.clone() for name, tensor in weights.items()}
    with file.open("r+b") as handle:
        handle.write(bytes(len(original)))
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())
    assert all(torch.equal(again[name], tensor) for name, tensor in expected.items())
    with file.open("r+b") as handle:
        handle.truncate(100)
    assert all(torch.equal(weights[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("damage", ["overwritten", "cut", "longer", "gone"])
def test_a_file_that_changes_after_the_check_is_its_members_fault(file, damage):
    upload = read_upload(file, CONTRACT)
    content = bytearray(file.read_bytes())
    if damage == "overwritten":
        content[len(content) // 2 :] = bytes(len(content) - len(content) // 2)
    file.write_bytes(content[:-5] if damage == "cut" else content + b"12345678" if damage == "longer" else content)
    if damage == "gone":
        file.unlink()
    for use in (upload.weights, upload.content):
        with pytest.raises(MemberFault, match=re.escape(str(file))) as caught:
            use()
        assert caught.value.client == 2
        assert "\n" not in str(caught.value)
    with pytest.raises(UploadError, match=re.escape(str(file))):
        read_weights(file, upload.digest)


def test_tensors_that_overlap_or_leave_gaps_are_refused(file):
    header, body = parts(file)
    names = sorted((n for n in header if n != "__metadata__"), key=lambda n: header[n]["data_offsets"])
    alike = [(header[n]["shape"], header[n]["dtype"]) for n in names]
    same = [
        n for n, kind in zip(names, alike, strict=True) if alike.count(kind) > 1 and kind == max(alike, key=alike.count)
    ]
    header[same[1]]["data_offsets"] = header[same[0]]["data_offsets"]
    rebuild(file, header, body)
    refused(file, "does not begin where the tensor before it ends")


def test_a_model_that_refers_to_an_upload_takes_no_numbers_that_training_cannot_explain(file):
    name = next(n for n in load_all(file) if n.endswith("running_var"))
    forge(file, {name: load_all(file)[name] * 1e30})
    digest = json.loads(parts(file)[0]["__metadata__"][MANIFEST])["digest"]
    with pytest.raises(UploadError, match="beyond the plausible"):
        read_weights(file, digest)


def test_a_pickle_is_never_opened(tmp_path):
    path = tmp_path / "model.safetensors"
    torch.save({"a": torch.zeros(3)}, path)
    refused(path, "header is damaged")


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"schema": 99}, "schema 99"),
        ({"federation": "other"}, "federation differs"),
        ({"encoder_hash": "other"}, "encoder_hash differs"),
        ({"classes": ["a", "b", "c", "e"]}, "classes differs"),
        ({"anchors": {"name": "random"}}, "anchors differs"),
        ({"image": {"channels": 3}}, "image differs"),
        ({"samples": -4}, "samples is -4"),
        ({"samples": "many"}, "samples is 'many'"),
        ({"client": True}, "client is True"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(file, changes, match):
    forge(file, **changes)
    refused(file, match)


def test_a_manifest_altered_without_its_digest_is_refused(file):
    forge(file, resign=False, samples=1000)
    refused(file, "does not match its digest")


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({"prototypes": None}, "prototypes is missing"),
        ({"prototypes": torch.zeros(5, 8)}, "prototypes has shape"),
        ({"prototypes": torch.zeros(4, 8, dtype=torch.int64)}, "prototypes has type"),
        ({"prototypes": torch.full((4, 8), float("nan"))}, "prototypes has values that are not finite"),
        ({"encoder.layers.0.weight": torch.full((2, 1, 3, 3), float("inf"))}, "not finite"),
        ({"encoder.layers.1.running_var": torch.tensor([1.0, -1.0])}, "negative variance"),
        ({"counts": torch.tensor([1, -2, 3, 4])}, "counts has a negative number"),
        ({"counts": torch.ones(4)}, "counts has type"),
        ({"encoder.layers.0.weight": torch.zeros(2, 1, 3, 3, dtype=torch.float64)}, "has type 'F64'"),
        ({"../../etc/passwd": torch.zeros(1)}, "is not a field"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(file, tensors, match):
    forge(file, tensors)
    refused(file, match)


def test_weights_are_checked_again_when_they_are_read(file):
    upload = read_upload(file, CONTRACT)
    header, body = parts(file)
    rebuild(file, header, body[:-1] + bytes([body[-1] ^ 1]))
    with pytest.raises(UploadError, match="does not match its digest"):
        [read_weights(file, upload.digest), upload.weights(), read_upload(file, CONTRACT)]
    write(file, epoch=8)
    with pytest.raises(UploadError, match="is not the upload that was fused"):
        read_weights(file, upload.digest)


def test_a_new_option_that_is_off_leaves_old_uploads_readable(tiny_uploads):
    contract = tiny_uploads.contract
    newer = replace(contract, encoder=contract.encoder | {"an_option_of_the_future": None})
    assert read_upload(tiny_uploads.uploads[0].path, newer).digest == tiny_uploads.uploads[0].digest
    other = replace(contract, encoder=contract.encoder | {"an_option_of_the_future": 2})
    with pytest.raises(UploadError, match="encoder_hash differs"):
        read_upload(tiny_uploads.uploads[0].path, other)
