"""What masked sums cost: `python -m benchmarks.masked [--members 100] [--missing 49]`, kept in results/masked.json.

A federation by file in a temporary folder, on one core: every member joins, masks sums of about 5 MB and answers; the
coordinator closes the round and opens the total, once with everybody there and once with as many missing as the
threshold allows. Seconds are those of the processor, and those of the clock beside them. Memory is what the process
needs at its peak beyond what it held before, in multiples of the vector. Checking that the opened total is possible
needs matrices of its own, as solving for the model does; it is measured apart.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch

from oneflare._version import __version__
from oneflare.client.files import ClientFiles
from oneflare.client.observer import Observer
from oneflare.core.config import DataConfig
from oneflare.core.files import write_json
from oneflare.data import ClientData, Split, load
from oneflare.federation.charter import FILE, Charter, new_charter, revised
from oneflare.federation.masked.enrolment import checked_roster, enrol, next_roster
from oneflare.federation.masked.opening import checked_total, open_vector
from oneflare.federation.masked.release import release
from oneflare.federation.masked.rounds import RoundFiles, close_round
from oneflare.federation.masked.secret import MaskSecrets
from oneflare.federation.masked.uploading import Masking, masked_copy
from oneflare.federation.member import Envelope, train_member
from oneflare.federation.model_signing import PRIVATE, make_key
from oneflare.nn.hardware import one_thread
from oneflare.upload import read_tensors, read_upload
from oneflare.upload.checking import read_manifest
from oneflare.upload.signing import read_key

RESULTS = Path("results/masked.json")
FILTERS = 110
"""of the feature map: 652,622 sums over ten classes, 5.2 MB"""
IMAGES = 20
"""of each member: more would not change what masking costs"""
SECONDS, MEMORY = 60.0, 3.0
T = TypeVar("T")


class Meter:
    """Seconds and memory of pieces of work."""

    def __init__(self, vector_bytes: int) -> None:
        self.vector_bytes = vector_bytes
        self.rows: dict[str, dict[str, float]] = {}

    def run(self, name: str, work: Callable[[], T]) -> T:
        """Do the work, and keep the largest figures that a piece of this name had."""
        ctypes.CDLL(None).malloc_trim(0)  # memory that was freed counts as free
        _reset_peak()
        before, clock, processor = _memory("VmRSS"), time.perf_counter(), time.process_time()
        result = work()
        row = {
            "processor_seconds": time.process_time() - processor,
            "clock_seconds": time.perf_counter() - clock,
            "memory_vectors": max(0, _memory("VmHWM") - before) / self.vector_bytes,
        }
        old = self.rows.setdefault(name, row)
        self.rows[name] = {key: max(old[key], value) for key, value in row.items()}
        return result


def _reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def _memory(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith(f"{name}:"))


def federation(folder: Path, members: int) -> tuple[Charter, dict[str, Masking]]:
    """A federation in which everybody has joined."""
    settings = {
        "method": "analytic",
        "encoder": {"name": "conv4", "width": 4},
        "analytic": {"name": "random_conv", "filters": FILTERS},
        "upload": {"masked": True},
    }
    shape = {"classes": [str(digit) for digit in range(10)], "image": {"size": 8, "channels": 1}}
    charter = revised(new_charter("cost", settings, **shape), coordinator=make_key(folder))
    masks = {}
    for index in range(members):
        name = f"m{index:03d}"
        secrets = MaskSecrets(folder.parent / f"{name}.mask")
        masks[name] = Masking(secrets, secrets.create())
    joined = [enrol(charter, name, IMAGES, mask.key, None) for name, mask in masks.items()]
    charter = next_roster(charter, joined, (), read_key(folder / PRIVATE))
    charter.write(folder / FILE)
    return charter, masks


def images_of(index: int, split: Split) -> ClientData:
    rows = torch.arange(index * 7, index * 7 + IMAGES) % len(split.labels)
    return ClientData.of(Split(split.images[rows], split.labels[rows]), 10)


def measure(members: int, missing: int, place: Path) -> dict[str, Any]:
    """Both rounds; the opened totals are compared with plain sums."""
    split = load(DataConfig(name="digits")).train
    folder, inbox = place / "fed", place / "inbox"
    folder.mkdir()
    charter, masks = federation(folder, members)
    plain = {}
    for index, name in enumerate(masks):
        work = place / f"{name}.work"
        train_member(charter, images_of(index, split), name, work)
        path = ClientFiles(work).upload
        plain[name] = path
    first = next(iter(plain.values()))
    meter = Meter(read_tensors(first, read_manifest(first), "statistics.")["statistics.fixed"].nbytes)
    for name, mask in masks.items():
        masked = meter.run("masking", lambda mask=mask, name=name: masked_copy(charter, plain[name], name, mask))  # type: ignore[misc]
        Envelope(name, None).seal(masked, inbox / f"{name}.safetensors")
    sizes = {"upload_bytes": (inbox / "m000.safetensors").stat().st_size, "vector_bytes": meter.vector_bytes}
    opened(meter, "nobody missing", charter, masks, place)
    again = next_roster(charter, (), (), read_key(folder / PRIVATE))
    again.write(folder / FILE)
    RoundFiles(folder).clear()
    for index, (name, mask) in enumerate(masks.items()):
        path = inbox / f"{name}.safetensors"
        path.unlink()
        if index >= missing:
            Envelope(name, None).seal(masked_copy(again, plain[name], name, mask), path)
    opened(meter, f"{missing} missing", again, masks, place)
    return {"members": members, "threshold": checked_roster(charter).threshold, **sizes, "measured": meter.rows}


def opened(meter: Meter, title: str, charter: Charter, masks: dict[str, Masking], place: Path) -> None:
    """Close the round, let members answer, open the total, and compare it with the sum of the plain files."""
    folder, answers = place / "fed", place / f"answers {title}"
    request = meter.run(f"closing, {title}", lambda: close_round(folder, place / "inbox")).request
    for name in request.uploaded:
        out = answers / f"{name}.release.json"
        meter.run(
            f"answering, {title}",
            lambda name=name, out=out: release(charter, RoundFiles(folder).request, out, name, masks[name]),  # type: ignore[misc]
        )
    uploads = {path.stem: read_upload(path, charter.masked_contract) for path in RoundFiles(folder).kept()}
    closed, vector = meter.run(f"opening, {title}", lambda: open_vector(charter, folder, uploads, answers, Observer()))
    total = meter.run(f"checking the total, {title}", lambda: checked_total(charter, closed, vector))
    expected = np.zeros(len(total.vector), dtype=np.int64)
    for name in request.uploaded:
        path = ClientFiles(place / f"{name}.work").upload
        expected += read_tensors(path, read_manifest(path), "statistics.")["statistics.fixed"].numpy()
    if not np.array_equal(expected, total.vector.numpy()):
        raise SystemExit("the opened total is not the plain sum")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--members", type=int, default=100)
    parser.add_argument("--missing", type=int, default=49)
    words = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, one_thread():
        found = measure(words.members, words.missing, Path(folder))
    for name, row in found["measured"].items():
        row |= {key: round(value, 3) for key, value in row.items()}
        shown = f"{row['processor_seconds']:.1f} s of one core ({row['clock_seconds']:.1f} s), "
        print(f"{name}: {shown}{row['memory_vectors']:.1f} vectors of memory")
    kept = {name: row for name, row in found["measured"].items() if name.startswith(("masking", "opening"))}
    found["holds"] = {
        "seconds": all(row["processor_seconds"] <= SECONDS for row in kept.values()),
        "memory": all(row["memory_vectors"] <= MEMORY for row in kept.values()),
    }
    write_json(RESULTS, {"oneflare": __version__, "cores": os.cpu_count(), "limits": [SECONDS, MEMORY], **found})
    print(
        f"within {SECONDS:.0f} s: {found['holds']['seconds']}, within {MEMORY:.0f} vectors: {found['holds']['memory']}"
    )


if __name__ == "__main__":
    main()
