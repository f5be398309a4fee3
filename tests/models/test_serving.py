"""`serve` under attack, over real sockets: what is too large, too slow or one too many gets its own status."""

from __future__ import annotations

import dataclasses
import io
import json
import socket
import threading
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress

import pytest
import torch
from PIL import Image

from oneflare.data import ImageSpec
from oneflare.models.base import SingleModel, Task
from oneflare.models.serving.app import make_server
from oneflare.models.serving.limits import SLOW_SECONDS, Limits
from oneflare.nn import PrototypeNetwork, build_encoder

SMALL = Limits(
    body_bytes=100_000,
    pixels=250_000,
    images=4,
    header_bytes=8_000,
    header_seconds=0.5,
    body_seconds=0.5,
    request_seconds=2.0,
    waiting=2,
    connections=6,
    held_bytes=250_000,
)
PATIENT = Limits(connections=6, waiting=1, request_seconds=1.0)


class Slow(SingleModel):
    """A real network that answers only when it is told to."""

    kind = "slow for a test"
    go: threading.Event

    def logits(self, images, batch_size=256):
        assert self.go.wait(30)
        return super().logits(images, batch_size)


def model(kind=SingleModel):
    encoder = {"name": "conv4", "width": 2}
    task = Task(encoder, ImageSpec.default(1, 8), ("cat", "dog"), 8)
    return kind(task, PrototypeNetwork(build_encoder(encoder, 1), torch.zeros(2, 8)))


@contextmanager
def running(limits: Limits, host: str = "127.0.0.1", served=None):
    """The server as `oneflare serve` runs it, on a free port, in a thread."""
    listening = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listening.bind((host, 0))
    listening.listen()
    server = make_server(served or model(), limits)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield (host, listening.getsockname()[1])
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()


def exchange(place, content: bytes, *, then: bytes = b"") -> tuple[int, dict]:
    """Send bytes, keep the connection open, and read until the server ends it or the answer is complete."""
    with socket.create_connection(place, timeout=20) as connection:
        with suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(content + then)
        return read_answer(connection)


