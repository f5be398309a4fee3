"""What the analytic companion costs and gives: `python -m benchmarks.analytic PART...`

Parts: speed, memory, accuracy, partitions, privacy, deep, solvers, combined, table. Every cell is a whole run through
the library, written to `results/analytic/PART.json` as soon as it is measured; a rerun measures only what is missing.
`table` writes `results/analytic/README.md` from those files. Data: $ONEFLARE_DATA.
"""

from __future__ import annotations

import json
import os
import resource
import statistics as summary
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from oneflare.client.observer import Observer
from oneflare.client.statistics import measure
from oneflare.core.files import write_json
from oneflare.data import load
from oneflare.fusion import FUSIONS, build_fusion
from oneflare.methods.resolve import resolve
from oneflare.metrics import evaluate
from oneflare.nn import build_encoder, build_feature_map
from oneflare.nn.hardware import one_thread
from oneflare.simulation.engines import map_tasks
from oneflare.simulation.files import RunFiles
from oneflare.simulation.simulation import Simulation
from oneflare.simulation.stages import Result, open_run, run_experiment
from oneflare.study.bench.steps import interleaved, machine, random_dataset
from oneflare.study.cells import Cell as StudyCell
from oneflare.study.cells import make_plan
from oneflare.study.declare import find_declaration
from oneflare.study.scales import find_scale

RESULTS = Path("results/analytic")
TRAIN = {"cifar10": 10_000, "svhn": 10_000, "cifar100": 10_000, "tiny-imagenet": 8_000}
ALPHAS = (0.05, 0.5)
SEEDS = (0, 1, 2)
RUNS = Path(os.environ.get("ONEFLARE_RUNS", "runs"))
"""where studies keep their cells"""
Cell = tuple[str, Callable[[], dict[str, Any]]]


def run(layer: dict[str, Any], keep: Callable[[Result], dict[str, Any]] | None = None) -> dict[str, Any]:
    """One experiment in a folder that does not stay; its figures."""
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        result = run_experiment(resolve(layer), Path(folder) / "run")
        content = result.content
        kept = ("accuracy", "balanced_accuracy", "worst_class", "calibration_error", "fuse_seconds")
        figures = {
            "fusions": {name: {key: getattr(row, key) for key in kept} for name, row in content.fusions.items()},
            "upload_bytes_per_client": content.cost.upload_bytes / len(content.fused_clients),
            "clients": len(content.fused_clients),
            "epochs": content.epochs,
            "peak_memory_bytes": content.cost.peak_memory_bytes,
            "wall_seconds": time.monotonic() - started,
        }
        return figures | (keep(result) if keep else {})


def setting(data: str, alpha: float, seed: int, **more: Any) -> dict[str, Any]:
    """Seeds vary the subset, the split and the features; 5 clients; all test images there are."""
    layer = {"data": {"name": data, "train_size": TRAIN[data], "seed": seed}, "alpha": alpha, "seed": seed}
    return layer | {"train.precision": "float32"} | more


def speed() -> Iterator[Cell]:
    def cell(filters: int) -> dict[str, Any]:
        data = random_dataset(32, 3, 10_000).train
        spec = {"name": "random_conv", "filters": filters, "mirror": True}
        features = build_feature_map(spec, 3, 32)
        halves = [slice(0, 5000), slice(5000, None)]

        def work(rows: slice, _observer: Observer) -> float:
            return measure(features, data.images[rows], data.labels[rows], 10).samples

        started = time.monotonic()
        map_tasks(work, halves, workers=2)
        seconds = time.monotonic() - started
        encoder = build_encoder({"name": "resnet8"}, 3).eval()
        pixels, batch = data.images[:256].float(), data.images[:256]
        with one_thread(), torch.no_grad():
            own, deep, ratio = interleaved(lambda: features(batch), lambda: encoder(pixels), repeats=5)
        return {
            "seconds_10000_images_two_workers": seconds,
            "features": features.dim,
            "feature_images_per_second_one_thread": 256 / own,
            "resnet8_forward_images_per_second_one_thread": 256 / deep,
            "time_over_resnet8_forward": ratio,
            "peak_memory_bytes_of_a_worker": 1024 * resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss,
            "machine": machine(),
        }

    for filters in (115, 230, 460):
        yield f"{filters}", lambda filters=filters: cell(filters)


