"""Distillation of a fused model into one network on public images (FedDF), and what all distillations share."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from oneflare.core.files import digest_of, tensor_digest
from oneflare.core.schedules import build_schedule
from oneflare.core.seeds import global_stream, torch_generator
from oneflare.data.dataset import normalise, to_unit
from oneflare.errors import ConfigError, RunError, UploadError
from oneflare.fusion.averaging.average import single_model, size_average
from oneflare.fusion.base import FUSIONS, Fused, Fusion, UploadSet, build_fusion
from oneflare.fusion.workspace import QUIET, Workspace, carry_out
from oneflare.models.base import SingleModel
from oneflare.nn import PrototypeNetwork
from oneflare.nn.hardware import one_thread
from oneflare.nn.optimisers import Adam

Count = Annotated[int, Field(ge=1)]
Batch = Annotated[int, Field(ge=2)]
Positive = Annotated[float, Field(gt=0)]
Weight = Annotated[float, Field(ge=0)]
Start = Literal["average", "fresh"]
Named = str | dict[str, Any]
OWN_TEACHER = "density_ratio"
"""the fusion that a student learns from unless another one is named"""


def divergence(teacher: Tensor, student: Tensor, temperature: float = 1.0) -> Tensor:
    """KL(softmax(t/T) || softmax(s/T)) of every image: `(n, C)`, `(n, C)` logits -> `(n,)`"""
    wanted, found = (teacher / temperature).log_softmax(1), (student / temperature).log_softmax(1)
    return (wanted.exp() * (wanted - found)).sum(1)


def distillation_loss(teacher: Tensor, student: Tensor, temperature: float = 1.0) -> Tensor:
    """T^2 mean KL(softmax(t/T) || softmax(s/T)): FedDF's loss of the student; T^2 keeps the gradient's size."""
    return temperature**2 * divergence(teacher, student, temperature).mean()


def initial_student(uploads: UploadSet, start: Start, seed: int) -> PrototypeNetwork:
    """`average`: the clients' mean, as FedDF starts; `fresh`: drawn anew from the seed, as DENSE starts."""
    if start == "average":
        return single_model(uploads, size_average(uploads)).network
    network = copy.deepcopy(uploads.template)
    with global_stream(seed, "student"):
        for module in network.modules():
            reset = getattr(module, "reset_parameters", None)
            if callable(reset):
                reset()
        nn.init.normal_(network.prototypes)
    return network


