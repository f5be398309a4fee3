"""Sends one message to every node and collects the replies that arrive in time.

A node may raise an error, die, hang, connect late or come back under another number; none of this stops the others.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from flwr.app import Message, MessageType, RecordDict
from flwr.serverapp import Grid

from oneflare.client.observer import Observer
from oneflare.core.plain import plain
from oneflare.errors import OneFlareError

LONGEST_PAUSE = 1.0
AT_ONCE = 16
_EXCEPTION = re.compile(r"<class '(?:[\w.]*\.)?(\w+)'>:<'(.*)'>", re.DOTALL)


@dataclass(frozen=True)
class Terms:
    """How many nodes there should be, and how long the server waits."""

    expected: int
    connect_seconds: float
    """for nodes to appear; those that appear later, while others work, still take part"""
    reply_seconds: float
    """for replies, counted from the first question"""
    nodes: frozenset[int] | None = None
    """the only ones that are asked; None: whoever appears"""
    kind: str = MessageType.TRAIN
    """which of its functions a node's app answers with"""


@dataclass
class Gathered:
    """Who answered, and why the others did not."""

    accepted: list[int] = field(default_factory=list)
    left_out: dict[int, str] = field(default_factory=dict)
    """node -> reason"""


def gather(
    grid: Grid,
    ask: Callable[[int], RecordDict | None],
    accept: Callable[[int, RecordDict], None],
    terms: Terms,
    *,
    observer: Observer | None = None,
    stopped: Callable[[], bool] = lambda: False,
) -> Gathered:
    """Ask every node once and hand each reply to `accept`, which keeps it or raises an error a user can act on.

    ask: the question to a node, None for nothing to ask of it.
    """
    outcome, observer = Gathered(), observer or Observer()
    waiting: dict[str, int] = {}
    known: set[int] = set()
    started = time.monotonic()
    asked_at: float | None = None
    pause = 0.05
    while not stopped():
        for node in sorted(_admitted(grid, terms) - known):
            known.add(node)
            content = ask(node)
            if content is None:
                continue
            asked_at = asked_at or time.monotonic()
            message = Message(content, node, terms.kind, ttl=terms.reply_seconds + 60)
            number = next(iter(grid.push_messages([message])), None)
            if number:
                waiting[number] = node
            else:
                outcome.left_out[node] = "the question could not be sent"
        for reply in _arrived(grid, list(waiting)):
            node = waiting.pop(reply.metadata.reply_to_message_id)
            pause = 0.05
            reason = _taken(node, reply, accept)
            if reason is None:
                outcome.accepted.append(node)
            else:
                outcome.left_out[node] = reason
                observer.note(f"node {node} is left out: {reason}")
        now = time.monotonic()
        complete = len(known) >= terms.expected
        if not waiting and (complete or now - started >= terms.connect_seconds):
            break
        if asked_at is not None and now - asked_at >= terms.reply_seconds:
            break
        time.sleep(pause)
        pause = min(1.3 * pause, LONGEST_PAUSE)
    for node in waiting.values():
        outcome.left_out[node] = f"no reply within {terms.reply_seconds:g} s"
        observer.note(f"node {node} is left out: {outcome.left_out[node]}")
    return outcome


def _admitted(grid: Grid, terms: Terms) -> set[int]:
    present = set(grid.get_node_ids())
    return present if terms.nodes is None else present & terms.nodes


def _arrived(grid: Grid, numbers: list[str]) -> Iterator[Message]:
    """Replies that are there, a few at a time: a grid holds all it is asked for in memory."""
    for start in range(0, len(numbers), AT_ONCE):
        yield from grid.pull_messages(numbers[start : start + AT_ONCE])


def _taken(node: int, reply: Message, accept: Callable[[int, RecordDict], None]) -> str | None:
    if reply.has_error():
        return readable(reply.error.reason)
    try:
        accept(node, reply.content)
    except OneFlareError as error:
        return plain(error)
    return None


def readable(reason: str | None) -> str:
    """Flower's description of an error as one line: the message, without the class where it is one of ours."""
    text = reason or "the node reported an error without a reason"
    found = _EXCEPTION.fullmatch(text.strip())
    if found:
        kind, message = found.groups()
        ours = {error.__name__ for error in OneFlareError.__subclasses__()}
        text = message if kind in ours else f"{kind}: {message}"
    return plain(" ".join(text.split()), 500)
