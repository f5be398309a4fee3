"""A fusion of your own on existing uploads: the most certain client decides. No training is repeated."""

from dataclasses import dataclass
from pathlib import Path
from tempfile import mkdtemp

import torch
import torch.nn.functional as F
from torch import Tensor

import oneflare
from oneflare.fusion import FUSIONS, QUIET, Fused, Fusion, UploadSet, Workspace
from oneflare.models.members import rule
from oneflare.simulation.stages import fuse_run
from oneflare.testing import check_fusion


@rule
@dataclass(frozen=True)
class LoudestRule:
    """For every image the client whose best cosine is largest decides."""

    prototypes: Tensor

    def start(self, images: int) -> Tensor:
        return torch.full((images, self.prototypes.shape[1]), -2.0)

    def add(self, state: Tensor, rows: slice, member: int, features: Tensor) -> None:
        scores = F.normalize(features, dim=1) @ self.prototypes[member].T
        louder = scores.max(1).values > state[rows].max(1).values
        state[rows] = torch.where(louder[:, None], scores, state[rows])

    def finish(self, state: Tensor) -> Tensor:
        return state


@FUSIONS.register("loudest")
class Loudest(Fusion):
    """the most certain client decides"""

    needs = frozenset({"weights", "prototypes"})

    def fuse(self, uploads: UploadSet, workspace: Workspace = QUIET) -> Fused:
        return Fused(uploads.members(LoudestRule(F.normalize(uploads.prototypes, dim=2))))


check_fusion("loudest")
folder = Path(mkdtemp()) / "run"
oneflare.run(data="digits", clients=4, alpha=0.3, epochs=3, fusions="count_prototypes", out=folder)
for name, row in fuse_run(folder, [{"name": "loudest"}]).fusions.items():
    print(f"{name:18} {100 * row.accuracy:5.1f} %")
