"""Limits on what one request and all requests together may cost, and the connection that enforces them.

The connection is uvicorn's own with clocks added: one for the header of a request, one for the whole of it. What is
refused before a request exists (a header too long or too slow, too many connections) is answered here; the rest is
answered by the application in `oneflare.models.serving.app`. Every refusal is a status and one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

LINGER_SECONDS = 2.0
"""how long a refused client may go on sending, so that it reads the answer before the connection ends"""


@dataclass(frozen=True)
class Limits:
    """What requests may cost; beyond it they are answered with the status that is named here."""

    body_bytes: int = 10_000_000
    """of one request; 413"""
    pixels: int = 25_000_000
    """of all images of one request, read from their headers before anything is decoded; 413"""
    images: int = 64
    """in one request; 413"""
    header_bytes: int = 16_384
    """of one request; 431"""
    header_seconds: float = 10.0
    """from the connection, or from the first byte of a later request, to the end of the header; 408"""
    body_seconds: float = 30.0
    """to receive the body; 408"""
    request_seconds: float = 60.0
    """from the end of the header to the answer; 504"""
    waiting: int = 16
    """complete requests that wait for the model; 429"""
    connections: int = 64
    """open at once; 503"""
    held_bytes: int = 100_000_000
    """bodies of all requests together; 503"""


class RequestError(Exception):
    """A request that is answered with a status and one line."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def answer_bytes(status: int, text: str) -> bytes:
    """A whole HTTP answer that ends the connection."""
    body = json.dumps({"error": text}).encode()
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body


class BoundedProtocol(H11Protocol):
    """An HTTP/1.1 connection on which nobody can wait, send or be silent for ever."""

    limits: ClassVar[Limits] = Limits()
    counters: ClassVar[tuple[Callable[[int], None], ...]] = ()
    """called with the status of every refusal that the application does not see"""

    _clock: asyncio.TimerHandle | None = None
    _phase: str = ""
    _refused: bool = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > self.limits.connections:
            self._refuse(503, f"the server has {self.limits.connections} connections open; try again later")
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        super().connection_lost(exc)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._watch()

    def send_400_response(self, msg: str) -> None:
        """Called by uvicorn while it handles h11's complaint, which knows the status."""
        del msg
        status = getattr(sys.exc_info()[1], "error_status_hint", 400)
        if status == 431:
            self._refuse(431, f"the header of the request exceeds {self.limits.header_bytes} bytes")
        else:
            self._refuse(400, "this is not a valid HTTP request")

    def _watch(self) -> None:
        """Start the clock that fits what the connection now waits for; a clock that fits already goes on."""
        if self._refused or self.transport.is_closing():
            return
        limits, theirs, ours = self.limits, self.conn.their_state, self.conn.our_state
        if theirs is h11.IDLE:
            idle = self.cycle is not None and not self.conn.trailing_data[0]
            if idle:  # between two requests, where uvicorn's own clock runs
                self._phase = ""
                self._stop_clock()
            else:
                self._start_clock("header", limits.header_seconds, self._late_header)
        elif ours is h11.DONE and theirs is h11.SEND_BODY:
            self._start_clock("rest", LINGER_SECONDS, self.transport.abort)
        else:  # the application has its own, shorter clock; this one is for clients that do not read their answer
            number = id(self.cycle)
            self._start_clock(f"request {number}", limits.request_seconds + LINGER_SECONDS, self.transport.abort)

    def _start_clock(self, phase: str, seconds: float, then: Callable[[], None]) -> None:
        if phase != self._phase:
            self._stop_clock()
            self._phase = phase
            self._clock = self.loop.call_later(seconds, then)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _late_header(self) -> None:
        self._refuse(408, f"the header of the request did not arrive within {self.limits.header_seconds:g} seconds")

    def _refuse(self, status: int, text: str) -> None:
        """Answer, stop sending, and hang up once the client had time to read the answer."""
        if self._refused or self.transport.is_closing():
            return
        self._refused = True
        self._stop_clock()
        for count in self.counters:
            count(status)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.transport.abort()
                return
        self.transport.write(answer_bytes(status, text))
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self._clock = self.loop.call_later(LINGER_SECONDS, self.transport.abort)


def bounded(limits: Limits, count: Callable[[int], None]) -> type[BoundedProtocol]:
    """The connection class for uvicorn's `http`."""
    return type("Bounded", (BoundedProtocol,), {"limits": limits, "counters": (count,)})
