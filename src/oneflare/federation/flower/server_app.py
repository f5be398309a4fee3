"""The Flower app that the SuperLink runs: one round, a check of every reply, then the fusion."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oneflare.client.observer import Observer
from oneflare.simulation.engines.flower import require_flower

require_flower()

from flwr.app import Context, RecordDict  # noqa: E402
from flwr.serverapp import Grid, ServerApp  # noqa: E402

from oneflare.core.files import write_bytes, write_json  # noqa: E402
from oneflare.data.local import read_local  # noqa: E402
from oneflare.errors import ConfigError, OneFlareError, RunError, UploadError, did_you_mean  # noqa: E402
from oneflare.federation.charter import Charter, read_charter, short  # noqa: E402
from oneflare.federation.coordinator import FusedFederation, Rules, fuse_federation  # noqa: E402
from oneflare.federation.flower.nodes import read_nodes  # noqa: E402
from oneflare.federation.identity import identify  # noqa: E402
from oneflare.federation.intake import Intake, take_in  # noqa: E402
from oneflare.federation.member import charter_reader  # noqa: E402
from oneflare.federation.publishing import publish  # noqa: E402
from oneflare.federation.versions import FederationFiles  # noqa: E402
from oneflare.simulation.engines.flower.gather import Gathered, Terms, gather  # noqa: E402
from oneflare.simulation.engines.flower.records import UPLOAD, question, read_answer  # noqa: E402
from oneflare.upload import SIZE_LIMIT, read_manifest  # noqa: E402

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
log = logging.getLogger("flwr")
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    try:
        coordinate(grid, Settings.of(context.run_config), context.run_id, _Log())
    except OneFlareError as error:
        log.error("error: %s", error)
        raise


class _Log(Observer):
    """Writes to Flower's log, which `flwr log` shows."""

    def note(self, text: str) -> None:
        log.info(text)


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


def coordinate(grid: Grid, settings: Settings, run: int, observer: Observer) -> FusedFederation:
    """Ask the members' nodes for their uploads; fuse those that are good with the files that were taken in before.

    Who is not in, and why, is said and written down.
    """
    charter, files = read_charter(settings.federation), FederationFiles(settings.federation)
    charter.check_flower()
    held_out = None
    if settings.test is not None:
        reader = charter_reader(charter)
        held_out = read_local(settings.test, charter.classes, charter.inputs, part="test", reader=reader).split
    inbox = settings.federation / "inbox" / f"flower-{run}"
    inbox.mkdir(parents=True, exist_ok=True)
    owners = _owners(charter, settings, files.removed())
    members = f"{len(charter.members)} members" if charter.members else "open to anybody"
    observer.note(f"{charter.name} ({short(charter.fingerprint)}), {members}: asking every node for its upload")
    gathered = _collect(grid, _Round(charter, settings, owners, inbox), observer)
    kept, removed = files.kept(), files.removed()
    intake = take_in(charter, sorted(inbox.glob("[!.]*.safetensors")), known=files.known(), fallback=kept)
    present = set(intake.uploads)
    missing = [name for name in charter.members if name not in present and name not in removed]
    report = {
        "run": str(run),
        "federation": charter.fingerprint,
        "in": sorted(present),
        "by_file": sorted(name for name, upload in intake.uploads.items() if upload.path in kept),
        "missing": missing,
        "left_out": {str(node): reason for node, reason in gathered.left_out.items()},
        "refused": [verdict.to_dict() for verdict in intake.verdicts if verdict.status != "in"],
    }
    write_json(settings.federation / "flower.json", report)
    _tell(intake, report, observer)
    rules = Rules(keep=True, min_members=settings.min_members or None, everybody=True)
    least = rules.least(charter, files.last(), removed)
    if len(present) < least:
        reasons = "; ".join(gathered.left_out.values())
        raise RunError(
            f"{len(present)} usable uploads, but min-members is {least}; nothing was fused"
            + (f" ({reasons})" if reasons else "")
        )
    fused = fuse_federation(settings.federation, uploads=inbox, rules=rules, test=held_out, observer=observer)
    publish(fused)
    for name, made in fused.content.fusions.items():
        measured = f", accuracy {100 * made.scores.accuracy:.1f} %" if made.scores else ""
        observer.note(f"{name}: {settings.federation / made.model}{measured}")
    return fused


def _tell(intake: Intake, report: Mapping[str, Any], observer: Observer) -> None:
    for verdict in intake.verdicts:
        if verdict.status != "in":
            observer.note(f"{verdict.who} ({verdict.file}) is left out ({verdict.status}): {verdict.reason}")
    if report["by_file"]:
        observer.note(f"taken in by file before this round: {', '.join(report['by_file'])}")
    observer.note(f"in: {', '.join(report['in']) or 'nobody'}; missing: {', '.join(report['missing']) or 'nobody'}")


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


@dataclass(frozen=True)
class _Round:
    charter: Charter
    settings: Settings
    owners: Mapping[int, str] | None
    inbox: Path

    def terms(self) -> Terms:
        expected = len(self.charter.members) or ANY if self.owners is None else len(self.owners)
        nodes = None if self.owners is None else frozenset(self.owners)
        return Terms(expected, self.settings.connect_seconds, self.settings.reply_seconds, nodes)

    def keep(self, node: int, upload: bytes) -> str:
        """Put a reply into the inbox, whole, under its node's number; returns whose it is.

        A reply that says it is another member's than the node's is refused. Its content is judged later, with all.
        """
        arrived = self.inbox / f".node-{node}.safetensors"
        write_bytes(arrived, upload)
        try:
            owner = None if self.owners is None else self.owners[node]
            sender = identify(arrived, read_manifest(arrived), self.charter, carrier=owner)
            arrived.replace(self.inbox / f"node-{node}.safetensors")
        except UploadError as error:
            raise UploadError(str(error).removeprefix(f"{arrived}: ")) from None
        finally:
            arrived.unlink(missing_ok=True)
        return sender.member


def _collect(grid: Grid, this: _Round, observer: Observer) -> Gathered:
    """One file per node in the inbox."""
    terms = this.charter.to_yaml()

    def accept(node: int, content: RecordDict) -> None:
        _, files = read_answer(content)
        upload = files.get(UPLOAD)
        if upload is None:
            raise UploadError("the reply holds no upload")
        if len(upload) > SIZE_LIMIT:
            raise UploadError(f"the upload has {len(upload)} bytes, more than the limit of {SIZE_LIMIT}")
        observer.note(f"node {node} ({this.keep(node, upload)}): {len(upload)} bytes")

    gathered = gather(grid, lambda _: _question(terms), accept, this.terms(), observer=observer)
    for node in sorted(set(grid.get_node_ids()) - set(this.owners or grid.get_node_ids())):
        gathered.left_out[node] = "is registered for no member of this federation and was not asked"
        observer.note(f"node {node} {gathered.left_out[node]}")
    return gathered


def _question(terms: str) -> RecordDict:
    """The charter, and a number nobody can guess.

    A SuperLink (1.41) matches a reply to its question by the question's number, a digest of its content, and does not
    compare the sender that a reply names with the node that delivered it. With the nonce, only the node that was asked
    can know the number.
    """
    return question({"charter": terms, "nonce": secrets.token_hex(16)})
