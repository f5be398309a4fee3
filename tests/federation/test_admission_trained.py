"""Members are checked by their effect under trained methods too, where the federation's fusion is a density ratio."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hospitals import digits, make, rows_of, tiny_charter, typed, write_pngs
from oneflare.federation.charter import FILE
from oneflare.study.lies import claiming_more, rewritten
from oneflare.upload import read_upload, seal_upload

pytestmark = pytest.mark.soak
NAMES = ("east", "north", "south", "west")
SETTINGS = {
    "method": "flare",
    "encoder": {"name": "conv4", "width": 8},
    "train": {"epochs": 12, "batch_size": 32},
    "fusions": ["density_ratio"],
}
SWAPPED = ("3", "7")


@pytest.fixture(scope="module")
def ward(tmp_path_factory) -> Path:
    """Four honest members, and mallory, who swapped two folders and claims every image seven times."""
    root = tmp_path_factory.mktemp("ward")
    train, test = digits()
    charter = tiny_charter(settings=SETTINGS)
    charter.write(root / "federation" / FILE)
    for number, name in enumerate((*NAMES, "mallory")):
        write_pngs(root / "data" / name, train, rows_of(number, 200))
        if name == "mallory":
            first, second = (root / "data" / name / label for label in SWAPPED)
            first.rename(root / "held")
            second.rename(first)
            (root / "held").rename(second)
        make(charter, root / "data" / name, root / "inbox" / f"{name}.safetensors", name)
    plain = root / "inbox" / "mallory.safetensors"
    claims = rewritten(read_upload(plain, charter.contract), root / "claims", claiming_more)
    seal_upload(claims, plain, member="mallory", created="2026-01-01T00:00:00+00:00")
    write_pngs(root / "own", test, range(300))
    return root


def test_swapped_folders_are_named_by_their_effect_on_density_ratios(ward, capsys):
    words = ["server", "fuse", str(ward / "federation"), "--uploads", str(ward / "inbox")]
    checked = [*words, "--check-images", str(ward / "own"), "--json"]
    honest = [*checked, "--remove", "mallory"]
    code, out, said = typed(capsys, *honest)
    assert code == 0, said
    content = json.loads(out.splitlines()[-1])
    assert content["admission"]["effects"] == []
    assert content["suspects"] == {}
    code, _, said = typed(capsys, *checked, "--add", str(ward / "inbox" / "mallory.safetensors"))
    named = "mallory is suspect" in said
    if code == 0:  # the fusion left mallory out by itself, so nobody costs anything
        assert named
    else:
        assert "mallory takes class '" in said
        assert "east takes" not in said
