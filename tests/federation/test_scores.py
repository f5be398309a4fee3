"""Scores come back: members measure, the coordinator collects; versions, rollback, unlearning; by the real commands."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml

from hospitals import digits, typed, write_pngs
from oneflare.errors import RunError
from oneflare.federation.charter import read_charter
from oneflare.federation.history import History
from oneflare.federation.scores import pooled, read_scores
from oneflare.fusion import load_model
from oneflare.metrics import score
from oneflare.upload.signing import read_key
from score_parts import example_scores

NAMES = ("east", "north", "south")
TERMS = ["method=analytic", "encoder=conv4", "encoder.width=4", "analytic.filters=2", "analytic.colour_grid=1"]
SHAPE = ["--classes", "0,1,2,3,4,5,6,7,8,9", "--image-size", "8", "--channels", "1"]


class Quiet:
    """Stands in for pytest's capsys in a fixture of the module."""

    def readouterr(self):
        return type("Nothing", (), {"out": "", "err": ""})


def run(capsys, *words) -> str:
    """A command that must work; what it prints."""
    code, out, err = typed(capsys, *map(str, words))
    assert code == 0, out + err
    return out


def refused(capsys, *words) -> str:
    """A command that must be refused; its last line."""
    code, _, err = typed(capsys, *map(str, words))
    assert code == 2, err
    return err.splitlines()[-1]


@pytest.fixture(scope="module")
def measured(tmp_path_factory) -> Path:
    """Three members with keys, one fusion, and everybody's scores in inbox/."""
    root, quiet = tmp_path_factory.mktemp("federation"), Quiet()
    train, test = digits()
    for number, name in enumerate(NAMES):
        write_pngs(root / name / "images", train, range(number * 120, (number + 1) * 120))
        write_pngs(root / name / "held-out", test, range(number * 90, (number + 1) * 90))
        run(quiet, "client", "keygen", "--name", name, "--out", root)
    members = [word for name in NAMES for word in ("--member", f"{name}={root / name}.pub")]
    run(quiet, "server", "init", root / "fed", *SHAPE, *members, *TERMS)
    for name in NAMES:
        upload = root / "uploads" / f"{name}.safetensors"
        words = ("--data", root / name / "images", "--key", root / f"{name}.key", "--out", upload)
        run(quiet, "client", "train", root / "fed" / "federation.yaml", *words)
    run(quiet, "server", "fuse", root / "fed", "--uploads", root / "uploads")
    for name in NAMES:
        evaluate(quiet, root, name)
    return root


def evaluate(capsys, root: Path, name: str, *words) -> Path:
    out = root / "inbox" / f"{name}.json"
    data = ("--data", root / name / "held-out", "--alone", root / "uploads" / f"{name}.safetensors")
    run(capsys, "evaluate", root / "fed", *data, "--sign", root / f"{name}.key", "--out", out, *words)
    return out


@pytest.fixture
def place(measured, tmp_path) -> Path:
    """A copy of the federation that a test may change."""
    return Path(shutil.copytree(measured, tmp_path / "place"))


def test_a_member_tells_figures_of_both_models_on_the_same_images(measured):
    scores = read_scores(measured / "inbox" / "north.json")
    model = load_model(measured / "fed" / "model.safetensors")
    test = digits()[1]
    images, labels = test.images[90:180], test.labels[90:180]
    assert scores.together.accuracy.value == pytest.approx(score(model.logits(images), labels).accuracy)
    assert scores.together.images == scores.alone.images == 90
    gain = scores.together.accuracy.value - scores.alone.accuracy.value
    assert scores.comparison.gain.value == pytest.approx(gain)
    assert scores.member == "north"
    assert scores.federation == read_charter(measured / "fed").fingerprint
    text = (measured / "inbox" / "north.json").read_text()
    assert ".png" not in text
    assert str(measured) not in text


def test_scores_are_collected_into_result_card_log_and_version(place, capsys):
    out = run(capsys, "server", "scores", place / "fed", place / "inbox")
    assert "worst at " in out
    result = json.loads((place / "fed" / "result.json").read_text())
    assert [one["member"] for one in result["scores"]] == list(NAMES)
    told = pooled([read_scores(place / "inbox" / f"{name}.json") for name in NAMES])
    assert told.together.images == 270
    card = (place / "fed" / "card.md").read_text()
    head = yaml.safe_load(card.split("---\n")[1])
    assert head["model-index"][0]["results"][0]["metrics"][0]["value"] == round(told.together.accuracy.value, 4)
    assert f"worst at {told.worst.member}" in out
    assert told.worst.together.accuracy.value == min(one.together.accuracy.value for one in told.members)
    log = run(capsys, "server", "log", place / "fed")
    assert log.count("scored: who ") == 3
    version = History.read(place / "fed" / "models").versions[0]
    assert version.scores.accuracy == told.together.accuracy
    kept = json.loads((place / "fed" / "models" / "001" / "result.json").read_text())
    assert kept == result
    again = run(capsys, "server", "scores", place / "fed", place / "inbox", "--json")
    assert {one["status"] for one in json.loads(again)["verdicts"]} == {"known"}