def accuracy() -> Iterator[Cell]:
    sizes = [(data, filters) for filters in (115, 230) for data in TRAIN] + [("cifar10", 460)]
    for data, filters in sizes:
        for seed in SEEDS:
            for alpha in ALPHAS:
                spec = {"name": "random_conv", "filters": filters, "seed": seed}
                layer = setting(data, alpha, seed, method="analytic", analytic=spec)
                yield f"{data}/{filters}/{alpha}/{seed}", lambda layer=layer: run(layer)


def partitions() -> Iterator[Cell]:
    """Predictions for the same data under different splits and precisions."""
    for filters in (115, 230):
        for dtype in ("float32", "int16"):
            for kind in ("dirichlet", "iid"):
                for clients in (5, 100):
                    layer = setting("cifar10", 0.05, 0, method="analytic", clients=clients) | {
                        "partition.kind": kind,
                        "partition.min_samples": 0,
                        "analytic.filters": filters,
                        "upload.statistics_dtype": dtype,
                    }

                    def keep(result: Result, layer: dict[str, Any] = layer) -> dict[str, Any]:
                        images = load(resolve(layer).data).test.images
                        return {"predictions": "".join(str(c) for c in result.model().predict(images).tolist())}

                    name = f"{filters}/{dtype}/{kind}/{clients}"
                    yield name, lambda layer=layer, keep=keep: run(layer, keep)


def privacy() -> Iterator[Cell]:
    for filters in (6, 12, 29):
        for epsilon in (None, 100.0, 30.0, 10.0, 3.0, 1.0):
            for seed in SEEDS:
                layer = setting("cifar10", 0.5, seed, method="analytic") | {
                    "analytic.filters": filters,
                    "analytic.seed": seed,
                }
                if epsilon is not None:
                    layer |= {
                        "upload.counts": "withheld",
                        "upload.statistics_epsilon": epsilon,
                        "upload.statistics_noise_seed": seed,
                    }
                yield f"{filters}/{epsilon}/{seed}", lambda layer=layer: run(layer)


def deep() -> Iterator[Cell]:
    """Trained methods under every fusion their uploads can feed: the trainings of `oneflare study table1`."""
    plan = make_plan(find_declaration("table1"), find_scale("small"))
    for (place, arm, seed), cell in plan.cells.items():
        if arm in ("fedavg", "fafi", "flare", "flare_analytic", "analytic"):
            data, alpha = cell.experiment.data.name, cell.experiment.partition.alpha
            assert place
            yield f"{data}/{alpha}/{arm}/{seed}", lambda cell=cell: every_fusion(cell)


def every_fusion(cell: StudyCell) -> dict[str, Any]:
    """One set of uploads, fused in every way that needs no training; trained first where it is not there yet."""
    folder = cell.folder(RUNS)
    run_experiment(cell.experiment, folder)
    experiment, files = cell.experiment, RunFiles(folder)
    federation = Simulation.build(experiment, files, load(experiment.data))
    found = [files.client(client).read_summary() for client in range(experiment.partition.clients)]
    uploads = federation.collect([summary for summary in found if summary is not None], Observer())
    offered = frozenset.intersection(*(upload.fields for upload in uploads))
    fusions = {name: build_fusion({"name": name}) for name in FUSIONS}
    fed = [name for name, fusion in fusions.items() if fusion.needs <= offered and not fusion.trains]
    with one_thread():
        found = evaluate([{"name": name} for name in fed], uploads, federation.dataset.test)
    kept = ("accuracy", "balanced_accuracy", "worst_class", "calibration_error")
    scores = {one.name: one.scores.to_dict() for one in found}
    return {
        "fusions": {name: {key: row[key] for key in kept} for name, row in scores.items()},
        "upload_bytes_per_client": sum(upload.file_bytes for upload in uploads) / len(uploads),
        "clients": len(uploads),
        "epochs": experiment.epochs,
        "cell": cell.name,
    }


