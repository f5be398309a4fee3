"""Random numbers without global state: one independent stream per (seed, purpose...).

Every stream is named by what it is for, for example `(seed, client, "augment", epoch)`. A stream is never
continued across epochs, so resuming needs no generator state and the order in which clients run is irrelevant.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    import torch


def derive(seed: int, *purpose: str | int) -> int:
    """A 63-bit seed that depends on every part of the name, and on where one part ends and the next begins.

    A slash within a part is escaped, so `("a", 1)` and `("a/1",)` are two streams. Parts are compared as text: 1 and
    "1" are the same part.
    """
    text = "/".join(_escaped(str(part)) for part in (seed, *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def _escaped(part: str) -> str:
    return part.replace("\\", "\\\\").replace("/", "\\/")


def torch_generator(seed: int, *purpose: str | int) -> torch.Generator:
    import torch

    return torch.Generator().manual_seed(derive(seed, *purpose))


def numpy_generator(seed: int, *purpose: str | int) -> np.random.Generator:
    import numpy as np

    return np.random.default_rng(derive(seed, *purpose))


_GLOBAL = threading.Lock()


@contextlib.contextmanager
def global_stream(seed: int, *purpose: str | int) -> Iterator[None]:
    """For code that draws from torch's global generator, such as the initial weights of its layers.

    It is one for all threads, so one thread at a time draws; afterwards it is as it was.
    """
    import torch

    with _GLOBAL, torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive(seed, *purpose))
        yield
