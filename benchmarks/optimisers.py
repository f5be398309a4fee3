"""Whether OneFlare's own SGD is worth having: `python -m benchmarks.optimisers`

One step (clip the gradient's norm, update, drop the gradients) of our SGD and of torch's, foreach and fused, on the
same parameters. The three take turns in one process, so a busy machine slows all of them; each figure is the median of
ratios of neighbours. The start is the time in which a fresh process constructs the optimiser, torch being imported.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from oneflare.core.files import write_json
from oneflare.data import ImageSpec
from oneflare.nn import initial_network
from oneflare.nn.hardware import one_thread
from oneflare.nn.optimisers import SGD, StepSettings
from oneflare.study.bench.steps import machine

OUT = Path("results/optimisers.json")
NETWORKS: dict[str, dict[str, Any]] = {
    "resnet8 width 16": {"name": "resnet8", "width": 16},
    "conv4": {"name": "conv4"},
}
CLIP, LR, MOMENTUM, WEIGHT_DECAY = 1.0, 0.05, 0.9, 5e-4
ROUNDS, STEPS = 60, 20
STARTS = {
    "own": "from oneflare.nn.optimisers import SGD\nSGD([p])",
    "torch": "torch.optim.SGD([p], lr=0.1, momentum=0.9)",
}


def steps_of(spec: dict[str, Any]) -> dict[str, Callable[[], None]]:
    """One step of each optimiser, each on a network of its own, with the same gradients."""

    def parameters() -> list[torch.Tensor]:
        return list(initial_network(spec, ImageSpec.default(1, 8), 10, seed=0).parameters())

    gradients = [torch.randn_like(p) for p in parameters()]

    def step(kind: str) -> Callable[[], None]:
        weights = parameters()
        if kind == "own":
            own = SGD(weights, StepSettings(MOMENTUM, WEIGHT_DECAY, CLIP))

            def update() -> None:
                own.step(LR)
        else:
            theirs = torch.optim.SGD(
                weights, lr=LR, momentum=MOMENTUM, weight_decay=WEIGHT_DECAY, **{kind.removeprefix("torch "): True}
            )

            def update() -> None:
                torch.nn.utils.clip_grad_norm_(weights, CLIP, foreach=True)
                theirs.step()
                theirs.zero_grad(set_to_none=True)

        def whole() -> None:
            for weight, gradient in zip(weights, gradients, strict=True):
                weight.grad = gradient.clone()
            update()

        return whole

    return {kind: step(kind) for kind in ("own", "torch foreach", "torch fused")}


def seconds(work: Callable[[], None]) -> float:
    before = time.perf_counter()
    for _ in range(STEPS):
        work()
    return (time.perf_counter() - before) / STEPS


def start_seconds(code: str) -> float:
    """Of the construction alone, in a process of its own."""
    script = "import time, torch\np = torch.zeros(1, requires_grad=True)\nt = time.perf_counter()\n"
    done = subprocess.run(
        [sys.executable, "-c", f"{script}{code}\nprint(time.perf_counter() - t)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


def main() -> None:
    content: dict[str, Any] = {"machine": machine(), "step": {}, "start_seconds": {}}
    with one_thread():
        for name, spec in NETWORKS.items():
            steps = steps_of(spec)
            for work in steps.values():
                seconds(work)
            rows = [{kind: seconds(work) for kind, work in steps.items()} for _ in range(ROUNDS)]
            content["step"][name] = {
                "own_microseconds": 1e6 * min(row["own"] for row in rows),
                **{
                    f"{kind} over own": statistics.median(row[kind] / row["own"] for row in rows)
                    for kind in steps
                    if kind != "own"
                },
            }
            print(name, content["step"][name], flush=True)
    for kind, code in STARTS.items():
        content["start_seconds"][kind] = min(start_seconds(code) for _ in range(3))
        print(kind, content["start_seconds"][kind], flush=True)
    write_json(OUT, content)


if __name__ == "__main__":
    main()