class Student:
    """The network that learns, with its optimiser (Adam, rate falling as a cosine)."""

    def __init__(
        self,
        network: PrototypeNetwork,
        uploads: UploadSet,
        lr: float,
        temperature: float,
        keep_statistics: bool = False,
    ) -> None:
        """keep_statistics: batch normalisation stays as it is instead of following the images."""
        self.device = uploads.device
        self.network = network.to(self.device).requires_grad_(True)
        self.keep_statistics = keep_statistics
        self.image = uploads.contract.image
        self.lr = lr
        self.temperature = temperature
        self.optimizer = Adam(list(self.network.parameters()))
        self.schedule = build_schedule({"name": "cosine"})

    def logits(self, images: Tensor) -> Tensor:
        """images `(n, c, h, w)` in [0, 1] -> `(n, C)`, both in the processor's memory"""
        logits: Tensor = self.network(normalise(images.to(self.device), self.image)) @ self.network.prototypes.T
        return logits.cpu()

    def learn(self, images: Tensor, teacher: Tensor, progress: float) -> float:
        """One step toward the teacher's logits `(n, C)` on these images; returns the loss."""
        self.network.train(not self.keep_statistics)
        loss = distillation_loss(teacher, self.logits(images), self.temperature)
        loss.backward()
        self.optimizer.step(self.lr * self.schedule(progress))
        value = float(loss.detach())
        if not value < float("inf"):
            raise RunError("the student's loss is no longer finite; lower the fusion's lr")
        return value

    def state_dict(self) -> dict[str, Any]:
        return {"network": dict(self.network.state_dict()), "optimizer": self.optimizer.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.network.load_state_dict(state["network"])
        self.optimizer.load_state_dict(state["optimizer"])


class StudentTraining(ABC):
    """What every way of distilling has: a student, and the number of the step (a `Training`)."""

    student: Student
    step: int
    steps: int
    loss: float = 0.0
    """the student's last"""

    @abstractmethod
    def advance(self) -> None:
        """One or more steps; `step` says how many are done."""

    @abstractmethod
    def state_dict(self) -> dict[str, Any]: ...

    @abstractmethod
    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...

    def notes(self) -> dict[str, Any]:
        """For the fusion's metrics."""
        return {"steps": self.steps, "final_loss": self.loss}


class Distillation(Fusion):
    """A teacher by name, a student, a budget in steps."""

    single_network = True
    trains = True
    teacher: dict[str, Any]

    def __init__(self, teacher: Named, seed: int, extra_needs: frozenset[str]) -> None:
        self.teacher = {"name": teacher} if isinstance(teacher, str) else dict(teacher)
        if "name" not in self.teacher:
            raise ConfigError("teacher: must be a name or a mapping with a 'name'")
        fusion = build_fusion(self.teacher)
        if fusion.trains:
            raise ConfigError(f"teacher: {self.teacher['name']} is itself distilled; choose what it was distilled from")
        self.needs = fusion.needs | {"weights", "prototypes"} | extra_needs
        self.seed = seed

    def fuse(self, uploads: UploadSet, workspace: Workspace = QUIET) -> Fused:
        with one_thread():
            training = self.begin(uploads)
            seconds_before = carry_out(training, self._key(uploads), workspace)
        model = SingleModel(uploads.task, training.student.network.requires_grad_(False))
        return Fused(model, training.notes(), seconds_before=seconds_before)

    def _key(self, uploads: UploadSet) -> str:
        """Names the work: options, uploads and public images."""
        options = {name: value for name, value in vars(self).items() if name != "needs"}
        public = None if uploads.public is None else tensor_digest(uploads.public)
        return digest_of([type(self).__name__, options, [upload.digest for upload in uploads], public])

    @abstractmethod
    def begin(self, uploads: UploadSet) -> StudentTraining:
        """The optimisation before its first step."""


class PublicTraining(StudentTraining):
    """The teacher answers once for every public image, one client's network in memory at a time."""

    def __init__(self, fusion: DistillPublic, uploads: UploadSet) -> None:
        if uploads.public is None:
            raise UploadError("fusion distill_public needs public images; run with data.public=NUMBER")
        network = initial_student(uploads, fusion.start, fusion.seed)
        self.images = to_unit(uploads.public)
        self.answers = build_fusion(fusion.teacher).fuse(uploads).model.to(uploads.device).logits(self.images)
        self.student = Student(network, uploads, fusion.lr, fusion.temperature)
        self.seed, self.batch_size = fusion.seed, fusion.batch_size
        self.step, self.steps = 0, fusion.steps

    def advance(self) -> None:
        rows = draw_batch(len(self.images), self.batch_size, self.seed, self.step)
        self.loss = self.student.learn(self.images[rows], self.answers[rows], self.step / self.steps)
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "loss": self.loss, "student": self.student.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.step, self.loss = int(state["step"]), float(state["loss"])
        self.student.load_state_dict(state["student"])


def draw_batch(available: int, size: int, seed: int, step: int) -> Tensor:
    """Rows of a seeded batch, without repetition as long as there are enough; `(size,)`"""
    order = torch.randperm(available, generator=torch_generator(seed, "distillation batch", step))
    return order[torch.arange(size) % available]


@FUSIONS.register("distill_public")
class DistillPublic(Distillation):
    """one network taught by a fused model on public images without labels (FedDF)"""

    def __init__(
        self,
        *,
        teacher: Named = OWN_TEACHER,
        steps: Count = 300,
        batch_size: Batch = 64,
        lr: Positive = 1e-3,
        temperature: Positive = 1.0,
        start: Start = "average",
        seed: int = 0,
    ) -> None:
        super().__init__(teacher, seed, frozenset({"public"}))
        self.steps, self.batch_size, self.lr = steps, batch_size, lr
        self.temperature, self.start = temperature, start

    def begin(self, uploads: UploadSet) -> PublicTraining:
        return PublicTraining(self, uploads)
