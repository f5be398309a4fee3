"""The geometry of prototypes: cosines between classes, and all clients' prototypes on one plane."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oneflare.errors import UploadError
from oneflare.fusion.features.sums import counted_prototypes
from oneflare.nn.anchors import build_anchors
from oneflare.simulation.files import RunFiles
from oneflare.simulation.stages import Result, read_experiment
from oneflare.upload import KNOWN, read_prototypes

MOST_CLIENTS = 12
MOST_CLASSES = 200
CLIENT_COSINES = 30
"""classes up to which every client's own cosines are kept, not only the server's"""


def geometry(result: Result) -> dict[str, Any] | None:
    """Of the run's uploads, as far as they are still there and hold prototypes."""
    files = RunFiles(result.folder)
    clients: list[int] = []
    prototypes: list[Tensor] = []
    counts: list[Tensor | None] = []
    for client in result.content.fused_clients:
        try:
            found, count = read_prototypes(files.client(client).upload)
        except UploadError:
            continue
        if found is not None:
            clients.append(client)
            prototypes.append(found)
            counts.append(count)
    if not clients or len(prototypes[0]) > MOST_CLASSES:
        return None
    stack = torch.stack(prototypes)
    disclosed = [count for count in counts if count is not None]
    known = torch.stack(disclosed) if len(disclosed) == len(clients) else None
    server = stack.mean(0) if known is None else counted_prototypes(stack, known)
    anchors = build_anchors(read_experiment(result.folder).anchors, *server.shape)
    if anchors is not None and not bool(anchors.any()):
        anchors = None  # `shrink`: a target without direction
    shown = min(len(clients), MOST_CLIENTS)
    points = plane(server, stack[:shown], anchors)
    classes = len(server)
    everyone = classes <= CLIENT_COSINES
    return {
        "rule": "plain mean" if known is None else "mean by class counts",
        "clients": clients[:shown],
        "of": len(clients),
        "least": KNOWN,
        "counts": None if known is None else known[:shown].long().tolist(),
        "cosines": _rounded(cosines(server)),
        "client_cosines": [_rounded(cosines(stack[k])) for k in range(shown)] if everyone else None,
        **points,
    }


def cosines(prototypes: Tensor) -> Tensor:
    """`(C, d)` -> `(C, C)`"""
    unit = F.normalize(prototypes.double(), dim=1)
    return unit @ unit.T


def plane(server: Tensor, clients: Tensor, anchors: Tensor | None) -> dict[str, Any]:
    """Unit prototypes on the two directions in which they differ most (principal components).

    server `(C, d)`, clients `(N, C, d)`, anchors `(C, d)` -> coordinates, and the share of the variance they keep.
    The directions are those of the clients' and the server's prototypes; anchors are only carried along.
    """
    everyone = F.normalize(torch.cat([server[None], clients]).double(), dim=2)
    rows = everyone.flatten(0, 1)
    centre = rows.mean(0)
    _, spread, directions = torch.linalg.svd(rows - centre, full_matrices=False)
    axes = directions[:2]
    largest = axes.abs().argmax(1, keepdim=True)
    axes = axes * axes.gather(1, largest).sign()  # a principal axis has no sign of its own: fix one
    variance = spread.square()
    total = float(variance.sum())

    def project(points: Tensor) -> list[list[float]]:
        flat = (points - centre) @ axes.T
        if flat.shape[1] < 2:
            flat = F.pad(flat, (0, 2 - flat.shape[1]))
        return _rounded(flat, 4)

    return {
        "kept": [float(value) / total if total > 0 else 0.0 for value in variance[:2]],
        "server": project(everyone[0]),
        "points": [project(everyone[k]) for k in range(1, len(everyone))],
        "anchors": None if anchors is None else project(F.normalize(anchors.double(), dim=1)),
    }


def _rounded(values: Tensor, digits: int = 3) -> list[list[float]]:
    return [[round(value, digits) + 0.0 for value in row] for row in values.tolist()]
