"""Chooses who takes part in a fusion: clients can be left out or join later.

A fusion is a function of the set of uploads alone, so leaving out a file is exact unlearning. The result lies in a
folder of its own: the run's fusions stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from oneflare.core.files import digest_of
from oneflare.errors import RunError
from oneflare.fusion import UploadSet
from oneflare.upload import read_upload


@dataclass(frozen=True)
class Membership:
    """Changes to the clients of a run."""

    without: tuple[int, ...] = ()
    joining: tuple[Path, ...] = ()
    """uploads of clients the run does not have"""

    @property
    def unchanged(self) -> bool:
        return not self.without and not self.joining

    def apply(self, uploads: UploadSet) -> UploadSet:
        """The same federation with other members, ordered by client."""
        known = [upload.client for upload in uploads]
        for client in self.without:
            if client not in known:
                raise RunError(f"--without {client}: no such client; the run has {_list(known)}")
        chosen = {upload.client: upload for upload in uploads if upload.client not in self.without}
        for path in self.joining:
            upload = read_upload(path, uploads.contract)
            if upload.client in chosen:
                raise RunError(
                    f"{path}: client {upload.client} takes part already; add --without {upload.client} to replace it"
                )
            chosen[upload.client] = upload
        if not chosen:
            raise RunError(f"--without {_list(self.without)}: nobody is left to fuse")
        return replace(uploads, uploads=tuple(chosen[client] for client in sorted(chosen)))

    def folder(self, run: Path, members: UploadSet) -> Path:
        """Where fusions of these members are kept; depends on the uploads themselves, not on how they were named."""
        if self.unchanged:
            return run
        digest = digest_of([upload.digest for upload in members])
        names = [f"without-{'-'.join(map(str, sorted(self.without)))}"] if self.without else []
        names += ["with-" + "-".join(str(u.client) for u in members if u.path in self.joining)] if self.joining else []
        return run / "memberships" / "-".join([*names, digest[:8]])


def _list(clients: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(clients)))
