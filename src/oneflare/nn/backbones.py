"""Backbones: frozen pretrained networks that turn an image into features, once, before anything is trained.

A backbone is named in an experiment or in the terms of a federation together with the digest of its weights. Every
participant has it and checks it; it is in no upload and in no model file. A name may have an argument after a colon, as
in `torchvision:resnet18`.

With `tune` a backbone is cut in two (`oneflare.nn.cutting`): the trunk is what stays frozen, and its output takes the
place of the features; clients train the tail and upload it (`oneflare.nn.tuned`).
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
from oneflare.nn.cutting import LAST, cut, cut_name
from oneflare.nn.encoders import WIDEST
from oneflare.nn.given import CUSTOM, give, given
from oneflare.nn.weights import Pinned, Weights, digest_of_files

BATCH = 8
"""images that go through a backbone together, so that the activations stay in the processor's cache"""
ENLARGED = 4
"""an image is enlarged at most by this factor to reach a backbone's own size"""
WIDEST_CUT = 1 << 18
"""numbers of an image between trunk and tail, 512 KiB as float16"""


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
        whole = dict(spec)
    else:
        kind = spec["name"].partition(":")[0]
        whole = {**BACKBONES.complete({**spec, "name": kind}, "backbone"), "name": spec["name"]}
    return whole | ({"tune": None} if whole.get("tune") == "none" else {})


def pinned(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The completed spec with the digest of the weights, the number of features, and the name of the first module that
    is trained."""
    whole = complete(spec)
    if whole.get("tune") is not None and whole.get("copies") not in (None, "none"):
        raise ConfigError("backbone.copies takes a mean over features, which backbone.tune leaves to the clients; "
                          "leave one of the two out")  # fmt: skip
    if whole["digest"] is not None and whole["dim"] is not None and whole.get("tune") != LAST:
        return whole
    return whole | _measured(json.dumps(whole, sort_keys=True))


@functools.lru_cache(maxsize=32)
def _measured(spec: str) -> dict[str, Any]:
    whole = json.loads(spec)
    name, digest, weights, image = whole["name"], whole["digest"], whole["weights"], GIVEN_IMAGE
    if name != CUSTOM:
        kind, options = described(whole)
        digest, image = digest_of_files(kind.weights.find(name, options)), kind.image
    terms = BackboneTerms(name, digest, image)
    if whole.get("tune") is not None:
        terms = replace(terms, tune=cut_name(_network(terms, weights), whole["tune"], name))
    return {"digest": digest, "dim": Frozen(terms, "cpu", weights).features, "tune": terms.tune}


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
    terms = BackboneTerms(spec["name"], spec["digest"], image, spec.get("copies") or "none", spec.get("tune"))
    dim = spec["dim"] if terms.tune is None else frozen(terms, "cpu", spec.get("weights")).dim
    return ImageSpec.of_features(dim, terms)


class Trunk(nn.Module):
    """The frozen part of a backbone that was cut: images `(n, c, h, w)` -> what the tail is fed, `(n, D)` float16."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.shape: tuple[int, ...] = ()
        """of what the tail is fed for one image, known after the first images"""

    def forward(self, images: Tensor) -> Tensor:
        output: Tensor = self.network(images)
        self.shape = tuple(output.shape[1:])
        return output.flatten(1).half()


class Frozen:
    """A backbone with its weights, on a device: images -> features. Nothing in it is ever trained."""

    def __init__(self, terms: BackboneTerms, device: str | torch.device = "cpu", weights: str | None = None) -> None:
        """weights: the file, where it is not found by name"""
        self.terms, self.device = terms, torch.device(device)
        self.network, self.tail = _network(terms, weights).to(self.device), None
        if terms.tune is not None:
            trunk, self.tail = cut(self.network, terms.tune, terms.name)
            self.network = Trunk(trunk)
        shape = (1, terms.image.channels, terms.image.size, terms.image.size)
        features = self._features(torch.zeros(shape, device=self.device))
        self.dim, self.dtype = features.shape[1], features.dtype
        """of what is computed once of an image and fed to networks"""
        self.features = self.dim if self.tail is None else self._after(features).shape[1]
        """D of the whole network"""

    def __call__(self, images: Tensor) -> Tensor:
        """Images `(n, c, h, w)` as they are stored -> `(n, D, 1, 1)` in the processor's memory: features in float32, or
        in float16 what the tail is fed."""
        parts = []
        for block in images.split(BATCH):
            inputs = prepare(block.to(self.device), self.terms.image)
            parts.append(self._features(inputs).cpu())
        features = torch.cat(parts) if parts else torch.empty(0, self.dim, dtype=self.dtype)
        return features[:, :, None, None]

    @torch.no_grad()
    def _after(self, features: Tensor) -> Tensor:
        """What the tail makes of the trunk's output `(n, dim)`."""
        assert self.tail is not None
        assert isinstance(self.network, Trunk)
        return _checked(self.terms.name, self.tail(features.float().unflatten(1, self.network.shape)), WIDEST)

    @torch.no_grad()
    def _features(self, inputs: Tensor) -> Tensor:
        name, size = self.terms.name, inputs.shape[-1]
        try:
            features = of_copies(self.network, inputs.contiguous(memory_format=torch.channels_last), self.terms.copies)
        except (RuntimeError, TypeError, ValueError, AssertionError) as error:
            reason = str(error).strip().splitlines()[0][:160] if str(error).strip() else type(error).__name__
            raise ConfigError(f"backbone={name} does not take images of {size} pixels: {reason}") from None
        if self.tail is None:
            return _checked(name, features, WIDEST).float()
        tune = self.terms.tune
        if features.shape[1] > WIDEST_CUT:
            raise ConfigError(
                f"backbone.tune={tune}: the module is fed {features.shape[1]:,} numbers per image, more than the "
                f"{WIDEST_CUT:,} that are kept; choose a later module or smaller images"
            )
        if not bool(features.isfinite().all()):
            raise ConfigError(f"backbone.tune={tune}: the module is fed numbers beyond float16; choose another module")
        return features


def _checked(name: str, features: Any, widest: int) -> Tensor:
    if not isinstance(features, Tensor) or features.ndim != 2 or not 1 <= features.shape[1] <= widest:
        shape = tuple(features.shape) if isinstance(features, Tensor) else type(features).__name__
        raise ConfigError(f"backbone={name} must return features of shape (batch, D), not {shape}")
    return features


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
