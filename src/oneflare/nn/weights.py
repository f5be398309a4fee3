"""Finds the weights of pretrained networks, checks their digest, and reads them without executing anything."""

from __future__ import annotations

import functools
import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from oneflare.core.registry import Options
from oneflare.data.dataset import Copies
from oneflare.errors import ConfigError

FOLDER = "ONEFLARE_BACKBONES"
"""variable that names a folder with files of weights, searched by name"""
BLOCK = 1 << 20


@dataclass(frozen=True)
class Pinned(Options):
    """The options that every backbone has."""

    weights: str | None = None
    """the file with its weights; default: found by name in $ONEFLARE_BACKBONES, in a package or in a hub's cache"""
    digest: str | None = None
    """SHA-256 of the weights; default: that of the file that was found"""
    dim: int | None = None
    """how many features it gives; default: it is asked"""
    copies: Copies | None = None
    """mirror: the features of an image are the mean over it and its mirror image; default: none"""
    tune: str | None = None
    """the module from which on every client trains the backbone, or last for its last block; default: none"""


@dataclass(frozen=True)
class Weights:
    """Files that hold the weights of one network, and ways to get them."""

    files: tuple[str, ...]
    """names; nearly always one"""
    found: Callable[[], Path | None]
    """the folder of a package or of a hub's cache in which the files are, or None"""
    ways: tuple[str, ...]
    """how else to get them, in words that follow "or" """
    digest: str | None = None
    """where it is known without the files"""

    def find(self, name: str, pinned: Pinned) -> tuple[Path, ...]:
        """The files, with the digest that was pinned; else an error with the ways to get them."""
        places = self._places(pinned)
        wanted = pinned.digest or self.digest
        if not places:
            digest = f" (SHA-256 {wanted})" if wanted else ""
            raise ConfigError(
                f"backbone={name} needs {' and '.join(self.files)}{digest}, and this machine does not have it; "
                f"{', or '.join((*self.ways, f'copy it into a folder and set {FOLDER} to that folder', _GIVE))}"
            )
        digests = [digest_of_files(paths) for paths in places]
        if pinned.digest is None:
            return places[0]
        if pinned.digest not in digests:
            raise ConfigError(
                f"backbone={name}: {places[0][-1]} has SHA-256 {digests[0]}, but {pinned.digest} was agreed; "
                f"{', or '.join((*self.ways, _GIVE))}"
            )
        return places[digests.index(pinned.digest)]

    def _places(self, pinned: Pinned) -> list[tuple[Path, ...]]:
        """Wherever the files are on this machine, the most specific place first."""
        if pinned.weights is not None:
            given = Path(pinned.weights)
            if not given.exists():
                raise ConfigError(f"backbone.weights: there is no file {given}")
            return [tuple(given / file for file in self.files) if given.is_dir() else (given,)]
        folders = [Path(os.environ[FOLDER])] if os.environ.get(FOLDER) else []
        places = [tuple(folder / file for file in self.files) for folder in folders]
        places = [paths for paths in places if all(path.is_file() for path in paths)]
        found = self.found()
        return places if found is None else [*places, tuple(found / file for file in self.files)]


_GIVE = "for a run, give its file with backbone.weights=FILE"


def digest_of_files(paths: Sequence[Path]) -> str:
    """SHA-256 of one file, or of the lines that `sha256sum` prints for several, by name."""
    digests = [_file_digest(path, path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    if len(paths) == 1:
        return digests[0]
    lines = sorted(f"{digest}  {path.name}\n" for digest, path in zip(digests, paths, strict=True))
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@functools.lru_cache(maxsize=64)
def _file_digest(path: Path, size: int, changed: int) -> str:
    del size, changed  # a file that was replaced is read again
    total = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(BLOCK):
                total.update(block)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None
    return total.hexdigest()


def read_state(path: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, or of a file of torch.save that holds nothing else."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return dict(load_file(path))
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # foreign bytes make readers raise many kinds
        reason = str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
        raise ConfigError(f"{path} does not hold weights that can be read without executing code ({reason})") from None
    for inner in ("state_dict", "model"):
        if isinstance(state, dict) and isinstance(state.get(inner), dict):
            state = state[inner]
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ConfigError(f"{path} does not hold a dictionary of tensors; save the network's state_dict()")
    return state
