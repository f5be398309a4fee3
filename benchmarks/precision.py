"""What bfloat16 training costs in accuracy: `python -m benchmarks.precision`

Digits and a subset of CIFAR-10, three seeds, float32 against bfloat16 on the same partitions. Rows already in
`results/precision.json` are kept. Where the processor announces AMX and cannot run it, start with
ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16. Data: $ONEFLARE_DATA.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path
from typing import Any

from oneflare.core.files import read_json, write_json
from oneflare.methods.resolve import resolve
from oneflare.simulation.stages import run_experiment
from oneflare.study.bench.steps import machine

OUT = Path("results/precision.json")
SETTINGS: dict[str, dict[str, Any]] = {
    "digits": {"data": "digits", "epochs": 20},
    "cifar10": {
        "data": {"name": "cifar10", "train_size": 2000, "test_size": 1000},
        "encoder": {"name": "resnet8", "width": 16, "stem_stride": 2},
        "epochs": 10,
    },
}
SEEDS = (0, 1, 2)


def main() -> None:
    content = read_json(OUT) if OUT.exists() else {"machine": machine(), "accuracy": {}}
    rows = content["accuracy"]
    for name, setting in SETTINGS.items():
        for seed in SEEDS:
            for precision in ("float32", "bfloat16"):
                key = f"{name}/{precision}/{seed}"
                if key in rows:
                    continue
                layer = setting | {"seed": seed, "train.precision": precision, "train.snapshots": 0}
                with tempfile.TemporaryDirectory() as folder:
                    result = run_experiment(resolve({"method": "flare"}, layer), Path(folder) / "run")
                rows[key] = {fusion: row.accuracy for fusion, row in result.fusions.items()}
                print(key, rows[key], flush=True)
                write_json(OUT, content)
    content["points_lost"] = {
        name: {fusion: _lost(rows, name, fusion) for fusion in rows[f"{name}/float32/0"]} for name in SETTINGS
    }
    content["mean_points_lost"] = {
        name: statistics.fmean(lost.values()) for name, lost in content["points_lost"].items()
    }
    write_json(OUT, content)
    print(content["mean_points_lost"])


def _lost(rows: dict[str, Any], name: str, fusion: str) -> float:
    gaps = [rows[f"{name}/float32/{seed}"][fusion] - rows[f"{name}/bfloat16/{seed}"][fusion] for seed in SEEDS]
    return 100 * statistics.fmean(gaps)


if __name__ == "__main__":
    main()
