"""Decoded images as one tensor: in memory while they are few, in a temporary file where they are many."""

from __future__ import annotations

import tempfile
import weakref
from typing import IO

import numpy as np
import torch
from torch import Tensor

from oneflare.errors import DataError

IN_MEMORY = 1 << 30
"""bytes of images that are held in memory; more of them lie in a file, which the system reads piece by piece"""


class ImageStore:
    """Takes blocks of images one after the other and gives all of them back as one tensor.

    More than `in_memory` bytes are written to a file without a name in the folder for temporary files ($TMPDIR). The
    tensor then is that file, mapped into memory: the system keeps of it what there is room for, and removes it when
    nobody uses it any more, also after a crash. Whoever writes into the tensor changes neither the file nor what others
    see.
    """

    def __init__(self, in_memory: int = IN_MEMORY) -> None:
        self.in_memory = in_memory
        self.parts: list[Tensor] = []
        self.size = 0
        """bytes in memory"""
        self.images = 0
        self.file: IO[bytes] | None = None

    def add(self, images: Tensor) -> None:
        """images: `(n, ...)`, all blocks of one type and shape but for n"""
        self.parts.append(images)
        self.images += len(images)
        self.size += images.numel() * images.element_size()
        if self.file is not None or self.size > self.in_memory:
            self._write()

    def tensor(self) -> Tensor:
        """All images in the order in which they came; nothing may be added afterwards."""
        if self.file is None:
            together = self.parts[0] if len(self.parts) == 1 else torch.cat(self.parts)
            self.parts = [together]
            return together
        self.file.flush()
        example = self.parts[0]
        numbers = np.memmap(self.file, _numpy_type(example), "c", shape=(self.images, *example.shape[1:]))
        return torch.from_numpy(numbers)

    def _write(self) -> None:
        """Moves what is in memory behind what the file holds; one empty block stays and tells type and shape."""
        try:
            if self.file is None:
                self.file = tempfile.TemporaryFile()  # noqa: SIM115  (it lives as long as this store)
                weakref.finalize(self, self.file.close)
            for part in self.parts:
                self.file.write(part.contiguous().numpy().tobytes())
        except OSError as error:
            raise DataError(
                f"{self.size:,} bytes of images could not be written to a temporary file ({error.strerror}); "
                "set TMPDIR to a folder with more room"
            ) from None
        self.parts, self.size = [self.parts[0][:0]], 0


def _numpy_type(tensor: Tensor) -> np.dtype[np.generic]:
    return np.dtype(tensor.numpy().dtype)
