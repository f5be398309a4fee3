"""Four members by file with masked sums, by the real commands: one missing, files damaged, replayed and late."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from hospitals import digits, typed, write_pngs
from masked_parts import NAMES, SHAPE, TERMS, init, join, release, run, train
from oneflare.core.files import load_state
from oneflare.federation.charter import read_charter, revised
from oneflare.federation.masked.enrolment import ENROLMENT, read_enrolment
from oneflare.federation.masked.files import write_message
from oneflare.federation.masked.opening import open_total
from oneflare.federation.masked.rounds import Request, RoundFiles
from oneflare.federation.recording import check_log
from oneflare.fusion import load_model
from oneflare.fusion.analytic.solver import solve
from oneflare.upload import read_tensors, read_upload
from oneflare.upload.checking import read_manifest
from oneflare.upload.masking.fixed_point import from_vector
from oneflare.upload.signing import read_key
from shared import forge, hearing


@pytest.fixture
def open_round(enrolled, tmp_path) -> Path:
    return Path(shutil.copytree(enrolled, tmp_path / "root"))


@pytest.fixture
def answered(closed, tmp_path) -> Path:
    return Path(shutil.copytree(closed, tmp_path / "root"))


def plain_sums(root: Path, name: str) -> torch.Tensor:
    """What a member's own folder holds before masking."""
    path = root / f"{name}.work" / "upload.safetensors"
    return read_tensors(path, read_manifest(path), "statistics.")["statistics.fixed"]


def refused(capsys, *words: str | Path) -> str:
    """The one line that a command is refused with."""
    code, _, error = typed(capsys, *map(str, words))
    lines = [line for line in error.splitlines() if line.startswith("error: ")]
    assert code == 2, error
    assert len(lines) == 1
    return lines[0]


def test_one_of_four_is_missing_and_the_model_is_that_of_the_plain_sum_of_three(answered, capsys):
    root, charter = answered, read_charter(answered / "fed")
    code, out, error = typed(capsys, "server", "fuse", str(root / "fed"), "--releases", str(root / "inbox"))
    assert code == 0, error
    assert "the total under roster 1 is over 120 images" in out
    assert "missing" in out
    plain = sum(plain_sums(root, name) for name in NAMES[:3])
    uploads = {
        name: read_upload(RoundFiles(root / "fed").uploads / f"{name}.safetensors", charter.masked_contract)
        for name in NAMES[:3]
    }
    heard: list[str] = []
    total = open_total(charter, root / "fed", uploads, None, hearing(heard))
    assert heard == []
    assert torch.equal(total.vector, plain)
    fixed, plan = charter.contract.fixed, charter.contract.statistics
    found = solve(from_vector(plain, 10, plan.dim, fixed), kind="lda", ridge=None)
    model = load_model(root / "fed" / "model.safetensors")
    assert torch.equal(model.weight, found.weight)
    assert torch.equal(model.bias, found.bias)
    result = json.loads((root / "fed" / "result.json").read_text())
    assert result["masked"]["counts"] == plain[:10].tolist()
    assert result["missing"] == ["west"]
    card = (root / "fed" / "card.md").read_text()
    assert "masked" in card
    assert "100 at most (enrolled)" in card
    before = load_state(root / "fed" / "model.safetensors")
    assert typed(capsys, "server", "fuse", str(root / "fed"))[0] == 0  # from what the folder keeps
    assert str(load_state(root / "fed" / "model.safetensors")) == str(before)


def test_no_file_that_a_member_sends_or_the_coordinator_keeps_holds_plain_sums_or_keys(closed):
    sums = {name: plain_sums(closed, name).numpy() for name in NAMES}
    secrets = [(closed / f"{name}.mask" / "mask.key").read_bytes().split(b"\n")[1] for name in NAMES]
    for path in [*(closed / "inbox").rglob("*"), *(closed / "fed").rglob("*")]:
        content = path.read_bytes() if path.is_file() else b""
        assert not any(secret in content for secret in secrets), path
        assert not any(row[10:14].tobytes() in content for row in sums.values()), path
        assert b"private" not in content.lower() or path.name in ("coordinator.key",), path
    manifest = read_manifest(closed / "inbox" / "east.safetensors")
    assert manifest["samples"] == 100  # enrolled with; it has 40
    assert "counts" not in manifest["tensors"]
    for name in NAMES:
        assert (closed / f"{name}.mask").stat().st_mode & 0o777 == 0o700