def test_the_card_is_read_by_hugging_face(place, capsys):
    hub = pytest.importorskip("huggingface_hub")
    run(capsys, "server", "scores", place / "fed", place / "inbox")
    card = hub.ModelCard.load(place / "fed" / "card.md")
    results = {(one.dataset_name, one.metric_type) for one in card.data.eval_results}
    assert ("Test images of north", "accuracy") in results
    assert card.data.library_name == "oneflare"
    assert card.text.strip().startswith("# Model of the federation fed")


def tamper(path: Path, change) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c["together"]["accuracy"].update(value=0.99, high=1.0), "forged or the file altered"),
        (lambda c: c.update(member="east"), "signed with another key than the one admitted for east"),
        (lambda c: c.update(member="nobody"), "'nobody' is not a member of fed"),
        (lambda c: c.update(federation="0" * 64), "made for another federation"),
        (lambda c: c.update(federation=None), "names no member"),
        (lambda c: (c.pop("signature"), c.pop("key")), "is not signed, but north has a key"),
        (lambda c: c.update(surprise=1), "the field 'surprise' is unknown"),
        (lambda c: c.update(kind="result"), "is no file of scores"),
        (lambda c: c["together"]["classes"][0].update(support=10_000), "do not add up to the images"),
    ],
)
def test_foreign_forged_and_damaged_scores_are_refused_with_one_line(place, capsys, change, words):
    before = (place / "fed" / "result.json").read_bytes()
    tamper(place / "inbox" / "north.json", change)
    line = refused(capsys, "server", "scores", place / "fed", place / "inbox" / "north.json")
    assert line.startswith("error: the file was refused")
    assert words in line
    assert (place / "fed" / "result.json").read_bytes() == before
    assert "refused: who " in run(capsys, "server", "log", place / "fed")


def test_what_is_cut_off_is_refused_and_the_others_are_taken(place, capsys):
    text = (place / "inbox" / "north.json").read_text()
    (place / "inbox" / "north.json").write_text(text[:-50])
    assert "1 of 3 files were refused" in refused(capsys, "server", "scores", place / "fed", place / "inbox")
    result = json.loads((place / "fed" / "result.json").read_text())
    assert [one["member"] for one in result["scores"]] == ["east", "south"]


def signed_again(place: Path, name: str, **changes) -> Path:
    """The member's own scores with other fields, signed by its key: a lie, or a clock that is wrong."""
    path = place / "inbox" / f"{name}.json"
    tamper(path, lambda content: (content.update(changes), content.pop("signature"), content.pop("key")))
    read_scores(path).signed(read_key(place / f"{name}.key")).write(path)
    return path


def test_replayed_scores_and_those_of_other_models_are_refused(place, capsys):
    old = (place / "inbox" / "north.json").read_bytes()
    newer = evaluate(capsys, place, "north")
    run(capsys, "server", "scores", place / "fed", newer)
    newer.write_bytes(old)
    assert "is older than the scores of north" in refused(capsys, "server", "scores", place / "fed", newer)
    file = signed_again(place, "south", created="2999-01-01T00:00:00+00:00")
    assert "in the future" in refused(capsys, "server", "scores", place / "fed", file)
    file = signed_again(place, "south", created="9999-12-31T23:59:59-23:59")
    assert "does not say when it was made" in refused(capsys, "server", "scores", place / "fed", file)
    file = signed_again(place, "south", created="2026-01-01T00:00:00+00:00", model="0" * 64)
    assert "is about another model, not about the one in use" in refused(
        capsys, "server", "scores", place / "fed", file
    )
    test = read_scores(place / "inbox" / "north.json").test
    model = read_scores(place / "inbox" / "east.json").model
    file = signed_again(place, "south", test=test, model=model)
    assert "the same test images as the scores of north" in refused(capsys, "server", "scores", place / "fed", file)
    file = signed_again(place, "south", smallest_group=1, test="0" * 64)
    assert "withholds groups below 1, and the terms say 5" in refused(capsys, "server", "scores", place / "fed", file)


def test_evaluate_asks_for_name_and_key_before_it_measures(place, capsys):
    words = ["evaluate", place / "fed", "--data", place / "north" / "held-out"]
    assert "say whose scores these are" in refused(capsys, *words, "--out", place / "s.json")
    line = refused(capsys, *words, "--out", place / "s.json", "--name", "east", "--sign", place / "north.key")
    assert "the key belongs to north, not to east" in line
    line = refused(capsys, *words, "--out", place / "s.json", "--name", "east")
    assert "east's scores must be signed" in line
    assert "give --out FILE" in refused(capsys, *words, "--name", "east")
    assert not (place / "s.json").exists()


