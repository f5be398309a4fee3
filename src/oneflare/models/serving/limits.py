"""Limits on what one request and all requests together may cost, and the connection that enforces them.

The connection is uvicorn's own with clocks added: one for the header of a request, one for the whole of it. What is
refused before a request exists (a header too long or too slow, too many connections) is answered here; the rest is
answered by the application in `oneflare.models.serving.app`. Every refusal is a status and one line of JSON. Where all
connections are taken, a new one gets the place of one that is idle, or else of the slowest sender.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

LINGER_SECONDS = 2.0
"""how long a refused client may be silent, so that it reads the answer before the connection ends"""
LONGEST_LINGER_SECONDS = 20.0
"""how long it may go on sending in all; what it sends is thrown away"""
SLOW_SECONDS = 2.0
"""how long a body may be on its way before its sender has to give way to a new connection"""


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
    """open at once; a new one takes the place of an idle one or of the slowest sender (408), else it is refused; 503"""
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


class LingeringTransport:
    """A transport that is closed only when the client had time to read the answer.

    Closing a socket on which data arrives resets the connection, and the answer is lost before it is read. uvicorn
    closes as soon as it has answered, also in the middle of a body.
    """

    def __init__(self, transport: asyncio.Transport, protocol: BoundedProtocol) -> None:
        self._transport, self._protocol = transport, protocol

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def close(self) -> None:
        if self._protocol.conn.their_state is h11.SEND_BODY and not self._protocol.refused:
            self._protocol.hang_up()
        elif not self._protocol.refused or self._protocol.lost:
            self._transport.close()


class BoundedProtocol(H11Protocol):
    """An HTTP/1.1 connection on which nobody can wait, send or be silent for ever."""

    limits: ClassVar[Limits] = Limits()
    counters: ClassVar[tuple[Callable[[int], None], ...]] = ()
    """called with the status of every refusal that the application does not see"""

    refused: bool = False
    """answered for the last time; what still arrives is thrown away"""
    lost: bool = False
    """closed, by either side"""
    since: float = 0.0
    """when it began what it does now: to wait for a header, or to send a body"""
    received: int = 0
    """bytes since then"""

    _clock: asyncio.TimerHandle | None = None
    _phase: str = ""
    _last: float = 0.0
    """when the connection must end, once it was refused"""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(LingeringTransport(transport, self))  # type: ignore[arg-type]
        self.since = self.loop.time()
        if self._made_room():
            self._watch()
        else:
            self._refuse(503, f"the server has {self.limits.connections} connections open; try again later")

    def data_received(self, data: bytes) -> None:
        if self.refused:
            self._linger()
            return
        self.received += len(data)
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost = True
        self._stop_clock()
        super().connection_lost(exc)

    @property
    def idle(self) -> bool:
        """Whether it holds a place without having sent the whole header of a request."""
        return self.conn.their_state is h11.IDLE

    def _made_room(self) -> bool:
        """Whether this new connection may stay; the place that it takes may have been another one's until now."""
        others = [one for one in self.connections if one is not self and not getattr(one, "refused", False)]
        if len(others) < self.limits.connections:
            return True
        chosen = gives_way((one for one in others if isinstance(one, BoundedProtocol)), self.loop.time())
        if chosen is None:
            return False
        chosen._refuse(408, "other clients need this connection, which sent too little for too long; try again later")
        return True

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
        if self.refused or self.transport.is_closing():
            return
        limits, theirs, ours = self.limits, self.conn.their_state, self.conn.our_state
        if theirs is h11.IDLE:
            idle = self.cycle is not None and not self.conn.trailing_data[0]
            if idle:  # between two requests, where uvicorn's own clock runs
                if self._phase:
                    self._phase, self.since = "", self.loop.time()
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
            self._phase, self.since, self.received = phase, self.loop.time(), 0
            self._clock = self.loop.call_later(seconds, then)

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _late_header(self) -> None:
        self._refuse(408, f"the header of the request did not arrive within {self.limits.header_seconds:g} seconds")

    def _refuse(self, status: int, text: str) -> None:
        """Answer, stop sending, and hang up once the client had time to read the answer."""
        if self.refused or self.transport.is_closing():
            return
        for count in self.counters:
            count(status)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self.cycle.response_started:
                self.refused = True
                self.transport.abort()
                return
        self.transport.write(answer_bytes(status, text))
        self.hang_up()

    def hang_up(self) -> None:
        """Send nothing more, throw away what still arrives, and end the connection when the client had time to read."""
        self.refused = True
        self._unset_keepalive_if_required()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        self.flow.resume_reading()
        self._last = self.loop.time() + LONGEST_LINGER_SECONDS
        self._linger()
        lingering = [one for one in self.connections if isinstance(one, BoundedProtocol) and one.refused]
        if len(lingering) > self.limits.connections:
            min(lingering, key=lambda one: one._last).transport.abort()

    def _linger(self) -> None:
        self._stop_clock()
        left = self._last - self.loop.time()
        if left > 0:
            self._clock = self.loop.call_later(min(left, LINGER_SECONDS), self.transport.abort)
        else:
            self.transport.abort()


def gives_way(connections: Iterable[BoundedProtocol], now: float) -> BoundedProtocol | None:
    """The connection that a new one replaces: an idle one, else the slowest that sends its body for a while already.

    Of idle ones the longest idle, from the address with the most of them: whoever fills all places loses its own.
    """
    found = list(connections)
    idle = [one for one in found if one.idle]
    if idle:
        crowd = Counter(one.client[0] if one.client else "" for one in idle)
        return min(idle, key=lambda one: (-crowd[one.client[0] if one.client else ""], one.since))
    slow = [one for one in found if one.conn.their_state is h11.SEND_BODY and now - one.since > SLOW_SECONDS]
    return min(slow, key=lambda one: one.received / (now - one.since), default=None)


def bounded(limits: Limits, count: Callable[[int], None]) -> type[BoundedProtocol]:
    """The connection class for uvicorn's `http`."""
    return type("Bounded", (BoundedProtocol,), {"limits": limits, "counters": (count,)})
