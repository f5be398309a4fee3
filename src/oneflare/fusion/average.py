"""Fusions that average weights into one network."""

from __future__ import annotations

import copy

import torch
from torch import Tensor

from oneflare.fusion.base import FUSIONS, Fusion, UploadSet
from oneflare.fusion.model import SingleModel


@FUSIONS.register("average")
class Average(Fusion):
    """one-shot FedAvg: weights and prototypes averaged by client size (the lower bound)"""

    def fuse(self, uploads: UploadSet) -> SingleModel:
        shares = uploads.size_weights
        total: dict[str, Tensor] = {}
        for share, upload in zip(shares, uploads, strict=True):
            for name, tensor in upload.weights().items():
                part = share * tensor.double()
                total[name] = part if name not in total else total[name] + part
        network = copy.deepcopy(uploads.template)
        network.encoder.load_state_dict(
            {name: total[name].to(tensor.dtype) for name, tensor in network.encoder.state_dict().items()}
        )
        with torch.no_grad():
            network.prototypes.copy_(torch.einsum("n,ncd->cd", shares, uploads.prototypes.double()))
        return SingleModel(uploads.task, network)
