"""Members that claim far larger second moments than the others, so that fusions by them hear nobody else."""

from __future__ import annotations

import pytest
import torch

from conftest import members_that_know
from oneflare.fusion.trust.sums import loud_evidence
from oneflare.upload import Upload
from oneflare.upload.evidence import FISHER, GRADIENTS, HEAD, INPUTS

LIAR = 1


@pytest.fixture(scope="module")
def members(tmp_path_factory):
    layer = {"upload.evidence": "fisher,kronecker", "fusions": ["fisher"]}
    return members_that_know(tmp_path_factory.mktemp("loud") / "run", layer)


def lying(monkeypatch, prefix: str, factor: float) -> None:
    """One member's evidence of one kind is multiplied in one layer."""
    original = Upload.evidence

    def lie(upload, asked=""):
        found = original(upload, asked)
        if upload.client == LIAR:
            name = next((name for name in found if name.startswith(prefix) and not name.endswith(HEAD)), None)
            found |= {} if name is None else {name: found[name] * factor}
        return found

    monkeypatch.setattr(Upload, "evidence", lie)


def test_honest_members_are_not_named(members):
    assert loud_evidence(members) == {}


@pytest.mark.parametrize(
    ("prefix", "factor", "words"),
    [
        (INPUTS, 1e4, "what enters its layers is"),
        (GRADIENTS, 1e8, "the squared gradients of its layers are"),
        (FISHER, 1e8, "the Fisher information of its weights is"),
    ],
)
def test_whoever_outweighs_everybody_is_named(members, monkeypatch, prefix, factor, words):
    lying(monkeypatch, prefix, factor)
    found = loud_evidence(members)
    assert list(found) == [LIAR]
    assert found[LIAR].startswith(words)
    assert found[LIAR].endswith("times as large as usual")


def test_a_layer_that_means_nothing_to_the_others_is_not_compared(members, monkeypatch):
    original = Upload.evidence

    def dead(upload, asked=""):
        found = original(upload, asked)
        return found if upload.client == LIAR else {name: torch.zeros_like(value) for name, value in found.items()}

    monkeypatch.setattr(Upload, "evidence", dead)
    assert loud_evidence(members) == {}


def test_members_that_hardly_have_gradients_do_not_make_the_others_suspect(members, monkeypatch):
    """Images of a single class leave nothing to learn; here that is so for two members of three."""
    original = Upload.evidence

    def calm(upload, asked=""):
        found = original(upload, asked)
        if upload.client != LIAR:
            found = {name: tensor if name.startswith(INPUTS) else 3e-6 * tensor for name, tensor in found.items()}
        return found

    monkeypatch.setattr(Upload, "evidence", calm)
    assert loud_evidence(members) == {}
