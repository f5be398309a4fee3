"""Measures the evidence of `oneflare.upload.evidence` in one pass over the client's own images after training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from oneflare.client.density import measure_density
from oneflare.data import ClientData, ImageSpec, prepare
from oneflare.errors import TrainingError
from oneflare.nn import PrototypeNetwork
from oneflare.upload.evidence import (
    CLASS_MEANS,
    FISHER,
    GRADIENTS,
    HEAD,
    INPUTS,
    MEAN,
    RAW_MEAN,
    RAW_VARIANCE,
    UNKNOWN,
    VARIANCE,
    layout,
    linear_maps,
    map_shape,
    offers,
)
from oneflare.upload.symmetric import triangle

BLOCK = 128
"""images that are measured at a time"""


MOST_GRADIENTS = 1 << 25
"""numbers that gradients of single images may take at a time"""


def measure_evidence(
    network: PrototypeNetwork, data: ClientData, image: ImageSpec, names: Iterable[str]
) -> dict[str, Tensor]:
    """The tensors of `layout`, float32, zero without any image; the network is left in evaluation mode, without
    gradients."""
    offered = offers(names)
    network.eval()
    if not len(data):
        return {name: torch.zeros(shape) for name, shape in layout(network, names).items()}
    sums: dict[str, Tensor] = {}
    passes = _blocks(network, data, image) if offered - {"density", UNKNOWN} else ()
    for inputs, labels in passes:
        parts: dict[str, Tensor] = {}
        if offered & {"moments", "class_means"}:
            parts |= _feature_sums(network, inputs, labels, len(data.counts))
        if "raw_moments" in offered:
            parts |= _raw_sums(network, inputs)
        if "gram" in offered:
            parts |= _factor_sums(network, inputs, labels, gradients="kronecker" in offered)
        if "fisher" in offered:
            parts |= _fisher_sums(network, inputs, labels)
        sums = {name: part if name not in sums else sums[name] + part for name, part in parts.items()}
    evidence = _means(sums, data, offered)
    if UNKNOWN in offered:
        assert network.unknown is not None
        evidence[UNKNOWN] = network.unknown.detach().float().cpu().contiguous()
    if "density" in offered:
        evidence |= measure_density(network, data, image)
    if not all(bool(torch.isfinite(tensor).all()) for tensor in evidence.values()):
        raise TrainingError("the evidence is not finite; lower train.lr or train.clip")
    return evidence


def _blocks(network: PrototypeNetwork, data: ClientData, image: ImageSpec) -> Iterator[tuple[Tensor, Tensor]]:
    device = network.prototypes.device
    for images, labels in zip(data.images.split(BLOCK), data.labels.split(BLOCK), strict=True):
        yield prepare(images.to(device), image), labels.to(device)


def _means(sums: Mapping[str, Tensor], data: ClientData, offered: frozenset[str]) -> dict[str, Tensor]:
    """Sums over images -> what is sent."""
    n, result = len(data), {}
    for name, total in sums.items():
        total = total.cpu()
        if name == CLASS_MEANS:
            if "class_means" in offered:
                result[name] = total / data.counts.clamp(min=1)[:, None]
            if "moments" in offered:
                mean = total.sum(0) / n
                result |= {MEAN: mean, VARIANCE: (sums[VARIANCE].cpu() / n - mean.square()).clamp(min=0)}
        elif name == RAW_MEAN:
            mean = total / n
            result |= {RAW_MEAN: mean, RAW_VARIANCE: (sums[RAW_VARIANCE].cpu() / n - mean.square()).clamp(min=0)}
        elif name.startswith((INPUTS, GRADIENTS)):
            result[name] = total.masked_select(triangle(len(total)).cpu()) / n
        elif name.startswith(FISHER):
            result[name] = total / n
    return {name: tensor.float().contiguous() for name, tensor in result.items()}


@torch.no_grad()
def _feature_sums(network: PrototypeNetwork, inputs: Tensor, labels: Tensor, classes: int) -> dict[str, Tensor]:
    """sum of z over each class, and sum of z^2"""
    features = network(inputs).double()
    sums = torch.zeros(classes, features.shape[1], dtype=torch.float64, device=features.device)
    return {CLASS_MEANS: sums.index_add_(0, labels, features), VARIANCE: features.square().sum(0)}


@torch.no_grad()
def _raw_sums(network: PrototypeNetwork, inputs: Tensor) -> dict[str, Tensor]:
    """sum of f, and sum of f^2"""
    features = network.encoder(inputs).double()
    return {RAW_MEAN: features.sum(0), RAW_VARIANCE: features.square().sum(0)}


def _factor_sums(network: PrototypeNetwork, inputs: Tensor, labels: Tensor, *, gradients: bool) -> dict[str, Tensor]:
    """sums over images of sum_t a_t a_t^T, and of mean_t g_t g_t^T"""
    maps = linear_maps(network)
    sums: dict[str, Tensor] = {}
    for name, module in maps.items():  # a layer that evaluation leaves out has seen nothing
        for kind, size in zip((GRADIENTS, INPUTS), map_shape(network, module), strict=True):
            if kind == INPUTS or gradients:
                sums[kind + name] = torch.zeros(size, size, dtype=torch.float64, device=inputs.device)

    def watch(name: str) -> Callable[[nn.Module, tuple[Any, ...], Tensor], None]:
        def seen(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> None:
            rows = _rows(module, arguments[0].detach())
            sums[INPUTS + name] += (rows.T @ rows).double()
            if gradients:
                output.register_hook(lambda slope: backward(name, slope))

        return seen

    def backward(name: str, slope: Tensor) -> None:
        places = slope[0].numel() // slope.shape[1]
        rows = slope.flatten(2).transpose(1, 2).flatten(0, 1) if slope.ndim == 4 else slope.flatten(0, -2)
        sums[GRADIENTS + name] += (rows.T @ rows).double() / places

    hooks = [module.register_forward_hook(watch(name)) for name, module in maps.items() if module is not None]
    try:
        with torch.set_grad_enabled(gradients):
            features = network(inputs)
            logits = features @ network.prototypes.T
            if gradients:  # the sum over images: in evaluation mode each one's gradient is its own
                loss = F.cross_entropy(logits, labels, reduction="sum")
                wanted = [p for p in network.parameters() if p.requires_grad]
                torch.autograd.grad(loss, wanted, allow_unused=True)
    finally:
        for hook in hooks:
            hook.remove()
    z = features.detach()
    sums[INPUTS + HEAD] += (z.T @ z).double()
    if gradients:
        slope = logits.detach().softmax(1) - F.one_hot(labels, logits.shape[1])
        sums[GRADIENTS + HEAD] += (slope.T @ slope).double()
    return sums


def _rows(module: nn.Module, inputs: Tensor) -> Tensor:
    """a of every image and place as rows, a last 1 where there is a bias"""
    inputs = inputs.float()
    if isinstance(module, nn.Conv2d):
        patches = F.unfold(inputs, module.kernel_size, module.dilation, module.padding, module.stride)  # type: ignore[arg-type]
        rows = patches.transpose(1, 2).flatten(0, 1)
    else:
        rows = inputs.flatten(0, -2)
    return rows if module.bias is None else torch.cat([rows, rows.new_ones(len(rows), 1)], dim=1)


def _fisher_sums(network: PrototypeNetwork, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """sum over images of (dl/dw)^2"""
    parameters = {name: tensor.detach() for name, tensor in network.named_parameters() if name != UNKNOWN}
    buffers = dict(network.named_buffers())

    def loss(parameters: dict[str, Tensor], image: Tensor, label: Tensor) -> Tensor:
        features = functional_call(network, (parameters, buffers), (image[None],))
        return F.cross_entropy(features @ parameters[HEAD].T, label[None])

    slopes = vmap(grad(loss), in_dims=(None, 0, 0))
    size = max(1, min(len(labels), MOST_GRADIENTS // sum(tensor.numel() for tensor in parameters.values())))
    sums = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in parameters.items()}
    try:
        for some, theirs in zip(inputs.split(size), labels.split(size), strict=True):
            for name, slope in slopes(parameters, some, theirs).items():
                sums[name] += slope.square().sum(0)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise TrainingError(
            f"upload.evidence=fisher does not work with this encoder ({reason}); leave it out"
        ) from None
    return {FISHER + name: total for name, total in sums.items()}
