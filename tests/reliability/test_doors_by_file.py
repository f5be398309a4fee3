"""A federation by file, attacked with the installed command: by members, by strangers, and by its own coordinator."""

from __future__ import annotations

import json
import os
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch
from record import record_door
from safetensors.torch import load_file

from crowd import charter_of, upload_of
from oneflare.federation.charter import Charter, read_charter, revised
from oneflare.federation.member import signer
from oneflare.study.attacks import ATTACKS
from oneflare.upload import Contents, seal_upload, write_upload
from oneflare.upload.signing import SigningKey, generate
from shared import COMMAND, oneflare

pytestmark = pytest.mark.soak
NAMES = ("east", "north", "south", "west")
NEW = "2026-02-01T00:00:00+00:00"


@pytest.fixture
def keys(tmp_path) -> dict[str, SigningKey]:
    return {name: generate(tmp_path / f"{name}.key", tmp_path / f"{name}.pub") for name in (*NAMES, "mallory")}


@pytest.fixture
def office(tmp_path, keys) -> Path:
    """The coordinator's folder: four members and mallory are admitted, the four have sent their uploads."""
    charter = charter_of({name: key.public for name, key in keys.items()})
    charter.write(tmp_path / "federation" / "federation.yaml")
    (tmp_path / "inbox").mkdir()
    for name in NAMES:
        upload_of(charter, tmp_path / "inbox" / f"{name}.safetensors", name, signer(keys[name]))
    return tmp_path


def fuse(office: Path, *words: str) -> subprocess.CompletedProcess:
    return oneflare("server", "fuse", "federation", *words, cwd=office)


def one_line(outcome: subprocess.CompletedProcess) -> str:
    assert outcome.returncode == 2, outcome
    assert outcome.stdout == ""
    assert outcome.stderr.count("\n") == 1
    assert outcome.stderr.startswith("error: ")
    return outcome.stderr


def poisoned(charter: Charter, path: Path, key: SigningKey, client: int) -> None:
    """mallory's upload, signed with mallory's key, with any client number."""
    network, counts = ATTACKS["sign_flip"](charter.template(), torch.full((10,), 9), 0)
    plain = path.with_suffix(".plain")
    write_upload(plain, network, charter.contract, Contents(client=client, counts=counts, epoch=2))
    seal_upload(plain, path, member="mallory", created=NEW, sign=signer(key))
    plain.unlink()


def test_an_attacker_cannot_have_somebody_else_suspected(office, keys):
    charter = read_charter(office / "federation")
    for name in NAMES:
        poisoned(charter, office / "inbox" / "mallory.safetensors", keys["mallory"], charter.client(name))
        outcome = fuse(office, "--uploads", "inbox", "--min-members", "4")
        assert outcome.returncode == 0
        assert "suspect" not in outcome.stderr
        result = json.loads((office / "federation" / "result.json").read_text())
        (refused,) = [verdict for verdict in result["verdicts"] if verdict["status"] != "in"]
        assert refused["member"] is None
        assert f"has client number {charter.client(name)}, but mallory's is" in refused["reason"]
    poisoned(charter, office / "inbox" / "mallory.safetensors", keys["mallory"], charter.client("mallory"))
    outcome = fuse(office, "--uploads", "inbox")
    assert "mallory is suspect" in outcome.stderr
    assert not [name for name in NAMES if f"{name} is suspect" in outcome.stderr]
    record_door(
        "framing",
        promise="nobody can have another member suspected or removed",
        tried="a member signs a poisoned upload with each of the four others' client numbers",
        outcome="4 of 4 refused by name; with its own number the attacker itself is named",
    )


def test_a_model_of_all_is_not_replaced_by_one_of_a_few(office, keys):
    assert fuse(office, "--uploads", "inbox", "--remove", "mallory").returncode == 0
    before = (office / "federation" / "model.safetensors").read_bytes()
    for name in ("east", "north"):
        path = office / "inbox" / f"{name}.safetensors"
        damaged = bytearray(path.read_bytes())
        damaged[-100] ^= 1
        path.write_bytes(bytes(damaged))
    answer = one_line(fuse(office, "--uploads", "inbox"))
    assert "2 usable uploads (south, west), but 4 are needed" in answer
    assert (office / "federation" / "model.safetensors").read_bytes() == before
    assert fuse(office, "--uploads", "inbox", "--min-members", "2").returncode == 0
    assert (office / "federation" / "models" / "001" / "model.safetensors").read_bytes() == before
    record_door(
        "fewer_members",
        promise="a model of all members is not replaced by one of a few unless the coordinator says so",
        tried="two of four uploads damaged on their way, one member removed before",
        outcome="exit 2, one line, nothing changed; with --min-members 2 the version before is kept whole",
    )


