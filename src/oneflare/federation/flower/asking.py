"""What the server asks of the members' nodes in a round on Flower, and where their answers are put."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import MessageType, RecordDict
from flwr.serverapp import Grid

from oneflare.client.observer import Observer
from oneflare.core.files import write_bytes
from oneflare.errors import ConfigError, UploadError, did_you_mean
from oneflare.federation.charter import Charter
from oneflare.federation.flower.nodes import read_nodes
from oneflare.federation.identity import identify
from oneflare.federation.masked.files import SIZE_LIMIT as MESSAGE_LIMIT
from oneflare.federation.masked.files import read_message
from oneflare.federation.masked.release import SUFFIX as RELEASE_SUFFIX
from oneflare.federation.masked.release import Release
from oneflare.simulation.engines.flower.gather import Gathered, Terms, gather
from oneflare.simulation.engines.flower.records import RELEASE, UPLOAD, question, read_answer
from oneflare.upload import SIZE_LIMIT, read_manifest

DEFAULTS: dict[str, Any] = {
    "federation": "",
    "min-members": 0,
    "nodes": "bound",
    "connect-seconds": 60,
    "reply-seconds": 3600,
    "test": "",
}
"""The run configuration. federation: folder with federation.yaml, on the SuperLink's machine. test: images there.
min-members: with fewer members in the fusion nothing is fused; 0: all members that are not removed. nodes: "bound" asks
the nodes that are registered for a member, "any" whoever connects, and believes whoever they say they are."""

NODES = ("bound", "any")
ANY = 1 << 30
INBOX = "inbox"
Accept = Callable[[int, RecordDict], None]


@dataclass(frozen=True)
class Settings:
    """How one round is run."""

    federation: Path
    min_members: int
    nodes: str
    connect_seconds: float
    reply_seconds: float
    test: Path | None

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Settings:
        for name in config:
            if name not in DEFAULTS:
                raise ConfigError(f"run configuration: unknown key '{name}'{did_you_mean(name, DEFAULTS)}")
        values = DEFAULTS | dict(config)
        if not values["federation"]:
            raise ConfigError("run configuration: 'federation' is missing; give the folder with federation.yaml")
        least = values["min-members"]
        if isinstance(least, bool) or not isinstance(least, int) or least < 0:
            raise ConfigError(f"run configuration: min-members is {least!r}, not a number of members, or 0 for all")
        if values["nodes"] not in NODES:
            raise ConfigError(f"run configuration: nodes is {values['nodes']!r}, not one of {', '.join(NODES)}")
        for name in ("connect-seconds", "reply-seconds"):
            if isinstance(values[name], bool) or not isinstance(values[name], int | float) or values[name] <= 0:
                raise ConfigError(f"run configuration: {name} is {values[name]!r}, not a number above 0")
        return cls(
            Path(str(values["federation"])).expanduser(),
            least,
            str(values["nodes"]),
            float(values["connect-seconds"]),
            float(values["reply-seconds"]),
            Path(str(values["test"])).expanduser() if values["test"] else None,
        )


@dataclass(frozen=True)
class Asking:
    """A round on Flower: under which terms, which node is whose, and the folder in which answers are put."""

    charter: Charter
    settings: Settings
    owners: Mapping[int, str] | None
    """node -> the member it is registered for; None: nodes are not bound to members"""
    inbox: Path

    @classmethod
    def of(cls, charter: Charter, settings: Settings, removed: Mapping[str, str], run: int) -> Asking:
        """removed: members that are not asked"""
        inbox = settings.federation / INBOX / f"flower-{run}"
        inbox.mkdir(parents=True, exist_ok=True)
        return cls(charter, settings, _owners(charter, settings, removed), inbox)

    def owner(self, node: int) -> str | None:
        return None if self.owners is None else self.owners[node]

    def uploads(self, grid: Grid, observer: Observer) -> Gathered:
        """One upload per node in the inbox."""

        def accept(node: int, content: RecordDict) -> None:
            upload = _file(content, UPLOAD, SIZE_LIMIT)
            observer.note(f"node {node} ({self._keep(node, upload)}): {len(upload)} bytes")

        gathered = self._gather(grid, {}, accept, MessageType.TRAIN, observer)
        for node in sorted(set(grid.get_node_ids()) - set(self.owners or grid.get_node_ids())):
            gathered.left_out[node] = "is registered for no member of this federation and was not asked"
            observer.note(f"node {node} {gathered.left_out[node]}")
        return gathered

    def releases(self, grid: Grid, request: str, observer: Observer) -> Gathered:
        """One answer per node to the request that closed a round of masked sums, in the inbox."""

        def accept(node: int, content: RecordDict) -> None:
            path = self.inbox / f"node-{node}{RELEASE_SUFFIX}"
            write_bytes(path, _file(content, RELEASE, MESSAGE_LIMIT))
            try:
                sender = read_message(path, "release", Release).member
                if self.owner(node) not in (None, sender):
                    raise UploadError(f"the reply is a release of {sender}, but this node is {self.owner(node)}'s")
            except UploadError as error:
                path.unlink()
                raise UploadError(str(error).removeprefix(f"{path}: ")) from None
            observer.note(f"node {node} ({sender}): has released its part of the masks")

        return self._gather(grid, {"request": request}, accept, MessageType.QUERY, observer)

    def _gather(self, grid: Grid, asked: Mapping[str, str], accept: Accept, kind: str, observer: Observer) -> Gathered:
        expected = len(self.charter.members) or ANY if self.owners is None else len(self.owners)
        nodes = None if self.owners is None else frozenset(self.owners)
        seconds = self.settings.connect_seconds, self.settings.reply_seconds
        task = {"charter": self.charter.to_yaml(), **asked}
        return gather(
            grid, lambda _: _question(task), accept, Terms(expected, *seconds, nodes, kind), observer=observer
        )

    def _keep(self, node: int, upload: bytes) -> str:
        """Put a reply into the inbox, whole, under its node's number; returns whose it is.

        A reply that says it is another member's than the node's is refused. Its content is judged later, with all.
        """
        arrived = self.inbox / f".node-{node}.safetensors"
        write_bytes(arrived, upload)
        try:
            sender = identify(arrived, read_manifest(arrived), self.charter, carrier=self.owner(node))
            arrived.replace(self.inbox / f"node-{node}.safetensors")
        except UploadError as error:
            raise UploadError(str(error).removeprefix(f"{arrived}: ")) from None
        finally:
            arrived.unlink(missing_ok=True)
        return sender.member


def _file(content: RecordDict, name: str, limit: int) -> bytes:
    """The file that a reply must hold."""
    _, files = read_answer(content)
    found = files.get(name)
    if found is None:
        raise UploadError(f"the reply holds no {Path(name).stem}")
    if len(found) > limit:
        raise UploadError(f"the {Path(name).stem} has {len(found)} bytes, more than the limit of {limit}")
    return found


def _owners(charter: Charter, settings: Settings, removed: Mapping[str, str]) -> dict[int, str] | None:
    """node -> the member it is registered for; None: nodes are not bound to members."""
    if settings.nodes == "any":
        return None
    nodes = read_nodes(settings.federation)
    owners = {
        bound.node: name
        for name, bound in nodes.items()
        if name not in removed and (name in charter.members or not charter.members)
    }
    if not owners:
        raise ConfigError(
            f"no member of {settings.federation} has a node; register each with `oneflare flower register`, "
            'or say nodes="any" in a rehearsal'
        )
    return owners


def _question(task: Mapping[str, str]) -> RecordDict:
    """What is asked, and a number nobody can guess.

    A SuperLink (1.41) matches a reply to its question by the question's number, a digest of its content, and does not
    compare the sender that a reply names with the node that delivered it. With the nonce, only the node that was asked
    can know the number.
    """
    return question({**task, "nonce": secrets.token_hex(16)})
