"""What the SuperLink runs: one round, every reply examined like a file in an inbox, then the federation's fusion."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oneflare.engine.flower import require_flower

require_flower()

from flwr.app import Context, RecordDict  # noqa: E402
from flwr.serverapp import Grid, ServerApp  # noqa: E402

from oneflare.charter import Charter, read_charter, short  # noqa: E402
from oneflare.coordinator import Fused, Rules, fuse_federation  # noqa: E402
from oneflare.data.local import read_local  # noqa: E402
from oneflare.engine.flower.gather import Gathered, Terms, gather  # noqa: E402
from oneflare.engine.flower.records import UPLOAD, question, read_answer  # noqa: E402
from oneflare.errors import ConfigError, OneFlareError, RunError, UploadError, did_you_mean  # noqa: E402
from oneflare.files import write_bytes, write_json  # noqa: E402
from oneflare.intake import take_in  # noqa: E402
from oneflare.plain import plain  # noqa: E402
from oneflare.report.federation import write_card, write_federation_page  # noqa: E402
from oneflare.upload import SIZE_LIMIT  # noqa: E402

DEFAULTS: dict[str, Any] = {
    "federation": "",
    "min-members": 1,
    "connect-seconds": 60,
    "reply-seconds": 3600,
    "test": "",
}
"""The run configuration. federation: folder with federation.yaml, on the SuperLink's machine. test: images there."""

ANY = 1 << 30
log = logging.getLogger("flwr")
app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    try:
        coordinate(grid, Settings.of(context.run_config), context.run_id, log.info)
    except OneFlareError as error:
        log.error("error: %s", error)
        raise


@dataclass(frozen=True)
class Settings:
    """How one round is run."""

    federation: Path
    min_members: int
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
        for name in ("min-members", "connect-seconds", "reply-seconds"):
            if isinstance(values[name], bool) or not isinstance(values[name], int | float) or values[name] <= 0:
                raise ConfigError(f"run configuration: {name} is {values[name]!r}, not a number above 0")
        return cls(
            Path(str(values["federation"])).expanduser(),
            int(values["min-members"]),
            float(values["connect-seconds"]),
            float(values["reply-seconds"]),
            Path(str(values["test"])).expanduser() if values["test"] else None,
        )


def coordinate(grid: Grid, settings: Settings, run: int, say: Callable[[str], None]) -> Fused:
    """Ask every node for its upload and fuse those that are good; who is not in, and why, is said and written down."""
    charter = read_charter(settings.federation)
    held_out = None if settings.test is None else read_local(settings.test, charter.classes, charter.image.spec()).split
    inbox = settings.federation / "inbox" / f"flower-{run}"
    members = f"{len(charter.members)} members" if charter.members else "open to anybody"
    say(f"{charter.name} ({short(charter.fingerprint)}), {members}: asking every node for its upload")
    gathered = _collect(grid, charter, settings, inbox, say)
    intake = take_in(charter, sorted(inbox.glob("[!.]*.safetensors")))
    present = set(intake.uploads)
    missing = [name for name in charter.members if name not in present]
    report = {
        "run": str(run),
        "federation": charter.fingerprint,
        "in": sorted(present),
        "missing": missing,
        "left_out": {str(node): reason for node, reason in gathered.left_out.items()},
        "refused": [verdict.to_dict() for verdict in intake.verdicts if verdict.status != "in"],
    }
    write_json(settings.federation / "flower.json", report)
    for verdict in intake.verdicts:
        if verdict.status != "in":
            say(f"{verdict.who} ({verdict.file}) is left out ({verdict.status}): {verdict.reason}")
    say(f"in: {', '.join(sorted(present)) or 'nobody'}; missing: {', '.join(missing) or 'nobody'}")
    if len(present) < settings.min_members:
        reasons = "; ".join(gathered.left_out.values())
        raise RunError(
            f"{len(present)} usable uploads, but min-members is {settings.min_members}; nothing was fused"
            + (f" ({reasons})" if reasons else "")
        )
    rules = Rules(keep=True, min_members=settings.min_members)
    fused = fuse_federation(settings.federation, uploads=inbox, rules=rules, test=held_out, say=say)
    write_card(fused)
    write_federation_page(fused)
    for name, fusion in fused.content["fusions"].items():
        scores = fusion["scores"]
        measured = f", accuracy {100 * scores['accuracy']:.1f} %" if scores else ""
        say(f"{name}: {settings.federation / fusion['model']}{measured}")
    return fused


def _collect(grid: Grid, charter: Charter, settings: Settings, inbox: Path, say: Callable[[str], None]) -> Gathered:
    """One file per node in the inbox, written whole; what is in them is judged later, all at once."""
    terms = charter.to_yaml()

    def accept(node: int, content: RecordDict) -> None:
        facts, files = read_answer(content)
        upload = files.get(UPLOAD)
        if upload is None:
            raise UploadError("the reply holds no upload")
        if len(upload) > SIZE_LIMIT:
            raise UploadError(f"the upload has {len(upload)} bytes, more than the limit of {SIZE_LIMIT}")
        write_bytes(inbox / f"node-{node}.safetensors", upload)
        say(f"node {node} ({plain(facts.get('member'), 64)}): {len(upload)} bytes")

    return gather(
        grid,
        lambda _: question({"charter": terms}),
        accept,
        Terms(len(charter.members) or ANY, settings.connect_seconds, settings.reply_seconds),
        say=say,
    )
