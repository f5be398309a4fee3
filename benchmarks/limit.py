"""How accurate the analytic companion is for so many megabytes: `python -m benchmarks.limit [PREFIX | table | ...]`

Every cell is one command of `oneflare run` in $ONEFLARE_RUNS/limit (resumable); its figures and the command go to
`results/analytic/limit.json`. `again:PREFIX` measures cells that are there once more. `table` writes
`results/analytic/limit.md` and the picture of the curve from that file. `same` asks the models of cells that differ by
their split alone, and writes how many answers differ to `results/analytic/same.json`. `bits` measures the bits of a
product with and without its large directions apart. `solver` measures time and memory of the solver alone, for 10,000
features (`solver:5000` for 5,000). Data: $ONEFLARE_DATA.
"""

from __future__ import annotations

import json
import math
import os
import resource
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from oneflare.core.config import DataConfig
from oneflare.core.files import write_json
from oneflare.core.threads import in_threads
from oneflare.data import load
from oneflare.fusion.analytic.solver import solve
from oneflare.models import load_model
from oneflare.nn import build_feature_map
from oneflare.nn.blocks import blocks_of
from oneflare.simulation.results import RunResult
from oneflare.study.bench.steps import machine
from oneflare.upload.coding import coder_of, estimated_bytes
from oneflare.upload.statistics import Statistics
from oneflare.upload.symmetric import triangle_size
from oneflare.upload.words import rows_apart

RESULTS = Path("results/analytic/limit.json")
TABLE = Path("results/analytic/limit.md")
PICTURE = Path("docs/measured/analytic-curve.svg")
RUNS = Path(os.environ.get("ONEFLARE_RUNS", "runs")) / "limit"
CLIENTS = 10
DATA = ("cifar10", "svhn", "cifar100")
PUBLISHED = {
    "AFL, ResNet-18 of ImageNet": 80.75,
    "FedSRA, 600 epochs": 78.9,
    "FedCGS, ResNet-18 of ImageNet": 63.95,
    "Coates et al. 2011, 4,000 centroids": 79.6,
}
"""accuracy on all of CIFAR-10 (50,000 training images), as its authors report it"""
PUBLISHED_MAPS = {"CKN, two layers": ((2300, 77.5), (9200, 82.0))}
"""features and accuracy, on 50,000 images; drawn at the size that sums of so many features in float32 would have"""


BLOCKS = {"3MB": 2, "45MB": 8}
"""in which features are where products are summed within blocks alone, by the size of the upload"""
ONE_BLOCK = "analytic.blocks=1"
MOVED = "fusions=[{name: analytic, moved: 1}]"
"""for CIFAR-10, chosen on training images that nobody trained on (docs/analytic.md)"""
MEANS = ["analytic.moved=1", "analytic.copies=2"]
"""features are means over each image and a moved copy, chosen in the same way; for sums of whole numbers"""
PATCHES = {"cifar10": "small", "cifar100": "small", "svhn": "large"}
"""`analytic.patches`, chosen on training images that nobody trained on (docs/analytic.md)"""


