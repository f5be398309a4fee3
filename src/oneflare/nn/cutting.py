"""Cuts a pretrained network in two at one of its modules: a trunk that stays frozen, and a tail that clients train.

    network(x) = tail(trunk(x))

The cut lies before a module that has a name, such as `blocks.15`; `last` stands for the last block. Only the forward
functions of the modules around it are traced (`torch.fx`); every other module is taken as it is.
"""

from __future__ import annotations

from typing import Any

from torch import fx, nn

from oneflare.errors import ConfigError, did_you_mean

LAST = "last"
CONTAINERS = (nn.Sequential, nn.ModuleList)
LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.MultiheadAttention)
TUNABLE = "leave it frozen, or take efficientnet_lite0, a network of torchvision or timm, or your own nn.Module"
SHOWN = 6
"""names of modules that an error lists"""


def cut_name(network: nn.Module, tune: str, what: str) -> str:
    """The name of the module that a tail begins with. tune: that name, or `last`; what: the network, for errors"""
    if next(network.parameters(), None) is None:
        raise ConfigError(f"backbone.tune: {what} has no weights that could be trained; {TUNABLE}")
    if tune != LAST:
        names = [name for name, _ in network.named_modules() if name]
        if tune not in names:
            raise ConfigError(f"backbone.tune: {what} has no module '{tune}'{did_you_mean(tune, names)}")
        return tune
    blocks = _blocks(network)
    if not blocks:
        names = [name for name, module in network.named_modules() if isinstance(module, LAYERS)][-SHOWN:]
        raise ConfigError(
            f"backbone.tune=last: {what} has no list of blocks; name the module from which on it is trained"
            + (f", such as {', '.join(names)}" if names else "")
        )
    return blocks[-1]


def _blocks(network: nn.Module, name: str = "", *, listed: bool = False) -> list[str]:
    """Names of the elements of lists of modules that hold at least two layers themselves, outermost and in order."""
    container = isinstance(network, CONTAINERS)
    if listed and not container and sum(isinstance(module, LAYERS) for module in network.modules()) > 1:
        return [name]
    found = []
    for own, module in network.named_children():
        found += _blocks(module, f"{name}.{own}" if name else own, listed=container)
    return found


class _Around(fx.Tracer):
    """Traces the modules around one module, and nothing inside it or beside it."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        del m
        return not self.name.startswith(module_qualified_name + ".")


def cut(network: nn.Module, tune: str, what: str) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Trunk and tail as for `cut_name`; their modules are the network's own, not copies of them."""
    name = cut_name(network, tune, what)
    try:
        graph = _Around(name).trace(network)
    except Exception as error:  # forward functions that follow their numbers cannot be traced, in many ways
        reason = str(error).strip().splitlines()[0][:120] if str(error).strip() else type(error).__name__
        raise ConfigError(f"backbone.tune: {what} cannot be cut at {name} ({reason}); {TUNABLE}") from None
    calls = [node for node in graph.nodes if node.op == "call_module" and node.target == name]
    if len(calls) != 1 or len(calls[0].all_input_nodes) != 1:
        raise ConfigError(f"backbone.tune: {what} does not call {name} once with one input; choose another module")
    before = calls[0].all_input_nodes[0]
    (images,) = [node for node in graph.nodes if node.op == "placeholder"][:1]
    if before is images:
        raise ConfigError(
            f"backbone.tune: {what} begins with {name}, so that nothing would be frozen; choose a later one"
        )
    (output,) = [node for node in graph.nodes if node.op == "output"]
    trunk = _part(network, graph, images, before)
    tail = _part(network, graph, before, output.args[0])
    if tail is None or trunk is None:
        raise ConfigError(f"backbone.tune: {what} goes around {name} as well as through it; choose another module")
    return trunk, tail


def _part(network: nn.Module, graph: fx.Graph, start: fx.Node, end: Any) -> fx.GraphModule | None:
    """The part of a network that computes one node from another; None where it needs the images as well."""
    part = fx.Graph()
    copied = {start: part.placeholder("x")}
    for node in graph.nodes:
        if node in _needed(start, end):
            if node.op == "placeholder":
                return None
            copied[node] = part.node_copy(node, lambda old: copied[old])
    part.output(copied[end])
    return fx.GraphModule(network, part)


def _needed(start: fx.Node, end: fx.Node) -> set[fx.Node]:
    """What must be computed to get from one node to another, without the first."""
    found: set[fx.Node] = set()
    waiting = [end]
    while waiting:
        node = waiting.pop()
        if node is not start and node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found
