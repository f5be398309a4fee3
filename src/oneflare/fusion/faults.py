"""Continues a fusion without the members whose uploads turn out to be unusable, and names them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from oneflare.errors import MemberFault, UploadError
from oneflare.fusion.base import UploadSet

T = TypeVar("T")


def without_faulty(uploads: UploadSet, work: Callable[[UploadSet], T]) -> tuple[T, list[MemberFault]]:
    """What `work` makes of the uploads, and which members were left out for it.

    A member's fault (`MemberFault`) refuses that one upload, and the work starts again with the others: its result is
    that of a federation in which the member never was. Numbers that only fail together are one line, not a member's
    fault. Raises `UploadError` when nobody is left.
    """
    faults: list[MemberFault] = []
    while True:
        try:
            return work(uploads), faults
        except MemberFault as fault:
            kept = tuple(upload for upload in uploads if upload.client != fault.client)
            if len(kept) == len(uploads):
                raise
            faults.append(fault)
            if not kept:
                reasons = "; ".join(map(str, faults))
                raise UploadError(f"no upload is left to fuse ({reasons})") from None
            uploads = uploads.without({fault.client})
        except torch.linalg.LinAlgError as error:
            reason = str(error).splitlines()[0]
            raise UploadError(
                f"these uploads cannot be solved together ({reason}), and no single one is at fault; "
                "use another fusion, or more damping"
            ) from error
