"""A fused model as a differentiable teacher, with a weight for each client."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from oneflare.data.dataset import normalise
from oneflare.errors import ConfigError
from oneflare.models.base import BATCH, GlobalModel, SingleModel
from oneflare.models.members import MemberModel, added, features_for
from oneflare.nn.encoders import both_features


class Teacher:
    """Holds every network of the model in memory: a gradient with respect to the images goes through all of them."""

    def __init__(self, model: GlobalModel) -> None:
        self.model = model
        self.networks: list[nn.Module] = []
        if isinstance(model, MemberModel):
            for member in model.members:
                encoder = copy.deepcopy(model.encoder)
                encoder.load_state_dict(dict(member.weights()))
                self.networks.append(encoder)
        elif isinstance(model, SingleModel):
            self.networks.append(model.network)
        else:
            raise ConfigError(
                f"a generator cannot learn from a model of kind '{model.kind}', which has no gradient; "
                "choose another teacher, or fusion distill_public"
            )
        for network in self.networks:
            network.to(model.device).eval().requires_grad_(False)

    def __len__(self) -> int:
        return len(self.networks)

    def logits(self, images: Tensor, weights: Tensor | None = None) -> Tensor:
        """images `(n, c, h, w)` in [0, 1] -> `(n, C)`.

        weights: `(N,)`, how much each client counts; 1/N each is the model as it was fused. What client i adds to the
        rule's sum is multiplied by N w_i.
        """
        inputs = normalise(images.to(self.model.device), self.model.task.image)
        if isinstance(self.model, SingleModel):
            own = self.model.network
            answers: Tensor = own(inputs) @ own.prototypes.T
            return answers.cpu()
        assert isinstance(self.model, MemberModel)
        start = self.model.start(images.detach(), BATCH)
        state = start
        for index, network in enumerate(self.networks):
            features = features_for(self.model.rule, both_features(network, inputs).cpu())
            part = added(self.model.rule, start, index, features) - start
            state = state + (part if weights is None else len(self) * weights[index] * part)
        return self.model.rule.finish(state)

    def logits_and_statistics(self, images: Tensor, weights: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The logits, and how far the images are from what the networks saw in training: `statistics_loss`."""
        gaps: list[Tensor] = []
        hooks = [
            module.register_forward_pre_hook(_watch(gaps))
            for network in self.networks
            for module in network.modules()
            if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None
        ]
        try:
            logits = self.logits(images, weights)
        finally:
            for hook in hooks:
                hook.remove()
        return logits, torch.stack(gaps).sum().cpu() / len(self) if gaps else images.new_zeros(())


def statistics_loss(inputs: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    """|mu(x) - mu_l|_2 + |sigma^2(x) - sigma_l^2|_2 of one layer (DENSE, equation of L_BN).

    inputs `(n, channels, h, w)` of a batch normalisation; mean, variance `(channels,)` it remembers from training.
    """
    found = inputs.mean((0, 2, 3))
    spread = inputs.var((0, 2, 3), unbiased=False)
    return _norm(found - mean) + _norm(spread - variance)


def _norm(x: Tensor) -> Tensor:
    """|x|_2 with gradient 0 at 0"""
    return x.square().sum().clamp(min=1e-24).sqrt()


def _watch(gaps: list[Tensor]) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def see(module: nn.Module, inputs: tuple[Any, ...]) -> None:
        assert isinstance(module, nn.BatchNorm2d)
        assert module.running_mean is not None
        assert module.running_var is not None
        gaps.append(statistics_loss(inputs[0], module.running_mean, module.running_var))

    return see
