"""Decrypts uploads for the time of one fusion, in a folder of its own that is deleted afterwards."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from oneflare.errors import ConfigError, UploadError
from oneflare.federation.charter import FILE, Charter
from oneflare.upload import SIZE_LIMIT
from oneflare.upload.encryption import SUFFIX, BoxKey, decrypt, generate_box, is_encrypted, read_box

PRIVATE = "coordinator.box"
FOLDER = ".decrypted"
Opener = Callable[[Path], Path]
"""a file as it was sent -> a file that is not encrypted"""


def make_box(folder: Path) -> str:
    """A key for encryption in a new federation's folder, or the one that is there; the public one."""
    private = folder / PRIVATE
    return (read_box(private) if private.exists() else generate_box(private)).public


def box_key(charter: Charter, folder: Path) -> BoxKey | None:
    """The private key to which the charter's uploads are encrypted; None if there is none here."""
    private = folder / PRIVATE
    if charter.encryption is None or not private.exists():
        return None
    key = read_box(private)
    if key.public != charter.encryption:
        raise ConfigError(f"{private} is not the key of {charter.encryption} in {FILE}; put the right one there")
    return key


@contextlib.contextmanager
def decrypted(charter: Charter, folder: Path) -> Iterator[Opener]:
    """Opens encrypted uploads while they are needed; other files stay as they are."""
    place = folder / FOLDER
    shutil.rmtree(place, ignore_errors=True)
    key = box_key(charter, folder)
    number = 0

    def opened(path: Path) -> Path:
        nonlocal number
        if not path.name.endswith(SUFFIX) and not is_encrypted(path):
            if charter.encryption is not None and not _own_copy(path, folder):
                raise UploadError(
                    f"{path}: is not encrypted, and the terms ask for it; the member sends the file "
                    f"{path.name}{SUFFIX}, which `oneflare client train` has written beside it"
                )
            return path
        if key is None:
            missing = f"{folder / PRIVATE} is missing" if charter.encryption else f"{FILE} names no key for encryption"
            raise UploadError(f"{path}: is encrypted, and {missing}")
        number += 1
        target = place / str(number) / path.name.removesuffix(SUFFIX)
        decrypt(path, target, key, SIZE_LIMIT)
        return target

    try:
        yield opened
    finally:
        shutil.rmtree(place, ignore_errors=True)


OWN = ("members", "masked", "models")
"""folders of a federation with uploads that were decrypted before"""


def _own_copy(path: Path, folder: Path) -> bool:
    """Whether an upload lies where the federation keeps decrypted copies, or came through Flower's own encryption."""
    try:
        inside = path.resolve().relative_to(folder.resolve())
    except ValueError:
        return False
    through_flower = inside.parts[0] == "inbox" and len(inside.parts) > 1 and inside.parts[1].startswith("flower-")
    return inside.parts[0] in OWN or through_flower
