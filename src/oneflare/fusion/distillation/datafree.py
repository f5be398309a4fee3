"""Distillation without images: a generator makes inputs from what the networks know (DENSE)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from oneflare.core.registry import Options
from oneflare.core.seeds import torch_generator
from oneflare.errors import ConfigError
from oneflare.fusion.base import FUSIONS, UploadSet, build_fusion
from oneflare.fusion.distillation.public import (
    OWN_TEACHER,
    Batch,
    Count,
    Distillation,
    Named,
    Positive,
    Start,
    Student,
    StudentTraining,
    Weight,
    divergence,
    draw_batch,
    initial_student,
)
from oneflare.fusion.distillation.teacher import Teacher
from oneflare.nn.generator import initial_generator
from oneflare.nn.optimisers import Adam

NOISE = 64
WIDTH = 32
"""of the generator"""
LABEL_SCALE = 3.0
"""the label's part in the generator's input, beside noise of size 1"""


def disagreement_loss(teacher: Tensor, student: Tensor) -> Tensor:
    """L_div = - mean w KL(teacher || student), w = 1 where the two choose different classes, else 0 (DENSE).

    Minimising it looks for images beside the student's decision boundary; logits `(n, C)`, `(n, C)`.
    """
    differs = (teacher.argmax(1) != student.argmax(1)).float()
    return -(differs * divergence(teacher, student)).mean()


def generator_loss(
    teacher: Tensor, student: Tensor, labels: Tensor, statistics: Tensor, statistics_weight: float, diversity: float
) -> Tensor:
    """L_gen = CE(teacher, y) + lambda_1 L_BN + lambda_2 L_div (DENSE); logits `(n, C)`, labels `(n,)`"""
    loss = F.cross_entropy(teacher, labels) + statistics_weight * statistics
    return loss + diversity * disagreement_loss(teacher, student)


@dataclass
class Pool:
    """Every invented image so far, with the label it was invented for."""

    images: Tensor
    labels: Tensor

    @classmethod
    def empty(cls, uploads: UploadSet) -> Pool:
        image = uploads.contract.image
        return cls(torch.empty(0, image.channels, image.size, image.size), torch.empty(0, dtype=torch.long))

    def __len__(self) -> int:
        return len(self.labels)

    def add(self, images: Tensor, labels: Tensor) -> None:
        self.images, self.labels = torch.cat([self.images, images]), torch.cat([self.labels, labels])

    def state_dict(self) -> dict[str, Any]:
        return {"images": self.images, "labels": self.labels}


class Inventor:
    """The generator with its optimiser, and the noise of the present round."""

    def __init__(self, uploads: UploadSet, lr: float, batch_size: int, seed: int) -> None:
        image = uploads.contract.image
        self.classes = len(uploads.contract.classes)
        self.device = uploads.device
        generator = initial_generator(NOISE + self.classes, image.channels, image.size, WIDTH, seed)
        self.generator = generator.to(self.device)
        self.optimizer = Adam(list(self.generator.parameters()))
        self.lr, self.batch_size, self.seed = lr, batch_size, seed

    def draw(self, round_: int) -> tuple[Tensor, Tensor]:
        """Noise `(n, NOISE)` and labels `(n,)` of a round: every class as often as the others, as far as they go."""
        random = torch_generator(self.seed, "noise", round_)
        noise = torch.randn(self.batch_size, NOISE, generator=random)
        first = torch.randperm(self.classes, generator=random)
        return noise, first[torch.arange(self.batch_size) % self.classes]

    def images(self, noise: Tensor, labels: Tensor) -> Tensor:
        """The generator is told the label, so that it need not learn anew in every round what each class is."""
        inputs = torch.cat([noise, LABEL_SCALE * F.one_hot(labels, self.classes)], 1)
        images: Tensor = self.generator(inputs.to(self.device))
        return images.cpu()

    def state_dict(self) -> dict[str, Any]:
        return {"generator": dict(self.generator.state_dict()), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.generator.load_state_dict(state["generator"])
        self.optimizer.load_state_dict(state["optimizer"])


class DatafreeTraining(StudentTraining):
    """Rounds: the generator invents a batch for the teacher and against the student, then the student learns."""

    def __init__(self, fusion: Datafree, uploads: UploadSet) -> None:
        network = initial_student(uploads, fusion.start, fusion.seed)
        self.fusion = fusion
        self.teacher = Teacher(build_fusion(fusion.teacher).fuse(uploads).model.to(uploads.device))
        # A mean of clients knows the statistics of real images, which invented ones would spoil.
        keep = fusion.start == "average"
        self.student = Student(network, uploads, fusion.lr, fusion.temperature, keep_statistics=keep)
        self.inventor = Inventor(uploads, fusion.generator_lr, fusion.batch_size, fusion.seed)
        self.pool = Pool.empty(uploads)
        self.step = 0
        self.steps = fusion.rounds * self.round_steps

    @property
    def round_steps(self) -> int:
        return self.fusion.generator_steps + self.fusion.student_steps

    @property
    def round(self) -> int:
        return self.step // self.round_steps

    def advance(self) -> None:
        noise, labels = self.inventor.draw(self.round)
        self.student.network.eval()
        for _ in range(self.fusion.generator_steps):
            self.improve(noise, labels)
        with torch.no_grad():
            self.keep(self.inventor.images(noise, labels), labels)
        for index in range(self.fusion.student_steps):
            number = self.round * self.fusion.student_steps + index
            rows = draw_batch(len(self.pool), self.fusion.batch_size, self.fusion.seed, number)
            self.loss = self.teach(rows, number, number / (self.fusion.rounds * self.fusion.student_steps))
        self.step += self.round_steps

    def improve(self, noise: Tensor, labels: Tensor) -> None:
        """One step of the generator."""
        images = self.inventor.images(noise, labels)
        loss = self.generator_loss(images, labels)
        loss.backward()
        self.inventor.optimizer.step(self.inventor.lr)
        self.student.network.zero_grad()

    @abstractmethod
    def generator_loss(self, images: Tensor, labels: Tensor) -> Tensor:
        """What the generator minimises."""

    def keep(self, images: Tensor, labels: Tensor) -> None:
        """What the round invented goes into the pool."""
        self.pool.add(images, labels)

    @abstractmethod
    def teach(self, rows: Tensor, number: int, progress: float) -> float:
        """The student's step of this number on these images of the pool; its loss."""

    def state_dict(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "loss": self.loss,
            "student": self.student.state_dict(),
            "inventor": self.inventor.state_dict(),
            "pool": self.pool.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.loss = int(state["step"]), float(state["loss"])
        self.student.load_state_dict(state["student"])
        self.inventor.load_state_dict(state["inventor"])
        self.pool = Pool(**state["pool"])


@dataclass(frozen=True)
class DatafreeOptions(Options):
    """The options that both ways of distilling without images share."""

    rounds: Count = 5
    generator_steps: Count = 10
    student_steps: Count = 10
    batch_size: Batch = 64
    lr: Positive = 1e-3
    """of the student"""
    generator_lr: Positive = 1e-2
    temperature: Positive = 0.5
    start: Start = "average"
    """of the student, see `initial_student`"""
    seed: int = 0


class Datafree(Distillation):
    """What both ways of distilling without images have in common."""

    def __init__(self, teacher: Named, options: DatafreeOptions) -> None:
        super().__init__(teacher, options.seed, frozenset())
        if "weights" not in build_fusion(self.teacher).needs:
            raise ConfigError(
                f"teacher: {self.teacher['name']} has no networks to invent images from; use distill_public"
            )
        self.rounds, self.batch_size, self.temperature = options.rounds, options.batch_size, options.temperature
        self.generator_steps, self.generator_lr = options.generator_steps, options.generator_lr
        self.student_steps, self.lr, self.start = options.student_steps, options.lr, options.start


class DenseTraining(DatafreeTraining):
    """DENSE; the teacher's answers to the pool are kept beside it."""

    fusion: DistillDatafree

    def __init__(self, fusion: DistillDatafree, uploads: UploadSet) -> None:
        super().__init__(fusion, uploads)
        self.answers = torch.empty(0, len(uploads.contract.classes))

    def generator_loss(self, images: Tensor, labels: Tensor) -> Tensor:
        teacher, statistics = self.teacher.logits_and_statistics(images)
        student = self.student.logits(images)
        return generator_loss(teacher, student, labels, statistics, self.fusion.statistics, self.fusion.diversity)

    def keep(self, images: Tensor, labels: Tensor) -> None:
        super().keep(images, labels)
        self.answers = torch.cat([self.answers, self.teacher.logits(images)])

    def teach(self, rows: Tensor, number: int, progress: float) -> float:
        del number
        return self.student.learn(self.pool.images[rows], self.answers[rows], progress)

    def state_dict(self) -> dict[str, Any]:
        return super().state_dict() | {"answers": self.answers}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.answers = state["answers"]


@FUSIONS.register("distill_datafree")
class DistillDatafree(Datafree):
    """one network taught by a fused model on images that a generator invents from the clients' networks (DENSE)"""

    def __init__(
        self,
        *,
        teacher: Named = OWN_TEACHER,
        statistics: Weight = 1.0,
        diversity: Weight = 0.5,
        options: DatafreeOptions = DatafreeOptions(student_steps=20),
    ) -> None:
        super().__init__(teacher, options)
        self.statistics, self.diversity = statistics, diversity

    def begin(self, uploads: UploadSet) -> DenseTraining:
        return DenseTraining(self, uploads)