def test_versions_and_rollback(place, capsys):
    run(capsys, "server", "scores", place / "fed", place / "inbox")
    first = (place / "fed" / "model.safetensors").read_bytes()
    (place / "uploads" / "east.safetensors").unlink()
    run(capsys, "server", "fuse", place / "fed", "--uploads", place / "uploads", "--min-members", "2")
    second = (place / "fed" / "model.safetensors").read_bytes()
    assert first != second
    assert "scores" not in json.loads((place / "fed" / "result.json").read_text())
    old = refused(capsys, "server", "scores", place / "fed", place / "inbox" / "north.json")
    assert "is about version 1, not about the one in use (version 2)" in old
    listed = run(capsys, "server", "versions", place / "fed")
    assert "001" in listed.splitlines()[0]
    assert "in use" in listed.splitlines()[1]
    assert "Gone since" in listed.splitlines()[1]
    assert "version 1 of " in run(capsys, "server", "rollback", place / "fed")
    assert (place / "fed" / "model.safetensors").read_bytes() == first
    assert [one["member"] for one in json.loads((place / "fed" / "result.json").read_text())["scores"]] == list(NAMES)
    assert sorted(path.stem for path in (place / "fed" / "members").iterdir()) == list(NAMES)
    assert History.read(place / "fed" / "models").current == 1
    run(capsys, "predict", place / "fed", place / "north" / "held-out")  # its signature is valid again
    run(capsys, "predict", place / "fed" / "models" / "002", place / "north" / "held-out")
    assert "rolled_back: instead_of 2" in run(capsys, "server", "log", place / "fed")
    assert "version 1 is in use already" in refused(capsys, "server", "rollback", place / "fed", "1")
    assert "there is no version 9" in refused(capsys, "server", "rollback", place / "fed", "9")
    assert "no earlier version" in refused(capsys, "server", "rollback", place / "fed")
    run(capsys, "server", "rollback", place / "fed", "2")
    assert (place / "fed" / "model.safetensors").read_bytes() == second
    damaged = place / "fed" / "models" / "001" / "model.safetensors"
    damaged.unlink()
    damaged.write_bytes(first[:-1])
    assert "is damaged" in refused(capsys, "server", "rollback", place / "fed", "1")


def test_who_is_removed_leaves_no_version_and_no_scores_behind(place, capsys):
    run(capsys, "server", "scores", place / "fed", place / "inbox")
    run(capsys, "server", "fuse", place / "fed", "--remove", "north")
    assert not (place / "fed" / "models" / "001").exists()
    line = refused(capsys, "server", "rollback", place / "fed", "1")
    assert "version 1 was deleted, because north is in it and left on" in line
    upload = (place / "uploads" / "north.safetensors").read_bytes()[-3000:-2000]
    files = [path for path in (place / "fed").rglob("*") if path.is_file()]
    assert not [path for path in files if upload in path.read_bytes()]
    assert "scores" not in json.loads((place / "fed" / "result.json").read_text())
    assert History.read(place / "fed" / "models").versions[0].scores is None
    line = refused(capsys, "server", "scores", place / "fed", place / "inbox" / "north.json")
    assert "north was removed on" in line


def test_rehearsal_answers_every_image_by_a_model_that_has_not_seen_it(place, capsys):
    words = ["client", "rehearse", place / "fed" / "federation.yaml", "--data", place / "north" / "images"]
    before = sorted(place.rglob("*"))
    found = json.loads(run(capsys, *words, "--folds", "3", "--json"))
    assert found["figures"]["images"] == 120
    assert len(found["folds_accuracy"]) == 3
    assert found["figures"]["accuracy"]["value"] > found["guess"]["value"]
    code, out, err = typed(capsys, *map(str, words), "--folds", "2")
    assert code == 0
    assert "fold 2 of 2: training on" in err
    assert "nothing was sent or kept" in out
    assert sorted(place.rglob("*")) == before
    assert "folds cannot be made" in refused(capsys, *words, "--folds", "99")


def test_pooling_refuses_scores_of_different_models():
    with pytest.raises(RunError, match="different models"):
        pooled([example_scores("a"), example_scores("b", model="1" * 64)])


def test_plain_uploads_are_refused_where_the_terms_ask_for_encryption(measured, tmp_path, capsys):
    members = [word for name in NAMES for word in ("--member", f"{name}={measured / name}.pub")]
    run(capsys, "server", "init", tmp_path / "fed", *SHAPE, *members, *TERMS, "--encrypt")
    charter, inbox = tmp_path / "fed" / "federation.yaml", tmp_path / "inbox"
    inbox.mkdir()
    for name in NAMES:
        words = ("--data", measured / name / "images", "--key", measured / f"{name}.key")
        run(capsys, "client", "train", charter, *words, "--out", tmp_path / f"{name}.safetensors")
        shutil.copy(tmp_path / f"{name}.safetensors.encrypted", inbox)
    shutil.copy(tmp_path / "north.safetensors", inbox)
    (inbox / "north.safetensors.encrypted").unlink()
    line = refused(capsys, "server", "fuse", tmp_path / "fed", "--uploads", inbox)
    assert "is not encrypted, and the terms ask for it; the member sends the file north.safetensors.encrypted" in line
    run(capsys, "server", "fuse", tmp_path / "fed", "--uploads", inbox, "--min-members", "2")
    run(capsys, "server", "fuse", tmp_path / "fed")  # its own copies are decrypted
