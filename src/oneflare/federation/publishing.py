"""Publishes a model after a fusion, new scores or a rollback with its card and page; puts earlier versions in use."""

from __future__ import annotations

from pathlib import Path

from oneflare.client.observer import Observer
from oneflare.core.files import exclusive
from oneflare.errors import RunError
from oneflare.federation.charter import read_charter
from oneflare.federation.coordinator import FusedFederation, read_fused, release
from oneflare.federation.history import History
from oneflare.federation.model_signing import coordinator_key
from oneflare.federation.page import write_card, write_federation_page
from oneflare.federation.recording import rollback_event, write_down
from oneflare.federation.versions import FederationFiles, keep_version, put_back

WAIT_SECONDS = 60.0


def publish(fused: FusedFederation) -> None:
    """Write the card and the page, and keep the version with them."""
    write_card(fused)
    write_federation_page(fused)
    with exclusive(fused.files.folder, wait_seconds=WAIT_SECONDS):
        keep_version(fused.files, fused.content)


def roll_back(folder: Path, number: int | None = None, observer: Observer | None = None) -> FusedFederation:
    """Put an earlier version of the model in use again: by default the one before. Nothing is deleted.

    The uploads of that version become those of the last fusion, so that a later fusion without new uploads makes the
    same model again. Card and page are written by `publish`.
    """
    with exclusive(folder, wait_seconds=WAIT_SECONDS):
        charter, files = read_charter(folder), FederationFiles(folder)
        coordinator_key(charter, folder)  # a wrong key is found before anything is changed
        last, history = read_fused(folder), History.read(files.models)
        target = history.before().number if number is None else history.find(number).number
        if target == last.version:
            raise RunError(f"version {target} is in use already; `oneflare server versions {folder}` lists all")
        keep_version(files, last)
        content = put_back(files, target)
        write_down(charter, folder, [rollback_event(files, content, last.version)])
        release(charter, files, content, observer or Observer())
    return FusedFederation(charter, files, content)
