"""The contract of a global model: what a fusion returns and everybody uses to predict.

A `SingleModel` is one network. A `MemberModel` keeps the clients' encoders and a `Rule` that combines their features;
it streams: one encoder in memory at a time, all images through it, then the next. Several member models over the same
uploads are evaluated in one pass (`logits_of_all`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self

import torch
from torch import Tensor, nn

from oneflare.core.files import save_state
from oneflare.data import ImageSpec, prepare
from oneflare.errors import DataError
from oneflare.nn import PrototypeNetwork
from oneflare.nn.backbones import frozen

if TYPE_CHECKING:
    from oneflare.models.decisions import Decision

BATCH = 256
PROCESSOR = torch.device("cpu")


@dataclass(frozen=True)
class Task:
    """What a model classifies, and with which encoder."""

    encoder: dict[str, Any]
    image: ImageSpec
    classes: tuple[str, ...]
    dim: int

    def to_dict(self) -> dict[str, Any]:
        pixels = self.image.pixels
        image = self.image.to_dict()
        if pixels is not None:  # always written out: without it, a file is from before there was such a rule
            image["pixels"] = pixels.model_dump(mode="json", exclude_none=True)
        return {
            "encoder": self.encoder,
            "image": image,
            "classes": list(self.classes),
            "dim": self.dim,
        }

    @classmethod
    def from_dict(cls, value: Mapping[str, Any]) -> Task:
        image = ImageSpec.from_dict(value["image"])
        if "pixels" not in value["image"]:
            image = replace(image, pixels=None)
        return cls(dict(value["encoder"]), image, tuple(value["classes"]), int(value["dim"]))


@dataclass(frozen=True)
class Cost:
    """What one prediction takes."""

    parameters: int
    forward_passes: int


@dataclass(frozen=True)
class Answers:
    """What a model makes of n images."""

    logits: Tensor
    """`(n, C)`"""
    familiarity: Tensor | None = None
    """`(n,)` how far the members know the image, larger for more; None where the model cannot tell"""


KINDS: dict[str, type[GlobalModel]] = {}


class GlobalModel(ABC):
    """A classifier for raw images `(n, c, h, w)`, uint8 or floats in [0, 1]; `KINDS` lists those a file may name."""

    kind: ClassVar[str]
    device: torch.device = PROCESSOR
    """where its networks compute; answers are always in the processor's memory"""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        KINDS[cls.kind] = cls

    def __init__(self, task: Task) -> None:
        self.task = task
        self.decision: Decision | None = None
        """thresholds that were chosen for the model; None: the most likely class is the answer"""

    @property
    @abstractmethod
    def cost(self) -> Cost: ...

    @abstractmethod
    def logits(self, images: Tensor, batch_size: int = BATCH) -> Tensor:
        """`(n, C)`"""

    @abstractmethod
    def state(self, reference_from: Path | None) -> dict[str, Any]:
        """Everything but the task, for the model file."""

    @classmethod
    @abstractmethod
    def from_state(
        cls, task: Task, state: Mapping[str, Any], encoder: Callable[[], nn.Module], source: Path
    ) -> GlobalModel:
        """The model of a file; `encoder` makes an empty one, `source` is where the file is."""

    def to(self, device: str | torch.device) -> Self:
        """The same model, whose networks compute on this device from now on."""
        self.device = torch.device(device)
        return self

    @property
    def familiarity_bound(self) -> float | None:
        """No familiarity is farther from 0 than this; None where the model cannot tell unknown images from known."""
        return None

    def answers(self, images: Tensor, batch_size: int = BATCH) -> Answers:
        """Logits, and where the model can tell, how far the members know each image."""
        return Answers(self.logits(images, batch_size))

    def predict_proba(self, images: Tensor, batch_size: int = BATCH) -> Tensor:
        return self.logits(images, batch_size).softmax(1)

    def predict(self, images: Tensor, batch_size: int = BATCH) -> Tensor:
        return self.logits(images, batch_size).argmax(1)

    def decide(self, images: Tensor, batch_size: int = BATCH) -> Tensor:
        """The class of every image by the model's thresholds `(n,)`, -1 for none of the known classes."""
        answers = self.answers(images, batch_size)
        return answers.logits.argmax(1) if self.decision is None else self.decision.labels(answers)

    def save(self, path: Path, *, embed: bool = True) -> None:
        """One file. Without `embed`, members stay where they are and are referred to by relative path and digest."""
        state = self.state(None if embed else path.parent)
        save_state(path, {"kind": self.kind, "task": self.task.to_dict(), "state": state})

    def rehearsal(self) -> Tensor:
        """Logits `(1, C)` of a blank image, for checking a file that was just read."""
        return self.logits(self.blank_image())

    def blank_image(self) -> Tensor:
        image = self.task.image
        return torch.zeros(1, image.channels, image.size, image.size, dtype=torch.uint8)

    def remarks(self) -> list[str]:
        """What whoever asked the model should know about its answers so far; nothing, for most models."""
        return []

    def inputs(self, images: Tensor) -> Tensor:
        """What the model's networks are fed: images as they are, or the features that its backbone gives of them.

        Features `(n, D, 1, 1)` that were computed before pass as they are.
        """
        image = self.task.image
        wanted = [(spec.channels, spec.size, spec.size) for spec in (image.decoded, image)]
        if images.ndim != 4 or tuple(images.shape[1:]) not in wanted:
            raise DataError(f"images of shape {tuple(images.shape)} do not fit; the model takes (n, *{wanted[0]})")
        if image.backbone is None or tuple(images.shape[1:]) == wanted[1]:
            return images
        return frozen(image.backbone, self.device.type)(images)


class SingleModel(GlobalModel):
    """One network, the cheapest to deploy."""

    kind = "single"

    def __init__(self, task: Task, network: PrototypeNetwork) -> None:
        super().__init__(task)
        self.network = network.eval()

    @property
    def cost(self) -> Cost:
        return Cost(sum(p.numel() for p in self.network.parameters()), 1)

    @torch.no_grad()
    def logits(self, images: Tensor, batch_size: int = BATCH) -> Tensor:
        images, network = self.inputs(images), self.network.to(self.device)
        parts = [
            (network(prepare(batch.to(self.device), self.task.image)) @ network.prototypes.T).cpu()
            for batch in images.split(batch_size)
        ]
        return torch.cat(parts) if parts else torch.empty(0, len(self.task.classes))

    def state(self, reference_from: Path | None) -> dict[str, Any]:
        del reference_from
        return {"network": dict(self.network.state_dict())}

    @classmethod
    def from_state(
        cls, task: Task, state: Mapping[str, Any], encoder: Callable[[], nn.Module], source: Path
    ) -> SingleModel:
        del source
        network = PrototypeNetwork(encoder(), torch.zeros(len(task.classes), task.dim))
        network.load_state_dict(state["network"])
        return cls(task, network)
