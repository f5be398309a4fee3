"""The coordinator's log: what is in it, and that edited, forged, removed and reordered lines are found and named."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import multiprocessing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hospitals import typed
from oneflare.errors import ConfigError, RunError
from oneflare.federation.log import (
    EVENTS,
    FORGED_HEAD,
    HEAD_MESSAGE,
    Event,
    FederationLog,
    Position,
    end_digest,
    signed,
)
from oneflare.upload.signing import SigningKey, generate

AT = "2026-01-01T00:00:00+00:00"
ID = "0" * 32


@pytest.fixture(scope="module")
def keys(tmp_path_factory) -> dict[str, SigningKey]:
    folder = tmp_path_factory.mktemp("keys")
    return {name: generate(folder / f"{name}.key", folder / f"{name}.pub") for name in ("old", "new", "thief")}


@pytest.fixture
def log(tmp_path, keys) -> FederationLog:
    made = FederationLog(tmp_path, ID)
    for number in range(6):
        made.append([Event("received", {"who": f"member{number}"})], AT, keys["old"])
    return made


def problems(log: FederationLog, keys: dict[str, SigningKey], *others: tuple[str, Position]) -> tuple[str, ...]:
    return log.verify([keys["old"].public], *others).problems


def lines(log: FederationLog) -> list[bytes]:
    return log.file.read_bytes().splitlines(keepends=True)


def test_what_is_written_is_read_and_nothing_is_wrong_with_it(log, keys):
    found = log.verify([keys["old"].public])
    assert found.problems == ()
    assert [entry.details["who"] for entry in found.entries] == [f"member{number}" for number in range(6)]
    assert [entry.number for entry in found.entries] == [1, 2, 3, 4, 5, 6]
    assert found.position == Position(6, json.loads(log.head.read_text())["digest"])
    assert Position.parse(str(found.position)) == found.position
    with pytest.raises(ConfigError, match="is no position in a log"):
        Position.parse("last week")


@given(position=st.integers(0, 10**6), change=st.integers(1, 255))
@settings(max_examples=40)
def test_no_byte_can_be_changed(keys, tmp_path_factory, position, change):
    log = FederationLog(tmp_path_factory.mktemp("log"), ID)
    log.append([Event("removed", {"who": "north"}), Event("approved", {"who": "south"})], AT, keys["old"])
    content = bytearray(log.file.read_bytes())
    content[position % len(content)] ^= change
    log.file.write_bytes(bytes(content))
    assert problems(log, keys)


def test_an_edited_line_is_named_even_if_the_chain_is_made_right_again(log, keys):
    import hashlib

    rows = [dataclasses.replace(entry) for entry in log.verify([keys["old"].public]).entries]
    rows[2] = dataclasses.replace(rows[2], details={"who": "mallory"})
    for index in range(3, 6):
        rows[index] = dataclasses.replace(rows[index], previous=hashlib.sha256(rows[index - 1].line).hexdigest())
    log.file.write_bytes(b"".join(row.line for row in rows))
    found = problems(log, keys)
    assert "line 3 is not signed by the coordinator: it was edited or forged" in found
    assert not any(text.startswith(("line 1 ", "line 2 ")) for text in found)


def test_removed_and_reordered_and_added_lines_are_named(log, keys):
    whole = lines(log)
    log.file.write_bytes(b"".join(whole[:2] + whole[3:]))
    assert "line 3 has the number 4: lines are missing, were added or change places here" in problems(log, keys)
    log.file.write_bytes(b"".join([whole[0], whole[2], whole[1], *whole[3:]]))
    assert problems(log, keys)[0].startswith("line 2 has the number 3")
    forged = signed(dataclasses.replace(log.verify([]).entries[0], number=7, previous="0" * 64), keys["thief"])
    log.file.write_bytes(b"".join(whole) + forged.line)
    assert problems(log, keys) == (
        "line 7 does not follow the line before it: that line was changed, or one was taken out or put in",
        "line 7 is not signed by the coordinator: it was edited or forged",
    )


def test_lines_that_were_cut_off_are_missed(log, keys):
    whole, end = lines(log), log.verify([keys["old"].public]).position
    log.file.write_bytes(b"".join(whole[:4]))
    assert problems(log, keys) == ("the last 2 of 6 lines are missing: head.json has seen them",)
    log.head.unlink()
    assert problems(log, keys) == ("head.json is missing or damaged, which says where the log ends",)
    log.append([Event("fused")], AT, keys["old"])  # somebody goes on from the shorter log
    assert problems(log, keys) == ()
    assert problems(log, keys, ("--expect", end)) == ("the last 1 of 6 lines are missing: --expect has seen them",)
    log.append([Event("fused")], AT, keys["old"])
    assert problems(log, keys, ("--expect", end)) == ("line 6 is not the one that --expect has seen",)


def test_the_next_line_does_not_cover_up_that_lines_were_cut_off(log, keys):
    end = log.verify([keys["old"].public]).position
    cut = "the last 2 of 6 lines are missing: head.json has seen them"
    log.file.write_bytes(b"".join(lines(log)[:4]))
    for _ in range(2):  # once is enough
        log.append([Event("fused")], AT, keys["old"], others=[("result.json", end)])
        assert problems(log, keys) == (f"line 5 found this when it was written: {cut}",)
    assert [entry.event for entry in log.verify([keys["old"].public]).entries[4:]] == ["broken", "fused", "fused"]


def end_after(log: FederationLog, number: int) -> dict[str, object]:
    return {"entries": number, "digest": hashlib.sha256(lines(log)[number - 1]).hexdigest()}


def test_a_rewritten_head_does_not_hide_that_lines_were_cut_off(log, keys):
    forged = (
        "head.json, which says where the log ends, is not signed by the coordinator: it was written by somebody else"
    )
    content, shorter = lines(log), end_after(log, 4)
    stolen = json.loads(log.head.read_text())
    thief = keys["thief"].sign(end_digest(ID, Position(**shorter)), HEAD_MESSAGE)
    heads = [
        shorter,
        shorter | {"key": keys["old"].public, "signature": stolen["signature"]},
        shorter | {"key": keys["thief"].public, "signature": thief},
        shorter | {"key": keys["old"].public, "signature": "!"},
    ]
    for head in heads:
        log.file.write_bytes(b"".join(content[:4]))
        log.head.write_text(json.dumps(head))
        assert problems(log, keys) == (forged,)
    log.append([Event("fused")], "2027-01-01T00:00:00+00:00", keys["old"])  # all lines so far are of one moment
    log.head.write_text(json.dumps(end_after(log, 5)))
    log.append([Event("fused")], "2027-01-02T00:00:00+00:00", keys["old"])
    assert problems(log, keys) == (f"line 6 found this when it was written: {forged}",)


def test_a_log_that_was_set_back_is_missed_by_the_file_beside_the_key(tmp_path, keys):
    log = FederationLog(tmp_path / "federation", ID, tmp_path / "stick" / "coordinator.seen")
    for number in range(6):
        log.append([Event("received", {"who": f"member{number}"})], f"2026-01-0{number + 1}", keys["old"])
        if number == 3:
            earlier = log.file.read_bytes(), log.head.read_bytes()
    assert problems(log, keys) == ()
    log.file.write_bytes(earlier[0])
    log.head.write_bytes(earlier[1])
    missed = "the last 2 of 6 lines are missing: coordinator.seen beside the key has seen them"
    assert problems(log, keys) == (missed,)
    log.append([Event("fused")], AT, keys["old"])
    assert problems(log, keys) == (f"line 5 found this when it was written: {missed}",)
    log.seen.unlink()
    gone = "coordinator.seen beside the key is missing or damaged, which says where the log ends"
    assert gone in problems(log, keys)


def test_a_new_log_in_the_place_of_one_that_is_gone_says_so(log, keys):
    end = log.verify([keys["old"].public]).position
    for path in (log.file, log.head):
        path.unlink()
    log.append([Event("fused")], AT, keys["old"], others=[("result.json", end)])
    gone = "the last 6 of 6 lines are missing: result.json has seen them"
    assert problems(log, keys) == (f"line 1 found this when it was written: {gone}",)


def test_a_missing_head_is_written_down_unless_the_first_writer_was_killed(log, keys):
    log.head.unlink()
    log.append([Event("fused")], "2027-01-02T00:00:00+00:00", keys["old"])  # all lines so far are of one moment
    assert problems(log, keys) == ()
    log.head.unlink()
    log.append([Event("fused")], AT, keys["old"])
    missing = "head.json is missing or damaged, which says where the log ends"
    assert problems(log, keys) == (f"line 8 found this when it was written: {missing}",)


def test_a_line_that_is_cut_short_is_not_written_after(log, keys):
    log.file.write_bytes(log.file.read_bytes()[:-5])
    assert "line 6 is damaged: it is not a line of this log" in problems(log, keys)
    with pytest.raises(RunError, match="its last line is cut short"):
        log.append([Event("fused")], AT, keys["old"])


def test_an_old_key_does_not_count_after_a_later_one(log, keys):
    both = [keys["old"].public, keys["new"].public]
    log.append([Event("rotated", {"who": "coordinator"})], AT, keys["old"])
    log.append([Event("fused")], AT, keys["new"])
    assert log.verify(both).problems == ()
    log.append([Event("fused")], AT, keys["old"])
    assert log.verify(both).problems == ("line 9 is not signed by the coordinator: it was edited or forged",)


def test_without_a_key_lines_are_chained_all_the_same(tmp_path):
    log = FederationLog(tmp_path, ID)
    log.append([Event("fused"), Event("removed", {"who": "north"})], AT, None)
    assert log.verify([]).problems == ()
    rows = lines(log)
    log.file.write_bytes(rows[1])
    assert log.verify([]).problems


def test_text_of_others_writes_no_line_of_its_own(tmp_path, keys):
    log = FederationLog(tmp_path, ID)
    log.append([Event("refused", {"file": "x\n{}\x1b[2J", "reason": "y" * 10_000})], AT, keys["old"])
    (entry,) = log.verify([keys["old"].public]).entries
    assert "\x1b" not in entry.text
    assert "\n" not in entry.text
    assert len(entry.line) < 2000


def write_some(folder: str, name: str) -> None:
    log = FederationLog(Path(folder), ID)
    for number in range(5):
        log.append([Event("received", {"who": f"{name}{number}"})], AT, None)


def test_writers_at_the_same_time_lose_nothing(tmp_path):
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=write_some, args=(str(tmp_path), name)) for name in "abc"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(120)
    found = FederationLog(tmp_path, ID).verify([])
    assert found.problems == ()
    assert sorted(entry.details["who"] for entry in found.entries) == sorted(f"{n}{i}" for n in "abc" for i in range(5))


def test_the_command_shows_and_verifies(tmp_path, capsys):
    folder = tmp_path / "federation"
    words = ["encoder=conv4", "encoder.width=4", "epochs=1"]
    code, _, said = typed(capsys, "server", "init", str(folder), "--classes", "a,b", "--channels", "1", *words)
    assert code == 0, said
    assert typed(capsys, "server", "admit", str(folder), "north")[0] == 0
    code, out, _ = typed(capsys, "server", "log", str(folder))
    assert code == 0
    assert "terms: charter" in out
    assert "admitted: who north" in out
    assert "each signed by the coordinator and following the one before" in out
    end = out.split("note the end: ")[1].strip()
    assert typed(capsys, "server", "log", str(folder), "--expect", end)[0] == 0
    file, head = folder / "log" / "entries.jsonl", folder / "log" / "head.json"
    whole, true_head = file.read_bytes(), head.read_bytes()
    kept = whole.splitlines(keepends=True)[:-1]
    file.write_bytes(b"".join(kept))  # nobody shall know that north was admitted
    head.write_text(json.dumps({"entries": len(kept), "digest": hashlib.sha256(kept[-1]).hexdigest()}))
    code, _, said = typed(capsys, "server", "log", str(folder))
    assert code == 2
    assert FORGED_HEAD.format("head.json") in said
    assert "the last 1 of 3 lines are missing: coordinator-" in said
    head.write_bytes(true_head)
    file.write_bytes(whole.replace(b'"who":"north"', b'"who":"south"'))
    code, _, said = typed(capsys, "server", "log", str(folder))
    assert code == 2
    assert "is not signed by the coordinator: it was edited or forged" in said.splitlines()[-1]
    code, _, said = typed(capsys, "server", "log", str(folder), "--expect", "9:" + "0" * 64)
    assert "--expect has seen them" in said
    assert set(EVENTS) >= {json.loads(line)["event"] for line in file.read_text().splitlines()}
