"""Fusion that weighs every weight by its Fisher information."""

from __future__ import annotations

from torch import Tensor

from oneflare.errors import ConfigError
from oneflare.fusion.averaging.average import full_state, single_model, size_average
from oneflare.fusion.base import FUSIONS, Fused, Fusion, UploadSet
from oneflare.fusion.workspace import QUIET, Workspace
from oneflare.upload.evidence import FISHER


@FUSIONS.register("fisher")
class FisherMean(Fusion):
    """every weight averaged by client size times its diagonal Fisher information

    theta = sum_i n_i (F_i + damping) theta_i / sum_i n_i (F_i + damping): the mode of the product of the clients'
    Gaussian posteriors with diagonal precision n_i F_i (Matena and Raffel 2022). Where nobody is sure, the plain
    average is left. Running statistics of batch normalisation are averaged by size.
    """

    single_network = True
    needs = frozenset({"weights", "prototypes", "fisher"})

    def __init__(self, *, damping: float = 1e-6) -> None:
        if not damping > 0:
            raise ConfigError(f"fusion fisher.damping: must be greater than 0 (got {damping})")
        self.damping = damping

    def fuse(self, uploads: UploadSet, workspace: Workspace = QUIET) -> Fused:
        weighted: dict[str, Tensor] = {}
        weights: dict[str, Tensor] = {}
        for share, upload in zip(uploads.size_weights, uploads, strict=True):
            state = full_state(upload)
            for key, information in upload.evidence(FISHER).items():
                name = key.removeprefix(FISHER)
                weight = share * (information.double() + self.damping)
                weighted[name] = weighted.get(name, 0) + weight * state[name]
                weights[name] = weights.get(name, 0) + weight
        fused = {name: total / weights[name] for name, total in weighted.items()}
        return Fused(single_model(uploads, size_average(uploads) | fused))
