"""The statistics family on the same features: `python -m benchmarks.family [--name NAME] [--map SPEC] [KEY=VALUE...]`

Three runs give all rows: one whose uploads hold the covariances and mixtures of every class of the map's features
feeds the fusions that work on the map itself; two more are for the methods that have a map of their own over it
(fed3r, safle). Every run and every row goes through the library. The figures are written to `results/family/NAME.json`
as soon as a run is done, a rerun measures only what is missing, and `results/family/NAME.md` is made from them.

    ONEFLARE_DATA=... python -m benchmarks.family
    ONEFLARE_DATA=... python -m benchmarks.family --name lite0 --map '{"name": "identity"}' backbone=efficientnet_lite0
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oneflare.core.files import write_json, write_text
from oneflare.core.layers import parse_overrides
from oneflare.fusion import build_fusion
from oneflare.methods.recipes import METHODS
from oneflare.methods.resolve import resolve
from oneflare.simulation.stages import run_experiment
from oneflare.upload.contract import statistics_layout
from oneflare.upload.mixtures import MEANS, VARIANCES
from oneflare.upload.statistics import Plan, parts_for

RESULTS = Path("results/family")
SETTING = {"data": {"name": "cifar10", "train_size": 5000, "test_size": 2000}, "alpha": 0.05, "clients": 5, "seed": 0}
ON_THE_MAP = ("analytic", "fedncm", "afl", "fedcgs", "gh_lda", "gh_qda", "fisher_mix", "fedpft")
OVER_THE_MAP = ("fed3r", "safle")
PUBLISHED = (
    ("afl", 80.75, 58.56, "ResNet-18, CVPR 2025"),
    ("fedcgs", 63.95, 39.95, "ResNet-18 fed 32 pixels, AAAI 2025"),
    ("gh_lda", 86.05, 63.92, "ResNet-18 at 224 pixels, ICLR 2026"),
    ("fisher_mix", 84.74, 66.99, "ResNet-18 at 224 pixels, ICLR 2026"),
    ("safle", 90.73, 70.61, "ResNet-18, CVPR 2026"),
)
"""published accuracies on CIFAR-10 and CIFAR-100, all 50,000 images, backbone pretrained on ImageNet, any alpha"""


def upload_bytes(method: str, dim: int, classes: int) -> int:
    """What a client of this method sends: the tensors of its statistics, float32 (mixtures: float16)."""
    needs = build_fusion(resolve({"method": method}).fusions[0]).needs
    plan = Plan({}, "", dim, parts=parts_for(needs))
    halves = (MEANS, VARIANCES)
    sizes = {name: math.prod(shape) for name, (shape, _) in statistics_layout(plan, classes).items()}
    return sum(number * (2 if name in halves else 8 if name == "counts" else 4) for name, number in sizes.items())


def measured(methods: tuple[str, ...], spec: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """One run whose uploads feed the fusions of several methods; each one's figures."""
    fusions = [dict(resolve({"method": method}).fusions[0]) for method in methods]
    layer = {"method": methods[0], "analytic": dict(spec), "fusions": fusions, "workers": 1}
    with tempfile.TemporaryDirectory() as folder:
        started = time.monotonic()
        result = run_experiment(resolve(SETTING, layer, extra), Path(folder) / "run").content
        seconds = time.monotonic() - started
    rows = {}
    for method, fusion in zip(methods, fusions, strict=True):
        row = result.fusions[fusion["name"]]
        rows[method] = {
            "accuracy": row.accuracy,
            "calibration_error": row.calibration_error,
            "fuse_seconds": row.fuse_seconds,
            "run_seconds": seconds,
        }
    return rows


def over(method: str, spec: Mapping[str, Any]) -> dict[str, Any]:
    """The map of a method that has one of its own, over the map that all share."""
    recipe = METHODS[method].recipe["analytic"]
    return dict(recipe) | {"of": dict(spec)}


def table(content: Mapping[str, Any]) -> str:
    """The figures as Markdown, beside the published ones."""
    lines = [
        f"# The statistics family: {content['name']}",
        "",
        f"One run each with {json.dumps(content['setting'])}, features of `{json.dumps(content['map'])}`; accuracy on "
        "test images. Written by `python -m benchmarks.family`. The published figures have another backbone and all "
        "50,000 images, so only their order can be compared.",
        "",
        "| method | accuracy | calibration error | published on CIFAR-10 / CIFAR-100 |",
        "|---|---|---|---|",
    ]
    published = {name: f"{ten:.2f} / {hundred:.2f} ({words})" for name, ten, hundred, words in PUBLISHED}
    for method, row in sorted(content["rows"].items(), key=lambda item: -item[1]["accuracy"]):
        figures = f"{100 * row['accuracy']:.1f} | {100 * row['calibration_error']:.1f}"
        lines.append(f"| `{method}` | {figures} | {published.get(method, '')} |")
    lines += ["", "What a client sends in statistics, with 1,280 features below and 10 classes:", ""]
    lines += ["| method | features | MB |", "|---|---|---|"]
    for method in (*ON_THE_MAP, *OVER_THE_MAP):
        dim = {"fed3r": 2048, "safle": 2560}.get(method, 1280)
        lines.append(f"| `{method}` | {dim:,} | {upload_bytes(method, dim, 10) / 1e6:.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="random_conv", help="of the files in results/family")
    parser.add_argument("--map", default='{"name": "random_conv"}', help="the feature map that all share, as JSON")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="further settings of every run")
    given = parser.parse_args()
    spec, extra = json.loads(given.map), parse_overrides(given.settings)
    path = RESULTS / f"{given.name}.json"
    content = {"name": given.name, "map": spec, "setting": SETTING | extra, "rows": {}}
    if path.exists():
        before = json.loads(path.read_text())
        content["rows"] = before["rows"] if before["setting"] == json.loads(json.dumps(content["setting"])) else {}
    for methods in (ON_THE_MAP, *((method,) for method in OVER_THE_MAP)):
        if not set(methods) <= set(content["rows"]):
            own = spec if len(methods) > 1 else over(methods[0], spec)
            content["rows"] |= measured(methods, own, extra)
            write_json(path, content)
    write_text(path.with_suffix(".md"), table(content))
    print(table(content))


if __name__ == "__main__":
    main()
