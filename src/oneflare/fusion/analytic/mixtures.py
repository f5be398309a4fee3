"""A head trained on samples of the clients' Gaussian mixtures."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from oneflare.core.seeds import torch_generator
from oneflare.errors import UploadError
from oneflare.fusion.analytic.published import FamilyFusion, check_range, linear_model, softmax_head
from oneflare.fusion.base import FUSIONS, UploadSet
from oneflare.models.analytic import AnalyticModel
from oneflare.upload.mixtures import Mixtures


@FUSIONS.register("fedpft")
class FedPft(FamilyFusion):
    """FedPFT: a linear head trained on samples of every client's Gaussian mixtures

    From the mixture sum_k w_k N(mu_k, diag(v_k)) of each client and class as many features are drawn as the client has
    images of the class, and a softmax classifier is trained on all of them. Beitollahi et al., "Parametric Feature
    Transfer: One-shot Federated Learning with Foundation Models" (2024). Mixtures are kept side by side and not added
    up, so the model depends on the split; a client that leaves takes its mixtures with it. Ours: the head is trained
    by L-BFGS to its optimum (theirs by SGD), and beyond `most` samples every mixture gives proportionally fewer.
    """

    needs = frozenset({"mixtures"})

    def __init__(self, *, most: int = 20_000, decay: float = 1e-3, steps: int = 100, seed: int = 0) -> None:
        """most: samples in all. decay: of the head's weights. steps: of L-BFGS at most"""
        check_range("fedpft", {"most": most, "steps": steps}, 0, math.inf, open_low=True)
        check_range("fedpft", {"decay": decay}, 0, math.inf, open_low=False)
        self.most, self.decay, self.steps, self.seed = most, decay, steps, seed

    def solved(self, uploads: UploadSet) -> AnalyticModel:
        images = sum(float(upload.class_means().counts.sum()) for upload in uploads)
        if images == 0:
            raise UploadError("the mixtures rest on no images; collect more uploads")
        drawn = []
        for upload in uploads:
            with upload.blamed():
                generator = torch_generator(self.seed, "fedpft", upload.digest)
                drawn.append(sample(upload.mixtures(), min(1.0, self.most / images), generator))
        samples, labels = torch.cat([rows for rows, _ in drawn]), torch.cat([labels for _, labels in drawn])
        counts = torch.bincount(labels, minlength=len(uploads.contract.classes))
        position = (counts > 0).cumsum(0) - 1
        weight, bias = softmax_head(samples, position[labels], int((counts > 0).sum()), self.decay, self.steps)
        return linear_model(uploads, weight, bias, counts)


def sample(mixtures: Mixtures, share: float, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Features `(n, D)` and labels `(n,)`: of each class `share` of as many as it has images, at least one."""
    rows, labels = [], []
    for label in (mixtures.counts > 0).nonzero().flatten().tolist():
        number = max(1, round(share * float(mixtures.counts[label])))
        chosen = torch.multinomial(mixtures.weights[label], number, replacement=True, generator=generator)
        noise = torch.randn(number, mixtures.means.shape[2], generator=generator)
        rows.append(mixtures.means[label, chosen] + noise * mixtures.variances[label, chosen].sqrt())
        labels.append(torch.full((number,), label))
    return torch.cat(rows), torch.cat(labels)
