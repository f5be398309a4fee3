"""Masked sums on Flower: the same files in two rounds of one run, one member missing, and what each side refuses."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from oneflare.simulation.engines.flower import require_flower

require_flower()

from flwr.app import Context, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402

from masked_parts import NAMES, run  # noqa: E402
from oneflare.core.files import read_json  # noqa: E402
from oneflare.errors import RunError  # noqa: E402
from oneflare.federation.coordinator import read_fused  # noqa: E402
from oneflare.federation.flower.client_app import app as client_app  # noqa: E402
from oneflare.federation.flower.server_app import app as server_app  # noqa: E402
from oneflare.federation.masked.rounds import RoundFiles  # noqa: E402
from oneflare.simulation.engines.flower.inprocess import InProcessGrid  # noqa: E402
from oneflare.simulation.engines.flower.records import answer, read_answer  # noqa: E402


def here(root: Path, names=NAMES, app=client_app, number: int = 1, **settings) -> None:
    """One run of the two apps in this process; each node belongs to whom it says."""
    charter = str(root / "fed" / "federation.yaml")
    seats = [
        {"data": str(root / "data" / name), "member": name, "key": str(root / f"{name}.key"), "federation": charter}
        for name in names
    ]
    grid = InProcessGrid(app, seats, workers=1)
    config = {"federation": str(root / "fed"), "connect-seconds": 0.2, "reply-seconds": 60, "nodes": "any", **settings}
    try:
        server_app(grid, Context(number, 0, {}, RecordDict(), config))
    finally:
        grid.close()


@pytest.fixture
def root(enrolled, tmp_path) -> Path:
    """Four members with a signed roster; nothing has been sent."""
    place = tmp_path / "root"
    shutil.copytree(enrolled, place, ignore=shutil.ignore_patterns("inbox", "*.safetensors", "*.work"))
    return place


def test_a_run_with_a_member_missing_opens_the_very_total_of_the_same_files_by_hand(root, closed):
    """The masks differ, the sum does not: not in one bit of the model."""
    here(root, NAMES[:3], **{"min-members": 3})
    run("server", "fuse", closed / "fed", "--releases", closed / "inbox", "-q")
    assert list(read_fused(root / "fed").names) == list(NAMES[:3])
    assert read_json(root / "fed" / "flower.json")["missing"] == ["west"]
    one, other = (load_file(folder / "fed" / "model.safetensors") for folder in (root, closed))
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())
    masked = [load_file(folder / "fed" / "masked" / "uploads" / "east.safetensors") for folder in (root, closed)]
    words = next(name for name, tensor in masked[0].items() if tensor.dtype == torch.int64)
    assert (masked[0][words] == masked[1][words]).double().mean() < 0.01


def test_all_members_are_waited_for_unless_the_coordinator_says_fewer(root):
    with pytest.raises(RunError, match=r"3 of 4 .* but min-members is 4; the round stays open"):
        here(root, NAMES[:3])
    assert not RoundFiles(root / "fed").request.exists()
    with pytest.raises(RunError, match="1 of 3 needed answers"):
        here(root, NAMES[3:], number=2)  # what came before is still in the inbox; but nobody else is there to release
    here(root, number=3)
    assert list(read_fused(root / "fed").names) == list(NAMES)


def test_a_run_goes_on_where_the_one_before_stopped(root):
    """Nobody releases at first: the round stays closed, and the next run asks for releases alone."""
    silent, asked = ClientApp(), []

    @silent.train()
    def train(message, context):
        asked.append(context.node_config["member"])
        return client_app(message, context)

    @silent.query()
    def refuse(message, context):
        raise RuntimeError("the line is cut")

    with pytest.raises(RunError, match="nothing can be opened yet"):
        here(root, app=silent)
    assert sorted(asked) == sorted(NAMES)
    kept = RoundFiles(root / "fed").request.read_bytes()
    here(root, number=2)
    assert RoundFiles(root / "fed").request.read_bytes() == kept
    assert read_fused(root / "fed").masked is not None


def test_a_node_answers_for_a_roster_that_its_owner_confirmed_and_no_other(root):
    """The coordinator signs another roster, which the owners' copies do not have; without a copy nothing is sent."""
    own = root / "confirmed.yaml"
    shutil.copy(root / "fed" / "federation.yaml", own)
    run("server", "roster", root / "fed", "--without", "west")
    reasons = {}
    for name, config in {"other": {"federation": str(own)}, "none": {}}.items():
        seat = {"data": str(root / "data" / "east"), "member": "east", "key": str(root / "east.key"), **config}
        grid = InProcessGrid(client_app, [seat], workers=1)
        settings = {"federation": str(root / "fed"), "connect-seconds": 0.2, "reply-seconds": 60, "nodes": "any"}
        try:
            with pytest.raises(RunError):
                server_app(grid, Context(1, 0, {}, RecordDict(), settings))
        finally:
            grid.close()
        reasons[name] = list((root / "fed" / "inbox").rglob("*.safetensors"))
    assert reasons == {"other": [], "none": []}


def test_a_release_of_somebody_else_and_a_reply_without_one_are_refused(root, caplog):
    """east answers for nobody, north with south's release; the round needs three of four and has two."""
    wrong = ClientApp()
    wrong.train()(client_app)

    @wrong.query()
    def release(message, context):
        member = context.node_config["member"]
        reply = client_app(message, context)
        facts, files = read_answer(reply.content)
        if member == "east":
            reply.content = answer(facts, {})
        if member == "north":
            reply.content = answer(facts, {"release.json": files["release.json"][:-9]})
        return reply

    with pytest.raises(RunError, match=r"2 of 3 needed answers are here for east's mask \(south, west\)"):
        here(root, app=wrong)
    left_out = read_json(root / "fed" / "flower.json")["left_out"]
    assert left_out["1"] == "the reply holds no release"
    assert "damaged or cut off" in left_out["2"]


def test_terms_without_masks_have_nothing_to_release(tmp_path):
    from flwr.app import Message, MessageType

    from flower_parts import MEMBERS, make_federation
    from oneflare.errors import ConfigError
    from oneflare.simulation.engines.flower.records import question

    charter = make_federation(tmp_path)
    message = Message(question({"charter": charter.to_yaml(), "request": "{}"}), 1, MessageType.QUERY)
    message.metadata.__dict__["_message_id"] = "1"
    config = {"data": str(tmp_path / MEMBERS[0]), "member": MEMBERS[0]}
    with pytest.raises(ConfigError, match="are not masked, so there is nothing to release"):
        client_app(message, Context(1, 1, config, RecordDict(), {}))
