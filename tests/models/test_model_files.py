"""Model files in other hands: every field is checked, and a signature shows whether somebody changed one."""

from __future__ import annotations

import copy
import csv
import io
import json
import os
import shutil
from pathlib import Path

import pytest
import torch

import oneflare
from hospitals import NAMES, digits, make, rows_of, tiny_charter, typed, write_pngs
from oneflare.core.files import load_state, save_state
from oneflare.data.local import read_local
from oneflare.errors import ConfigError, RunError
from oneflare.federation.charter import read_charter, revised
from oneflare.federation.coordinator import fuse_federation
from oneflare.federation.model_signing import PRIVATE, make_key
from oneflare.federation.page import write_card
from oneflare.federation.recording import write_down
from oneflare.fusion import load_model
from oneflare.fusion.single_upload import model_of_upload
from oneflare.models.sealing import seal
from oneflare.upload.signing import generate
from shared import hearing

ESCAPE = "\x1b]0;pwned\x07cat\x1b[31m"
FUSIONS = ["robust_prototypes", "average"]


@pytest.fixture(scope="module")
def federation(tmp_path_factory) -> Path:
    """A fused federation whose coordinator signs, with an upload and an image beside it."""
    root = tmp_path_factory.mktemp("signed")
    train, test = digits()
    folder = root / "federation"
    charter = tiny_charter(
        settings={"encoder": {"name": "conv4", "width": 4}, "train": {"epochs": 1}, "fusions": FUSIONS}
    )
    charter = revised(charter, coordinator=make_key(folder))
    charter.write(folder / "federation.yaml")
    for index, name in enumerate(NAMES[:2]):
        write_pngs(root / name, train, rows_of(index, 30))
        make(charter, root / name, root / "inbox" / f"{name}.safetensors", name)
    write_pngs(root / "test", test, range(4))
    write_card(fuse_federation(folder, uploads=root / "inbox"))
    return folder


def picture(federation: Path) -> str:
    return str(next((federation.parent / "test").rglob("*.png")))


def changed(state: dict, place: str, value: object) -> dict:
    """A copy with one field replaced, or removed if `value` is the ellipsis."""
    result = copy.deepcopy(state)
    *path, last = [int(part) if part.isdecimal() else part for part in place.split(".")]
    node = result
    for part in path:
        node = node[part]
    if value is ...:
        del node[last]
    else:
        node[last] = value(node[last]) if callable(value) else value
    return result


