"""Thresholds of classes and "none of the known classes": the rule, its file, prediction, HTTP and ONNX."""

from __future__ import annotations

import asyncio
import hashlib
import json
from dataclasses import replace
from pathlib import Path

import httpx
import numpy as np
import onnxruntime
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hospitals import typed
from oneflare.errors import RunError
from oneflare.fusion import build_fusion, load_model
from oneflare.metrics.figures import figures_of
from oneflare.models.base import Answers
from oneflare.models.cards import CardText, read_card
from oneflare.models.decisions import NONE, Decision, decision_path
from oneflare.models.onnx import FAMILIARITY, INPUT, LABELS, export_onnx
from oneflare.models.predicting import described
from oneflare.models.sealing import WITHOUT, seal
from oneflare.models.serving.app import build_app
from oneflare.upload.signing import generate


def decision(**fields) -> Decision:
    standard = {
        "model": "0" * 64, "classes": ("a", "b", "c"), "thresholds": (0.5, 0.25, 0.75), "floor": 1.0, "keeps": 0.95,
        "aim": "", "members": ("north",), "images": 100, "chosen": "2027-01-31T12:00:00+00:00",
    }  # fmt: skip
    return Decision(**(standard | fields))


def by_the_rule(probabilities: list[float], thresholds: list[float | None]) -> set[int]:
    """The rule word by word; several classes if they are equally good to rounding."""
    ratios = [p if t is None else p / t for p, t in zip(probabilities, thresholds, strict=True)]
    reached = [c for c, t in enumerate(thresholds) if t is not None and probabilities[c] >= t]
    plain = [c for c, t in enumerate(thresholds) if t is None]
    among = reached or plain or range(len(thresholds))
    best = max(ratios[c] for c in among)
    return {c for c in among if ratios[c] >= best * (1 - 1e-9)}


@given(
    st.lists(st.floats(-8, 8), min_size=3, max_size=3),
    st.lists(st.none() | st.floats(0.01, 0.99), min_size=3, max_size=3),
)
def test_a_class_is_the_answer_where_it_reaches_its_threshold(logits, thresholds):
    row = torch.tensor([logits], dtype=torch.float64)
    shares = row.softmax(1)[0].tolist()
    if any(t is not None and abs(p - t) < 1e-9 for p, t in zip(shares, thresholds, strict=True)):
        return
    found = int(decision(thresholds=tuple(thresholds), floor=None).labels(Answers(row)))
    assert found in by_the_rule(shares, thresholds)


def test_one_class_with_a_threshold_has_the_rates_that_members_measured():
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 3, (400,), generator=generator)
    logits = torch.randn(400, 3, generator=generator, dtype=torch.float64) + 2 * torch.eye(3)[labels]
    figures = figures_of(logits, labels, ("a", "b", "c"))
    for rates in figures.classes[1].curve:
        answers = decision(thresholds=(None, rates.threshold, None), floor=None).labels(Answers(logits))
        assert float((answers[labels == 1] == 1).double().mean()) == pytest.approx(rates.sensitivity)
        assert float((answers[labels != 1] != 1).double().mean()) == pytest.approx(rates.specificity)


def test_an_unfamiliar_image_shows_none_of_the_classes():
    answers = Answers(torch.eye(3) * 5, torch.tensor([0.9, 1.0, 3.0]))
    assert decision().labels(answers).tolist() == [NONE, 1, 2]
    assert decision(floor=None).labels(answers).tolist() == [0, 1, 2]
    assert decision(thresholds=(None,) * 3).labels(answers).tolist() == [NONE, 1, 2]


@pytest.fixture(scope="module")
def knowing(knowing_members, tmp_path_factory) -> Path:
    """A model that can tell unknown images, as a file."""
    path = tmp_path_factory.mktemp("knowing") / "model.safetensors"
    build_fusion({"name": "density_ratio"}).fuse(knowing_members).model.save(path)
    return path


