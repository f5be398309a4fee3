"""Fusions on the same uploads, over seeds: `python -m benchmarks.density RUNS NAME` reads the run folders in RUNS that
`oneflare compare METHODS --out RUNS` or several `oneflare run --out RUNS/...` have left, and writes
`results/density/NAME.json` and `.md`: accuracy by method, fusion and seed, with what made it. The figures are those of
the run's own fusions and of whatever `oneflare fuse RUN --all` has added since; all must be of today's arithmetic.
Rows of methods and seeds that are not in RUNS stay as they were.
"""

from __future__ import annotations

import statistics
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from oneflare._version import FUSION_ARITHMETIC
from oneflare.core.files import read_json, write_json, write_text
from oneflare.simulation.results import RunResult

RESULTS = Path(__file__).parents[1] / "results" / "density"


def collect(runs: Path) -> dict[str, Any]:
    """Every finished run below a folder."""
    rows: list[dict[str, Any]] = []
    for path in sorted(runs.glob("*/result.json")):
        found = RunResult.read(path)
        fusions = figures(path.parent)
        rows.append(
            {
                "method": found.method,
                "seed": found.seed,
                "data": found.data.name,
                "train": found.data.train,
                "partition": {"alpha": found.partition.alpha, "clients": found.partition.clients},
                "partition_digest": found.partition.digest,
                "encoder": found.encoder,
                "epochs": found.epochs,
                "precision": found.precision,
                "oneflare": found.oneflare,
                "accuracy": {name: fusion["accuracy"] for name, fusion in fusions.items()},
                "calibration_error": {name: fusion["calibration_error"] for name, fusion in fusions.items()},
            }
        )
    return {"runs": rows}


def figures(run: Path) -> dict[str, dict[str, Any]]:
    """What was measured of every fusion of a run, by name."""
    found = {path.parent.name: read_json(path) for path in sorted(run.glob("fusions/*/metrics.json"))}
    old = [name for name, row in found.items() if row.get("code", {}).get("arithmetic") != FUSION_ARITHMETIC]
    if old:
        raise SystemExit(f"{run}: {', '.join(old)} were made with another arithmetic; `oneflare fuse {run} --all`")
    return found


def table(content: dict[str, Any], command: str) -> str:
    """Mean and deviation over seeds, methods by fusions."""
    cells: dict[tuple[str, str], list[float]] = defaultdict(list)
    for row in content["runs"]:
        for name, accuracy in row["accuracy"].items():
            cells[row["method"], name].append(100 * accuracy)
    fusions = list(dict.fromkeys(name for _, name in cells))
    lines = [f"Test accuracy in per cent, mean ± deviation over seeds. Made by `{command}`.", ""]
    lines += [f"| method | {' | '.join(fusions)} |", "|---|" + "---:|" * len(fusions)]
    for method in dict.fromkeys(method for method, _ in cells):
        values = [cells.get((method, name), []) for name in fusions]
        shown = [_spread(some) for some in values]
        seeds = max(len(some) for some in values)
        lines.append(f"| {method} ({seeds} {'seed' if seeds == 1 else 'seeds'}) | {' | '.join(shown)} |")
    return "\n".join(lines) + "\n"


def _spread(values: list[float]) -> str:
    if not values:
        return "–"
    return f"{statistics.fmean(values):.1f}" + (f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else "")


def main(runs: str, name: str, *command: str) -> None:
    path = RESULTS / f"{name}.json"
    rows = {(row["method"], row["seed"]): row for row in read_json(path)["runs"]} if path.exists() else {}
    rows |= {(row["method"], row["seed"]): row for row in collect(Path(runs))["runs"]}
    content = {"runs": [rows[key] for key in sorted(rows)], "command": " ".join(command)}
    write_json(path, content)
    write_text(RESULTS / f"{name}.md", table(content, content["command"]))
    print((RESULTS / f"{name}.md").read_text())


if __name__ == "__main__":
    main(*sys.argv[1:])
