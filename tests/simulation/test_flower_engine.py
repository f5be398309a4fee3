"""Clients on Flower without sockets: the apps, the gathering of replies and its faults, and equality with `local`."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

from conftest import SERVERS, TINY
from oneflare.simulation.engines.flower import require_flower
from shared import hearing

require_flower()

from flwr.app import ConfigRecord, Context, Message, RecordDict  # noqa: E402
from flwr.clientapp import ClientApp  # noqa: E402

from oneflare.client.files import ClientSummary  # noqa: E402
from oneflare.client.observer import Observer  # noqa: E402
from oneflare.data import load  # noqa: E402
from oneflare.errors import ConfigError, RunError, UploadError  # noqa: E402
from oneflare.fusion import load_model  # noqa: E402
from oneflare.methods.resolve import resolve  # noqa: E402
from oneflare.nn.given import GIVEN, give  # noqa: E402
from oneflare.simulation.engines.flower.gather import Terms, gather, readable  # noqa: E402
from oneflare.simulation.engines.flower.inprocess import InProcessGrid  # noqa: E402
from oneflare.simulation.engines.flower.records import answer, question, read_answer, read_question  # noqa: E402
from oneflare.simulation.engines.flower.simulation import train_simulated  # noqa: E402
from oneflare.simulation.files import RunFiles  # noqa: E402
from oneflare.simulation.simulation import Simulation  # noqa: E402


def launch_here(server, client, nodes):
    grid = InProcessGrid(client, [{}] * nodes, workers=2)
    try:
        server(grid, Context(1, 0, {}, RecordDict(), {}))
    finally:
        grid.close()


def train_here(federation: Simulation, launch=launch_here, observer=None) -> list[ClientSummary]:
    return train_simulated(
        [federation.clients.job(client) for client in range(3)],
        federation.dataset.train,
        federation.partition.indices,
        federation.files.folder,
        launch,
        observer or Observer(),
    )


def federation_in(folder: Path, **more) -> Simulation:
    experiment = resolve(TINY, {"method": "flare", "fusions": SERVERS, "engine": "flower"}, more)
    return Simulation.build(experiment, RunFiles(folder), load(experiment.data))


def test_uploads_models_and_traces_equal_those_of_the_local_engine(tmp_path, tiny_run):
    federation = federation_in(tmp_path)
    seen: list[ClientSummary] = []

    class Counting(Observer):
        def client_done(self, summary, samples_seen):
            assert samples_seen == 2 * summary.samples
            seen.append(summary)

    summaries = train_here(federation, observer=Counting())
    assert [summary.client for summary in summaries] == [0, 1, 2]
    assert sorted(summary.client for summary in seen) == [0, 1, 2]
    uploads = federation.collect(summaries, Observer())
    federation.fuse(federation.experiment.fusions, uploads, Observer())
    theirs = RunFiles(tiny_run)
    for client in range(3):
        ours, local = federation.files.client(client).folder, theirs.client(client).folder
        names = {path.relative_to(local).as_posix() for path in local.rglob("*") if path.is_file()}
        assert names == {path.relative_to(ours).as_posix() for path in ours.rglob("*") if path.is_file()}
        for name in names - {"summary.json"}:
            assert (ours / name).read_bytes() == (local / name).read_bytes(), name
    images = federation.dataset.test.images
    for spec in federation.experiment.fusions:
        one, other = (load_model(files.model(spec["name"])) for files in (federation.files, theirs))
        assert torch.equal(one.predict_proba(images), other.predict_proba(images))
    assert not (tmp_path / ".flower").exists()


def test_an_encoder_given_in_python_reaches_nodes_in_other_processes(tmp_path, monkeypatch):
    """Ray sends the app of the nodes in this form to processes that know nothing else of this one."""
    from ray import cloudpickle

    torch.manual_seed(0)
    own = give(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 12)))
    federation = federation_in(tmp_path, encoder=own, epochs=1, fusions="average")

    def elsewhere(server, client, nodes):
        sent = cloudpickle.dumps(client)
        monkeypatch.delitem(GIVEN, own["digest"])
        launch_here(server, cloudpickle.loads(sent), nodes)

    summaries = train_here(federation, elsewhere)
    assert [summary.status for summary in summaries] == ["trained"] * 3, summaries
    monkeypatch.delitem(GIVEN, own["digest"])


def test_only_missing_clients_are_asked_and_a_node_that_fails_is_tried_again(tmp_path):
    federation = federation_in(tmp_path)
    whole = {}

    def break_one(server, client, nodes):
        def train(message: Message, context: Context) -> Message:
            if read_question(message.content)["client"] == 1:
                raise RunError("the disk is full; make room")
            return client(message, context)

        faulty = ClientApp()
        faulty.train()(train)
        launch_here(server, faulty, nodes)

    summaries = train_here(federation, break_one)
    assert [summary.status for summary in summaries] == ["trained", "failed", "trained"]
    assert summaries[1].reason == "the disk is full; make room"
    assert not federation.files.client(1).summary.exists()
    uploads = federation.collect(summaries, Observer())
    assert [upload.client for upload in uploads] == [0, 2]

    def count(server, client, nodes):
        whole["nodes"] = nodes
        launch_here(server, client, nodes)

    assert [summary.status for summary in train_here(federation, count)] == ["trained"] * 3
    assert whole["nodes"] == 1


def test_a_reply_of_another_client_or_with_a_strange_file_is_refused(tmp_path):
    federation = federation_in(tmp_path)

    def confuse(server, client, nodes):
        def train(message: Message, context: Context) -> Message:
            reply = client(message, context)
            facts, files = read_answer(reply.content)
            if facts["client"] == 0:
                facts["client"] = 2
            if facts["client"] == 1:
                files = {"../../escape": b"x"}
            reply.content = answer(facts, files)
            return reply

        faulty = ClientApp()
        faulty.train()(train)
        launch_here(server, faulty, nodes)

    summaries = train_here(federation, confuse)
    assert [summary.status for summary in summaries] == ["failed", "failed", "trained"]
    assert "asked was 0" in summaries[0].reason
    assert "'../../escape'" in summaries[1].reason
    assert not list(tmp_path.parent.glob("escape"))


def echo(node_id: int, payload: bytes = b"\x00\xff"):
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        return Message(answer({"node": node_id}, {"upload.safetensors": payload}), reply_to=message)

    return app


def faulty(work):
    app = ClientApp()
    app.train()(work)
    return app


def test_errors_and_silence_are_reported_and_the_rest_is_gathered():
    release = threading.Event()

    def crash(message, context):
        raise ValueError("no such file")

    def hang(message, context):
        release.wait(20)
        return Message(answer({}, {}), reply_to=message)

    def nonsense(message, context):
        return Message(RecordDict({"other": ConfigRecord({"a": 1})}), reply_to=message)

    grid = InProcessGrid([echo(1), faulty(crash), faulty(hang), faulty(nonsense)], [{}] * 4, workers=4)
    kept, said = {}, []

    def accept(node, content):
        kept[node] = read_answer(content)

    outcome = gather(grid, lambda node: question({}), accept, Terms(4, 1, 1.5), observer=hearing(said))
    release.set()
    grid.close()
    assert outcome.accepted == [1]
    assert kept == {1: ({"node": 1}, {"upload.safetensors": b"\x00\xff"})}
    assert outcome.left_out[2] == "ValueError: no such file"
    assert outcome.left_out[3] == "no reply within 1.5 s"
    assert "no valid record" in outcome.left_out[4]
    assert len(said) == 3


def test_a_node_that_connects_late_takes_part_and_nobody_waits_for_one_that_never_does():
    grid = InProcessGrid([echo(1), echo(2)], [{}] * 2)
    late = grid.nodes.pop(2)
    timer = threading.Timer(0.5, lambda: grid.nodes.update({2: late}))
    timer.start()
    outcome = gather(grid, lambda node: question({}), lambda node, content: None, Terms(2, 20, 60))
    assert sorted(outcome.accepted) == [1, 2]
    outcome = gather(grid, lambda node: question({}), lambda node, content: None, Terms(3, 0.3, 60))
    assert sorted(outcome.accepted) == [1, 2]
    grid.close()


def test_two_hundred_concurrent_replies_arrive_whole():
    payloads = {node: bytes([node % 251]) * (200_000 + node) for node in range(1, 201)}
    grid = InProcessGrid([echo(node, payloads[node]) for node in payloads], [{}] * 200, workers=50)
    kept = {}

    def accept(node, content):
        facts, files = read_answer(content)
        assert facts == {"node": node}
        kept[node] = files["upload.safetensors"]

    outcome = gather(grid, lambda node: question({}), accept, Terms(200, 60, 120))
    grid.close()
    assert not outcome.left_out
    assert kept == payloads


def test_errors_of_flower_are_one_readable_line():
    assert readable("<class 'oneflare.errors.DataError'>:<'no folder at x;\n give one'>") == "no folder at x; give one"
    assert readable("<class 'ZeroDivisionError'>:<'division by zero'>") == "ZeroDivisionError: division by zero"
    assert "without a reason" in readable(None)


def test_a_message_without_our_records_is_refused():
    with pytest.raises(UploadError, match="no valid record"):
        read_question(RecordDict({"oneflare.task": ConfigRecord({"json": "[1]"})}))
    with pytest.raises(UploadError, match="no files"):
        read_answer(RecordDict({"oneflare.facts": ConfigRecord({"json": "{}"})}))


def test_a_missing_flower_is_one_line_with_the_remedy(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'oneflare\[flower\]'"):
        require_flower()