def test_what_was_replaced_or_removed_does_not_come_back(office, keys):
    charter, box = read_charter(office / "federation"), office / "inbox"
    old = (box / "north.safetensors").read_bytes()
    ahead = (datetime.now(UTC) + timedelta(hours=12)).isoformat()
    upload_of(charter, box / "north.safetensors", "north", signer(keys["north"]), created=ahead)
    assert "in the future" in one_line(fuse(office, "--uploads", "inbox", "--remove", "mallory"))
    upload_of(charter, box / "north.safetensors", "north", signer(keys["north"]), created=NEW)
    assert fuse(office, "--uploads", "inbox", "--remove", "mallory").returncode == 0
    (box / "north.safetensors").write_bytes(old)
    assert "before the upload of north that was fused already" in one_line(fuse(office, "--uploads", "inbox"))
    more = charter.experiment | {"fusions": [{"name": "count_prototypes"}, {"name": "ensemble"}]}
    revised(charter, experiment=more).write(office / "federation" / "federation.yaml")
    assert fuse(office).returncode == 0
    charter.write(office / "federation" / "federation.yaml")
    weights = load_file(office / "federation" / "members" / "north.safetensors")
    secret = weights["encoder.project.weight"].numpy().tobytes()
    holders = [path for path in (office / "federation").rglob("*.safetensors") if secret in path.read_bytes()]
    assert "ensemble.safetensors" in {path.name for path in holders}
    assert fuse(office, "--remove", "north").returncode == 0
    left = [path for path in (office / "federation").rglob("*") if path.is_file() and secret in path.read_bytes()]
    assert left == []
    record_door(
        "replay",
        promise="what was replaced or removed does not come back, and no file of who left stays",
        tried="an upload dated 12 hours ahead, an older signed upload sent again, a removal after a fusion was dropped "
        "from the terms",
        outcome=f"2 of 2 refused with the remedy; of {len(holders)} files with the member's weights 0 are left",
    )


YAML = {
    "a key twice": "upload: {counts_epsilon: 0.1}\nupload: {counts_epsilon: 9}\n",
    "nesting": "use: " + "[" * 100_000,
    "an integer of 5,000 digits": "version: " + "9" * 5000,
    "a date that is none": "deadline: 2027-13-45",
    "aliases": "a: &a [x]\nb: [*a, *a]",
    "not UTF-8": "name: \udcff",
    "a control character": "name: \x1b[31m",
    "a wide encoder": "experiment: {encoder: {name: resnet18, width: 1000000000}}",
    "a wide projection": "experiment: {encoder: {name: resnet8, dim: 1000000000}}",
    "many filters": "experiment: {method: analytic, analytic: {name: random_conv, filters: 4096}}",
}
LIMIT_KIB = 6 << 20


def test_terms_that_could_be_misread_or_take_memory_are_one_line(tmp_path):
    rest = 'version: 1\nname: x\nid: "' + "0" * 32 + '"\nclasses: [a, b]\n'
    for kind, text in YAML.items():
        key = text.split(":")[0]
        kept = "".join(line + "\n" for line in rest.splitlines() if not line.startswith(f"{key}:"))
        (tmp_path / "federation.yaml").write_bytes((kept + text).encode(errors="surrogateescape"))
        command = [*COMMAND, "client", "train", "federation.yaml", "--data", "images", "--dry-run"]
        limited = ["bash", "-c", f'ulimit -v {LIMIT_KIB}; exec "$@"', "bash", *command]
        outcome = subprocess.run(limited, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert "federation.yaml" in one_line(outcome), kind
        assert len(outcome.stderr) < 500, kind
    record_door(
        "yaml",
        promise="terms that two programs would read differently, or that take memory, are refused before training",
        tried=f"{len(YAML)} files: {', '.join(YAML)}",
        outcome=f"{len(YAML)} of {len(YAML)} refused in one line, in less than {LIMIT_KIB >> 20} GiB of address space",
    )


def test_names_forge_no_line_and_six_admissions_at_once_lose_nobody(office, keys):
    evil = b"x\n\x1b[2J\x1b[32mnorth was removed\x9b1m\xff.safetensors"
    stolen = (office / "inbox" / "north.safetensors").read_bytes()
    Path(os.fsdecode(bytes(office / "inbox") + b"/" + evil)).write_bytes(stolen[:-7])
    outcome = fuse(office, "--uploads", "inbox", "--min-members", "4")
    assert outcome.returncode == 0
    shown = [outcome.stdout, outcome.stderr]
    shown += [(office / "federation" / name).read_text() for name in ("result.json", "card.md", "report.html")]
    for text in shown:
        assert not {"\x1b", "\x9b", "\udcff"} & set(text)
        assert not any(line.strip().startswith("north was removed") for line in text.splitlines())
    names = [f"member{number}" for number in range(6)]
    for name in names:
        generate(office / f"{name}.key", office / f"{name}.pub")
    started = [
        subprocess.Popen([*COMMAND, "server", "admit", "federation", name, f"{name}.pub"], cwd=office) for name in names
    ]
    assert [process.wait(300) for process in started] == [0] * 6
    assert set(names) <= set(read_charter(office / "federation").members)
    record_door(
        "names",
        promise="text of others forges no line of a log, a table or a page, and admissions at once lose nobody",
        tried="an upload whose name holds a line end, escape sequences and bytes that are not UTF-8; six admissions "
        "at the same time",
        outcome="5 places written without a control character; 6 of 6 admitted",
    )
