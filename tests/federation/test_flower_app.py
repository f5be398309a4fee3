"""A real federation on Flower: the packaged apps in one process, then on a real SuperLink with SuperNodes."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path

import pytest
import torch

from flower_parts import MEMBERS, make_federation
from oneflare.simulation.engines.flower import require_flower
from reliability.record import record_door

require_flower()

from flwr.app import Context, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402

from oneflare.core.files import digest_of, read_json, tensor_digest, write_bytes  # noqa: E402
from oneflare.errors import ConfigError, RunError  # noqa: E402
from oneflare.federation.charter import FILE, new_charter, read_charter, revised  # noqa: E402
from oneflare.federation.coordinator import FederationFiles, fuse_federation, read_fused  # noqa: E402
from oneflare.federation.flower.asking import Settings  # noqa: E402
from oneflare.federation.flower.certificates import Certificates, make_node_key  # noqa: E402
from oneflare.federation.flower.client_app import Node  # noqa: E402
from oneflare.federation.flower.client_app import app as client_app  # noqa: E402
from oneflare.federation.flower.deployment import Deployment  # noqa: E402
from oneflare.federation.flower.nodes import bind_node  # noqa: E402
from oneflare.federation.flower.server_app import app as server_app  # noqa: E402
from oneflare.federation.flower.template import write_app  # noqa: E402
from oneflare.federation.member import make_upload, member_data, work_folder  # noqa: E402
from oneflare.federation.quorum import Rules  # noqa: E402
from oneflare.fusion import load_model  # noqa: E402
from oneflare.simulation.engines.flower.inprocess import InProcessGrid  # noqa: E402
from oneflare.simulation.engines.flower.records import answer, read_answer, read_question  # noqa: E402
from oneflare.upload.signing import generate  # noqa: E402


def round_here(folder: Path, seats, app=client_app, **settings) -> None:
    grid = InProcessGrid(app, seats, workers=len(seats))
    config = {"federation": str(folder / "federation"), "connect-seconds": 0.2, "reply-seconds": 60, "min-members": 1}
    config |= {"nodes": "any", **settings}
    try:
        server_app(grid, Context(1, 0, {}, RecordDict(), config))
    finally:
        grid.close()


def node_of(folder: Path, name: str, **more) -> dict[str, str]:
    return {"data": str(folder / name), "member": name, **more}


def by_file(folder: Path, charter, members=MEMBERS) -> Path:
    """The same federation without Flower; returns its folder."""
    target = folder / "by-file"
    charter.write(target / FILE)
    for name in members:
        data = member_data(charter, folder / name).data
        make_upload(charter, data, target / "inbox" / f"{name}.safetensors", member=name)
    fuse_federation(target, uploads=target / "inbox", rules=Rules(min_members=len(members)))
    return target


def same_model(one: Path, other: Path) -> None:
    from safetensors.torch import load_file

    first, second = (load_file(FederationFiles(folder).model) for folder in (one, other))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def test_a_round_gives_the_model_of_the_same_federation_by_file(tmp_path):
    charter = make_federation(tmp_path)
    left = tmp_path / "kept" / "north.safetensors"
    nodes = [node_of(tmp_path, name, **({"out": str(left)} if name == "north" else {})) for name in MEMBERS]
    round_here(tmp_path, nodes, test=str(tmp_path / "test"))
    federation = tmp_path / "federation"
    same_model(federation, by_file(tmp_path, charter))
    content = read_fused(federation)
    assert list(content.names) == list(MEMBERS)
    assert content.missing == ()
    assert content.test_images == 60
    assert read_json(federation / "flower.json")["in"] == list(MEMBERS)
    assert (federation / "card.md").exists()
    assert (federation / "report.html").exists()
    assert left.read_bytes() in [path.read_bytes() for path in (federation / "inbox").rglob("*.safetensors")]
    load_model(federation / "model.safetensors")


def test_faults_are_named_and_the_rest_is_fused(tmp_path):
    charter = make_federation(tmp_path)
    other = make_federation(tmp_path / "other")
    nodes = [
        node_of(tmp_path, "east"),
        node_of(tmp_path, "north", data=str(tmp_path / "nowhere")),
        node_of(tmp_path, "south", federation=str(tmp_path / "other" / "federation")),
        node_of(tmp_path, "east", member="stranger"),
        node_of(tmp_path, "east", nonsense=1),
    ]
    round_here(tmp_path, nodes)
    report = read_json(tmp_path / "federation" / "flower.json")
    assert report["in"] == ["east"]
    assert report["missing"] == ["north", "south"]
    assert "images cannot be used; the log of its node says why" in report["left_out"]["2"]
    assert "nowhere" not in report["left_out"]["2"]  # names of files may name patients
    assert "ask the coordinator which are right" in report["left_out"]["3"]
    assert "'stranger' is not a member" in report["left_out"]["4"]
    assert "unknown key 'nonsense'" in report["left_out"]["5"]
    assert charter.fingerprint != other.fingerprint
    with pytest.raises(RunError, match="1 usable uploads, but min-members is 2; nothing was fused"):
        round_here(tmp_path, nodes[:2], **{"min-members": 2})


def with_nan(path: Path) -> None:
    """Spoil an upload so that nothing but its numbers is wrong: the digests are right."""
    from safetensors import safe_open
    from safetensors.torch import save

    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        manifest = json.loads(file.metadata()["oneflare"])
    tensors["prototypes"][0, 0] = float("nan")
    manifest["tensors"]["prototypes"] = tensor_digest(tensors["prototypes"])
    manifest.pop("signature", None)
    manifest["digest"] = digest_of({key: value for key, value in manifest.items() if key != "digest"})
    write_bytes(path, save(tensors, metadata={"oneflare": json.dumps(manifest, sort_keys=True)}))


def test_a_reply_with_nan_or_a_broken_file_is_refused_like_a_file(tmp_path):
    make_federation(tmp_path)

    def spoil(message, context):
        reply = client_app(message, context)
        facts, files = read_answer(reply.content)
        path = tmp_path / "spoilt" / f"{facts['member']}.safetensors"
        write_bytes(path, files["upload.safetensors"])
        if facts["member"] == "north":
            with_nan(path)
        if facts["member"] == "south":
            path.write_bytes(path.read_bytes()[:-5])
        reply.content = answer(facts, {"upload.safetensors": path.read_bytes()})
        return reply

    app = ClientApp()
    app.train()(spoil)
    round_here(tmp_path, [node_of(tmp_path, name) for name in MEMBERS], app)
    report = read_json(tmp_path / "federation" / "flower.json")
    assert report["in"] == ["east"]
    assert report["missing"] == ["north", "south"]
    reasons = {verdict["member"]: verdict["reason"] for verdict in report["refused"]}
    assert "not finite" in reasons["north"]
    assert "not a valid safetensors file" in reasons["south"]
    assert read_fused(tmp_path / "federation").missing == ("north", "south")


def test_members_with_keys_sign_and_a_name_alone_is_not_believed(tmp_path):
    charter = make_federation(tmp_path)
    key = generate(tmp_path / "north.key", tmp_path / "north.pub")
    members = dict.fromkeys(MEMBERS) | {"north": key.public}
    revised(charter, members=members).write(tmp_path / "federation" / FILE)
    round_here(tmp_path, [node_of(tmp_path, "north"), node_of(tmp_path, "east")])
    report = read_json(tmp_path / "federation" / "flower.json")
    assert report["in"] == ["east"]
    assert "must be signed" in report["left_out"]["1"]
    signing = {"data": str(tmp_path / "north"), "key": str(tmp_path / "north.key")}
    round_here(tmp_path, [signing, node_of(tmp_path, "east")])
    content = read_fused(tmp_path / "federation")
    assert {member.name: member.signed for member in content.members} == {"east": False, "north": True}


def bound_to(folder: Path, *members: str) -> None:
    """Node 1 is registered for the first member, node 2 for the second, and so on."""
    for number, name in enumerate(members, start=1):
        files = Certificates(folder / "keys")
        make_node_key(files, name)
        bind_node(folder / "federation", name, files.node_public(name), lambda _, node=number: node)


def test_a_node_sends_for_the_member_it_is_registered_for_and_for_nobody_else(tmp_path):
    make_federation(tmp_path)
    nodes = [
        node_of(tmp_path, "east"),
        node_of(tmp_path, "north", member="south"),
        node_of(tmp_path, "south"),
        node_of(tmp_path, "north"),
    ]
    with pytest.raises(ConfigError, match=r"no member of .* has a node; register each"):
        round_here(tmp_path, nodes, nodes="bound")
    bound_to(tmp_path, "east", "north", "south")
    round_here(tmp_path, nodes[:2], nodes="bound")
    report = read_json(tmp_path / "federation" / "flower.json")
    assert report["in"] == ["east"]
    assert report["left_out"] == {"2": "came from north's node, but says that it is from south; each sends its own"}
    inbox = tmp_path / "federation" / "inbox" / "flower-1"
    assert [path.name for path in inbox.iterdir()] == ["node-1.safetensors"]
    round_here(tmp_path, nodes, nodes="bound")
    report = read_json(tmp_path / "federation" / "flower.json")
    assert report["in"] == ["east", "south"]
    assert report["left_out"]["4"] == "is registered for no member of this federation and was not asked"


def test_a_question_to_a_node_cannot_be_guessed_by_another(tmp_path):
    make_federation(tmp_path)
    seen = []

    def listen(message, context):
        seen.append(read_question(message.content)["nonce"])
        return client_app(message, context)

    app = ClientApp()
    app.train()(listen)
    round_here(tmp_path, [node_of(tmp_path, name) for name in MEMBERS], app)
    assert len(set(seen)) == len(MEMBERS)
    assert all(len(nonce) == 32 for nonce in seen)


def test_members_who_sent_by_file_stay_in_and_count(tmp_path):
    charter = make_federation(tmp_path)
    federation = tmp_path / "federation"
    for name in ("north", "south"):
        data = member_data(charter, tmp_path / name).data
        make_upload(charter, data, tmp_path / "mail" / f"{name}.safetensors", member=name)
    fuse_federation(federation, uploads=tmp_path / "mail", rules=Rules(min_members=2))
    round_here(tmp_path, [node_of(tmp_path, "east")], **{"min-members": 0})
    assert list(read_fused(federation).names) == list(MEMBERS)
    report = read_json(federation / "flower.json")
    assert report["in"] == list(MEMBERS)
    assert report["by_file"] == ["north", "south"]
    same_model(federation, by_file(tmp_path, charter))


def test_the_minimum_is_over_members_that_are_fused_and_is_all_of_them_unless_said(tmp_path):
    make_federation(tmp_path)
    federation, nodes = tmp_path / "federation", [node_of(tmp_path, name) for name in MEMBERS]
    with pytest.raises(RunError, match="2 usable uploads, but min-members is 3; nothing was fused"):
        round_here(tmp_path, nodes[:2], **{"min-members": 0})
    assert not FederationFiles(federation).result.exists()
    round_here(tmp_path, nodes, **{"min-members": 0})
    fuse_federation(federation, remove=["south"])
    with pytest.raises(RunError, match="2 usable uploads, but min-members is 3"):
        round_here(tmp_path, nodes, **{"min-members": 3})
    round_here(tmp_path, nodes, **{"min-members": 0})
    assert list(read_fused(federation).names) == ["east", "north"]
    assert read_json(federation / "flower.json")["missing"] == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "'federation' is missing"),
        ({"federation": "x", "min-member": 2}, "did you mean 'min-members'"),
        ({"federation": "x", "min-members": -1}, "min-members is -1, not a number of members"),
        ({"federation": "x", "nodes": "all"}, "nodes is 'all', not one of bound, any"),
        ({"federation": "x", "reply-seconds": 0}, "reply-seconds is 0, not a number above 0"),
    ],
)
def test_mistakes_in_the_run_configuration(config, message):
    with pytest.raises(ConfigError, match=message):
        Settings.of(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "'data' is missing"),
        ({"data": "x", "memebr": "north"}, "did you mean 'member'"),
        ({"data": "x", "out": "upload.pt"}, r"ends in \.safetensors"),
    ],
)
def test_mistakes_in_the_node_configuration(config, message):
    with pytest.raises(ConfigError, match=message):
        Node.of(config)


PRIVATE = {
    "method": "analytic",
    "analytic": {"name": "random_conv", "filters": 3},
    "upload": {"statistics_epsilon": 1.0, "counts": "withheld"},
}


def ask(folder: Path, rounds: int, **node) -> tuple[set[bytes], list[str]]:
    """A coordinator that asks one member again and again: the different uploads it got, and the refusals."""
    got: set[bytes] = set()
    refused = []

    def listen(message, context):
        reply = client_app(message, context)
        got.update(read_answer(reply.content)[1].values())
        return reply

    for _ in range(rounds):
        try:
            round_here(folder, [node_of(folder, "east", **node)], app=[listen])
        except RunError:
            refused.append(read_json(folder / "federation" / "flower.json")["left_out"]["1"])
    return got, refused


def other_terms(folder: Path) -> None:
    """The same federation under a new identity."""
    charter = new_charter(
        "digits", PRIVATE, classes=[str(label) for label in range(10)], image={"size": 8, "channels": 1}
    )
    shutil.rmtree(folder / "federation")
    charter.write(folder / "federation" / FILE)


def test_a_coordinator_that_asks_again_gets_the_same_upload(tmp_path):
    make_federation(tmp_path, **PRIVATE)
    assert tuple(map(len, ask(tmp_path, 2))) == (1, 0)
    other_terms(tmp_path)
    got, refused = ask(tmp_path, 1)
    assert got == set()
    assert "budget=2 in --node-config" in refused[0]
    assert "1 is spent" in refused[0]
    assert len(ask(tmp_path, 1, budget="2")[0]) == 1
    assert len(read_json(tmp_path / ".home" / "ledger" / "ledger.json")["answers"]) == 2


@pytest.mark.soak
def test_forty_rounds_average_no_noise_away(tmp_path):
    make_federation(tmp_path, **PRIVATE)
    same, none = ask(tmp_path, 40)
    assert (len(same), none) == (1, [])
    refusals = []
    for _ in range(10):
        other_terms(tmp_path)
        got, refused = ask(tmp_path, 1)
        assert got == set()
        refusals += refused
    record_door(
        "budget",
        promise="nobody averages a member's noise away by asking again",
        tried="a coordinator on Flower: 40 rounds at epsilon 1 under the same terms, 10 under new ones",
        outcome=f"one upload, 40 times the same bytes; {len(refusals)} of 10 refused: {refusals[0].split(';')[0]}",
    )


def round_on(deployment: Deployment, folder: Path, **settings) -> dict:
    app = folder / "app"
    if not app.exists():
        write_app(app, folder / "federation", 1)
    status = deployment.run(app, {"connect-seconds": 120, "reply-seconds": 600, **settings}, 900)
    logs = "".join(deployment.log(name).read_text()[-3000:] for name in deployment.processes)
    assert status == "finished:completed", logs
    return read_json(folder / "federation" / "flower.json")


def wait_until(condition, seconds: float = 180) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "timed out"
        time.sleep(0.1)


@pytest.mark.soak
def test_a_superlink_and_three_supernodes(tmp_path):
    charter = make_federation(tmp_path)
    with Deployment(tmp_path / "deployment") as deployment:
        for name in MEMBERS:
            deployment.start_node(name, node_of(tmp_path, name))
        report = round_on(deployment, tmp_path)
        started = list(deployment.processes.values())
    assert report["in"] == list(MEMBERS)
    assert report["left_out"] == {}
    same_model(tmp_path / "federation", by_file(tmp_path, charter))
    assert all(process.poll() is not None for process in started)


@pytest.mark.soak
def test_a_supernode_killed_while_it_trains_is_missed_and_the_rest_is_fused(tmp_path):
    charter = make_federation(tmp_path, train={"epochs": 60, "batch_size": 8, "checkpoint_seconds": 0})
    out = tmp_path / "work" / "north.safetensors"
    with Deployment(tmp_path / "deployment") as deployment:
        for name in MEMBERS:
            deployment.start_node(name, node_of(tmp_path, name, **({"out": str(out)} if name == "north" else {})))
        import threading

        def kill() -> None:
            wait_until((work_folder(out) / "checkpoint" / "state.safetensors").exists)
            deployment.kill("north")

        killer = threading.Thread(target=kill)
        killer.start()
        report = round_on(deployment, tmp_path)
        killer.join()
    assert report["in"] == ["east", "south"]
    assert report["missing"] == ["north"]
    assert len(report["left_out"]) == 1
    same_model(tmp_path / "federation", by_file(tmp_path, charter, ("east", "south")))


@pytest.mark.soak
def test_a_supernode_that_returns_nan_is_left_out(tmp_path):
    charter = make_federation(tmp_path)
    out = tmp_path / "work" / "north.safetensors"
    data = member_data(charter, tmp_path / "north").data
    make_upload(charter, data, out, member="north")
    with_nan(work_folder(out) / "upload.safetensors")
    out.unlink()
    with Deployment(tmp_path / "deployment") as deployment:
        for name in MEMBERS:
            deployment.start_node(name, node_of(tmp_path, name, **({"out": str(out)} if name == "north" else {})))
        report = round_on(deployment, tmp_path)
    assert report["in"] == ["east", "south"]
    assert report["missing"] == ["north"]
    assert "not finite" in report["refused"][0]["reason"]
    assert read_charter(tmp_path / "federation").fingerprint == charter.fingerprint
