"""Keeps a backbone's features of images on disk, by the content of the images.

A folder belongs to one backbone, one way of preparing images and one version of the arithmetic. It holds chunks: files
that appear whole or not at all, so what was computed before a kill is found again. Features say much about the images
behind them, so the folder can be read by its owner alone.
"""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from oneflare.core.files import digest_of, load_state, save_state
from oneflare.data import ImageSpec
from oneflare.data.images import Decoded
from oneflare.errors import RunError

ARITHMETIC = 2
"""version of decoding and of backbones; features of another one are computed again"""
VARIABLE = "ONEFLARE_CACHE"
DIGEST_BYTES = 32


class Kept(NamedTuple):
    """What was done to an image as it was decoded, as `Decoded` says it."""

    size: tuple[int, int]
    grey: bool
    changes: frozenset[str]
    kind: str

    def as_decoded(self, nothing: Tensor) -> Decoded:
        return Decoded(nothing.numpy(), self.size, self.grey, self.changes, self.kind)


def cache_folder() -> Path:
    """$ONEFLARE_CACHE, or the user's own folder for such files."""
    given = os.environ.get(VARIABLE)
    return Path(given) if given else Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "oneflare"


@dataclass
class FeatureCache:
    """The features of one backbone under one way of preparing images."""

    folder: Path
    places: dict[bytes, tuple[str, int]] = field(default_factory=dict)
    """digest of an image -> chunk and row"""
    known: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, image: ImageSpec, *, refuse_constant: bool) -> FeatureCache:
        """image: what the network on top is fed"""
        key = digest_of([ARITHMETIC, image.to_dict(), refuse_constant])
        folder = cache_folder() / "features" / key[:24]
        try:
            folder.mkdir(parents=True, exist_ok=True)
            folder.chmod(0o700)
        except OSError as error:
            raise RunError(
                f"{folder} cannot be written ({error.strerror}); set {VARIABLE} to a folder with room for features"
            ) from None
        cache = cls(folder)
        cache.look()
        return cache

    def look(self) -> None:
        """Find the chunks that others have written meanwhile; a damaged one is removed and its images forgotten."""
        for path in self.folder.glob("*.safetensors"):
            if path.name not in self.known:
                self.enter(path.name)

    def enter(self, name: str) -> None:
        self.known.add(name)
        try:
            digests = load_state(self.folder / name)["digests"].numpy().tobytes()
        except (RunError, KeyError, TypeError, AttributeError):
            with contextlib.suppress(FileNotFoundError):
                (self.folder / name).unlink()
            return
        for row in range(len(digests) // DIGEST_BYTES):
            self.places[digests[row * DIGEST_BYTES : (row + 1) * DIGEST_BYTES]] = (name, row)

    def write(self, digests: Sequence[bytes], features: Tensor, kept: Sequence[Kept]) -> str:
        """One more chunk; returns its name. features: `(n, D, 1, 1)`"""
        name = f"{secrets.token_hex(8)}.safetensors"
        listed = [[list(one.size), one.grey, sorted(one.changes), one.kind] for one in kept]
        numbers = torch.frombuffer(bytearray(b"".join(digests)), dtype=torch.uint8)
        save_state(self.folder / name, {"digests": numbers, "features": features, "kept": listed})
        (self.folder / name).chmod(0o600)
        return name

    def read(self, digests: Sequence[bytes], dim: int) -> tuple[Tensor, list[Kept]]:
        """Features `(n, D, 1, 1)` of images that are all there, and what was done to the images."""
        features, kept = torch.empty(0, dim, 1, 1), dict[int, Kept]()
        by_chunk: dict[str, list[tuple[int, int]]] = {}
        for row, digest in enumerate(digests):
            name, place = self.places[digest]
            by_chunk.setdefault(name, []).append((row, place))
        for name, pairs in by_chunk.items():
            chunk = load_state(self.folder / name)
            if len(features) == 0:  # in the numbers that chunks have
                features = torch.empty(len(digests), dim, 1, 1, dtype=chunk["features"].dtype)
            rows, places = (torch.tensor(column) for column in zip(*pairs, strict=True))
            features[rows] = chunk["features"][places]
            for row, place in pairs:
                size, grey, changes, kind = chunk["kept"][place]
                kept[row] = Kept((size[0], size[1]), grey, frozenset(changes), kind)
        return features, [kept[row] for row in range(len(digests))]
