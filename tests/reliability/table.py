"""Write the table of docs/reliability.md from results/trust/*.json: `python tests/reliability/table.py`."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results" / "trust"
PAGE = ROOT / "docs" / "reliability.md"
PRIVACY = ROOT / "docs" / "privacy.md"
MEBIBYTE = 1 << 20


def figures(name: str) -> dict[str, Any] | None:
    path = RESULTS / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def rows() -> Iterator[tuple[str, str, str]]:
    """promise, how it was tried, what came out"""
    if crash := figures("crashes"):
        stages = ", ".join(f"{number} {stage}" for stage, number in crash["stages"].items())
        yield (
            "killed at random moments",
            f"{crash['crashes']} SIGKILLs ({stages})",
            f"{crash['survived']} resumed, figures and files bit for bit",
        )
    if writing := figures("writing"):
        yield (
            "killed between a file and its name",
            f"{len(writing['kinds'])} SIGKILLs, one for each kind of file ({', '.join(writing['kinds'])})",
            f"{writing['survived']} resumed, figures and files bit for bit",
        )
    if stop := figures("sigterm"):
        yield "SIGTERM", f"{stop['stopped']} stops in training", f"{stop['resumed']} resumed, figures bit for bit"
    if hostile := figures("hostile"):
        yield (
            "hostile files",
            f"{hostile['files']:,} mutated files of {len(hostile['kinds'])} kinds",
            f"{hostile['let_in']} let in; slowest {1000 * hostile['slowest_seconds']:.0f} ms; peak memory "
            f"{hostile['peak_bytes'] / MEBIBYTE:.0f} MiB at a size limit of {hostile['size_limit'] / MEBIBYTE:.0f} MiB",
        )
    if signed := figures("signed"):
        let_in = signed["files"] - signed["refused"]
        yield "forged signatures", f"{signed['files']:,} replayed, re-signed or renamed uploads", f"{let_in} let in"
    if load := figures("load"):
        yield (
            "a folder of uploads",
            f"{load['uploads']:,} honest and {load['hostile']} hostile files, {load['upload_bytes'] / 1e3:.0f} kB each",
            f"{load['fused']:,} fused, {load['refused']} refused; peak memory "
            f"{load['intake_peak_bytes'] / MEBIBYTE:.0f} MiB to verify, "
            f"{load['fusion_peak_bytes'] / MEBIBYTE:.0f} MiB to fuse",
        )
    if flower := figures("flower"):
        yield (
            "Flower replies",
            f"{flower['replies']} nodes in Flower's simulation",
            f"{flower['fused']} fused; peak memory {flower['peak_bytes'] / MEBIBYTE:.0f} MiB",
        )
    if attacks := figures("attacks"):
        for scene in attacks["scenes"]:
            yield _attack_row(scene)
    if real := figures("real"):
        for alpha in sorted({run["alpha"] for run in real["runs"]}, reverse=True):
            yield _real_row(alpha, real)
    for path in sorted((RESULTS / "doors").glob("*.json")):
        door = json.loads(path.read_text())
        yield door["promise"], door["tried"], door["outcome"]


def _real_row(alpha: float, real: dict[str, Any]) -> tuple[str, str, str]:
    """Federations of real images: those of the studies, with each member in turn as the attacker."""
    runs = [run for run in real["runs"] if run["alpha"] == alpha]
    rows = {row["attack"]: row for row in real["summary"] if row["alpha"] == alpha}
    honest = rows.pop("nobody")
    named = ", ".join(f"{attack} {row['named']} of {row['attackers']}" for attack, row in rows.items())
    wrongly = sum(row["wrongly"] for row in rows.values())
    return (
        f"suspicion on real images, alpha {alpha:g}",
        f"{len(runs)} federations of {len({run['method'] for run in runs})} methods on "
        f"{', '.join(sorted({run['data'] for run in runs}))}; then each member in turn attacks",
        f"{honest['wrongly']} of {honest['honest']} honest members suspected where nobody attacks; named: {named}; "
        f"honest members suspected beside an attacker: {wrongly} of {sum(row['honest'] for row in rows.values())}",
    )


def _attack_row(scene: dict[str, Any]) -> tuple[str, str, str]:
    verdicts = {attack: row for attack, row in scene["verdicts"].items() if attack != "nobody"}
    worst_plain = max(verdicts, key=lambda attack: verdicts[attack]["plain_loss"])
    worst = max(verdicts, key=lambda attack: verdicts[attack]["robust_loss"])
    found = [row for attack, row in scene["found"].items() if attack != "nobody"]
    clean = 100 * scene["verdicts"]["nobody"]["robust_loss"]
    return (
        f"poisoned uploads, alpha {scene['alpha']:g}",
        f"{scene['attackers']} of {scene['clients']} members, {len(verdicts)} attacks",
        f"points lost: count_prototypes up to {100 * verdicts[worst_plain]['plain_loss']:.1f} ({worst_plain}), "
        f"robust_prototypes up to {100 * verdicts[worst]['robust_loss']:.1f} ({worst}), "
        f"{100 * (verdicts[worst]['robust_loss_to_removal']):.1f} more than if the attackers were known; "
        f"{clean:.1f} without attack; {sum(row['named'] for row in found)} of {sum(row['attackers'] for row in found)} "
        f"attackers named, {sum(row['wrongly'] for row in scene['found'].values())} honest members wrongly",
    )


def table() -> str:
    lines = ["| promise | tried with | outcome |", "|---|---|---|"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows())]) + "\n"


def audit_table() -> str:
    lines = [
        "| method | sent as | membership AUC | found at 1 % false alarms "
        "| class shares off by | by guessing | correlation |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in (figures("audit") or {"rows": []})["rows"]:
        member, labels = row["membership"], row["labels"]
        cells = ["", ""] if member is None else [f"{member['auc']:.3f}", f"{100 * member['true_positives']:.1f} %"]
        correlation = "" if labels["correlation"] is None else f"{labels['correlation']:.2f}"
        cells += [f"{labels['total_variation']:.3f}", f"{labels['guessing']:.3f}", correlation]
        lines.append(f"| {row['method']} | {row['switches']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def insert(page: Path, name: str, made: str) -> None:
    block = re.compile(rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)", re.DOTALL)
    text = page.read_text()
    if not block.search(text):
        sys.exit(f"{page} has no place for the {name}")
    page.write_text(block.sub(lambda found: found[1] + made + found[2], text))
    print(made)


def main() -> None:
    insert(PAGE, "table", table())
    insert(PRIVACY, "audit", audit_table())


if __name__ == "__main__":
    main()
