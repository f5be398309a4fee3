"""The fusion bench on digits and CIFAR-10: `python -m benchmarks.fusion [digits] [cifar10] [--with-training]`.

Trains what is missing in runs/fusion-NAME (three seeds of flare and fafi whose uploads hold everything a fusion may
ask for), prints the table, and keeps it in results/fusion/NAME.json and .md with the time it took.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from oneflare._version import __version__
from oneflare.core.files import write_json, write_text
from oneflare.study.compare import compare_methods
from oneflare.study.fusing import BenchTable, bench_runs
from oneflare.upload.evidence import EVIDENCE

METHODS = ("flare", "fafi")
SEEDS = 3
SHARED: dict[str, Any] = {
    "partition": {"kind": "dirichlet", "alpha": 0.05, "clients": 5},
    "upload": {"evidence": sorted(EVIDENCE)},
    "analytic": {"name": "random_conv"},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "digits": {"data": {"name": "digits", "public": 200}, "train": {"snapshots": 0}},
    "cifar10": {
        "data": {"name": "cifar10", "train_size": 5000, "test_size": 2000, "public": 500},
        "encoder": {"name": "resnet8", "width": 16, "stem_stride": 2},
        "train": {"epochs": 5, "snapshots": 0},
    },
}
RESULTS = Path("results/fusion")


def cpu_seconds() -> float:
    """Of this process and of all it has waited for."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in used)


def run(name: str, with_training: bool) -> None:
    layers = [SHARED, SETTINGS[name]]
    folder = compare_methods(METHODS, layers, seeds=SEEDS, folder=Path("runs") / f"fusion-{name}").folder
    started, cpu, load = time.monotonic(), cpu_seconds(), os.getloadavg()[0]
    tables = bench_runs([folder], with_training=with_training)
    took = {
        "wall_seconds": time.monotonic() - started,
        "cpu_seconds": cpu_seconds() - cpu,
        "load_average": [load, os.getloadavg()[0]],
        "cores": os.cpu_count(),
    }
    content = {"oneflare": __version__, "settings": layers, "took": took, "tables": [t.to_dict() for t in tables]}
    write_json(RESULTS / f"{name}.json", content)
    text = markdown(name, tables, took)
    write_text(RESULTS / f"{name}.md", text)
    print(text)


def markdown(name: str, tables: list[BenchTable], took: dict[str, Any]) -> str:
    lines = [
        f"# Every fusion of the same uploads: {name}",
        "",
        f"Command: `python -m benchmarks.fusion {name}`. Dirichlet alpha 0.05, 5 clients, {SEEDS} seeds, settings in "
        f"`{name}.json`. Mean ± deviation over seeds; difference: accuracy minus that of the first row on the same "
        "uploads, in points. Server s and MiB: processor time of fusing, and growth of resident memory, "
        "in a process of its own (of two fusions the second, if the first took less than 2 s). "
        "MB: what a fusion reads of all uploads.",
        "",
        f"Fusing and measuring took {took['wall_seconds']:.0f} s of wall time and {took['cpu_seconds']:.0f} s of "
        f"processor time on {took['cores']} cores; load average {took['load_average'][0]:.0f} to "
        f"{took['load_average'][1]:.0f}. Results that were there already are read back and cost nothing.",
    ]
    for table in tables:
        lines += ["", f"## Uploads of {table.experiment.method}", ""]
        columns = (
            "fusion", "accuracy %", "difference", "balanced %", "worst class %", "calibration error %", "parameters",
            "passes", "server s", "MiB", "MB",
        )  # fmt: skip
        lines += ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
        lines += ["| " + " | ".join(row(table, fusion)) + " |" for fusion in table.names]
        lines += ["", *(f"- not in the table: {fusion} {why}" for fusion, why in table.left_out.items())]
    return "\n".join(lines) + "\n"


def row(table: BenchTable, fusion: str) -> list[str]:
    def spread(value: Any, sign: str = "") -> str:
        return f"{100 * value.mean:{sign}.1f} ± {100 * (value.std or 0):.1f}"

    def mean(key: str, pattern: str, unit: float = 1.0) -> str:
        value = table.figure(fusion, key)
        return "–" if value is None else pattern.format(value.mean / unit)

    quality = [
        spread(table.figure(fusion, key))
        for key in ("accuracy", "balanced_accuracy", "worst_class", "calibration_error")
    ]
    difference = "" if fusion == table.first else spread(table.difference(fusion), "+")
    return [
        fusion, quality[0], difference, *quality[1:], mean("parameters", "{:,.0f}"), mean("forward_passes", "{:.3g}"),
        mean("fuse_cpu_seconds", "{:.2f}"),
        mean("peak_memory_bytes", "{:.1f}", 2**20), mean("needed_bytes", "{:.2f}", 1e6),
    ]  # fmt: skip


if __name__ == "__main__":
    names = [word for word in sys.argv[1:] if not word.startswith("-")] or list(SETTINGS)
    for name in names:
        run(name, "--with-training" in sys.argv)
