"""Fusing and measuring in one place, as simulation, study and coordinator use it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from oneflare.core.config import DataConfig
from oneflare.data import load
from oneflare.errors import ConfigError, UploadError
from oneflare.fusion import FUSIONS, QUIET, Fused, Fusion, Suspect, build_fusion
from oneflare.metrics import evaluate, fuse_timed, score
from oneflare.study.attacks import counts_of, network_of, overflowing
from oneflare.upload import Contents, read_upload, write_upload

TEST = load(DataConfig(test_size=40)).test
STUDENT = {
    "name": "distill_datafree", "teacher": "ensemble", "rounds": 1, "generator_steps": 1, "student_steps": 1,
    "batch_size": 4,
}  # fmt: skip


@pytest.fixture
def registered():
    """Registers a fusion for one test."""
    names = []

    def register(name, part):
        FUSIONS.register(name)(part)
        names.append(name)

    yield register
    for name in names:
        del FUSIONS._entries[name]


def test_every_fusion_is_scored_by_its_own_answers(tiny_uploads):
    specs = [{"name": "average"}, {"name": "iffi", "seed": 1}, {"name": "iffi", "seed": 2}, STUDENT]
    found = evaluate(specs, tiny_uploads, TEST)
    assert [one.made.spec for one in found] == specs
    for spec, one in zip(specs, found, strict=True):
        model = build_fusion(spec).fuse(tiny_uploads).model
        assert one.scores == score(model.logits(TEST.images), TEST.labels)
        assert one.model.cost == model.cost
        assert one.made.origin["options"] == {key: value for key, value in spec.items() if key != "name"}
    *plain, student = found
    assert all(one.retention is None for one in plain)
    teacher = build_fusion({"name": "ensemble"}).fuse(tiny_uploads).model
    theirs, own = teacher.predict(TEST.images), student.model.predict(TEST.images)
    assert student.retention is not None
    assert student.retention.name == "ensemble"
    assert student.retention.accuracy == pytest.approx(float((theirs == TEST.labels).double().mean()))
    assert student.retention.agreement == pytest.approx(float((theirs == own).double().mean()))
    assert student.retention.passes_ratio == len(tiny_uploads)


def test_what_a_fusion_says_beside_its_model_is_in_its_metrics(tiny_uploads, registered):
    class Talkative(Fusion):
        """says something"""

        def fuse(self, uploads, workspace=QUIET):
            suspects = (Suspect(0, "one", "kept"), Suspect(1, "two", "capped"), Suspect(2, "three", "left out"))
            model = build_fusion({"name": "average"}).fuse(uploads).model
            return Fused(model, {"steps": 7}, suspects, seconds_before=1000.0)

    registered("talkative", Talkative)
    quiet, talkative = (
        one.to_dict() for one in evaluate([{"name": "average"}, {"name": "talkative"}], tiny_uploads, TEST)
    )
    assert quiet.keys().isdisjoint({"training", "suspects", "teacher"})
    assert talkative["training"] == {"steps": 7}
    assert talkative["suspects"] == [
        "client 0 is suspect: one",
        "client 1 is suspect and counts as a member of median size: two",
        "client 2 is suspect and is left out: three",
    ]
    assert talkative["fuse_seconds"] > 1000 > quiet["fuse_seconds"]
    assert talkative["accuracy"] == quiet["accuracy"]


def test_a_fusion_that_returns_a_bare_model_is_refused_by_name(tiny_uploads, registered):
    class Bare(Fusion):
        """returns a model"""

        def fuse(self, uploads, workspace=QUIET):
            return build_fusion({"name": "average"}).fuse(uploads).model

    registered("bare", Bare)
    with pytest.raises(ConfigError, match=r"fusion bare: fuse\(\) returned a SingleModel; return Fused\(model\)"):
        fuse_timed({"name": "bare"}, tiny_uploads)


def test_the_earlier_signature_is_refused_where_the_class_is_made():
    with pytest.raises(ConfigError, match=r"Old: fuse must take \(self, uploads, workspace\) and return Fused"):

        class Old(Fusion):
            def fuse(self, uploads):
                return uploads


def test_an_evaluation_needs_no_more_passes_than_there_are_members(tiny_uploads, monkeypatch):
    """Fusions that ask every member's encoder share one pass of each."""
    passes = []
    scratch = tiny_uploads.scratch
    scratch.register_forward_hook(lambda module, inputs, output: passes.append(len(inputs[0])))
    specs = [{"name": name} for name in ("feature_mean", "count_prototypes", "ensemble")]
    found = evaluate(specs, tiny_uploads, TEST)
    assert sum(passes) == len(tiny_uploads) * len(TEST.labels)
    assert len({tuple(one.model.logits(TEST.images).flatten().tolist()) for one in found}) == 3
    assert torch.isfinite(found[0].model.logits(TEST.images)).all()


@pytest.fixture
def overflowing_member(tiny_uploads, tmp_path):
    """The same federation with one member whose weights are finite and whose answers are not."""
    first = tiny_uploads.uploads[0]
    network, counts = overflowing(network_of(tiny_uploads, first), counts_of(first), 0)
    path = tmp_path / "overflowing.safetensors"
    write_upload(path, network, tiny_uploads.contract, Contents(client=first.client, counts=counts, epoch=2))
    sent = read_upload(path, tiny_uploads.contract)
    return dataclasses.replace(tiny_uploads, uploads=(sent, *tiny_uploads.uploads[1:])), first.client


def test_a_network_without_finite_answers_is_refused_and_the_remedy_named(registered, tiny_uploads):
    class Enormous(type(build_fusion({"name": "average"}))):
        """the average, so large that its answers overflow"""

        def fuse(self, uploads, workspace=QUIET):
            fused = super().fuse(uploads, workspace)
            with torch.no_grad():
                for parameter in fused.model.network.encoder.parameters():
                    parameter.mul_(1e30)
            return fused

    registered("enormous", Enormous)
    with pytest.raises(UploadError, match=r"no finite answer.*leave that member out"):
        fuse_timed({"name": "enormous"}, tiny_uploads)


def test_a_member_that_overflows_is_named_and_the_others_answer(overflowing_member, tiny_uploads):
    uploads, client = overflowing_member
    images = load(DataConfig(test_size=40)).test.images
    fused = fuse_timed({"name": "robust_prototypes"}, uploads).fused
    assert [suspect.client for suspect in fused.suspects if suspect.left_out] == [client]
    alone = fuse_timed({"name": "robust_prototypes"}, tiny_uploads.without({client})).fused
    assert torch.allclose(fused.model.logits(images), alone.model.logits(images), atol=1e-5)
    plain = fuse_timed({"name": "feature_mean"}, uploads).model
    assert bool(torch.isfinite(plain.logits(images)).all())
    assert plain.remarks() == ["member 1 of 3 gave no usable answer to 40 images and had no say on them"]
