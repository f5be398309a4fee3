"""Time and memory of the sums of many images: `python -m benchmarks.stream [IMAGES]`, 1,000,000 by default.

Random images of 32 x 32 pixels lie in a temporary file, as a member's do that has many (`oneflare.data.store`), and the
sums of an eighth, a quarter and all of them are measured. Writes `results/analytic/stream.json`. Memory is what the
system cannot take back: the pages of the file are not counted, because it drops them when it needs the room.
"""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import torch

from oneflare.client.statistics import measure
from oneflare.core.files import write_json
from oneflare.data.store import ImageStore
from oneflare.nn import build_feature_map
from oneflare.study.bench.steps import machine

RESULTS = Path(__file__).parents[1] / "results" / "analytic" / "stream.json"
BLOCK = 10_000
CLASSES = 10
FILTERS = 24
EVERY = 0.2
"""seconds between two looks at the memory"""


def anonymous_bytes() -> int:
    """Memory of this process that belongs to no file."""
    status = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in status if line.startswith("RssAnon")).split()[1])


class Peak(threading.Thread):
    """Looks at the memory again and again until it is stopped."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes, self.over = 0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(EVERY):
            self.bytes = max(self.bytes, anonymous_bytes())

    def stop(self) -> int:
        self.over.set()
        self.join()
        return self.bytes


def random_images(number: int) -> torch.Tensor:
    store, generator = ImageStore(), torch.Generator().manual_seed(0)
    for start in range(0, number, BLOCK):
        shape = (min(BLOCK, number - start), 3, 32, 32)
        store.add(torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator))
    return store.tensor()


def main(most: int = 1_000_000) -> None:
    features = build_feature_map({"name": "multi_scale", "filters": FILTERS, "mirror": True}, 3, 32)
    images, rows = random_images(most), []
    labels = torch.arange(most) % CLASSES
    for number in (most // 8, most // 4, most):
        peak, before = Peak(), (time.monotonic(), time.process_time())
        peak.start()
        measure(features, images[:number], labels[:number], CLASSES)
        seconds = time.monotonic() - before[0], time.process_time() - before[1]
        row = {"images": number, "image_bytes": images[:number].numel(), "memory_bytes": peak.stop()}
        rows.append(row | {"wall_seconds": seconds[0], "processor_seconds": seconds[1]})
        print(rows[-1], flush=True)
        write_json(RESULTS, {"features": features.dim, "rows": rows, "machine": machine()})


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