def cells() -> dict[str, list[str]]:
    """name -> words of `oneflare run`, the most telling first"""
    found = {}
    in_blocks = [(data, "45MB", "coarse", 0.05, 0) for data in DATA]
    in_blocks += [("cifar10", "3MB", "coarse", alpha, 0) for alpha in (0.05, 0.5)]
    in_blocks += [(data, "45MB", "coarse", 0.05, seed) for seed in (1, 2) for data in DATA]
    in_blocks += [("cifar10", "3MB", "coarse", 0.05, seed) for seed in (1, 2)]
    in_blocks += [(data, "45MB", "coarse", 0.5, 0) for data in DATA]
    in_blocks += [("cifar10", "45MB", dtype, alpha, 0) for dtype in ("fine", "float32") for alpha in (0.05, 0.5)]
    exact = [("cifar10", "3MB"), *((data, "45MB") for data in DATA)]
    in_blocks += [(data, limit, "whole", alpha, 0) for data, limit in exact for alpha in (0.05, 0.5)]
    in_blocks += [(data, limit, "whole", 0.05, seed) for seed in (1, 2) for data, limit in exact]
    for data, limit, dtype, alpha, seed in in_blocks:
        words = _words(data, limit, dtype, alpha, seed)
        words += [f"analytic.blocks={BLOCKS[limit]}", "analytic.kept=10"]
        size, end = f"{limit} in {BLOCKS[limit]} blocks", f"{dtype}-a{alpha}-s{seed}"
        chosen = [*words, f"analytic.patches={PATCHES[data]}"]
        if dtype == "whole" and data != "svhn":
            name = size if limit == "3MB" else f"{size}, {PATCHES[data]} patches"
            mean = [*(words if limit == "3MB" else chosen), *MEANS]
            found[f"{data}-{name}, means-{end}"] = mean
            found[f"{data}-{name}, means of three-{end}"] = mean[:-1]
            continue
        found[f"{data}-{size}, {PATCHES[data]} patches-{end}"] = chosen
        if (data, limit) == ("cifar10", "45MB"):
            found[f"{data}-{size}, {PATCHES[data]} patches, moved-{end}"] = [*chosen, MOVED]
        found[f"{data}-{size}-{end}"] = words
    wanted = [(data, "45MB", "coarse", 0.05, 0) for data in DATA]
    wanted += [(data, limit, "coarse", 0.05, 0) for limit in ("3MB", "20MB", "10MB") for data in DATA]
    wanted += [("cifar10", "3MB", "coarse", 0.5, 0), ("cifar10", "3MB", "fine", 0.05, 0)]
    wanted += [("cifar10", "3MB", "fine", 0.5, 0)]
    wanted += [(data, "3MB", "float32", 0.05, 0) for data in DATA]
    wanted += [(data, limit, "coarse", 0.05, seed) for limit in ("3MB", "45MB") for seed in (1, 2) for data in DATA]
    for data, limit, dtype, alpha, seed in wanted:
        found[f"{data}-{limit}-{dtype}-a{alpha}-s{seed}"] = [*_words(data, limit, dtype, alpha, seed), ONE_BLOCK]
    return found


def _words(data: str, limit: str, dtype: str, alpha: float, seed: int) -> list[str]:
    words = ["method=analytic", f"data={data}", f"upload.limit={limit}", f"upload.statistics_dtype={dtype}"]
    return [*words, f"analytic.seed={seed}", f"clients={CLIENTS}", f"alpha={alpha}", "train.precision=float32"]


def stored() -> dict[str, Any]:
    return dict(json.loads(RESULTS.read_text())) if RESULTS.exists() else {}


def measure(only: str, again: bool = False) -> None:
    """again: also cells that are in the results already, from another run"""
    for name, words in cells().items():
        folder = RUNS / name
        if not name.startswith(only) or (name in stored() and not again):
            continue
        if not (folder / "result.json").exists():
            before = time.monotonic(), children_seconds()
            command = str(Path(sys.executable).with_name("oneflare"))
            subprocess.run([command, "run", *words, "--out", str(folder), "--quiet"], check=True)
            wall, processor = time.monotonic() - before[0], children_seconds() - before[1]
            write_json(folder / "time.json", {"wall_seconds": wall, "processor_seconds": processor})
        write_json(RESULTS, stored() | {name: figures(folder, words)})
        print(name, flush=True)