def solvers() -> Iterator[Cell]:
    """The statistics of `oneflare study table1`, solved both ways; how images are split does not matter."""
    plan = make_plan(find_declaration("table1"), find_scale("small"))
    for (place, arm, seed), cell in plan.cells.items():
        if arm == "analytic" and cell.experiment.partition.alpha == ALPHAS[0]:
            assert place
            yield f"{cell.experiment.data.name}/{seed}", lambda cell=cell: both_solvers(cell)


def both_solvers(cell: StudyCell) -> dict[str, Any]:
    folder = cell.folder(RUNS)
    run_experiment(cell.experiment, folder)
    federation, uploads = open_run(folder, Observer())
    names = ("lda", "ridge")
    with one_thread():
        specs = [{"name": "analytic", "solver": name} for name in names]
        found = evaluate(specs, uploads, federation.dataset.test)
    return {name: one.scores.accuracy for name, one in zip(names, found, strict=True)}


def combined() -> Iterator[Cell]:
    """Where the networks are good, bad and in between: is the combination ever worse than its better part?"""
    digits = {"method": "flare_analytic", "data": "digits"}
    for seed in SEEDS:
        for alpha in ALPHAS:
            for epochs in (5, 20):
                layer = digits | {"alpha": alpha, "seed": seed, "epochs": epochs}
                yield f"digits/{alpha}/{epochs}/{seed}", lambda layer=layer: run(layer)
    for data in ("svhn", "cifar10"):
        layer = setting(data, 0.5, 0, method="flare_analytic", epochs=12, clients=2) | {"partition.kind": "iid"}
        yield f"{data}/iid, 2 clients/12/0", lambda layer=layer: run(layer)


