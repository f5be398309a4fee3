"""An encoder with one learnable prototype per class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oneflare.core.seeds import global_stream, torch_generator
from oneflare.nn.encoders import build_encoder, check_size, feature_dim


class PrototypeNetwork(nn.Module):
    """z = f(x)/|f(x)|, logits z P^T, with prototypes P `(C, d)`."""

    def __init__(self, encoder: nn.Module, prototypes: Tensor) -> None:
        super().__init__()
        self.encoder = encoder
        self.prototypes = nn.Parameter(prototypes.clone())
        self.unknown: nn.Parameter | None = None
        """`(d,)` prototype of the class "unknown", where the objective trains one"""

    def forward(self, images: Tensor) -> Tensor:
        """Unit features `(batch, d)`, always float32."""
        return F.normalize(self.encoder(images).float(), dim=1)


def signed_root(features: Tensor) -> Tensor:
    """u = sign(f) sqrt(|f|), entry by entry: pooled features are skewed, and their roots are nearly Gaussian.

    The gradient, which is infinite at 0, is taken as 0 there.
    """
    return features.sign() * features.abs().clamp(min=1e-20).sqrt()


def add_unknown(network: PrototypeNetwork, seed: int) -> PrototypeNetwork:
    """A prototype u ~ N(0, 1) for images that show none of the classes; it depends on the seed alone."""
    draw = torch.randn(network.prototypes.shape[1], generator=torch_generator(seed, "initial prototype of unknown"))
    network.unknown = nn.Parameter(draw)
    return network


def freeze_prototypes(network: PrototypeNetwork, anchors: Tensor) -> PrototypeNetwork:
    """P = A, a constant: a classifier that nobody trains. anchors: `(C, d)`"""
    with torch.no_grad():
        network.prototypes.copy_(anchors)
    network.prototypes.requires_grad_(False)
    return network


def filled(network: PrototypeNetwork, weights: Mapping[str, Tensor], prototypes: Tensor) -> PrototypeNetwork:
    """The network with these weights of its encoder and these prototypes."""
    network.encoder.load_state_dict(dict(weights))
    with torch.no_grad():
        network.prototypes.copy_(prototypes)
    return network


def initial_network(
    spec: Mapping[str, Any], channels: int, size: int, classes: int, seed: int, dim: int | None = None
) -> PrototypeNetwork:
    """The start that all clients share: weights and P ~ N(0, 1) depend on the seed alone.

    dim: d where it is known; else the encoder is asked.
    """
    with global_stream(seed, "initial weights"):
        encoder = build_encoder(spec, channels)
    if dim is None:
        dim = feature_dim(encoder, channels, size)
    check_size(f"one prototype for each of {classes} classes", classes * dim, "choose a smaller encoder.dim")
    prototypes = torch.randn(classes, dim, generator=torch_generator(seed, "initial prototypes"))
    return PrototypeNetwork(encoder, prototypes)
