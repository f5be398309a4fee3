"""All benchmarks together, with their targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oneflare._version import __version__
from oneflare.client.observer import Observer
from oneflare.core.files import read_json, write_json
from oneflare.errors import ConfigError, did_you_mean
from oneflare.study.bench.growth import client_growth, fusion_growth, start_up
from oneflare.study.bench.steps import busy_machine, cohort_gain, controller_costs, machine, step_overhead
from oneflare.study.bench.wire import communication

RESNET8 = {"name": "resnet8", "width": 16}
CLIENTS = (5, 10, 50, 100, 500, 1000)


@dataclass(frozen=True)
class BenchTarget:
    """A ratio and the most it may be."""

    name: str
    value: float
    limit: float

    @property
    def held(self) -> bool:
        return self.value <= self.limit


def run_suite(
    out: Path, *, quick: bool, observer: Observer, only: Sequence[str] = ()
) -> tuple[dict[str, Any], list[BenchTarget]]:
    """Measure everything, write `out` (JSON); `quick` leaves out what takes minutes.

    only: sections to measure again, the others stay as the file has them
    """
    content: dict[str, Any] = {"oneflare": __version__, "quick": quick, "machine": machine()}
    sections = _sections(quick)
    for name in only:
        if name not in sections:
            raise ConfigError(f"no benchmark is called '{name}'{did_you_mean(name, sections)}")
    if only:
        content = (read_json(out) if out.exists() else {}) | content
        sections = {name: section for name, section in sections.items() if name in only or name not in content}
    for name, section in sections.items():
        observer.note(f"measuring {name.replace('_', ' ')}")
        content[name] = section()
        write_json(out, content)
    targets = find_targets(content)
    content["targets"] = [{"name": t.name, "value": t.value, "limit": t.limit, "held": t.held} for t in targets]
    write_json(out, content)
    return content, targets


def _sections(quick: bool) -> dict[str, Callable[[], Any]]:
    counts: Sequence[int] = (5, 10, 100) if quick else CLIENTS
    sections: dict[str, Callable[[], Any]] = {
        "start_up": start_up,
        "step_overhead": lambda: _overheads(quick),
        "controllers": lambda: controller_costs(size=8, channels=1, batch=128),
        "busy_machine": lambda: busy_machine(RESNET8, size=8, channels=1, batch=128),
        "cohort": lambda: _cohorts(quick),
        "widths": lambda: [_speed({"name": "resnet8", "width": width}, 32, 3) for width in (8, 16, 32)],
        "sizes": lambda: [_speed(RESNET8, size, 3) for size in (8, 16, 32, 64)],
        "clients_8x8": lambda: client_growth(
            counts, size=8, channels=1, samples=4000, epochs=5, batch=4, encoder=RESNET8
        ),
        "fusion": lambda: fusion_growth((5, 20) if quick else (5, 25, 100), encoder=RESNET8),
        "communication": lambda: communication({"method": "flare", "epochs": 10 if quick else 40}),
    }
    if not quick:
        sections["clients_32x32"] = lambda: client_growth(
            (5, 10, 1000), size=32, channels=3, samples=20_000, epochs=3, batch=20, encoder=RESNET8
        )
    return sections


def _overheads(quick: bool) -> list[dict[str, Any]]:
    rows = [step_overhead(RESNET8, size=8, channels=1, batch=128, repeats=30)]
    rows.append(step_overhead(RESNET8, size=32, channels=3, batch=128, repeats=7))
    if not quick:
        rows.append(step_overhead({"name": "resnet8", "width": 32}, size=32, channels=3, batch=128, repeats=5))
        rows.append(step_overhead({"name": "resnet18", "width": 64}, size=32, channels=3, batch=128, repeats=2))
    return rows


def _speed(encoder: dict[str, Any], size: int, channels: int) -> dict[str, Any]:
    return step_overhead(encoder, size=size, channels=channels, batch=32, repeats=4)


def _cohorts(quick: bool) -> list[dict[str, Any]]:
    rows = [cohort_gain(size=8, channels=1, samples=samples, clients=16) for samples in (1, 2, 4, 8, 16, 32)]
    if not quick:
        rows += [cohort_gain(size=32, channels=3, samples=samples, clients=16, repeats=2) for samples in (2, 8)]
    return rows


def find_targets(content: dict[str, Any]) -> list[BenchTarget]:
    """The promises, each as a ratio or a number of seconds with its limit."""
    targets = [
        BenchTarget("help, seconds", content["start_up"]["help_seconds"], 0.5),
        BenchTarget(
            "first step on digits, seconds (whole one-step run)", content["start_up"]["one_step_run_seconds"], 4.0
        ),
        BenchTarget("step beside a busy neighbour per core over alone", content["busy_machine"]["ratio"], 5.0),
    ]
    for row in content["step_overhead"]:
        label = f"{row['encoder']['name']} width {row['encoder']['width']}, {row['size']}x{row['size']}"
        targets.append(
            BenchTarget(f"full step over bare pass: {label}", row["ratio"], 1.25 if row["size"] == 8 else 1.10)
        )
    for name, ratio in content["controllers"].items():
        if "pcgrad" not in name:
            targets.append(BenchTarget(f"controller over fixed: {name}", ratio, 1.05))
    int8 = content["communication"]["formats"]["int8"]
    for encoder, ratio in content["communication"]["int8_over_float32"].items():
        targets.append(BenchTarget(f"int8 upload over float32, bytes: {encoder}", ratio, 0.27))
    targets.append(BenchTarget("int8 upload, points lost on average", int8["mean_points_lost"], 0.5))
    for key in ("clients_8x8", "clients_32x32"):
        rows = {row["clients"]: row for row in content.get(key, [])}
        if 1000 in rows:
            targets.append(BenchTarget(f"{key}: time of 1000 over 5", rows[1000]["seconds"] / rows[5]["seconds"], 1.3))
            memory = rows[1000]["peak_memory_bytes"] / rows[10]["peak_memory_bytes"]
            targets.append(BenchTarget(f"{key}: memory of 1000 over 10", memory, 1.3))
    most = content["fusion"][-1]
    fewest = content["fusion"][0]
    memory = most["peak_memory_bytes"] / fewest["peak_memory_bytes"]
    targets.append(BenchTarget(f"fusing {most['uploads']} uploads over {fewest['uploads']}: memory", memory, 1.3))
    per_upload = (most["seconds"] / most["uploads"]) / (fewest["seconds"] / fewest["uploads"])
    targets.append(
        BenchTarget(f"fusing {most['uploads']} uploads over {fewest['uploads']}: time per upload", per_upload, 1.3)
    )
    return targets