def children_seconds() -> float:
    """Of a processor, in all finished processes that this one started."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def figures(folder: Path, words: list[str]) -> dict[str, Any]:
    result = RunResult.read(folder / "result.json")
    if len(result.fused_clients) < CLIENTS:
        raise SystemExit(f"{folder}: only clients {list(result.fused_clients)} were fused; result.json says why")
    own = result.fusions["analytic"]
    sizes = [path.stat().st_size for path in sorted(folder.glob("clients/*/upload.safetensors"))]
    return {
        "command": shlex.join(["oneflare", "run", *words]),
        "accuracy": own.accuracy,
        "balanced_accuracy": own.balanced_accuracy,
        "calibration_error": own.calibration_error,
        "largest_upload_bytes": max(sizes),
        "client_seconds": result.cost.train_seconds,
        "fuse_seconds": own.fuse_seconds,
        "peak_memory_bytes": result.cost.peak_memory_bytes,
        **json.loads((folder / "time.json").read_text()),
        "machine": machine(),
    }


def solver(dim: int = 10_000, classes: int = 10) -> None:
    """Time and memory of `solve` for sums of Gaussian features with a decaying spectrum; prints one line of JSON."""
    generator = torch.Generator().manual_seed(0)
    total = Statistics.zeros(dim, classes)
    decay = (1 + torch.arange(dim)).double() ** -0.5
    for _ in range(6):
        labels = torch.randint(0, classes, (1000,), generator=generator)
        phi = torch.randn(1000, dim, generator=generator).double() * decay
        phi[:, :classes] += torch.nn.functional.one_hot(labels, classes)
        total.gram.addmm_(phi.T, phi)
        total.sums.index_add_(0, labels, phi)
        total.counts.add_(torch.bincount(labels, minlength=classes))
    started, processor = time.monotonic(), time.process_time()
    ridge = solve(total).ridge
    seconds = {"wall_seconds": time.monotonic() - started, "processor_seconds": time.process_time() - processor}
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = {"features": dim, "ridge": ridge, **seconds, "peak_memory_bytes": peak, "machine": machine()}
    write_json(RESULTS.with_name(f"solver-{dim}.json"), found)
    print(json.dumps(found))


def same() -> None:
    """Between the first split of each map, and each other one: how many test images get another answer."""
    file = RESULTS.with_name("same.json")
    found: dict[str, Any] = dict(json.loads(file.read_text())) if file.exists() else {}
    for name in stored():
        data, size, dtype, _, seed = name.split("-")
        first = f"{data}-{size}-{dtype}-a0.05-{seed}"
        models = [RUNS / cell / "fusions/analytic/model.safetensors" for cell in (first, name)]
        if name in (first, *found) or not all(model.exists() for model in models):
            continue
        images = load(DataConfig(name=data)).test.images
        one, two = (answers(model, images) for model in models)
        found[name] = {"as": first, "images": len(images), "another_answer": int((one != two).sum())}
        write_json(file, found)
        print(name, found[name], flush=True)


def answers(model: Path, images: torch.Tensor) -> torch.Tensor:
    found = load_model(model)
    return torch.cat(in_threads(lambda part: found.logits(part).argmax(1), images.split(125)))


def bits(data: str = "cifar10", fineness: float = 1 / 8) -> None:
    """Of a product in the first of eight blocks of 30,505 features, rounded to so much of sqrt(n), of few classes."""
    spec = {"name": "paired", "features": 30505, "blocks": 8, "kept": 10, "mirror": True, "patches": PATCHES[data]}
    dataset, features, coder = load(DataConfig(name=data)), build_feature_map(spec, 3, 32), coder_of(spec, 3, 32)
    size = blocks_of(features)[0]
    coder = coder.apart(blocks_of(features))[0]
    for classes, images in (((0, 1, 2), 4800), ((3,), 1500), ((4, 5), 400)):
        chosen = torch.cat([(dataset.train.labels == label).nonzero().flatten() for label in classes])[:images]
        phi = torch.cat(in_threads(lambda part: features(part)[:, :size], dataset.train.images[chosen].split(128)))
        z = coder.changed(phi - phi.mean(0))
        products, chance = z.T @ z, math.sqrt(len(z))
        rows = rows_apart(products, chance)
        together = estimated_bytes(products, fineness * chance)
        apart = estimated_bytes(rows.left_of(products), fineness * chance) + 8 * len(rows.code)
        each = {name: 8 * own / triangle_size(size) for name, own in (("together", together), ("apart", apart))}
        print(json.dumps({"images": len(z), "classes": len(classes), "features": size, **each}), flush=True)


def table() -> None:
    lines = [
        "# Accuracy for so many megabytes and seconds",
        "",
        "Written by `python -m benchmarks.limit table` from `limit.json`, which holds the command of each line.",
        f"20,000 training and 5,000 test images, {CLIENTS} clients. A size in megabytes is `upload.limit`, with",
        "`analytic=paired`. Lines that name `multi_scale` are of that older map: with windows where the size is in",
        "megabytes, without (`analytic.shifted=false`) where it is a number of filters. Lines that name blocks have",
        "`analytic.blocks`, and all ten outputs of each filter (`analytic.kept=10`); those that name patches have",
        "`analytic.patches`; those that name `moved` also ask moved copies of test images, and those that name means",
        "have features that are means over an image and one or two moved copies. Lines that name contrast 10 are of",
        "code that added 10 to the variance of every patch (`analytic.contrast`), with other shares of the banks. Some",
        "were fused again from the same uploads by later code: docs/analytic.md says which.",
        "Seconds of clients and of the fusion passed on a machine of two cores that many others used at the same time.",
        "Processor seconds are those of all processes of a run: reading, clients, checks, fusion and test images.",
        "",
        "| data | size | sums | alpha | seed of filters | accuracy % | largest upload MB | clients s | fusion s "
        "| whole run s | processor s |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for name, cell in stored().items():
        data, chosen, dtype, alpha, seed = name.split("-")
        size = f"{cell['largest_upload_bytes'] / 1e6:.2f}"
        row = [data, chosen, dtype, alpha[1:], seed[1:], f"{100 * cell['accuracy']:.2f}", size]
        row += [f"{cell['client_seconds']:.0f}", f"{cell['fuse_seconds']:.0f}"]
        measured = [cell.get(f"{kind}_seconds") for kind in ("wall", "processor")]
        row += ["not measured" if seconds is None else f"{seconds:.0f}" for seconds in measured]
        lines.append("| " + " | ".join(row) + " |")
    TABLE.write_text("\n".join(lines) + "\n")
    draw()


MARKERS = {"whole": "o", "coarse": "s", "fine": "^", "float32": "D", "int12": "v"}
"""of a point, by how sums are sent"""


def points(measure: str, unit: float) -> list[tuple[str, str, bool, float, float]]:
    """Data, sums, whether of an older map, measure / unit and accuracy % of each cell that has the measure."""
    found = []
    for name, cell in stored().items():
        data, size, dtype, *_ = name.split("-")
        if cell.get(measure) is not None:
            older = "multi_scale" in size or "contrast 10" in size
            found.append((data, dtype, older, cell[measure] / unit, 100 * cell["accuracy"]))
    return found


def draw() -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "oneflare"
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(11, 5.5), sharey=True)
    colours = {data: f"C{place}" for place, data in enumerate(DATA)}
    for axes, measure, unit in ((left, "largest_upload_bytes", 1e6), (right, "processor_seconds", 1.0)):
        for data, dtype, older, cost, accuracy in points(measure, unit):
            face = "none" if older else colours[data]
            axes.plot(cost, accuracy, MARKERS[dtype], color=colours[data], markerfacecolor=face, alpha=0.8)
    for label, maps in PUBLISHED_MAPS.items():
        places = [(2 * dim * (dim + 1) / 1e6, accuracy) for dim, accuracy in maps]
        left.plot(*zip(*places, strict=True), "*:", color="gray", label=f"{label}, CIFAR-10, 50,000 images")
    for data, colour in colours.items():
        left.plot([], [], "-", linewidth=4, color=colour, label=f"{data}, 20,000 images")
    for dtype, marker in MARKERS.items():
        left.plot([], [], marker, color="black", label=dtype)
    left.plot([], [], "o", color="black", markerfacecolor="none", label="hollow: older maps")
    beside = {"textcoords": "offset points"}
    for label, accuracy in PUBLISHED.items():
        left.axhline(accuracy, color="lightgray", linewidth=0.8)
        left.annotate(label, (1.05, accuracy), (0, 2 if accuracy > 79 else -8), fontsize=7, color="gray", **beside)
    left.set(xscale="log", xlim=(1, 250), xlabel="megabytes that a client sends", ylabel="accuracy %")
    right.set(xscale="log", xlabel="processor seconds of a whole run")
    figure.legend(*left.get_legend_handles_labels(), fontsize=8, loc="lower center", ncol=4)
    figure.tight_layout(rect=(0, 0.13, 1, 1))
    figure.savefig(PICTURE, metadata={"Date": None})
    pyplot.close(figure)


def main(words: list[str]) -> None:
    torch.set_num_threads(1)
    for word in words or ["", "table"]:
        if word == "table":
            table()
        elif word.startswith("solver"):
            solver(int(word.partition(":")[2] or 10_000))
        elif word in ("same", "bits"):
            {"same": same, "bits": bits}[word]()
        elif word.startswith("again:"):
            measure(word.partition(":")[2], again=True)
        else:
            measure(word)


if __name__ == "__main__":
    main(sys.argv[1:])
