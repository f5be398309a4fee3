"""What one deployable network keeps of its teacher: `python -m benchmarks.distill`

Digits, alpha 0.05, 5 clients, FLARE uploads, 400 public images, seeds 0 to 4, every fusion with its default budget.
Each seed is a whole run through the library in `runs/distill_digits`, which resumes where it was stopped; its figures
go to `results/fusion/distill_digits.json`, and the table beside it.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path
from typing import Any

from oneflare.core.files import write_json, write_text
from oneflare.fusion.distillation.public import OWN_TEACHER
from oneflare.methods.resolve import resolve
from oneflare.simulation.stages import run_experiment

RESULTS = Path("results/fusion/distill_digits.json")
FUSIONS = ("distill_public", "distill_datafree", "coboosting")
SEEDS = (0, 1, 2, 3, 4)
RUNS = Path("runs/distill_digits")
SETTING = {
    "method": "flare",
    "data": {"name": "digits", "public": 400},
    "alpha": 0.05,
    "workers": 1,
    "train": {"snapshots": 0},
}
KEPT = ("accuracy", "balanced_accuracy", "worst_class", "parameters", "forward_passes", "fuse_seconds")
MORE = ("teacher", "training")
"""of fusions that have them"""


def measure(seed: int) -> dict[str, Any]:
    experiment = resolve(SETTING, {"seed": seed, "fusions": [OWN_TEACHER, "average", *FUSIONS]})
    rows = run_experiment(experiment, RUNS / f"s{seed}").fusions
    contents = {name: row.to_dict() for name, row in rows.items()}
    return {name: {key: row[key] for key in KEPT + MORE if key in row} for name, row in contents.items()}


def table(content: dict[str, Any]) -> str:
    seeds = sorted(content, key=int)
    lines = [
        f"# One network from FLARE uploads: digits, alpha 0.05, 5 clients, seeds {', '.join(seeds)}",
        "",
        "`python -m benchmarks.distill`; 400 public images that no client owns (only distill_public looks at them);",
        f"teacher: {OWN_TEACHER}; options as by default. Test accuracy in %, mean ± deviation over seeds.",
        "Steps and rates were chosen on 200 of those public images with their labels. Seconds are of the wall clock,",
        "on one thread of a machine that others used too.",
        "",
        "| fusion | accuracy | of the teacher's, % | agreement, % | parameters | passes | seconds |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in (OWN_TEACHER, "average", *FUSIONS):
        rows = [content[seed][name] for seed in seeds]
        cells = [spread([100 * row["accuracy"] for row in rows])]
        for key in ("kept", "agreement"):
            cells.append(spread([100 * row["teacher"][key] for row in rows]) if "teacher" in rows[0] else "")
        cells += [f"{rows[0]['parameters']:,}", str(rows[0]["forward_passes"])]
        cells.append(f"{statistics.mean(row['fuse_seconds'] for row in rows):.1f}")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.1f}" + (f" ± {statistics.stdev(values):.1f}" if len(values) > 1 else "")


def main() -> None:
    content = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    for seed in SEEDS:
        if str(seed) not in content:
            print(f"seed {seed}", file=sys.stderr)
            content[str(seed)] = measure(seed)
            write_json(RESULTS, content)
    write_text(RESULTS.with_suffix(".md"), table(content))
    print(table(content))


if __name__ == "__main__":
    main()
