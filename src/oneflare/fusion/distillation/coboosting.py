"""Distillation in which generated images and the clients' weights improve each other (Co-Boosting)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oneflare.core.seeds import torch_generator
from oneflare.fusion.base import FUSIONS, UploadSet
from oneflare.fusion.distillation.datafree import Datafree, DatafreeOptions, DatafreeTraining
from oneflare.fusion.distillation.public import OWN_TEACHER, Named, Weight, divergence


def difficulty(logits: Tensor, labels: Tensor) -> Tensor:
    """d(x) = 1 - softmax(A_w(x))_y: how little the ensemble believes the label; `(n, C)`, `(n,)` -> `(n,)`"""
    return 1 - logits.softmax(1).gather(1, labels[:, None]).squeeze(1)


def hard_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """L_H = mean d(x) CE(A_w(x), y): images that the ensemble finds hard count more"""
    return (difficulty(logits, labels) * F.cross_entropy(logits, labels, reduction="none")).mean()


def adversarial_loss(teacher: Tensor, student: Tensor) -> Tensor:
    """L_A = - mean KL(A_w(x) || f_S(x)): images on which the student differs from the ensemble"""
    return -divergence(teacher, student).mean()


def diversified(images: Tensor, gradient: Tensor, size: float) -> Tensor:
    """x + size g/|g|_2 of every image, kept in [0, 1]; g is the gradient of u.A_w(x), u uniform in [-1, 1]^C"""
    norm = gradient.flatten(1).norm(dim=1).clamp(min=1e-12).view(-1, 1, 1, 1)
    moved: Tensor = images + size * gradient / norm
    return moved.clamp(0, 1)


def updated_weights(weights: Tensor, gradient: Tensor, rate: float) -> Tensor:
    """w <- w - rate sign(g), no weight below 0, sum 1; g is the gradient of CE(A_w(x), y) in w. `(N,)`"""
    moved = (weights - rate * gradient.sign()).clamp(min=0)
    total = moved.sum()
    return moved / total if float(total) > 0 else weights


class CoboostingTraining(DatafreeTraining):
    """A_w: the teacher with the clients' weights w, which start equal."""

    fusion: Coboosting

    def __init__(self, fusion: Coboosting, uploads: UploadSet) -> None:
        super().__init__(fusion, uploads)
        self.weights = torch.full((len(self.teacher),), 1 / len(self.teacher))

    def generator_loss(self, images: Tensor, labels: Tensor) -> Tensor:
        teacher, statistics = self.teacher.logits_and_statistics(images, self.weights)
        loss = hard_loss(teacher, labels) + self.fusion.statistics * statistics
        return loss + self.fusion.adversarial * adversarial_loss(teacher, self.student.logits(images))

    def keep(self, images: Tensor, labels: Tensor) -> None:
        """The new images are also what the clients' weights are improved on."""
        super().keep(images, labels)
        harder = self.diversify(images, "weights", self.round)
        with torch.enable_grad():
            weights = self.weights.clone().requires_grad_()
            loss = F.cross_entropy(self.teacher.logits(harder, weights), labels)
            (gradient,) = torch.autograd.grad(loss, weights)
        self.weights = updated_weights(self.weights, gradient, self.fusion.weight_rate / len(self.weights))

    def teach(self, rows: Tensor, number: int, progress: float) -> float:
        images = self.diversify(self.pool.images[rows], "student", number)
        with torch.no_grad():
            answers = self.teacher.logits(images, self.weights)
        return self.student.learn(images, answers, progress)

    def diversify(self, images: Tensor, purpose: str, number: int) -> Tensor:
        """Harder and different each time: a step along the ensemble's answer to a random question."""
        random = torch_generator(self.fusion.seed, "direction", purpose, number)
        question = 2 * torch.rand(len(images), self.inventor.classes, generator=random) - 1
        with torch.enable_grad():
            moving = images.detach().requires_grad_()
            answer = (question * self.teacher.logits(moving, self.weights)).sum()
            (gradient,) = torch.autograd.grad(answer, moving)
        return diversified(images, gradient, self.fusion.perturbation)

    def notes(self) -> dict[str, Any]:
        return super().notes() | {"client_weights": self.weights.tolist()}

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"weights": self.weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.weights = state["weights"]


@FUSIONS.register("coboosting")
class Coboosting(Datafree):
    """distill_datafree in which hard images and the clients' weights in the teacher improve in turns (Co-Boosting)"""

    def __init__(
        self,
        *,
        teacher: Named = OWN_TEACHER,
        statistics: Weight = 1.0,
        adversarial: Weight = 0.5,
        perturbation: Weight = 8 / 255,
        weight_rate: Weight = 0.1,
        options: DatafreeOptions = DatafreeOptions(),
    ) -> None:
        """weight_rate: of the clients' weights, for one client; N clients share it."""
        super().__init__(teacher, options)
        self.statistics, self.adversarial = statistics, adversarial
        self.perturbation, self.weight_rate = perturbation, weight_rate

    def begin(self, uploads: UploadSet) -> CoboostingTraining:
        return CoboostingTraining(self, uploads)
