"""Fusions that average weights into one network, and what every such fusion shares."""

from __future__ import annotations

import copy
from collections.abc import Mapping

from torch import Tensor

from oneflare.fusion.base import FUSIONS, Fused, Fusion, UploadSet
from oneflare.fusion.workspace import QUIET, Workspace
from oneflare.models.base import SingleModel
from oneflare.upload import Upload


def full_state(upload: Upload) -> dict[str, Tensor]:
    """The client's whole network, by the names of `PrototypeNetwork`, float64 where floating."""
    state = {f"encoder.{name}": tensor.double() for name, tensor in upload.weights().items()}
    assert upload.prototypes is not None
    return {**state, "prototypes": upload.prototypes.double()}


def size_average(uploads: UploadSet) -> dict[str, Tensor]:
    """sum_i (n_i/n) theta_i, one client in memory at a time."""
    total: dict[str, Tensor] = {}
    for share, upload in zip(uploads.size_weights, uploads, strict=True):
        for name, tensor in full_state(upload).items():
            part = share * tensor
            total[name] = part if name not in total else total[name] + part
    return total


def single_model(uploads: UploadSet, state: Mapping[str, Tensor]) -> SingleModel:
    """One network with this state."""
    network = copy.deepcopy(uploads.template)
    network.load_state_dict({name: state[name].to(tensor.dtype) for name, tensor in network.state_dict().items()})
    return SingleModel(uploads.task, network)


@FUSIONS.register("average")
class Average(Fusion):
    """one-shot FedAvg: weights and prototypes averaged by client size (the lower bound)"""

    single_network = True

    def fuse(self, uploads: UploadSet, workspace: Workspace = QUIET) -> Fused:
        return Fused(single_model(uploads, size_average(uploads)))