def read_answer(connection: socket.socket) -> tuple[int, dict]:
    received = b""
    while True:
        part = connection.recv(65536)
        received += part
        head, end, body = received.partition(b"\r\n\r\n")
        length = [line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length:")]
        if end and length and len(body) >= int(length[0].split(b":")[1]):
            return int(head.split()[1]), json.loads(body)
        assert part, received


def head(size: int | None = None, *more: str, host: str = "127.0.0.1", path: str = "POST /predict") -> bytes:
    lines = [f"{path} HTTP/1.1", f"Host: {host}", *more]
    return "\r\n".join([*lines, *([] if size is None else [f"Content-Length: {size}"]), "", ""]).encode()


def png(width: int, height: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("1", (width, height)).save(buffer, "PNG")
    return buffer.getvalue()


def claimed(side: int) -> bytes:
    """A small file that says it is a large image."""
    small = png(8, 8)
    header = small[12:16] + side.to_bytes(4, "big") * 2 + small[24:29]
    return small[:12] + header + zlib.crc32(header).to_bytes(4, "big") + small[33:]


def noise(side: int) -> bytes:
    buffer = io.BytesIO()
    Image.effect_noise((side, side), 50).save(buffer, "PNG")
    return buffer.getvalue()


def form(*contents: bytes) -> bytes:
    parts = [
        b'--b\r\nContent-Disposition: form-data; name="image"; filename="x"\r\n\r\n' + one + b"\r\n" for one in contents
    ]
    body = b"".join(parts) + b"--b--\r\n"
    return head(len(body), "Content-Type: multipart/form-data; boundary=b") + body


@pytest.fixture(scope="module")
def place():
    with running(SMALL) as place:
        yield place


ATTACKS = {
    "a header that never ends": (b"GET / HTTP/1.1\r\nX: " + b"a" * 3_000_000, 431),
    "a header in one piece that is too long": (head(None, "X: " + "a" * 12_000, path="GET /health"), 431),
    "a header that stops in the middle": (b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n", 408),
    "a connection that says nothing": (b"", 408),
    "a body that stops in the middle": (head(5000) + b"x", 408),
    "a body whose length is too large": (head(10**12), 413),
    "a body in pieces that grows too large": (
        head(None, "Transfer-Encoding: chunked") + b"10000\r\n" + b"x" * 65536 + b"\r\n10000\r\n" + b"x" * 65536,
        413,
    ),
    "an image with too many pixels": (head(len(png(600, 600))) + png(600, 600), 413),
    "images with too many pixels together": (form(png(400, 400), png(400, 400)), 413),
    "too many images": (form(*[png(8, 8)] * 5), 413),
    "an image whose header claims too much": (head(len(claimed(60_000))) + claimed(60_000), 413),
    "no image": (head(4) + b"junk", 422),
    "an image that ends early": (head(400) + noise(50)[:400], 422),
    "a foreign format": (head(30) + b"%!PS-Adobe-3.0 EPSF-3.0\n%%Boun", 422),
    "another host": (head(None, host="evil.example", path="GET /health"), 421),
    "no HTTP": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n", 400),
    "two lengths": (head(5, "Content-Length: 6") + b"aaaaa", 400),
    "a body for a page that takes none": (head(10**9, path="GET /health") + b"x" * 100_000, 200),
}


@pytest.mark.parametrize("attack", list(ATTACKS))
def test_every_excess_has_its_own_status_and_one_line(place, attack):
    content, status = ATTACKS[attack]
    found, answer = exchange(place, content)
    assert found == status, answer
    if status != 200:
        assert set(answer) == {"error"}
        assert "\n" not in answer["error"]
        assert len(answer["error"]) < 200
    assert exchange(place, head(None, path="GET /health"))[0] == 200


def test_a_form_as_curl_sends_it_is_answered(place):
    status, answer = exchange(place, form(png(8, 8), png(30, 20)))
    assert status == 200
    assert [row["class"] in ("cat", "dog") for row in answer["predictions"]] == [True, True]


@pytest.mark.parametrize("host", ["[::1]", "[::1]:8000", "localhost:8000", "127.0.0.1"])
def test_it_answers_on_the_other_loopback_address(host):
    with running(SMALL, "::1") as place:
        assert exchange(place, head(None, host=host, path="GET /health"))[0] == 200
        assert exchange(place, head(None, host="[::2]", path="GET /health"))[0] == 421


def test_a_body_that_is_far_too_long_gets_its_answer_before_the_connection_ends(place):
    piece = b"100000\r\n" + b"x" * 0x100000 + b"\r\n"
    for start in (head(None, "Transfer-Encoding: chunked"), head(10**12)):
        with socket.create_connection(place, timeout=20) as connection:
            connection.sendall(start)
            for _ in range(30):
                connection.sendall(piece)
            status, answer = read_answer(connection)
            assert status == 413
            assert "100,000 bytes" in answer["error"]
            assert connection.recv(1) == b""


def test_idle_connections_give_way_to_requests():
    with running(PATIENT) as place:
        kept_alive = socket.create_connection(place, timeout=20)
        kept_alive.sendall(head(None, path="GET /health"))
        assert read_answer(kept_alive)[0] == 200
        idle = [socket.create_connection(place, timeout=20) for _ in range(20)]
        started = time.monotonic()
        for _ in range(10):
            assert exchange(place, head(None, path="GET /health"))[0] == 200
        assert time.monotonic() - started < 5
        status, answer = read_answer(idle[0])
        assert status == 408
        assert "other clients need this connection" in answer["error"]
        for connection in [kept_alive, *idle]:
            connection.close()


def test_the_slowest_sender_gives_way_and_whoever_waits_for_the_model_does_not():
    slow = model(Slow)
    slow.go = threading.Event()
    request = head(len(png(8, 8))) + png(8, 8)
    with running(dataclasses.replace(PATIENT, request_seconds=30, waiting=16), served=slow) as place:
        busy = [socket.create_connection(place, timeout=20) for _ in range(5)]
        for connection in busy:
            connection.sendall(request)
        sender = socket.create_connection(place, timeout=20)
        sender.sendall(head(5000) + b"x")
        status, answer = exchange(place, b"")
        assert status == 503
        assert "6 connections open" in answer["error"]
        time.sleep(SLOW_SECONDS + 0.5)
        assert exchange(place, head(None, path="GET /health"))[0] == 200
        assert read_answer(sender)[0] == 408
        slow.go.set()
        assert [read_answer(connection)[0] for connection in busy] == [200] * 5
        for connection in [sender, *busy]:
            connection.close()


def test_more_requests_than_may_wait_are_told_so_and_a_late_answer_too():
    slow = model(Slow)
    slow.go = threading.Event()
    request = head(len(png(8, 8))) + png(8, 8)
    with running(PATIENT, served=slow) as place, ThreadPoolExecutor(4) as pool:
        try:
            statuses = sorted(status for status, _ in pool.map(lambda _: exchange(place, request), range(4)))
            assert statuses == [429, 429, 429, 504]
        finally:
            slow.go.set()
        assert exchange(place, head(None, path="GET /health"))[0] == 200


def test_bodies_together_are_bounded():
    limits = Limits(body_bytes=100_000, held_bytes=250_000, body_seconds=20)
    with running(limits) as place:
        held = [socket.create_connection(place, timeout=20) for _ in range(2)]
        for connection in held:
            connection.sendall(head(100_000) + b"x" * 99_999)
        _, health = exchange(place, head(None, path="GET /health"))
        assert health["limits"]["held_bytes"] == 250_000
        status, answer = exchange(place, head(100_000) + b"x" * 99_999)
        assert status == 503, answer
        for connection in held:
            connection.sendall(b"x")
            assert read_answer(connection)[0] == 422
            connection.close()
