"""Features of a pretrained network on CIFAR-10: `python -m benchmarks.photographs` writes results/photographs/.

Every row is a command that anybody can type. A row that is there already is kept, so the program can be interrupted.
Processor seconds are those of the command and its workers; features that an earlier row or run has computed are found
in the cache, and `features_computed` says how many images the row sent through the backbone itself.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
from pathlib import Path

from oneflare._version import __version__
from oneflare.core.files import read_json, write_json

RESULTS = Path(__file__).parent.parent / "results/photographs/cifar10.json"
COMMON = ["backbone=efficientnet_lite0", "data=cifar10"]
SEEDS = (0, 1, 2)
PUBLISHED = ("afl", "fedcgs", "gh_lda", "gh_qda", "fisher_mix", "fedncm", "fed3r", "fedpft", "safle")
FUSED = ("fusions=density_ratio,ensemble,average,count_prototypes", "train.snapshots=0")
TUNED = ("backbone.tune=last", "epochs=10", "train.lr=0.01", "train.precision=float32")
"""chosen on 2,000 training images that nobody trained on"""
ROWS = [
    *(
        ["method=analytic", f"data.train_size={size}", f"alpha={alpha}"]
        for size in (2000, 10_000)
        for alpha in (0.05, 0.5)
    ),
    *(
        ["method=flare", "data.train_size=10000", f"alpha={alpha}", f"seed={seed}"]
        for seed in SEEDS
        for alpha in (0.05, 0.5)
    ),
    *([f"method={method}", "data.train_size=10000", "alpha=0.05"] for method in PUBLISHED),
    *(
        ["method=analytic", "data.train_size=2000", f"data.seed={seed}", f"backbone.copies={copies}"]
        for seed in SEEDS
        for copies in ("none", "mirror")
    ),
    *(
        ["method=flare", "data.train_size=2000", f"alpha={alpha}", *FUSED, *block, *split]
        for split in ([], ["seed=1"])
        for block in ([], TUNED)
        for alpha in (0.05, 0.5)
    ),
]
"""sums of features do not depend on the split, so methods that need nothing else are measured once"""


def measure(words: list[str]) -> dict[str, object]:
    """Run one command and return its figures."""
    command = [str(Path(sys.executable).parent / "oneflare"), "run", *COMMON, *words, "--json"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    content = json.loads(done.stdout)
    computed = sum(map(int, re.findall(r"computing features of (\d+) images", done.stderr)))
    return {
        "command": " ".join(["oneflare", *command[1:-1]]),
        "oneflare": __version__,
        "accuracy": {name: row["accuracy"] for name, row in content["fusions"].items()},
        "own_fusion": content["headline"],
        "test_images": content["data"]["test"],
        "processor_seconds": round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1),
        "features_computed": computed,
        "partition": content["partition"]["digest"],
    }


def main() -> None:
    rows = read_json(RESULTS) if RESULTS.exists() else {}
    for words in ROWS:
        name = ", ".join(word.split("=")[1] for word in words)
        if name not in rows:
            rows[name] = measure(words)
            write_json(RESULTS, rows)
        print(name, rows[name]["accuracy"], f"{rows[name]['processor_seconds']} processor seconds")


if __name__ == "__main__":
    main()
