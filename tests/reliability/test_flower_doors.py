"""Strangers and members who want in where they do not belong, against a closed deployment of real processes."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from record import record_door

from flower_parts import MEMBERS, make_federation
from oneflare.client.observer import Observer
from oneflare.core.files import read_json, write_text
from oneflare.federation.coordinator import fuse_federation
from oneflare.federation.flower.certificates import Certificates, make_certificates
from oneflare.federation.flower.deployment import CONNECTION, HOST, Deployment, Protection, free_port
from oneflare.federation.flower.proxy import NOBODY, STRANGER
from oneflare.federation.flower.template import write_app
from oneflare.federation.member import make_upload, member_data
from oneflare.federation.quorum import Rules
from oneflare.simulation.engines.flower import QUIET, require_flower

require_flower()

pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")
CLIENT = """\
from pathlib import Path

from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.train()
def train(message, context):
    data = Path(context.node_config["data"])
    (data.parent / "TAKEN").write_text(f"{sum(path.is_file() for path in data.rglob('*'))} images read")
    return Message(RecordDict(), reply_to=message)
"""
SERVER = """\
from pathlib import Path

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    Path(context.run_config["mark"]).write_text("the stranger's server app ran")
    nodes = list(grid.get_node_ids())
    replies = grid.send_and_receive([Message(RecordDict(), node, MessageType.TRAIN) for node in nodes], timeout=60)
    said = [reply.error.reason if reply.has_error() else "ran" for reply in replies]
    Path(context.run_config["said"]).write_text("\\n".join(said))
"""


def foreign_app(folder: Path) -> Path:
    """An app that reads members' images and leaves a mark wherever it runs."""
    app = folder / "foreign"
    project = write_app(app, folder)
    text = project.read_text()
    text = re.sub(r'(serverapp|clientapp) = ".*"', r'\1 = "foreign.\1:app"', text)
    settings = f'mark = "{folder}/MARK"\nsaid = "{folder}/SAID"\n'
    write_text(project, text[: text.index("[tool.flwr.app.config]")] + "[tool.flwr.app.config]\n" + settings)
    for name, code in {"__init__": "", "clientapp": CLIENT, "serverapp": SERVER}.items():
        write_text(app / "foreign" / f"{name}.py", code)
    return app


def listening(process: int) -> set[str]:
    """The addresses on which a process listens, in hexadecimal as the kernel writes them."""
    sockets = set()
    for entry in Path(f"/proc/{process}/fd").iterdir():
        with_number = re.fullmatch(r"socket:\[(\d+)\]", str(entry.readlink())) if entry.is_symlink() else None
        if with_number:
            sockets.add(with_number.group(1))
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/{process}/net/{table}").read_text().splitlines()[1:]
    ]
    return {line[1].split(":")[0] for line in lines if line[3] == "0A" and line[9] in sockets}