def test_masked_numbers_of_a_file_look_random_and_a_new_training_shares_nothing(enrolled, tmp_path):
    from scipy import stats

    charter = enrolled / "fed" / "federation.yaml"
    first = enrolled / "east.safetensors"
    again = train(enrolled, charter, "east", tmp_path / "again.safetensors")
    words = [
        read_tensors(path, read_manifest(path), "statistics.")["statistics.masked"].numpy() for path in (first, again)
    ]
    assert not np.intersect1d(*words).size
    for vector in words:
        assert stats.chisquare(np.bincount(vector.view(np.uint8), minlength=256)).pvalue > 1e-10


def test_the_same_command_again_gives_the_same_file(open_round):
    before = (open_round / "east.safetensors").read_bytes()
    train(open_round, open_round / "fed" / "federation.yaml", "east", open_round / "east.safetensors")
    assert (open_round / "east.safetensors").read_bytes() == before


def test_show_says_in_plain_words_what_a_masked_file_reveals(enrolled, capsys):
    code, out, _ = typed(capsys, "upload", "show", str(enrolled / "east.safetensors"), "--json")
    shown = json.loads(out)
    assert code == 0
    assert "reveals nothing but its size" in shown["first"][0]
    assert "from the coordinator and up to 2 members together" in shown["first"][0]
    fields = {row["name"]: row for row in shown["fields"]}
    assert fields["samples"]["holds"] == "at most 100 images"
    assert "statistics" not in fields


# ---- refusals: one line each, and nothing is changed


def test_the_order_of_the_steps_is_explained(open_round, tmp_path, capsys):
    root = open_round
    line = refused(capsys, "server", "fuse", root / "fed", "--uploads", root / "inbox")
    assert "the round is not closed" in line
    other = init(root, "young")
    line = refused(capsys, "client", "train", other, "--data", root / "data" / "east", "--key", root / "east.key")
    assert "has no roster yet" in line
    assert "0 members have joined" in refused(capsys, "server", "roster", root / "young")
    few = tmp_path / "few"
    few.mkdir()
    shutil.copy(root / "inbox" / "east.safetensors", few)
    line = refused(capsys, "server", "missing", root / "fed", "--uploads", few)
    assert "1 of 4 members have sent a usable upload" in line
    assert "ask north, south, west" in line


def test_before_the_deadline_a_round_with_missing_members_is_closed_only_on_request(open_round, capsys):
    charter = revised(read_charter(open_round / "fed"), deadline="2999-01-01")
    charter.write(open_round / "fed" / "federation.yaml")
    words = ["server", "missing", open_round / "fed", "--uploads", open_round / "inbox"]
    assert "west could still send" in refused(capsys, *words)
    run(*words, "--now")


def test_too_few_answers_say_whom_to_ask(answered, capsys):
    (answered / "inbox" / "south.release.json").unlink()
    line = refused(capsys, "server", "fuse", answered / "fed", "--releases", answered / "inbox")
    assert "west sent no upload" in line
    assert "ask south to run" in line
    assert not (answered / "fed" / "model.safetensors").exists()


def test_late_uploads_are_refused_by_name(answered, capsys):
    shutil.copy(answered / "west.safetensors", answered / "inbox")
    line = refused(capsys, "server", "missing", answered / "fed", "--uploads", answered / "inbox")
    assert "without west" in line
    words = ["server", "fuse", answered / "fed", "--uploads", answered / "inbox", "--releases", answered / "inbox"]
    code, out, error = typed(capsys, *map(str, words), "--json")
    assert code == 0, error
    verdicts = {row["member"]: row for row in json.loads(out)["verdicts"] if row["status"] != "in"}
    assert verdicts["west"]["status"] == "late"
    assert "closed" in verdicts["west"]["reason"]
    line = refused(capsys, "server", "fuse", answered / "fed", "--remove", "east")
    assert "cannot remove 'east' from a total of masked sums" in line
    line = refused(capsys, "server", "fuse", answered / "fed", "--check-images", answered / "data" / "east")
    assert "cannot be checked where sums are masked" in line