@pytest.fixture
def chosen(knowing, tmp_path) -> Path:
    """A copy with thresholds beside it."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(knowing.read_bytes())
    model = load_model(path)
    familiarity = model.answers(images()).familiarity
    digits = model.task.classes
    decision(
        model=hashlib.sha256(path.read_bytes()).hexdigest(),
        classes=digits,
        thresholds=(0.05, 0.9, *[None] * (len(digits) - 2)),
        floor=float(familiarity.median()),
    ).write(decision_path(path))
    return path


def images(number: int = 12) -> torch.Tensor:
    return torch.rand(number, 1, 8, 8, generator=torch.Generator().manual_seed(3))


def test_familiarity_is_the_best_mean_ratio_of_the_members(knowing):
    """max_c sum_i w_ic r_ic / sqrt(d), member by member"""
    model = load_model(knowing)
    answers = model.answers(images())
    total = torch.zeros(len(images()), len(model.task.classes))
    from oneflare.data import prepare
    from oneflare.nn.encoders import both_features

    for index, member in enumerate(model.members):
        model.encoder.load_state_dict(dict(member.weights()))
        features = both_features(model.encoder.eval(), prepare(images(), model.task.image)).own
        with torch.no_grad():
            total += model.rule.weights[index] * model.rule.ratios(index, features) / features.shape[1] ** 0.5
    known = model.rule.weights.sum(0) > 0
    assert torch.allclose(answers.familiarity, total[:, known].amax(1), atol=1e-4)
    assert float(answers.familiarity.abs().max()) <= model.familiarity_bound + 1e-4
    assert torch.equal(answers.logits, model.logits(images()))


@pytest.mark.parametrize("fusion", ["average", "ensemble", "count_prototypes"])
def test_models_without_densities_cannot_tell(knowing_members, fusion):
    model = build_fusion({"name": fusion}).fuse(knowing_members).model
    assert model.familiarity_bound is None
    assert model.answers(images(2)).familiarity is None


def test_a_model_answers_by_the_thresholds_beside_it(chosen):
    model = load_model(chosen)
    answers = model.answers(images())
    probabilities = answers.logits.softmax(1)
    (best,) = zip(*(by_the_rule(row, model.decision.thresholds) for row in probabilities.tolist()), strict=True)
    best = torch.tensor(best)
    unknown = answers.familiarity < model.decision.floor
    assert model.decide(images()).tolist() == torch.where(unknown, NONE, best).tolist()
    assert 0 < int(unknown.sum()) < len(unknown)
    for index, row in enumerate(described(model, answers)):
        name = model.task.classes[int(best[index])]
        assert (row["class"], row["known"]) == ((None, False) if unknown[index] else (name, True))
        assert row["top"][0]["class"] == row.get("nearest", row["class"]) == name
        assert row["top"][0].get("threshold") == model.decision.thresholds[int(best[index])]
    decision_path(chosen).unlink()
    plain = load_model(chosen)
    assert plain.decide(images()).tolist() == plain.predict(images()).tolist()


def test_onnx_names_the_same_classes(chosen, tmp_path):
    model = load_model(chosen)
    export_onnx(model, tmp_path / "model.onnx")
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    labels, familiarity = session.run([LABELS, FAMILIARITY], {INPUT: images().numpy()})
    answers = model.answers(images())
    clear = (answers.familiarity - model.decision.floor).abs() > 1e-3
    assert labels[clear.numpy()].tolist() == model.decide(images())[clear].tolist()
    assert np.allclose(familiarity, answers.familiarity.numpy(), atol=1e-3)
    told = session.get_modelmeta().custom_metadata_map
    assert float(told["least_familiarity"]) == model.decision.floor
    limits = [float(line) if line else None for line in told["thresholds"].split("\n")]
    assert limits == list(model.decision.thresholds)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model": "1" * 64}, "another model"),
        ({"classes": ("x", "y")}, "classes are not"),
        ({"thresholds": (0.5, 0.5)}, "for each class"),
        ({"thresholds": tuple([0.5] * 9 + [1.0])}, "for each class"),
        ({"floor": "low"}, "floor"),
        ({"surprise": 1}, "surprise"),
    ],
)
def test_thresholds_that_do_not_fit_are_refused(chosen, change, words):
    path = decision_path(chosen)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(RunError, match=words):
        load_model(chosen)


def test_a_floor_needs_densities(chosen, knowing_members):
    model = build_fusion({"name": "average"}).fuse(knowing_members).model
    model.save(chosen)
    path, content = decision_path(chosen), json.loads(decision_path(chosen).read_text())
    content["model"] = hashlib.sha256(chosen.read_bytes()).hexdigest()
    path.write_text(json.dumps(content))
    with pytest.raises(RunError, match="cannot tell unknown"):
        load_model(chosen)


@pytest.mark.parametrize("content", [b"", b"[", b"[]", b'{"model": NaN}', b"\xff"])
def test_damaged_thresholds_are_refused(chosen, content):
    decision_path(chosen).write_bytes(content)
    with pytest.raises(RunError, match="thresholds"):
        load_model(chosen)


def test_thresholds_must_be_signed_where_the_model_is(chosen, tmp_path):
    key = generate(tmp_path / "c.key", tmp_path / "c.pub")
    words = {"federation": "f" * 64, "signed": "2027-01-31"}
    seal(chosen, key, kind="model", **words)
    with pytest.raises(RunError, match="not signed"):
        load_model(chosen, key=key.public)
    seal(decision_path(chosen), key, kind="thresholds", **words)
    assert load_model(chosen, key=key.public).decision is not None
    content = json.loads(decision_path(chosen).read_text())
    decision_path(chosen).write_text(json.dumps(content | {"floor": -99.0}))
    with pytest.raises(RunError, match="changed after"):
        load_model(chosen, key=key.public)


def test_thresholds_that_were_taken_away_or_put_back_are_missed(chosen, tmp_path):
    key = generate(tmp_path / "a.key", tmp_path / "a.pub")
    words, file = {"federation": "f" * 64, "signed": "2026-01-01T00:00:00+00:00"}, decision_path(chosen)
    content = file.read_bytes()
    seal(file, key, kind="thresholds", **words)
    seal(chosen, key, kind="model", **words, thresholds=hashlib.sha256(content).hexdigest())
    assert load_model(chosen, key=key.public).decision is not None
    file.unlink()
    for known in (key.public, None):  # also to those who do not know the key
        with pytest.raises(RunError, match=r"chose thresholds for this model, and .* is not beside it"):
            load_model(chosen, key=known)
    file.write_bytes(content)
    seal(chosen, key, kind="model", **words, thresholds=WITHOUT)
    with pytest.raises(RunError, match="are not the thresholds that the coordinator signed with this model"):
        load_model(chosen, key=key.public)
    file.unlink()
    assert load_model(chosen, key=key.public).decision is None


def test_predict_says_none_of_the_known_classes(chosen, tmp_path, capsys):
    from PIL import Image

    model = load_model(chosen)
    for index, pixels in enumerate(images()):
        Image.fromarray((255 * pixels[0]).byte().numpy()).save(tmp_path / f"{index:02d}.png")
    model.decision = replace(model.decision, floor=1e3)
    model.decision.write(decision_path(chosen))
    code, out, _ = typed(capsys, "predict", str(chosen), str(tmp_path / "00.png"))
    assert code == 0
    assert "none of the known classes (nearest: " in out
    code, out, _ = typed(capsys, "predict", str(chosen), str(tmp_path / "00.png"), "--csv")
    _, name, probability, known, nearest, error = out.splitlines()[1].split(",")
    assert (name, known, error) == ("", "no", "")
    assert nearest in model.task.classes
    assert 0 < float(probability) <= 1


def test_serve_tells_use_limits_and_thresholds(chosen):
    model = load_model(chosen)
    told = CardText("For <b>nobody</b>.", ("Never seen: night.",))
    app = build_app(model, hosts=("local",), card=told)

    async def asked() -> list[httpx.Response]:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://local") as client:
            return [await client.get(path) for path in ("/about", "/health", "/metrics")]

    about, health, metrics = asyncio.run(asked())
    assert (about.json()["use"], about.json()["limits"]) == (told.use, list(told.limits))
    assert about.json()["thresholds"] == list(model.decision.thresholds)
    assert about.json()["keeps"] == 0.95
    assert health.json()["status"] == "ok"
    assert 'path="/about",status="200"' in metrics.text


def test_a_card_gives_its_use_and_limits(tmp_path):
    path = tmp_path / "card.md"
    assert read_card(path) is None
    path.write_text(
        "# M\n\n## Expected use\n\nFor \\*tests\\*.\n\nClasses: a, b.\n\n## Limits\n\n- one\n- a\\_b\n\n## Members\n"
    )
    assert read_card(path) == CardText("For *tests*.", ("one", "a_b"))
    path.write_text("nothing")
    assert read_card(path) == CardText("", ())
