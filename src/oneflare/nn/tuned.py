"""Encoders on a backbone whose last modules are trained at each client: the backbone's tail, and a head behind it.

    f(x) = head(tail(t)),   t = trunk(x)

The trunk is computed once of every image and never leaves its place (`oneflare.nn.backbones`), so that `t` is what
such an encoder is fed. All clients start with the published weights of the tail. Batch normalisation keeps the
published statistics, and whatever else a network does in training alone, such as dropout, is left out.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Self

from torch import Tensor, nn

from oneflare.data import ImageSpec
from oneflare.nn.backbones import Trunk, frozen
from oneflare.nn.encoders import Projecting, build_encoder


class Tuned(Projecting):
    """The tail of a backbone, always in evaluation mode, and an encoder of its features."""

    def __init__(self, tail: nn.Module, shape: tuple[int, ...], head: nn.Module) -> None:
        """shape: of what the tail is fed for one image"""
        super().__init__()
        self.tail, self.head, self.shape = tail.eval(), head, shape

    @property
    def project(self) -> nn.Module:  # type: ignore[override]
        """That of the head."""
        return self.head.project if isinstance(self.head, Projecting) else nn.Identity()

    def trunk(self, x: Tensor) -> Tensor:
        features = self.tail(x.reshape(x.shape[0], *self.shape))[:, :, None, None]
        own: Tensor = self.head.trunk(features) if isinstance(self.head, Projecting) else self.head(features)
        return own

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.tail.eval()
        return self


def encoder_on(spec: Mapping[str, Any], image: ImageSpec, weights: str | None = None) -> nn.Module:
    """The encoder that `spec` names for what `image` says it is fed, with fresh weights, and behind the backbone's tail
    where that is trained.

    weights: the backbone's file, where it is not found by name
    """
    terms = image.backbone
    if terms is None or terms.tune is None:
        return build_encoder(spec, image.channels)
    cut = frozen(terms, "cpu", weights)
    assert isinstance(cut.network, Trunk)
    assert cut.tail is not None
    tail = copy.deepcopy(cut.tail).requires_grad_(True)
    return Tuned(tail, cut.network.shape, build_encoder(spec, cut.features))
