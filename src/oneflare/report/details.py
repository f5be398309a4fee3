"""What a page shows of one run: the partition, lambda, geometry and every fusion, bounded in size."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from oneflare.report.geometry import geometry
from oneflare.report.story import LambdaCurve
from oneflare.simulation.files import RunFiles
from oneflare.simulation.results import FusionResult
from oneflare.simulation.stages import Result, read_experiment

MOST_POINTS = 100
"""of a curve over epochs"""
MOST_CLIENTS = 24
"""whose curves are kept; more than a reader can tell apart"""
MOST_ROWS = 100
"""clients in the client x class picture"""
Trace = list[dict[str, float]]


def traces_of(result: Result) -> dict[int, Trace]:
    """The traces of the clients that took part."""
    files = RunFiles(result.folder)
    return {client: files.client(client).read_trace() for client in result.content.fused_clients}


def run_details(result: Result, label: str, panel: int) -> dict[str, Any]:
    """Everything the page can show of one run, ready for JSON."""
    content = result.content
    experiment = read_experiment(result.folder)
    partition = content.partition
    return {
        "label": label,
        "name": label.rpartition(", seed")[0],
        "panel": panel,
        "method": content.method,
        "seed": content.seed,
        "headline": result.headline,
        "classes": list(content.data.classes),
        "table": partition.table[:MOST_ROWS],
        "clients": len(partition.table),
        "fused": list(content.fused_clients),
        "left_out": [
            {"client": client.client, "reason": client.reason or "its upload was refused"}
            for client in content.left_out
        ],
        "fusions": {name: _fusion(row) for name, row in result.fusions.items()},
        "lambda": lambda_curves(traces_of(result), bound_of(experiment.controller)),
        "geometry": geometry(result),
        "diagnostics": None if content.diagnostics is None else content.diagnostics.to_dict(),
        "configuration": experiment.to_yaml(),
        "provenance": _provenance(result, experiment.training_digest()),
    }


def bound_of(controller: Mapping[str, Any]) -> float | None:
    """Where the valve holds lambda, if there is one; `valve: null` is the strength that guarantees it."""
    bound = controller.get("lambda_max")
    return None if bound is None or controller.get("valve", 0) == 0 else float(bound)


def _fusion(row: FusionResult) -> dict[str, Any]:
    keys = (
        "accuracy", "balanced_accuracy", "worst_class", "calibration_error", "per_class", "reliability",
        "forward_passes", "parameters", "fuse_seconds", "history",
    )  # fmt: skip
    content = row.to_dict()
    return {key: content[key] for key in keys}


def lambda_curves(traces: Mapping[int, Trace], bound: float | None) -> dict[str, Any] | None:
    """Raw and effective lambda per client; None where nothing ever pulled."""
    if not any(row["lambda_raw_max"] > 0 for rows in traces.values() for row in rows):
        return None
    chosen = evenly(sorted(traces), MOST_CLIENTS)
    curves = []
    for client in chosen:
        rows = [traces[client][k] for k in kept_points([row["lambda_raw"] for row in traces[client]], MOST_POINTS)]
        curves.append(
            {
                "client": client,
                "epochs": [row["epoch"] for row in rows],
                "raw": [significant(row["lambda_raw"]) for row in rows],
                "effective": [significant(row["lambda_effective"]) for row in rows],
            }
        )
    return {"clients": curves, "of": len(traces), "bound": bound}


def mean_lambda(label: str, traces: Sequence[Sequence[Mapping[str, float]]]) -> LambdaCurve | None:
    """Mean over clients (and seeds) at each epoch all of them reached; None where nothing ever pulled."""
    pulled = [trace for trace in traces if trace and any(row["lambda_raw"] > 0 for row in trace)]
    if not pulled:
        return None
    shared = min(len(trace) for trace in pulled)
    raw = [sum(trace[k]["lambda_raw"] for trace in pulled) / len(pulled) for k in range(shared)]
    effective = [sum(trace[k]["lambda_effective"] for trace in pulled) / len(pulled) for k in range(shared)]
    largest = max(row.get("lambda_raw_max", row["lambda_raw"]) for trace in pulled for row in trace)
    kept = kept_points(raw, MOST_POINTS)
    return LambdaCurve(
        label,
        [int(pulled[0][k]["epoch"]) for k in kept],
        [significant(raw[k]) for k in kept],
        [significant(effective[k]) for k in kept],
        largest,
    )


def kept_points(values: Sequence[float], most: int) -> list[int]:
    """Positions of at most `most` values, in order: the first, the last, the largest, and evenly spread ones."""
    count = len(values)
    if count <= most:
        return list(range(count))
    peak = max(range(count), key=lambda k: values[k])
    return sorted({*evenly(range(count), most - 1), peak})


def evenly(items: Sequence[int], most: int) -> list[int]:
    """At most `most` of the items, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    return [items[round(k * (len(items) - 1) / (most - 1))] for k in range(most)]


def significant(value: float, digits: int = 5) -> float | None:
    """Rounded for the page; None where it is not finite, which JSON cannot say."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None


def _provenance(result: Result, digest: str) -> dict[str, str]:
    content = result.content
    cost, encoder = content.cost, content.encoder
    options = ", ".join(f"{key} {value}" for key, value in encoder.items() if key != "name")
    return {
        "folder": str(result.folder),
        "OneFlare": content.oneflare,
        "device": f"{content.device}, {content.precision}",
        "encoder": f"{encoder['name']} ({options})" if options else str(encoder["name"]),
        "settings (digest)": digest[:16],
        "partition (digest)": content.partition.digest[:16],
        "training, all clients": f"{cost.train_seconds:.1f} s",
        "uploaded": f"{cost.upload_bytes / 1e6:.2f} MB",
        "peak memory": f"{cost.peak_memory_bytes / 2**20:.0f} MiB",
    }