def other_request(root: Path, **changes) -> Path:
    """A request that the coordinator signed over other uploads than the first."""
    request = json.loads((root / "fed" / "masked" / "request.json").read_text())
    request.pop("oneflare")
    uploaded = request["uploaded"] | changes.pop("uploaded", {})
    request["uploaded"] = {name: row for name, row in uploaded.items() if row is not None}
    made = Request.model_validate(request | changes).signed(read_key(root / "fed" / "coordinator.key"))
    path = root / "other.json"
    path.write_text(json.dumps({"oneflare": "request"} | made.model_dump(mode="json")))
    return path


def test_a_member_never_releases_both_secrets_of_somebody(answered, capsys):
    root, charter = answered, answered / "fed" / "federation.yaml"
    words = release(root, charter, "east")
    before = (root / "inbox" / "east.release.json").read_bytes()
    code, out, _ = typed(capsys, *words)
    assert code == 0
    assert "the same again" in out
    assert (root / "inbox" / "east.release.json").read_bytes() == before
    note = read_manifest(root / "west.safetensors")
    west = {"digest": note["digest"], "salt": note["masked"]["salt"], "sealed": note["masked"]["sealed"]}
    words[3] = str(other_request(root, uploaded={"west": west}))
    line = refused(capsys, *words)
    assert "for west you released the seed in common with it" in line
    assert "asks for a share of its personal mask" in line
    words[3] = str(other_request(root, uploaded={"west": west, "north": None}))
    assert "for north you released a share of its personal mask" in refused(capsys, *words)
    north = json.loads((root / "fed" / "masked" / "request.json").read_text())["uploaded"]["north"]
    words[3] = str(other_request(root, uploaded={"north": north | {"salt": "0" * 64}}))
    assert "a share for one of its uploads" in refused(capsys, *words)
    assert (root / "inbox" / "east.release.json").read_bytes() == before


def test_requests_that_ask_too_much_or_come_from_others_get_no_answer(open_round, capsys):
    root, charter = open_round, open_round / "fed" / "federation.yaml"
    run("server", "missing", root / "fed", "--uploads", root / "inbox")
    words = release(root, charter, "east")
    text = (root / "fed" / "masked" / "request.json").read_text()
    cases = {
        "no valid JSON": text[:-40],
        "is not signed by the coordinator": text.replace('"created": "2', '"created": "1'),
        "give the file with the request": (root / "inbox" / "east.join.json").read_text(),
        "unknown key 'more'": text.replace("{", '{"more": 1, ', 1),
    }
    path = root / "other.json"
    words[3] = str(path)
    for reason, content in cases.items():
        path.write_text(content)
        assert reason in refused(capsys, *words)
    other_request(root, uploaded={"south": None})
    assert "asks for a total of 2 members" in refused(capsys, *words)
    other_request(root, federation="1" * 64)
    assert "is a request of another federation" in refused(capsys, *words)
    other_request(root, roster="1" * 64)
    assert "is for another roster than number 1" in refused(capsys, *words)
    own = json.loads(text)["uploaded"]["east"]
    other_request(root, uploaded={"east": own | {"salt": "0" * 64}})
    assert "lists an upload of east that was not made with this mask key" in refused(capsys, *words)
    assert not (root / "inbox" / "east.release.json").exists()
    (root / "east.mask" / "record.json").unlink()
    assert "is missing, so nobody knows what was released" in refused(capsys, *release(root, charter, "east"))