def with_nan(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.clone().float().fill_(float("nan"))


MALFORMED = [
    ("kind", 7),
    ("kind", "unknown kind"),
    ("kind", "single"),
    ("kind", ...),
    ("task", []),
    ("state", "x"),
    ("state", ...),
    ("task.classes", "cat"),
    ("task.classes", []),
    ("task.classes", ["a", "a"] * 5),
    ("task.classes.0", ESCAPE),
    ("task.classes.0", "a\nb"),
    ("task.classes.0", "a\u202eb"),
    ("task.classes.0", ""),
    ("task.classes.0", 7),
    ("task.classes.0", "x" * 5000),
    ("task.classes", [str(number) for number in range(11)]),
    ("task.dim", 10**12),
    ("task.dim", 0),
    ("task.dim", True),
    ("task.dim", 17),
    ("task.encoder", "conv4"),
    ("task.encoder.name", "nothing"),
    ("task.encoder.name", 7),
    ("task.encoder.width", 8),
    ("task.encoder.width", "x" * 500),
    ("task.encoder.nonsense", 1),
    ("task.image.size", 10**9),
    ("task.image.size", "8"),
    ("task.image.channels", 3),
    ("task.image.std", [0.0]),
    ("task.image.mean", [0.5, 0.5]),
    ("task.image.mean", None),
    ("state.rule", "Nothing"),
    ("state.rule", []),
    ("state.fields", []),
    ("state.fields", {}),
    ("state.fields.prototypes", with_nan),
    ("state.fields.prototypes", lambda tensor: tensor[:, :3]),
    ("state.fields.prototypes", lambda tensor: tensor[:3]),
    ("state.fields.prototypes", "text"),
    ("state.fields.weights", lambda tensor: tensor[:1]),
    ("state.fields.nonsense", 1),
    ("state.members", []),
    ("state.members", {}),
    ("state.members.0", "x"),
    ("state.members.0.digest", 7),
    ("state.members.0.weights", ...),
    ("state.members.0.weights", {}),
    ("state.members.0.weights.layers.0.weight", ...),
]


def refused(path: Path) -> str:
    with pytest.raises(RunError) as caught:
        load_model(path)
    text = str(caught.value)
    assert text.isprintable()
    assert len(text) < 600
    assert str(path) in text
    return text


def attack_fields(model: Path, folder: Path) -> int:
    state = load_state(model)
    for number, (place, value) in enumerate(MALFORMED):
        path = folder / f"{number}.safetensors"
        if place.endswith("weights.layers.0.weight"):
            forged = copy.deepcopy(state)
            forged["state"]["members"][0]["weights"].popitem()
        else:
            forged = changed(state, place, value)
        save_state(path, forged)
        refused(path)
    return len(MALFORMED)


def test_every_malformed_field_is_one_line(federation, tmp_path):
    assert attack_fields(federation / "model.safetensors", tmp_path) == len(list(tmp_path.iterdir())) > 0


@pytest.mark.parametrize(("place", "value"), [("state.network", {}), ("state.network", 7), ("task.dim", 8)])
def test_a_single_network_is_checked_too(federation, tmp_path, place, value):
    state = load_state(federation / "models" / "average.safetensors")
    save_state(tmp_path / "m.safetensors", changed(state, place, value))
    refused(tmp_path / "m.safetensors")


def test_what_is_no_file_is_refused_at_once(federation, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert "regular file" in refused(tmp_path / "pipe")
    assert "regular file" in refused(Path("/dev/zero"))
    (tmp_path / "folder").mkdir()
    assert "regular file" in refused(tmp_path / "folder")
    content = (federation / "model.safetensors").read_bytes()
    for number, damaged in enumerate((b"", b"\xff" * 8, content[:100], content[:-1], b"[" * 100_000)):
        (tmp_path / f"{number}").write_bytes(damaged)
        refused(tmp_path / f"{number}")


def copy_of(federation: Path, folder: Path) -> Path:
    shutil.copytree(federation, folder)
    return folder


def test_a_signed_model_is_verified_and_says_so(federation, capsys, tmp_path):
    code, out, err = typed(capsys, "predict", str(federation), picture(federation))
    assert code == 0
    assert "is signed by the coordinator (ed25519:" in err
    shutil.copy(federation / "model.safetensors", tmp_path)
    code, again, err = typed(capsys, "predict", str(tmp_path / "model.safetensors"), picture(federation))
    assert (code, again) == (0, out)
    assert "is not verified, because the coordinator's key is not known" in err
    words = ["predict", str(tmp_path / "model.safetensors"), picture(federation), "--key"]
    code, _, err = typed(capsys, *words, str(federation / "coordinator.pub"))
    assert code == 2
    assert "is not signed" in err
    shutil.copy(federation / "model.safetensors.sig", tmp_path)
    code, again, err = typed(capsys, *words, str(federation / "coordinator.pub"))
    assert (code, again) == (0, out)


def tamper(folder: Path, how: str) -> None:
    """What somebody without the coordinator's private key can do to a federation's folder."""
    model, signature = folder / "model.safetensors", folder / "model.safetensors.sig"
    if how == "class names":
        state = load_state(model)
        save_state(model, changed(state, "task.classes", list(reversed(state["task"]["classes"]))))
    elif how == "another fusion":
        shutil.copy(folder / "models" / "average.safetensors", model)
    elif how == "another fusion with its signature":
        shutil.copy(folder / "models" / "average.safetensors", model)
        shutil.copy(folder / "models" / "average.safetensors.sig", signature)
    elif how == "no signature":
        signature.unlink()
    elif how == "a key of their own":
        mallory = generate(folder / "mallory.key", folder / "mallory.pub")
        seal(model, mallory, kind="model", federation="0" * 64, signed="2026-01-01")
    elif how == "their signature under the right key":
        mallory = generate(folder / "mallory.key", folder / "mallory.pub")
        right = json.loads(signature.read_text())["key"]
        seal(model, mallory, kind="model", federation="0" * 64, signed="2026-01-01")
        signature.write_text(json.dumps(json.loads(signature.read_text()) | {"key": right}))
    elif how == "the card's signature":
        shutil.copy(folder / "card.md", model)
        shutil.copy(folder / "card.md.sig", signature)
    elif how == "a damaged signature":
        signature.write_text(signature.read_text()[:-20])
    else:
        signature.write_text(json.dumps(json.loads(signature.read_text()) | {"signed": "2030-01-01"}))


TAMPERED = [
    "class names",
    "another fusion",
    "another fusion with its signature",
    "no signature",
    "a key of their own",
    "their signature under the right key",
    "the card's signature",
    "a damaged signature",
    "a later date",
]


@pytest.mark.parametrize("how", TAMPERED)
def test_a_tampered_model_is_refused_by_every_command(how, federation, tmp_path, capsys):
    folder = copy_of(federation, tmp_path / "copy")
    tamper(folder, how)
    for words in (
        ["predict", str(folder), picture(federation)],
        ["evaluate", str(folder), "--data", str(federation.parent / "test")],
        ["export", str(folder), "--onnx", str(tmp_path / "m.onnx")],
        ["serve", str(folder)],
    ):
        code, out, err = typed(capsys, *words)
        assert (code, out) == (2, ""), words
        assert err.count("\n") == 1
        assert err.startswith("error: ")
    assert not (tmp_path / "m.onnx").exists()


def test_a_changed_result_makes_no_page(federation, tmp_path, capsys):
    folder = copy_of(federation, tmp_path / "copy")
    code, _, _ = typed(capsys, "report", str(folder))
    assert code == 0
    assert (folder / "report.html").stat().st_size > 1000
    (folder / "result.json").write_text((folder / "result.json").read_text().replace("east", "west"))
    code, _, err = typed(capsys, "report", str(folder))
    assert code == 2
    assert "was changed after the coordinator signed it" in err


def test_a_lost_key_is_said_and_leaves_no_old_signature(federation, tmp_path):
    folder, said = copy_of(federation, tmp_path / "copy"), []
    (folder / PRIVATE).unlink()
    fuse_federation(folder, observer=hearing(said))
    assert any("is not signed" in line for line in said)
    assert not list(folder.rglob("*.sig"))


def test_nothing_of_a_file_name_reaches_the_terminal_or_a_formula(federation, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = ["=cmd|calc.png", "@x.png", "\x1b[31mred.png"]
    for name in names:
        shutil.copy(picture(federation), name)
    code, out, _ = typed(capsys, "predict", str(federation), *names, "--csv")
    assert code == 0
    cells = [row["image"] for row in csv.DictReader(io.StringIO(out))]
    assert cells == ["'=cmd|calc.png", "'@x.png", "\\x1b[31mred.png"]
    code, out, err = typed(capsys, "predict", str(federation), *names, "\x1b]0;x\x07.png")
    assert code == 2
    assert "\x1b" not in out + err


def test_evaluate_takes_an_upload_and_any_fusion(federation, capsys):
    data = ["--data", str(federation.parent / "test"), "--json"]
    upload = federation.parent / "inbox" / "east.safetensors"
    code, out, err = typed(capsys, "evaluate", str(upload), *data)
    assert code == 0
    assert "that member alone" in err
    alone, charter = model_of_upload(upload), read_charter(federation)
    test = read_local(federation.parent / "test", charter.classes, charter.image.spec()).split
    assert json.loads(out)["accuracy"] == float((alone.predict(test.images) == test.labels).double().mean())
    answers = {}
    for fusion in FUSIONS:
        code, answers[fusion], _ = typed(capsys, "evaluate", str(federation), "--fusion", fusion, *data)
        assert code == 0
    own = typed(capsys, "evaluate", str(federation), *data)[1]
    assert own == answers[FUSIONS[0]]
    assert own != answers[FUSIONS[1]]
    code, _, err = typed(capsys, "evaluate", str(federation), "--fusion", "averag", *data)
    assert code == 2
    assert "did you mean 'average'?" in err


def test_a_damaged_upload_is_refused_by_evaluate(federation, tmp_path, capsys):
    content = bytearray((federation.parent / "inbox" / "east.safetensors").read_bytes())
    content[-10] ^= 1
    (tmp_path / "east.safetensors").write_bytes(content)
    data = ["--data", str(federation.parent / "test")]
    code, out, err = typed(capsys, "evaluate", str(tmp_path / "east.safetensors"), *data)
    assert (code, out) == (2, "")
    assert "digest" in err


def test_predict_knows_a_runs_own_fusion(tiny_run, tmp_path, capsys):
    write_pngs(tmp_path / "test", digits()[1], range(3))
    own = json.loads((tiny_run / "result.json").read_text())["headline"]
    code, out, _ = typed(capsys, "predict", str(tiny_run), str(tmp_path / "test"), "--json")
    assert code == 0
    code, named, _ = typed(capsys, "predict", str(tiny_run), str(tmp_path / "test"), "--json", "--fusion", own)
    assert (code, named) == (0, out)


@pytest.mark.parametrize("name", ["robust_prototypes", "fusion:analytic", "etf", "controller:fixed"])
def test_explain_takes_parts(name, capsys):
    code, out, _ = typed(capsys, "explain", name)
    assert code == 0
    kind, _, rest = out.partition(" ")
    assert kind in ("fusion", "anchors", "controller")
    assert rest.startswith(name.rpartition(":")[2])
    assert len(out.splitlines()) > 1


def test_an_encoder_that_would_not_be_used_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="trains no network"):
        oneflare.run(encoder=torch.nn.Flatten(), method="analytic", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_signature_of_a_model_remembers_where_the_log_ended(federation, tmp_path, capsys):
    folder = shutil.copytree(federation, tmp_path / "federation")
    received = shutil.copy(folder / "model.safetensors.sig", tmp_path / "model.safetensors.sig")
    assert typed(capsys, "server", "log", str(folder), "--expect", str(received))[0] == 0
    log, private = folder / "log" / "entries.jsonl", folder / PRIVATE
    charter = read_charter(folder)
    for path in (log, folder / "log" / "head.json", *folder.glob("*.seen")):
        path.unlink()
    (folder / "result.json").unlink()
    assert private.exists()
    write_down(charter, folder, [])  # the owner of the key writes a new history
    code, _, said = typed(capsys, "server", "log", str(folder))
    assert code == 0, said
    code, _, said = typed(capsys, "server", "log", str(folder), "--expect", str(received))
    assert code == 2
    assert "model.safetensors.sig has seen" in said
    tampered = json.loads(Path(received).read_text())
    Path(received).write_text(json.dumps(tampered | {"log": "1:" + "0" * 64}))
    code, _, said = typed(capsys, "server", "log", str(folder), "--expect", str(received))
    assert code == 2
    assert "is not signed by the coordinator's key" in said