def as_stranger(folder: Path, address: str, authority: Path, *words: str) -> str:
    """What `flwr` answers to somebody who has nothing but the CA's certificate and the proxy's address."""
    connection = f'[superlink]\ndefault = "door"\n\n[superlink.door]\naddress = "{address}"\n'
    write_text(folder / "stranger" / "config.toml", f'{connection}root-certificates = "{authority}"\n')
    outcome = subprocess.run(
        [str(Path(sys.executable).parent / "flwr"), *words],
        env=os.environ | QUIET | {"FLWR_HOME": str(folder / "stranger")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    text = " ".join((outcome.stdout + outcome.stderr).split())
    print("stranger:", " ".join(words[:2]), "->", outcome.returncode, text)
    assert outcome.returncode != 0, text
    return text


def ended(deployment: Deployment, name: str) -> str:
    """The log of a process that gives up by itself."""
    deployment.processes[name].wait(120)
    text = re.sub(r"\x1b\[[0-9;]*m", "", deployment.log(name).read_text())
    print(f"{name}:", text[-600:])
    return text


def until(condition, seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.2)


def connected(deployment: Deployment, name: str) -> bool:
    return "SuperNode ID" in deployment.log(name).read_text()


@pytest.mark.soak
def test_a_closed_deployment_keeps_everybody_where_they_belong(tmp_path):
    if shutil.which("nginx") is None:
        pytest.skip("nginx is not installed; apt-get install nginx-light")
    charter = make_federation(tmp_path)
    federation = tmp_path / "federation"
    app = write_app(tmp_path / "app", federation, 2).parent
    files = make_certificates(tmp_path / "certificates", ["127.0.0.1"], MEMBERS)
    foreign = foreign_app(tmp_path)
    data = member_data(charter, tmp_path / "south").data
    make_upload(charter, data, tmp_path / "mail" / "south.safetensors", member="south")
    fuse_federation(federation, uploads=tmp_path / "mail", rules=Rules(min_members=1))
    with Deployment(tmp_path / "deployment", Protection(files, federation, app)) as deployment:
        deployment.start_node("east", {"data": str(tmp_path / "east"), "member": "east"})
        deployment.start_node("north", {"data": str(tmp_path / "north"), "member": "south"})
        deployment.register("south", files.node_public("south"))
        assert listening(deployment.processes["superlink"].pid) == {"0100007F"}
        strangers_are_refused(tmp_path, deployment, files, foreign)
        cross_use_is_refused(tmp_path, deployment)
        until(lambda: connected(deployment, "east") and connected(deployment, "north"))
        foreign_app_is_refused(tmp_path, deployment, foreign)
        nobody_sends_as_another(tmp_path, deployment, app)


def strangers_are_refused(folder: Path, deployment: Deployment, files: Certificates, foreign: Path) -> None:
    address = f"{HOST}:{deployment.door}"
    own = make_certificates(folder / "own", ["127.0.0.1"], ["stranger"])
    ran = as_stranger(folder, address, files.authority, "run", str(foreign), "door")
    public = str(own.node_public("stranger"))
    registered = as_stranger(folder, address, files.authority, "supernode", "register", public, "door")
    for text in (ran, registered):
        assert NOBODY in text.replace(" │ │ ", " ")
        assert "success" not in text
    seat = replace(deployment.seat("north"), port=free_port())
    for name, certificate in (("own-authority", own), ("own-key", None)):
        chosen = replace(seat, node_key=own.node("stranger"))
        if certificate is not None:
            chosen = replace(
                chosen,
                certificate=certificate.member("stranger"),
                certificate_key=certificate.member_key("stranger"),
            )
        deployment.start_seat(name, replace(chosen, port=free_port()), {"data": "x", "member": "south"})
    assert NOBODY in ended(deployment, "own-authority")
    assert STRANGER in ended(deployment, "own-key")
    assert len(nodes_of(deployment)) == len(MEMBERS)
    assert not (folder / "MARK").exists()
    record_door(
        "flower-stranger",
        promise="A stranger with the CA's certificate cannot run an app or register a node",
        tried="`flwr run` and `flwr supernode register` through the proxy; a SuperNode with a certificate of another "
        "authority; a SuperNode with a member's certificate and a node key of its own",
        outcome=f"three times `{NOBODY}`, once `{STRANGER}`; nothing ran, nobody was registered, the SuperLink "
        "listens on 127.0.0.1 only",
    )


def nodes_of(deployment: Deployment) -> list[dict]:
    return json.loads(deployment.flwr("supernode", "list", CONNECTION, "--format", "json"))["nodes"]


def cross_use_is_refused(folder: Path, deployment: Deployment) -> None:
    north, south = deployment.seat("north"), deployment.seat("south")
    mixed = replace(north, node_key=south.node_key)
    deployment.start_seat("mixed", mixed, {"data": str(folder / "north"), "member": "south"})
    assert STRANGER in ended(deployment, "mixed")


def foreign_app_is_refused(folder: Path, deployment: Deployment, foreign: Path) -> None:
    """The coordinator itself (or whoever is on its machine) runs another app: members do not execute it."""
    started = json.loads(deployment.flwr("run", str(foreign), CONNECTION, "--format", "json"))
    assert started["success"], started
    until((folder / "SAID").exists)
    assert (folder / "SAID").read_text().splitlines() == ["The FAB could not be verified."] * 2
    assert not (folder / "TAKEN").exists()
    for name in ("east", "north"):
        assert "refused to run the app that the coordinator sent: its digest is" in deployment.log(name).read_text()
    record_door(
        "flower-foreign-app",
        promise="A member's SuperNode runs one pinned app, whatever the coordinator sends",
        tried="an app that reads the member's images, run by the coordinator itself on two members",
        outcome="2 of 2 SuperNodes refused it (`The FAB could not be verified`, and the digest in the member's log); "
        "no image was read",
    )


def nobody_sends_as_another(folder: Path, deployment: Deployment, app: Path) -> None:
    """North's node says it is south; south had sent by file. The round fuses east and south's own file."""
    status = deployment.run(app, {"connect-seconds": 15, "reply-seconds": 300}, 600, Observer())
    report = read_json(folder / "federation" / "flower.json")
    assert status == "finished:completed", report
    assert report["in"] == ["east", "south"]
    assert report["by_file"] == ["south"]
    assert report["missing"] == ["north"]
    reason = "came from north's node, but says that it is from south; each sends its own"
    assert list(report["left_out"].values()) == [reason]
    record_door(
        "flower-cross-use",
        promise="A member's node cannot send as another member",
        tried="north's SuperNode with `member=south`; north's certificate with south's node key",
        outcome=f"`{reason}`; `{STRANGER}`; south's own upload stayed in the fusion",
    )


@pytest.mark.soak
def test_an_open_deployment_runs_whatever_a_stranger_sends(tmp_path):
    """Where nothing is closed, the same app runs: the test above can fail, and the warning in the docs is true."""
    make_federation(tmp_path)
    foreign = foreign_app(tmp_path)
    with Deployment(tmp_path / "deployment") as deployment:
        deployment.start_node("east", {"data": str(tmp_path / "east"), "member": "east"})
        until(lambda: connected(deployment, "east"))
        assert json.loads(deployment.flwr("run", str(foreign), CONNECTION, "--format", "json"))["success"]
        until((tmp_path / "SAID").exists)
    assert (tmp_path / "SAID").read_text() == "ran"
    assert (tmp_path / "TAKEN").read_text() == "60 images read"
    assert (tmp_path / "MARK").exists()