def test_damaged_and_foreign_files_are_left_out_with_one_line_each(answered, tmp_path, capsys):
    root, folder = answered, tmp_path / "bad"
    folder.mkdir()
    text = (root / "inbox" / "east.release.json").read_text()
    content = json.loads(text)
    forged = {
        "cut.release.json": text[: len(text) // 2],
        "replayed.release.json": json.dumps(content | {"request": "1" * 64}),
        "foreign.release.json": json.dumps(content | {"federation": "1" * 64}),
        "renamed.release.json": json.dumps(content | {"member": "north"}),
    }
    for name, words in forged.items():
        (folder / name).write_text(words)
    code, _, error = typed(capsys, "server", "fuse", str(root / "fed"), "--releases", str(folder))
    lines = error.splitlines()
    assert code == 2
    for name, reason in {
        "cut": "is damaged or cut off",
        "replayed": "answers another request",
        "foreign": "answers for another federation",
        "renamed": "is not the one that east gave north",
    }.items():
        assert [reason in line for line in lines if f"{name}.release.json" in line] == [True]
    assert "nothing can be opened yet" in lines[-1]


def test_uploads_of_other_rosters_keys_and_federations_are_refused(open_round, tmp_path, capsys):
    root, inbox = open_round, tmp_path / "in"
    inbox.mkdir()
    other = init(root, "other")
    for name in NAMES:
        join(root, other, name)
    run("server", "roster", root / "other", "--enrolments", root / "inbox")
    foreign = train(root, other, "east", tmp_path / "foreign.safetensors")
    plain = shutil.copy(root / "north.work" / "upload.safetensors", tmp_path / "plain.safetensors")
    cut = tmp_path / "cut.safetensors"
    cut.write_bytes((root / "inbox" / "south.safetensors").read_bytes()[:-100])
    for path in (foreign, plain, cut):
        shutil.copy(path, inbox)
    line = refused(capsys, "server", "missing", root / "fed", "--uploads", inbox)
    assert "foreign.safetensors) is refused: was made for another federation" in line
    assert "plain.safetensors) is refused: carries no member's name" in line
    assert "cut.safetensors) is refused: not a valid safetensors file" in line
    line = refused(capsys, "server", "roster", root / "fed", "--enrolments", root / "inbox")
    assert "is an enrolment for another federation" in line
    charter = root / "fed" / "federation.yaml"
    words = ["client", "train", charter, "--data", root / "data" / "east", "--key", root / "east.key"]
    assert "another mask key for east" in refused(capsys, *words, "--mask", root / "north.mask")
    assert "do not belong in a run's" in refused(capsys, *words, "--mask", root / "east.work" / "x.mask")
    run("server", "roster", root / "fed", "--without", "west")
    line = refused(capsys, "server", "missing", root / "fed", "--uploads", root / "inbox")
    assert "was masked for another roster than number 2" in line


def test_an_enrolment_has_a_date_that_others_can_be_compared_with(open_round, capsys):
    path, charter = open_round / "inbox" / "east.join.json", read_charter(open_round / "fed")
    made = read_enrolment(path, charter)
    for created, reason in {
        "2026-01-01T00:00:00": "does not say when it was made",
        "0001-01-01T00:00:00+23:59": "does not say when it was made",
        "2999-01-01T00:00:00+00:00": "in the future; the member must set its clock and join again",
    }.items():
        row = made.model_copy(update={"created": created}).signed(read_key(open_round / "east.key"))
        write_message(path, ENROLMENT, row)
        assert reason in refused(capsys, "server", "roster", open_round / "fed", "--enrolments", path.parent)


def test_unlearning_is_a_new_sum_whose_difference_members_are_warned_of(answered, capsys):
    root, charter = answered, answered / "fed" / "federation.yaml"
    run("server", "fuse", root / "fed", "--releases", root / "inbox")
    run("server", "roster", root / "fed", "--without", "west")
    for name in NAMES[:3]:
        train(root, charter, name, root / "inbox" / f"{name}.safetensors")
        (root / "inbox" / f"{name}.release.json").unlink()
    shutil.rmtree(root / "inbox" / "south.work")
    (root / "inbox" / "south.safetensors").unlink()
    run("server", "missing", root / "fed", "--uploads", root / "inbox")
    line = refused(capsys, *release(root, charter, "east"))
    assert "differs from the one of" in line
    assert "--reveal south answers anyway" in line
    for name in NAMES[:2]:
        run(*release(root, charter, name, "--reveal", "south"))
    run("server", "fuse", root / "fed", "--releases", root / "inbox", "--remove", "south")
    result = json.loads((root / "fed" / "result.json").read_text())
    assert [row["name"] for row in result["members"]] == ["east", "north"]
    both = plain_sums(root, "east") + plain_sums(root, "north")
    assert result["masked"]["counts"] == both[:10].tolist()
    assert not (root / "fed" / "models" / "001").exists()


def test_a_total_that_images_cannot_give_is_refused(open_round, capsys):
    """A member whose program adds other numbers than its sums: who it was is not known, but nothing is made of it."""
    root, charter = open_round, open_round / "fed" / "federation.yaml"
    work = root / "east.work" / "upload.safetensors"
    sums = plain_sums(root, "east")
    sums[20:] += 1 << 40
    forge(work, {"statistics.fixed": sums})
    (root / "east.work" / "masked.safetensors").unlink()
    shutil.copy(train(root, charter, "east", root / "east.safetensors"), root / "inbox")
    run("server", "missing", root / "fed", "--uploads", root / "inbox")
    for name in NAMES[:3]:
        run(*release(root, charter, name))
    line = refused(capsys, "server", "fuse", root / "fed", "--releases", root / "inbox")
    assert "is not a possible sum over images" in line


def test_more_images_than_enrolled_are_refused_before_any_work(open_round, capsys):
    root = open_round
    split, _ = digits()
    write_pngs(root / "many", split, range(101))
    charter = root / "fed" / "federation.yaml"
    line = refused(capsys, "client", "train", charter, "--data", root / "many", "--key", root / "east.key")
    assert "east has 101 images, and enrolled with at most 100" in line


def test_a_locked_key_needs_its_pass_phrase(open_round, capsys, monkeypatch):
    root, charter = open_round, open_round / "fed" / "federation.yaml"
    words = ["client", "join", charter, "--key", root / "east.key", "--images", "50", "-o", root / "e.join.json"]
    words += ["--mask", root / "new.mask", "--pass-phrase"]
    assert "there is no terminal" in refused(capsys, *words)
    monkeypatch.setenv("ONEFLARE_PASS_PHRASE", "open sesame")
    run(*words)
    monkeypatch.delenv("ONEFLARE_PASS_PHRASE")
    assert "is locked with a pass phrase" in refused(capsys, *words)


def test_doctor_looks_at_mask_keys(open_round, capsys, monkeypatch):
    from oneflare.cli.doctor import examine

    monkeypatch.chdir(open_round)
    (open_round / "east.mask" / "mask.key").chmod(0o644)
    (open_round / "west.mask" / "record.json").write_text("{")
    found = {Path(folder).name: problem for folder, problem in examine()["mask_keys"].items()}
    assert found["north.mask"] is None
    assert "can be read by others" in found["east.mask"]
    assert "not valid JSON" in found["west.mask"]


def test_masked_uploads_may_be_encrypted_too_and_survive_a_new_key_of_the_coordinator(enrolled, tmp_path):
    """The three layers do not know of each other: masks, encryption to the coordinator, succession of its key."""
    root = tmp_path / "root"
    shutil.copytree(enrolled, root, ignore=shutil.ignore_patterns("fed", "inbox", "*.mask", "*.work", "*.safetensors"))
    members = [word for one in NAMES for word in ("--member", f"{one}={root / one}.pub")]
    run("server", "init", root / "fed", *SHAPE, *members, *TERMS, "--encrypt")
    charter = root / "fed" / "federation.yaml"
    for name in NAMES:
        join(root, charter, name)
    run("server", "roster", root / "fed", "--enrolments", root / "inbox")
    for name in NAMES:
        train(root, charter, name, root / f"{name}.safetensors")
        shutil.copy(root / f"{name}.safetensors.encrypted", root / "inbox")
    run("server", "rotate", root / "fed")
    run("server", "missing", root / "fed", "--uploads", root / "inbox")
    for name in NAMES[:3]:
        run(*release(root, charter, name))
    run("server", "fuse", root / "fed", "--releases", root / "inbox")
    result = json.loads((root / "fed" / "result.json").read_text())
    assert result["masked"]["counts"] == sum(plain_sums(root, name) for name in NAMES)[:10].tolist()
    entries = {entry.event: entry.details for entry in check_log(root / "fed", read_charter(root / "fed")).entries}
    assert entries["roster"]["members"] == list(NAMES)
    assert [text.split(":")[0] for text in entries["closed"]["members"]] == list(NAMES)
    assert entries["closed"]["missing"] == []
