"""Fusion that reorders the clients' neurons to match each other before it averages them."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from oneflare.errors import ConfigError
from oneflare.fusion.averaging.channels import FIXED, PROTOTYPES, Channels
from oneflare.fusion.base import FUSIONS, Fused, Fusion, UploadSet
from oneflare.fusion.workspace import QUIET, Workspace
from oneflare.models.base import SingleModel
from oneflare.upload import Upload

State = dict[str, Tensor]
"""the encoder's state and the prototypes"""
Orders = dict[int, Tensor]
"""group of channels -> which of the client's channels takes each place"""


def best_order(similarity: Tensor) -> Tensor:
    """The permutation p that maximises sum_a S[a, p(a)]; `(n, n)` -> `(n,)`

    Optimal transport between two layers of n neurons with equal masses has a permutation among its optima (Birkhoff),
    so the plan of Singh and Jaggi (2020) is found exactly as an assignment.
    """
    from scipy.optimize import linear_sum_assignment

    return torch.from_numpy(linear_sum_assignment(similarity.numpy(), maximize=True)[1])


def similarity(
    reference: Mapping[str, Tensor],
    client: Mapping[str, Tensor],
    channels: Channels,
    group: int,
    orders: Orders,
    names: Iterable[str],
) -> Tensor:
    """S[a, b] = sum over the named tensors of <reference's slice a, client's slice b>, `(n, n)` float64

    The client's other axes are brought into the reference's order first. Maximising S over permutations minimises the
    squared distance of the two networks' weights. Tensors with an axis whose order is not yet known are left out.
    """
    size = channels.size(group)
    total = torch.zeros(size, size, dtype=torch.float64)
    for name in names:
        own = channels.of_tensor(name)
        for axis in (axis for axis, other in own.items() if other == group):
            others = {at: other for at, other in own.items() if at != axis and other != FIXED}
            if any(other not in orders for other in others.values()):
                continue
            tensor = client[name].double()
            for at, other in others.items():
                tensor = tensor.index_select(at, orders[other])
            rows = reference[name].double().movedim(axis, 0).reshape(size, -1)
            total += rows @ tensor.movedim(axis, 0).reshape(size, -1).T
    return total


def match(
    reference: Mapping[str, Tensor], client: Mapping[str, Tensor], channels: Channels, parameters: set[str], sweeps: int
) -> Orders:
    """Orders of all groups: layer by layer by incoming weights, then `sweeps` over all weights that touch a group."""
    touching = {
        group: sorted({axis.tensor for axis in channels.axes(group)} & (parameters | {PROTOTYPES}))
        for group in channels
    }
    orders: Orders = {}
    for group in channels:
        incoming = {axis.tensor for axis in channels.axes(group) if axis.axis == 0 or axis.tensor == PROTOTYPES}
        names = [name for name in touching[group] if name in incoming]
        orders[group] = best_order(similarity(reference, client, channels, group, orders, names))
    for _ in range(sweeps):
        changed = False
        for group in channels:
            scores = similarity(reference, client, channels, group, orders, touching[group])
            order = best_order(scores)
            rows = torch.arange(len(order))
            now, best = (float(scores[rows, o].sum()) for o in (orders[group], order))
            if best - now > 1e-9 * abs(best):
                orders[group], changed = order, True
        if not changed:
            break
    return orders


def reordered(state: Mapping[str, Tensor], channels: Channels, orders: Orders) -> State:
    """The same function with its channels in another order."""
    result = dict(state)
    for name in state:
        for axis, group in channels.of_tensor(name).items():
            if group != FIXED:
                result[name] = result[name].index_select(axis, orders[group])
    return result


@FUSIONS.register("otfusion")
class TransportFusion(Fusion):
    """OTFusion: every client's neurons matched to the largest client's, then averaged by size

    Layer by layer the order T of the client's channels that transports its incoming weights to the reference's at the
    least squared distance; then, up to `sweeps` times, each group again by all weights that touch it. Channels that
    are added to each other share one order. The weights, the batch-norm statistics and the columns of the prototypes
    follow (Singh and Jaggi 2020; several layers at once as in Ainsworth et al. 2023).
    """

    single_network = True

    def __init__(self, *, sweeps: int = 10) -> None:
        if sweeps < 0:
            raise ConfigError(f"fusion otfusion.sweeps: must be at least 0 (got {sweeps})")
        self.sweeps = sweeps

    def fuse(self, uploads: UploadSet, workspace: Workspace = QUIET) -> Fused:
        network = copy.deepcopy(uploads.template)
        channels = Channels(network.encoder)
        parameters = {name for name, _ in network.encoder.named_parameters()}
        shares = uploads.size_weights
        largest = int(shares.argmax())
        reference = _state(uploads.uploads[largest])
        total: State = {}
        for index, (share, upload) in enumerate(zip(shares, uploads, strict=True)):
            state = reference
            if index != largest:
                state = _state(upload)
                orders = match(reference, state, channels, parameters, self.sweeps)
                state = reordered(state, channels, orders)
            for name, tensor in state.items():
                part = share * tensor.double()
                total[name] = part if name not in total else total[name] + part
        with torch.no_grad():
            network.prototypes.copy_(total.pop(PROTOTYPES))
            for name, tensor in network.encoder.state_dict().items():
                tensor.copy_(total[name])
        return Fused(SingleModel(uploads.task, network))


def _state(upload: Upload) -> State:
    assert upload.prototypes is not None
    return {**upload.weights(), PROTOTYPES: upload.prototypes}
