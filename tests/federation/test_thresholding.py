"""`server thresholds` by the real commands: chosen on members' scores, signed, used, dropped with the next model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from eight import said

from hospitals import WORDS, digits, write_pngs
from oneflare.errors import ConfigError
from oneflare.federation.thresholding import Aims
from oneflare.fusion import load_model
from oneflare.models.decisions import decision_path
from oneflare.models.sealing import seal_path

MEMBERS = ("east", "north")


def few(split) -> list[int]:
    """Rows of the first four classes: members with few images of many classes may tell too little."""
    return [row for row in range(len(split.labels)) if int(split.labels[row]) < 4]


def _federation(root: Path, *settings: str) -> Path:
    """Two members have trained and measured; the coordinator has their scores."""
    train, test = digits()
    folder, inbox = root / "federation", root / "inbox"
    said(
        "server", "init", str(folder), "--classes", "0,1,2,3", "--image-size", "8",
        "--channels", "1", *settings,
    )  # fmt: skip
    inbox.mkdir()
    for index, name in enumerate(MEMBERS):
        write_pngs(root / name, train, few(train)[100 * index : 100 * (index + 1)])
        write_pngs(root / f"{name}-test", test, few(test)[70 * index : 70 * (index + 1)])
        said(
            "client", "train", str(folder / "federation.yaml"), "--data", str(root / name), "--name", name,
            "--out", str(inbox / f"{name}.safetensors"),
        )  # fmt: skip
    said("server", "fuse", str(folder), "--uploads", str(inbox))
    for name in MEMBERS:
        said(
            "evaluate", str(folder), "--data", str(root / f"{name}-test"), "--name", name,
            "--out", str(root / f"{name}.json"),
        )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """Of the method analytic, whose models have no densities."""
    return _federation(tmp_path_factory.mktemp("thresholds"), "method=analytic")


@pytest.mark.soak
def test_they_are_chosen_signed_used_and_dropped_with_the_next_model(tmp_path):
    federation = _federation(tmp_path, *[word for word in WORDS if word != "epochs=2"], "epochs=3", "method=flare")
    root, model = federation.parent, federation / "model.safetensors"
    assert "no member has sent scores" in said("server", "thresholds", str(federation), "--keep", "0.9", code=2)
    said("server", "scores", str(federation), *(str(root / f"{name}.json") for name in MEMBERS))
    words = ("server", "thresholds", str(federation), "--keep", "0.9", "--sensitivity", "3=0.9")
    out = said(*words)
    assert "3: the answer from a probability of" in out
    loaded = load_model(model)
    chosen = loaded.decision
    assert chosen.thresholds[3] is not None
    assert chosen.thresholds.count(None) == 3
    _, test = digits()
    rows = few(test)[: 70 * len(MEMBERS)]
    images, labels = test.images[rows], test.labels[rows]
    familiarity = loaded.answers(images).familiarity
    assert float((familiarity >= chosen.floor).double().mean()) >= 0.85  # of 0.9, without groups that are too small
    answered = loaded.decide(images)
    right = float((answered[labels == 3] == 3).double().mean())
    assert right >= 0.9 - float((answered[labels == 3] == -1).double().mean())
    page = (federation / "report.html").read_text()
    assert "none of the known classes" in page
    assert "a sensitivity of 0.9 for 3" in page
    assert "is signed by the coordinator" in said("predict", str(model), str(root / "north-test"))
    file = decision_path(model)
    file.rename(root / "held")  # somebody on the way takes the thresholds away
    refused = said("predict", str(model), str(root / "north-test"), code=2)
    assert "the coordinator chose thresholds for this model, and model.thresholds.json is not beside it" in refused
    (root / "held").rename(file)
    kept = file.read_bytes(), seal_path(file).read_bytes()
    said("export", str(model), "--onnx", str(root / "model.onnx"))
    assert "thresholds: " in said("server", "log", str(federation))
    said("server", "fuse", str(federation), "--add", str(_another(federation)))
    assert not decision_path(model).exists()
    assert load_model(model).decision is None
    said("server", "rollback", str(federation), "1")
    assert load_model(model).decision == chosen
    said("server", "thresholds", str(federation), "--remove")
    assert load_model(model).decision is None
    file.write_bytes(kept[0])  # and puts those back that the coordinator has removed
    seal_path(file).write_bytes(kept[1])
    refused = said("predict", str(model), str(root / "north-test"), code=2)
    assert "these are not the thresholds that the coordinator signed with this model" in refused
    file.unlink()
    assert "nothing to remove" in said("server", "thresholds", str(federation), "--remove", code=2)


def _another(federation: Path) -> Path:
    """The upload of a third member."""
    train, _ = digits()
    write_pngs(federation.parent / "south", train, few(train)[200:300])
    out = federation.parent / "south.safetensors"
    said(
        "client", "train", str(federation / "federation.yaml"), "--data", str(federation.parent / "south"),
        "--name", "south", "--out", str(out),
    )  # fmt: skip
    return out


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ([], "say what for"),
        (["--sensitivity", "elephant=0.9"], "no class 'elephant'"),
        (["--sensitivity", "3"], "CLASS=SHARE"),
        (["--sensitivity", "3=1.5"], "no share of images"),
        (["--sensitivity", "3=0.5", "--sensitivity", "3=0.9"], "--sensitivity 3 is given twice"),
        (["--sensitivity", "3=0.9", "--specificity", "3=0.9"], "one of both"),
        (["--keep", "0"], "no share of images"),
        (["--remove", "--keep", "0.9"], "leave out the other options"),
    ],
)
def test_what_cannot_be_meant_is_one_line(measured, words, complaint):
    assert complaint in said("server", "thresholds", str(measured), *words, code=2)


def test_a_model_without_densities_says_that_it_cannot_tell(measured):
    folder = measured
    said("server", "scores", str(folder), *(str(folder.parent / f"{name}.json") for name in MEMBERS))
    out = said("server", "thresholds", str(folder), "--keep", "0.9", code=2)
    assert "fusion analytic has no densities" in out
    said("server", "thresholds", str(folder), "--specificity", "2=0.99", "--json")
    content = json.loads(decision_path(folder / "model.safetensors").read_text())
    assert content["floor"] is None
    assert content["thresholds"][2] is not None


def test_members_measure_the_model_as_it_decides(measured):
    folder, root = measured, measured.parent
    said("server", "scores", str(folder), *(str(root / f"{name}.json") for name in MEMBERS))
    said("server", "thresholds", str(folder), "--sensitivity", "2=0.9")
    assert "no member has measured the model with these thresholds yet" in (folder / "report.html").read_text()
    assert "all figures here are of the most likely class" in (folder / "card.md").read_text()
    decision = load_model(folder / "model.safetensors").decision
    said("export", str(folder), "--onnx", str(root / "model.onnx"))  # which compares batches of several sizes
    for name in MEMBERS:
        words = ("evaluate", str(folder), "--data", str(root / f"{name}-test"))
        out = said(*words, "--name", name, "--out", str(root / f"{name}-again.json"))
        assert "the model decides by thresholds for a sensitivity of 0.9 for 2" in out
        assert "sensitivity as decided" in out
        printed = said(*words, "--json")
        figures = json.loads(printed[printed.index("{") :])  # after the remarks on stderr
        told = json.loads((root / f"{name}-again.json").read_text())["together"]["by_rule"]
        assert figures["by_rule"] == figures["figures"]["by_rule"]
        assert told["rule"] == figures["by_rule"]["rule"] == decision.rule
        assert told["decided"] == told["images"]  # without --keep every image gets a class
    out = said("server", "scores", str(folder), *(str(root / f"{name}-again.json") for name in MEMBERS))
    assert "as the model decides by its thresholds: accuracy" in out
    assert "As it decides, members measured" in (folder / "report.html").read_text()
    assert "So decided, accuracy" in (folder / "card.md").read_text()
    said("server", "thresholds", str(folder), "--specificity", "1=0.95")
    assert "no member has measured the model with these" in (folder / "report.html").read_text()


def test_aims_say_what_they_are_for():
    aims = Aims({"a": 0.95}, {"b": 0.9}, None)
    aims.check(("a", "b"))
    assert aims.words == "a sensitivity of 0.95 for a and a specificity of 0.9 for b"
    with pytest.raises(ConfigError, match="did you mean"):
        Aims({"melanom": 0.9}, {}, None).check(("melanoma", "b"))
