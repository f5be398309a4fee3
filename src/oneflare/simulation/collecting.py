"""Reading the uploads of a simulation as a server would: each is verified, and one that is refused is left out."""

from __future__ import annotations

from collections.abc import Sequence

from oneflare.client.files import ClientSummary
from oneflare.client.observer import Observer
from oneflare.errors import RunError, UploadError
from oneflare.simulation.files import RunFiles
from oneflare.upload import Contract, Upload, read_upload


def read_uploads(
    files: RunFiles, contract: Contract, summaries: Sequence[ClientSummary], observer: Observer, epoch: int | None
) -> tuple[Upload, ...]:
    """The uploads of all trained clients that keep the contract; one that does not is named in a warning.

    epoch: that of a snapshot; None for what clients sent in the end
    """
    uploads: list[Upload] = []
    for summary in summaries:
        if summary.status != "trained":
            continue
        place = files.client(summary.client)
        try:
            upload = read_upload(place.upload if epoch is None else place.snapshot(epoch), contract)
            if upload.client != summary.client:
                raise UploadError(f"{upload.path}: is the upload of client {upload.client}; send the right one")
            uploads.append(upload)
        except UploadError as error:
            observer.warn(f"client {summary.client} is left out: {error}")
    if not uploads:
        reasons = "; ".join(f"client {s.client}: {s.reason}" for s in summaries if s.reason)
        raise RunError(f"no client produced a usable upload ({reasons})")
    return tuple(uploads)
