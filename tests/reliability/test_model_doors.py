"""Models and their server in the hands of strangers, with a row of the reliability table for each door."""

from __future__ import annotations

import resource
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from record import record_door
from test_decisions import chosen, knowing
from test_decisions import test_thresholds_that_were_taken_away_or_put_back_are_missed as taken_or_put_back
from test_effort import HOSTILE, saved
from test_model_files import TAMPERED, attack_fields, copy_of, federation, picture, tamper
from test_serving import ATTACKS, SMALL, exchange, form, head, noise, read_answer, running

from hospitals import typed
from oneflare.models.serving.limits import Limits

__all__ = ["chosen", "federation", "knowing"]
REQUESTS = 10


@pytest.mark.soak
def test_malformed_and_tampered_models(federation, tmp_path, capsys):
    fields = attack_fields(federation / "model.safetensors", tmp_path)
    record_door(
        "model-fields",
        promise="A model file with a malformed field is refused in one printable line, whatever the field is.",
        tried=f"A stranger changes {fields} fields of a real model file: types, shapes, NaN, escape sequences, sizes.",
        outcome=f"{fields} of {fields} refused.",
    )
    for number, how in enumerate(TAMPERED):
        folder = copy_of(federation, tmp_path / f"copy{number}")
        tamper(folder, how)
        assert typed(capsys, "predict", str(folder), picture(federation))[0] == 2
    record_door(
        "model-signature",
        promise="Whoever has the coordinator's key does not use a model that the coordinator has not signed.",
        tried=f"Somebody without the private key changes the folder: {', '.join(TAMPERED)}.",
        outcome=f"{len(TAMPERED)} of {len(TAMPERED)} refused with exit code 2 and one line.",
    )


@pytest.mark.soak
def test_a_server_that_is_attacked():
    with running(SMALL) as place:
        for content, status in ATTACKS.values():
            assert exchange(place, content)[0] == status
            assert exchange(place, head(None, path="GET /health"))[0] == 200
    statuses = sorted({status for _, status in ATTACKS.values() if status != 200})
    record_door(
        "serve-requests",
        promise="A request that is too large, too slow or broken is answered with its own status; the others go on.",
        tried=f"A stranger sends {len(ATTACKS)} hostile requests over sockets: endless and slow headers and bodies, "
        "images that claim 3,600 megapixels, broken forms, foreign hosts.",
        outcome=f"All answered ({', '.join(map(str, statuses))}), and a healthy request after each of them.",
    )
    body = form(noise(4900), noise(4900))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with running(Limits(body_bytes=100_000_000, held_bytes=200_000_000, pixels=50_000_000)) as place:
        with ThreadPoolExecutor(REQUESTS) as pool:
            found = sorted(status for status, _ in pool.map(lambda _: exchange(place, body), range(REQUESTS)))
        assert threading.active_count() < 100
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert set(found) <= {200, 429, 503, 504}
    assert more < 1500
    record_door(
        "serve-memory",
        promise="Many large images at once do not take the server's memory.",
        tried=f"{REQUESTS} requests at once with two 24-megapixel images each ({len(body) / 1e6:.0f} MB).",
        outcome=f"Answers {found}; the process, which also holds the senders, grew by {more:.0f} MB.",
    )


@pytest.mark.soak
def test_files_that_decoders_would_work_on_for_hours():
    slowest, healthy = 0.0, saved("PNG")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with running(Limits()) as place:
        for made, _ in HOSTILE.values():
            hostile = form(*[made()] * 4)
            with ThreadPoolExecutor(3) as pool:
                answers = [pool.submit(exchange, place, hostile) for _ in range(3)]
                started = time.monotonic()
                assert exchange(place, head(len(healthy)) + healthy)[0] == 200
                slowest = max(slowest, time.monotonic() - started)
                assert [answer.result()[0] for answer in answers] == [413] * 3
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    assert slowest < 30
    assert more < 500
    record_door(
        "serve-decoders",
        promise="Small files on which decoders would work for hours, or that take gigabytes, are refused undecoded.",
        tried=f"A stranger sends {len(HOSTILE)} kinds of files, 12 of each: a photograph of a thousand scans, 2 MB "
        "of empty chunks, comments, frames or pages, a tile of 1,074 megapixels, a volume of a gigabyte.",
        outcome=f"All answered with 413; a healthy request beside them after {slowest:.1f} s at most; the process, "
        f"which also holds the senders, grew by {more:.0f} MB.",
    )


@pytest.mark.soak
def test_connections_that_say_nothing_and_a_body_without_end():
    with running(Limits()) as place:
        idle = [socket.create_connection(place, timeout=30) for _ in range(200)]
        slowest = 0.0
        for _ in range(20):
            started = time.monotonic()
            assert exchange(place, head(None, path="GET /health"))[0] == 200
            slowest = max(slowest, time.monotonic() - started)
        with socket.create_connection(place, timeout=30) as connection:
            connection.sendall(head(None, "Transfer-Encoding: chunked"))
            for _ in range(100):
                connection.sendall(b"100000\r\n" + b"x" * 0x100000 + b"\r\n")
            assert read_answer(connection)[0] == 413
        for one in idle:
            one.close()
    assert slowest < 5
    record_door(
        "serve-idle",
        promise="Connections that say nothing keep no place that others need, and whoever sends too much is told so.",
        tried=f"A stranger opens {len(idle)} connections and says nothing, where {Limits().connections} may be open; "
        "then a body of 100 MB in pieces.",
        outcome=f"20 of 20 requests meanwhile are answered, the slowest after {slowest:.1f} s; 413 after the body.",
    )


@pytest.mark.soak
def test_thresholds_on_their_way(chosen, tmp_path):
    taken_or_put_back(chosen, tmp_path)
    record_door(
        "thresholds",
        promise="A model with thresholds is not used without them, nor with others.",
        tried="Somebody on the way takes the thresholds file away, with and without the coordinator's key known, and "
        "puts one back that the coordinator had signed and removed.",
        outcome="3 of 3 refused in one line.",
    )
