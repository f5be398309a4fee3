"""Many images lie in a file, and nobody notices: the same numbers, in bounded memory, and nothing is left behind."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from oneflare.data import ImageSpec
from oneflare.data.labelled import Gathering
from oneflare.data.store import ImageStore
from oneflare.errors import DataError


@given(st.lists(st.integers(0, 5), min_size=1, max_size=6), st.sampled_from([0, 60, 200, 1 << 20]), st.booleans())
def test_blocks_come_back_as_one_tensor_wherever_they_lay(sizes, in_memory, floats):
    generator = torch.Generator().manual_seed(len(sizes))
    blocks = [torch.randint(0, 256, (size, 3, 2, 2), dtype=torch.uint8, generator=generator) for size in sizes]
    if floats:
        blocks = [block / 255 for block in blocks]
    store = ImageStore(in_memory)
    for block in blocks:
        store.add(block)
    together = store.tensor()
    assert torch.equal(together, torch.cat(blocks))
    assert together.dtype == blocks[0].dtype
    total = sum(block.numel() * block.element_size() for block in blocks)
    assert (store.file is not None) == (total > in_memory)


def test_writing_into_the_tensor_stays_with_whoever_does_it():
    store = ImageStore(0)
    store.add(torch.zeros(4, 1, 2, 2, dtype=torch.uint8))
    mine, others = store.tensor(), store.tensor()
    mine[:] = 7
    assert int(others.sum()) == 0


def test_images_in_a_file_take_no_memory_of_their_own_and_leave_no_file(tmp_path):
    """64 MB of images, at most 4 MB of them in memory; anonymous memory is what the system cannot take back."""
    program = """
import gc, sys, torch
from pathlib import Path
from oneflare.data.store import ImageStore

def anonymous():
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon"))
    return 1024 * int(line.split()[1])

store, before = ImageStore(4 << 20), anonymous()
for number in range(64):
    store.add(torch.full((1024, 1, 32, 32), number, dtype=torch.uint8))
images = store.tensor()
total = sum(int(block.long().sum()) for block in images.split(1024))
assert total == 1024 * 1024 * sum(range(64))
assert anonymous() - before < 40 << 20, anonymous() - before
"""
    subprocess.run([sys.executable, "-c", program], check=True, env={"TMPDIR": str(tmp_path), "PATH": ""})
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_one_line(monkeypatch):
    store = ImageStore(0)

    class Full:
        def write(self, _):
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    monkeypatch.setattr("tempfile.TemporaryFile", Full)
    with pytest.raises(DataError, match=r"12 bytes of images .*No space left on device.* TMPDIR"):
        store.add(torch.zeros(3, 1, 2, 2, dtype=torch.uint8))


@pytest.mark.parametrize("in_memory", [0, 1 << 30])
def test_a_class_of_equal_images_is_found_in_blocks(monkeypatch, in_memory):
    monkeypatch.setattr("oneflare.data.labelled.BLOCK", 2)
    gathering = Gathering(ImageSpec.default(1, 8), ("same", "other"))
    gathering.images = ImageStore(in_memory)
    gathering.images.add(torch.arange(7).reshape(7, 1, 1, 1).expand(7, 1, 8, 8).to(torch.uint8))
    gathering.labels = [0, 1, 0, 1, 0, 1, 0]
    assert len(gathering.split().images) == 7
    gathering.images = ImageStore(in_memory)
    gathering.images.add(torch.tensor([5, 0, 5, 1, 5, 2, 5]).reshape(7, 1, 1, 1).expand(7, 1, 8, 8).to(torch.uint8))
    with pytest.raises(DataError, match="all 4 images of class 'same' are equal"):
        gathering.split()
