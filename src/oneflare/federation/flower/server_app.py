"""The Flower app that the SuperLink runs: one round, a check of every reply, then the fusion.

Where sums are masked there are two rounds in one run: the masked uploads, then the releases that open their total.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from oneflare.client.observer import Observer
from oneflare.simulation.engines.flower import require_flower

require_flower()

from flwr.app import Context  # noqa: E402
from flwr.serverapp import Grid, ServerApp  # noqa: E402

from oneflare.core.files import write_json  # noqa: E402
from oneflare.data.dataset import Split  # noqa: E402
from oneflare.data.local import read_local  # noqa: E402
from oneflare.errors import OneFlareError, RunError  # noqa: E402
from oneflare.federation.charter import Charter, read_charter, short  # noqa: E402
from oneflare.federation.coordinator import FusedFederation, fuse_federation  # noqa: E402
from oneflare.federation.flower.asking import INBOX, Asking, Settings  # noqa: E402
from oneflare.federation.intake import Intake, take_in  # noqa: E402
from oneflare.federation.masked.enrolment import checked_roster  # noqa: E402
from oneflare.federation.masked.rounds import RoundFiles, close_round  # noqa: E402
from oneflare.federation.member import charter_reader  # noqa: E402
from oneflare.federation.publishing import publish  # noqa: E402
from oneflare.federation.quorum import Rules  # noqa: E402
from oneflare.federation.versions import FederationFiles  # noqa: E402
from oneflare.simulation.engines.flower.gather import Gathered  # noqa: E402

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


def coordinate(grid: Grid, settings: Settings, run: int, observer: Observer) -> FusedFederation:
    """Ask the members' nodes for their uploads; fuse those that are good with the files that were taken in before.

    Who is not in, and why, is said and written down.
    """
    charter, files = read_charter(settings.federation), FederationFiles(settings.federation)
    held_out = None
    if settings.test is not None:
        reader = charter_reader(charter)
        held_out = read_local(settings.test, charter.classes, charter.inputs, part="test", reader=reader).split
    asking = Asking.of(charter, settings, files.removed(), run)
    members = f"{len(charter.members)} members" if charter.members else "open to anybody"
    observer.note(f"{charter.name} ({short(charter.fingerprint)}), {members}: asking every node for its upload")
    together = _plain_round if charter.terms.upload.masked is None else _masked_round
    fused = together(grid, asking, run, held_out, observer)
    publish(fused)
    for name, made in fused.content.fusions.items():
        measured = f", accuracy {100 * made.scores.accuracy:.1f} %" if made.scores else ""
        observer.note(f"{name}: {settings.federation / made.model}{measured}")
    return fused


def _plain_round(grid: Grid, asking: Asking, run: int, test: Split | None, observer: Observer) -> FusedFederation:
    """One file from each member, and the fusion."""
    charter, settings = asking.charter, asking.settings
    files = FederationFiles(settings.federation)
    gathered = asking.uploads(grid, observer)
    kept, removed = files.kept(), files.removed()
    intake = take_in(charter, sorted(asking.inbox.glob("[!.]*.safetensors")), known=files.known(), fallback=kept)
    present = set(intake.uploads)
    report = _report(charter, run, gathered, present, removed) | {
        "by_file": sorted(name for name, upload in intake.uploads.items() if upload.path in kept),
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
    return fuse_federation(settings.federation, uploads=asking.inbox, rules=rules, test=test, observer=observer)


def _masked_round(grid: Grid, asking: Asking, run: int, test: Split | None, observer: Observer) -> FusedFederation:
    """Masked uploads from the members of the roster, then what opens their total, then the fusion.

    A round that was closed before, here or by file, goes on with the releases.
    """
    folder, charter = asking.settings.federation, asking.charter
    roster, gathered = checked_roster(charter), Gathered()
    if RoundFiles(folder).read(roster) is None:
        gathered = asking.uploads(grid, observer)
    closed = close_round(folder, folder / INBOX, early=True, least=asking.settings.min_members or len(roster.names))
    present = set(closed.request.uploaded)
    state, lost = "was closed before" if closed.before else "is closed", ", ".join(closed.missing) or "nobody"
    observer.note(f"the round {state}; in the total: {', '.join(sorted(present))}; missing: {lost}")
    released = asking.releases(grid, closed.path.read_text(), observer)
    gathered.left_out.update(released.left_out)
    write_json(folder / "flower.json", _report(charter, run, gathered, present, FederationFiles(folder).removed()))
    return fuse_federation(folder, rules=Rules(releases=asking.inbox), test=test, observer=observer)


def _report(
    charter: Charter, run: int, gathered: Gathered, present: set[str], removed: Mapping[str, str]
) -> dict[str, Any]:
    return {
        "run": str(run),
        "federation": charter.fingerprint,
        "in": sorted(present),
        "missing": [name for name in charter.members if name not in present and name not in removed],
        "left_out": {str(node): reason for node, reason in gathered.left_out.items()},
    }


def _tell(intake: Intake, report: Mapping[str, Any], observer: Observer) -> None:
    for verdict in intake.verdicts:
        if verdict.status != "in":
            observer.note(f"{verdict.who} ({verdict.file}) is left out ({verdict.status}): {verdict.reason}")
    if report["by_file"]:
        observer.note(f"taken in by file before this round: {', '.join(report['by_file'])}")
    observer.note(f"in: {', '.join(report['in']) or 'nobody'}; missing: {', '.join(report['missing']) or 'nobody'}")
