"""Backbones: frozen pretrained networks that turn an image into features, once, before anything is trained.

A backbone is named in an experiment or in the terms of a federation together with the digest of its weights. Every
participant has it and checks it; it is in no upload and in no model file. A name may have an argument after a colon, as
in `torchvision:resnet18`.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from oneflare.core.config import Pixels
from oneflare.core.registry import Registry
from oneflare.data import ImageSpec, prepare
from oneflare.data.dataset import BackboneTerms, Copies, Crop
from oneflare.errors import ConfigError
from oneflare.nn.encoders import WIDEST
from oneflare.nn.given import CUSTOM, give, given
from oneflare.nn.weights import Pinned, Weights, digest_of_files

BATCH = 8
"""images that go through a backbone together, so that the activations stay in the processor's cache"""
ENLARGED = 4
"""an image is enlarged at most by this factor to reach a backbone's own size"""


@dataclass(frozen=True)
class Backbone:
    """What is known of a backbone before its weights are read."""

    image: ImageSpec
    """how its authors prepare images"""
    weights: Weights
    build: Callable[[tuple[Path, ...]], nn.Module]
    """files -> the network, normalised images `(n, 3, h, w)` -> features `(n, D)`"""
    never_negative: bool = False
    """whether features are averages behind a ReLU, whose square roots are nearer to Gaussian than they are"""


BACKBONES: Registry[Backbone] = Registry("backbone")


def complete(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The spec with every option checked; a name that does not exist is a ConfigError."""
    if spec["name"] == CUSTOM:
        return dict(spec)
    kind = spec["name"].partition(":")[0]
    return {**BACKBONES.complete({**spec, "name": kind}, "backbone"), "name": spec["name"]}


def pinned(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The completed spec with the digest of the weights and the number of features."""
    whole = complete(spec)
    if whole["digest"] is not None and whole["dim"] is not None:
        return whole
    digest, dim = _measured(json.dumps(whole, sort_keys=True))
    return whole | {"digest": digest, "dim": dim}


@functools.lru_cache(maxsize=32)
def _measured(spec: str) -> tuple[str, int]:
    whole = json.loads(spec)
    kind, options = described(whole)
    digest = digest_of_files(kind.weights.find(whole["name"], options))
    terms = BackboneTerms(whole["name"], digest, kind.image)
    return digest, Frozen(terms, "cpu", options.weights).dim


def described(spec: Mapping[str, Any]) -> tuple[Backbone, Pinned]:
    """What a completed spec names, and its common options."""
    kind, _, argument = spec["name"].partition(":")
    options = {field.name: spec[field.name] for field in fields(Pinned)}
    return BACKBONES.build({**spec, "name": kind}, argument), Pinned(**options)


def never_negative(spec: Mapping[str, Any]) -> bool:
    """Whether a backbone is known to give no feature below 0. spec: its name, and options"""
    return spec["name"] != CUSTOM and described(complete(spec))[0].never_negative


def input_spec(
    spec: Mapping[str, Any], pixels: Pixels | None, size: int | None = None, native: int | None = None
) -> ImageSpec:
    """What the network on top of a pinned backbone is fed, with what the backbone is fed inside it.

    size: side of the images in pixels; default: the backbone's own, or less where `native`, the side that images have
    in their files, is so small that they would be enlarged more than fourfold.
    """
    own = GIVEN_IMAGE if spec["name"] == CUSTOM else described(spec)[0].image
    if size is None:
        size = own.size if native is None else min(own.size, ENLARGED * native)
    image = replace(own, size=size, pixels=pixels or own.pixels)
    terms = BackboneTerms(spec["name"], spec["digest"], image, spec.get("copies") or "none")
    return ImageSpec.of_features(spec["dim"], terms)


class Frozen:
    """A backbone with its weights, on a device: images -> features. Nothing in it is ever trained."""

    def __init__(self, terms: BackboneTerms, device: str | torch.device = "cpu", weights: str | None = None) -> None:
        """weights: the file, where it is not found by name"""
        self.terms, self.device = terms, torch.device(device)
        self.network = _network(terms, weights).to(self.device)
        shape = (1, terms.image.channels, terms.image.size, terms.image.size)
        features = self._features(torch.zeros(shape, device=self.device))
        self.dim = features.shape[1]

    def __call__(self, images: Tensor) -> Tensor:
        """Images `(n, c, h, w)` as they are stored -> features `(n, D, 1, 1)`, float32, in the processor's memory."""
        parts = []
        for block in images.split(BATCH):
            inputs = prepare(block.to(self.device), self.terms.image)
            parts.append(self._features(inputs).cpu())
        features = torch.cat(parts) if parts else torch.empty(0, self.dim)
        return features[:, :, None, None]

    @torch.no_grad()
    def _features(self, inputs: Tensor) -> Tensor:
        name, size = self.terms.name, inputs.shape[-1]
        try:
            features = of_copies(self.network, inputs.contiguous(memory_format=torch.channels_last), self.terms.copies)
        except (RuntimeError, TypeError, ValueError, AssertionError) as error:
            reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
            raise ConfigError(f"backbone={name} does not take images of {size} pixels: {reason}") from None
        if not isinstance(features, Tensor) or features.ndim != 2 or not 1 <= features.shape[1] <= WIDEST:
            shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
            raise ConfigError(f"backbone={name} must return features of shape (batch, D), not {shape}")
        return features.float()


def of_copies(network: nn.Module, inputs: Tensor, copies: Copies) -> Tensor:
    """Features `(n, D)` of normalised images `(n, c, h, w)`; with copies=mirror f = (g(x) + g(mirrored x)) / 2."""
    features: Tensor = network(inputs)
    return features if copies == "none" else (features + network(inputs.flip(-1))) / 2


def _network(terms: BackboneTerms, weights: str | None) -> nn.Module:
    """The network behind the terms, once its weights have the agreed digest."""
    if terms.name == CUSTOM:
        return given("backbone", terms.digest)
    kind, options = described(complete({"name": terms.name, "digest": terms.digest, "weights": weights}))
    network = kind.build(kind.weights.find(terms.name, options))
    return network.requires_grad_(False).eval()


@functools.lru_cache(maxsize=4)
def frozen(terms: BackboneTerms, device: str = "cpu", weights: str | None = None) -> Frozen:
    """The backbone of these terms, read once per process; its weights must have the agreed digest."""
    return Frozen(terms, device, weights)


IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
CENTRE = (0.5, 0.5, 0.5)
GIVEN_IMAGE = ImageSpec(3, 224, *IMAGENET, crop=Crop(0.875, "bilinear"))
"""what a module of the user's own is fed, unless another size is chosen"""


def give_backbone(module: nn.Module) -> dict[str, Any]:
    """The spec of a module of a Python session, which is used as it is, in evaluation mode."""
    spec = give(module.requires_grad_(False).eval())
    return spec | {"dim": Frozen(BackboneTerms(CUSTOM, spec["digest"], GIVEN_IMAGE)).dim, "weights": None}
