"""The result of a federation: what is written is read back, and what is not its form is refused by name."""

from __future__ import annotations

import json

import pytest

from oneflare.core.files import write_json
from oneflare.errors import RunError
from oneflare.federation.result import FederationResult, change_since

MEMBER = {
    "samples": 3, "created": "2027-01-01T00:00:00+00:00", "signed": True, "upload_bytes": 9, "file": "a.safetensors",
}  # fmt: skip
CONTENT = {
    "oneflare": "0.1.0",
    "federation": {"name": "lungs", "id": "i", "fingerprint": "f"},
    "fused": "2027-01-02T00:00:00+00:00",
    "method": "flare",
    "encoder": {"name": "conv4", "width": 2},
    "classes": ["a", "b"],
    "counts_mode": "exact",
    "headline": "average",
    "fusions": {
        "average": {
            "model": "model.safetensors", "sha256": "0", "parameters": 5, "forward_passes": 1,
            "scores": {
                "accuracy": 0.5, "balanced_accuracy": 0.5, "worst_class": 0.0, "calibration_error": 0.1,
                "per_class": [1.0, None], "reliability": [{"count": 2, "confidence": 0.9, "accuracy": 0.5}],
            },
        }
    },
    "test_images": 2,
    "members": [
        {"name": "north", "counts": [3, 0], "digest": "n", **MEMBER},
        {"name": "south", "counts": [1, 2], "digest": "s", **MEMBER},
    ],
    "missing": ["east"],
    "removed": {"west": "2026-12-01T00:00:00+00:00"},
    "verdicts": [
        {
            "file": "x", "status": "refused", "member": None, "claims": "west", "reason": "no", "created": None,
            "signed": False, "digest": None,
        }
    ],
    "notes": ["n"],
    "suspects": {"north": "why"},
    "admission": {
        "images": 2, "points": 10.0, "approved": [],
        "effects": [{"member": "north", "label": "a", "images": 2, "without": 100.0, "including": 50.0}],
    },
    "change": {"since": "2027-01-01", "came": ["south"], "gone": [], "renewed": [], "lost_classes": []},
}  # fmt: skip


def kept(folder, **changes) -> FederationResult:
    write_json(folder / "result.json", CONTENT | changes)
    return FederationResult.read(folder / "result.json")


def test_what_is_read_is_written_again(tmp_path):
    result = kept(tmp_path)
    result.write(tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text()) == CONTENT
    assert result.own.scores.per_class == [1.0, None]
    assert result.verdicts[0].who == "unknown, claims to be west"


def test_files_of_before_admission_and_changes_are_read(tmp_path):
    write_json(tmp_path / "result.json", {key: CONTENT[key] for key in list(CONTENT)[:-4]})
    result = FederationResult.read(tmp_path / "result.json")
    assert (result.notes, result.suspects, result.admission, result.change) == ((), {}, None, None)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"mood": "good"}, "the field 'mood' is unknown"),
        ({"members": [{"name": "north"}]}, "the field 'members.0.samples' is missing"),
        ({"test_images": "many"}, "the field 'test_images' is wrong"),
    ],
)
def test_another_form_is_refused_by_its_field(changes, complaint, tmp_path):
    with pytest.raises(RunError) as caught:
        kept(tmp_path, **changes)
    assert complaint in str(caught.value)
    assert str(caught.value).endswith("restore it from a copy, or remove it and fuse again")


def test_the_change_since_a_fusion(tmp_path):
    north, south = CONTENT["members"]
    old = kept(tmp_path)
    new = kept(tmp_path, members=[north | {"digest": "other"}, south | {"name": "east", "counts": [5, 0]}])
    change = change_since(old, new)
    assert (change.since, change.came, change.gone) == (old.fused, ("east",), ("south",))
    assert (change.renewed, change.lost_classes) == (("north",), ("b",))
    assert change_since(None, new) is None
    withheld = kept(tmp_path, members=[north | {"counts": None}])
    assert withheld.table is None
    assert change_since(old, withheld).lost_classes == ()  # nobody can say which classes are gone
