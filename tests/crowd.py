"""Many members without any training: slightly different networks, written and sealed like real uploads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from hospitals import tiny_charter
from oneflare.federation.charter import Charter
from oneflare.upload import Contents, seal_upload, write_upload

MADE = "2026-01-01T00:00:00+00:00"
TINY = {
    "encoder": {"name": "conv4", "width": 2},
    "train": {"epochs": 2, "batch_size": 32},
    "fusions": ["robust_prototypes"],
}


def charter_of(members: dict[str, str | None] | None = None) -> Charter:
    return tiny_charter(settings=TINY, members=members or {})


def upload_of(
    charter: Charter,
    path: Path,
    member: str,
    sign: Callable[[str], dict[str, str]] | None = None,
    created: str = MADE,
) -> Path:
    network = charter.template()
    generator = torch.Generator().manual_seed(charter.client(member))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
    counts = torch.randint(1, 30, (len(charter.classes),), generator=generator)
    plain = path.with_suffix(".plain")
    write_upload(plain, network, charter.contract, Contents(client=charter.client(member), counts=counts, epoch=2))
    seal_upload(plain, path, member=member, created=created, sign=sign)
    plain.unlink()
    return path