def memory() -> Iterator[Cell]:
    """Whole runs, each in a process of its own: a process remembers the peak of everything it ever did."""

    def cell(layer: list[str]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-m", "oneflare.cli.main", "run", *layer, "--json", "--quiet", "--out", folder]
            content = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
        return {"peak_memory_bytes": content["cost"]["peak_memory_bytes"]}

    for filters in (115, 230, 460):
        words = ["method=analytic", "data=cifar10", "data.train_size=10000", f"analytic.filters={filters}"]
        yield f"{filters}", lambda words=words: cell(words)


PARTS = {
    "speed": speed,
    "memory": memory,
    "accuracy": accuracy,
    "partitions": partitions,
    "privacy": privacy,
    "deep": deep,
    "solvers": solvers,
    "combined": combined,
}


def stored(part: str) -> dict[str, Any]:
    path = RESULTS / f"{part}.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def measure_part(part: str, only: str) -> None:
    for name, cell in PARTS[part]():
        cells = stored(part)
        if name in cells or not name.startswith(only):
            continue
        started = time.monotonic()
        write_json(RESULTS / f"{part}.json", cells | {name: cell()})
        print(f"{part} {name}: {time.monotonic() - started:.0f} s", flush=True)


def mean_and_spread(values: list[float]) -> str:
    text = f"{100 * summary.mean(values):.1f}"
    return text + (f" ± {100 * summary.stdev(values):.1f}" if len(values) > 1 else "")


def rows(header: list[str], body: list[list[str]]) -> str:
    lines = [header, ["---"] * len(header), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def table() -> None:
    """All parts as one page."""
    parts = [
        "# The analytic companion, measured\n\nWritten by `python -m benchmarks.analytic table` from the JSON files "
        "beside it. Accuracy in percent on all stored test images; ± is the deviation over seeds (subset, split and "
        "filters vary), a single figure is a single seed. Five clients.\n",
        _accuracy_table(),
        _compared_table(),
        _solver_table(),
        _deep_table(),
        _combined_table(),
        _partition_table(),
        _privacy_table(),
        _speed_table(),
    ]
    (RESULTS / "README.md").write_text("\n".join(parts))


def _accuracy_table() -> str:
    cells = stored("accuracy")
    body = []
    for data, filters in dict.fromkeys(tuple(name.split("/")[:2]) for name in cells):
        line = [data, filters]
        for alpha in ALPHAS:
            found = [cells[f"{data}/{filters}/{alpha}/{s}"] for s in SEEDS if f"{data}/{filters}/{alpha}/{s}" in cells]
            line.append(mean_and_spread([cell["fusions"]["analytic"]["accuracy"] for cell in found]) if found else "–")
        found = [cell for name, cell in cells.items() if name.startswith(f"{data}/{filters}/")]
        own = [cell["fusions"]["analytic"] for cell in found]
        line += [
            mean_and_spread([cell["balanced_accuracy"] for cell in own]),
            mean_and_spread([cell["calibration_error"] for cell in own]),
            f"{found[0]['upload_bytes_per_client'] / 1e6:.2f}",
            f"{summary.mean(cell['fuse_seconds'] for cell in own):.1f}",
        ]
        body.append(line)
    header = ["data", "filters", *(f"alpha {alpha}" for alpha in ALPHAS)]
    header += ["balanced", "calibration error", "upload MB (float32)", "fusion s"]
    return "## `analytic`\n\n" + rows(header, body)


def _compared_table() -> str:
    """What the recommendation of a method for a new federation rests on, from single runs of `oneflare run`."""
    content = stored("compared")
    text = "## `analytic` on the data of the trained methods' density ratios (alpha 0.05)\n\n"
    runs = content.get("runs", [])
    body = []
    for data in dict.fromkeys(run["data"] for run in runs):
        found = [run["accuracy"] for run in runs if run["data"] == data]
        command = next(run["command"] for run in runs if run["data"] == data)
        body.append([data, mean_and_spread(found), str(len(found)), f"`{command}`"])
    return (
        text
        + rows(["data", "accuracy", "seeds", "command of the first seed"], body)
        + f"\n{content.get('about', '')}\n"
    )


def _solver_table() -> str:
    cells = stored("solvers")
    body = []
    for data in dict.fromkeys(name.split("/")[0] for name in cells):
        found = [cell for name, cell in cells.items() if name.startswith(f"{data}/")]
        body.append([data, *(mean_and_spread([cell[solver] for cell in found]) for solver in ("lda", "ridge"))])
    title = "## The two solvers, same statistics (those of `oneflare study table1 --scale small`, 115 filters)\n\n"
    return title + rows(["data", "lda", "ridge"], body)


def _deep_table() -> str:
    """One table per place: fusions down, methods across."""
    cells = stored("deep")
    wanted = [name for name, _ in deep()]
    text = "## Trained methods under every fusion\n\n"
    text += (
        "The trainings of `oneflare study table1 --scale small`: the same images, splits and seeds for all columns, "
        "ResNet-8 (width 16, strided stem), 5 epochs, Tiny-ImageNet at 32x32. A small budget, stated because it "
        "matters: longer training helps the trained methods, and `analytic` takes no training. FedAvg's uploads under "
        "the fusion `ensemble` are the plain ensemble.\n"
    )
    methods = ("fedavg", "fafi", "flare", "flare_analytic", "analytic")
    for data, alpha in dict.fromkeys(tuple(name.split("/")[:2]) for name in wanted if name in cells):
        columns = {
            method: [cell for name, cell in cells.items() if name.startswith(f"{data}/{alpha}/{method}/")]
            for method in methods
        }
        fusions = list(dict.fromkeys(f for found in columns.values() for cell in found for f in cell["fusions"]))
        body = []
        for fusion in fusions:
            line = [fusion]
            for found in columns.values():
                values = [cell["fusions"][fusion]["accuracy"] for cell in found if fusion in cell["fusions"]]
                line.append(mean_and_spread(values) if values else "–")
            body.append(line)
        header = ["fusion", *(f"{method} ({len(found)})" for method, found in columns.items())]
        text += f"\n### {data}, alpha {alpha} (seeds in brackets)\n\n" + rows(header, body)
    missing = [name for name in wanted if name not in cells]
    if missing:
        lacking = dict.fromkeys("/".join(name.split("/")[:3]) for name in missing)
        text += f"\nNot measured: {len(missing)} of {len(wanted)} cells (of {', '.join(lacking)}).\n"
    return text


def _combined_table() -> str:
    body = []
    for part in ("combined", "deep"):
        for name, cell in stored(part).items():
            fusions = {fusion: row["accuracy"] for fusion, row in cell["fusions"].items()}
            if "flare_analytic" not in fusions:
                continue
            better = max(fusions["analytic"], fusions["count_prototypes"])
            line = [fusions["analytic"], fusions["count_prototypes"], fusions["flare_analytic"]]
            gap = 100 * (fusions["flare_analytic"] - better)
            body.append([name.replace("/", ", "), *(f"{100 * value:.1f}" for value in line), f"{gap:+.1f}"])
    header = ["cell", "analytic", "count_prototypes", "flare_analytic", "gap to the better part"]
    return "## `flare_analytic` and its two parts, same uploads\n\n" + rows(header, body)


def _partition_table() -> str:
    cells = stored("partitions")
    body = []
    for filters, dtype in dict.fromkeys(tuple(name.split("/")[:2]) for name in cells):
        found = {name: cell for name, cell in cells.items() if name.startswith(f"{filters}/{dtype}/")}
        texts = [cell["predictions"] for cell in found.values()]
        agree = [sum(a == b for a, b in zip(x, y, strict=True)) / len(x) for x in texts for y in texts]
        accuracies = [100 * cell["fusions"]["analytic"]["accuracy"] for cell in found.values()]
        body.append(
            [
                filters,
                dtype,
                str(len(found)),
                f"{100 * min(agree):.2f}",
                f"{min(accuracies):.2f} to {max(accuracies):.2f}",
                f"{next(iter(found.values()))['upload_bytes_per_client'] / 1e6:.2f}",
            ]
        )
    header = ["filters", "precision", "splits", "least agreement of predictions %", "accuracy", "upload MB"]
    title = "## Independence of the split (cifar10; alpha 0.05 and iid, 5 and 100 clients)\n\n"
    return title + rows(header, body)


def _privacy_table() -> str:
    cells = stored("privacy")
    epsilons = sorted({name.split("/")[1] for name in cells}, key=lambda word: -float(word.replace("None", "inf")))
    body = []
    for filters in sorted({name.split("/")[0] for name in cells}, key=int):
        line = [filters]
        for epsilon in epsilons:
            found = [cell for name, cell in cells.items() if name.startswith(f"{filters}/{epsilon}/")]
            line.append(mean_and_spread([c["fusions"]["analytic"]["accuracy"] for c in found]) if found else "–")
        body.append(line)
    title = "## Private statistics (cifar10, alpha 0.5, 5 clients who each add noise, delta 1e-5)\n\n"
    header = ["filters", *("exact" if epsilon == "None" else f"epsilon {epsilon}" for epsilon in epsilons)]
    return title + rows(header, body)


def _speed_table() -> str:
    whole = stored("memory")
    body = [
        [
            name,
            str(cell["features"]),
            f"{cell['seconds_10000_images_two_workers']:.1f}",
            f"{cell['feature_images_per_second_one_thread']:.0f}",
            f"{cell['resnet8_forward_images_per_second_one_thread']:.0f}",
            f"{cell['time_over_resnet8_forward']:.2f}",
            f"{cell['peak_memory_bytes_of_a_worker'] / 2**30:.2f}",
            f"{whole[name]['peak_memory_bytes'] / 2**30:.2f}" if name in whole else "–",
        ]
        for name, cell in stored("speed").items()
    ]
    header = ["filters", "D", "s for 10,000 images, two workers", "features images/s, one thread"]
    header += ["resnet8 forward images/s, one thread", "time over resnet8 forward", "peak GiB of a worker"]
    header += ["peak GiB of a whole run"]
    return "## Speed (32x32 colour)\n\n" + rows(header, body)


def main(words: list[str]) -> None:
    """`PART` or `PART:PREFIX` to measure only cells whose name begins so."""
    torch.set_num_threads(1)
    for word in words or [*PARTS, "table"]:
        part, _, only = word.partition(":")
        if part == "table":
            table()
        elif part in PARTS:
            measure_part(part, only)
        else:
            raise SystemExit(f"unknown part '{part}'; choose from {', '.join([*PARTS, 'table'])}")


if __name__ == "__main__":
    main(sys.argv[1:])
