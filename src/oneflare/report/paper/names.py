"""What a paper calls methods, servers, data sets and networks, and which publication it cites for them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from oneflare.errors import ConfigError
from oneflare.methods.recipes import find_method
from oneflare.study.records import RowResult

METHODS = {
    "fedavg": "FedAvg",
    "ensemble": "Ensemble",
    "fedprox": "FedProx",
    "fedetf": "FedETF",
    "fafi": "FAFI",
    "flare": "FLARE",
    "fedsra": "FedSRA",
    "fedov": "FedOV",
    "afl": "AFL",
    "analytic": "Analytic",
    "flare_analytic": "FLARE + analytic",
    "drcl": "random-fixed",
    "etf_annealed": "ETF-annealed",
}
"""by the name of the recipe; others go by that name, with hyphens"""
UNDER_SERVER = {
    ("fedavg", "ensemble"): "Ensemble",
    ("fedavg", "coboosting"): "Co-Boosting",
    ("fedavg", "laplace"): "FedLPA",
}
"""published methods whose clients train as FedAvg's do, by recipe and fusion"""
SERVERS = {
    "average": "mean of weights",
    "ensemble": "mean probability",
    "coboosting": "distilled network",
    "laplace": "Laplace posteriors",
    "open_set_votes": "open-set votes",
    "standardised_raw": "standardised by client",
    "standardised_batch": "standardised by batch",
    "feature_mean": "mean of features",
    "count_prototypes": "counted prototypes",
    "density_ratio": "density ratio",
    "iffi": "IFFI",
    "afl": "least squares",
    "analytic": "closed form",
    "flare_analytic": "combined",
}
"""by the name of the fusion; others go by that name, with spaces"""
DATA = {
    "digits": "Digits",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "svhn": "SVHN",
    "tiny-imagenet": "Tiny-ImageNet",
}
ENCODERS = {
    "conv4": "a network of four convolutions",
    "resnet8": "a ResNet-8",
    "resnet18": "a ResNet-18",
}
CITED = {
    "FedAvg": "mcmahan2017",
    "Ensemble": "guha2019",
    "FAFI": "zeng2025",
    "FedSRA": "fedsra",
    "FedOV": "diao2023",
    "Co-Boosting": "dai2024",
    "FedLPA": "liu2024",
    "AFL": "he2025",
}
"""keys of `references.bib` by the name of a method"""
NUMBER = re.compile(r"\bV\d+(?:\.\d+)?(?:-[A-Za-z]+)?\b")
"""a version number of the research log, which readers of a paper do not know"""
IN_BRACKETS = re.compile(rf"\s*\(({NUMBER.pattern})\)")


def recipe_name(method: str) -> str:
    """Of a recipe: `FAFI`, `meta-annealed`."""
    return METHODS.get(method, method.replace("_", "-"))


def method_name(row: RowResult) -> str:
    """Of a row: the published name of its recipe and server, or its label without version numbers."""
    pair = UNDER_SERVER.get((row.method, row.fusion))
    if pair is not None:
        return pair
    label = row.label.removesuffix(f", {row.fusion}") if row.id != row.arm else row.label
    if label in (row.arm, row.method):
        return recipe_name(row.method)
    if label.startswith("ours: "):
        label = f"{label.removeprefix('ours: ')} (ours)"
    return without_numbers(label)


def server_name(fusion: str) -> str:
    return SERVERS.get(fusion, fusion.replace("_", " "))


def data_name(data: str) -> str:
    return DATA.get(data, data)


def in_words(text: str) -> str:
    """The text with names of methods and servers instead of version numbers and of what the code calls fusions."""
    for fusion in SERVERS:
        if "_" in fusion:
            text = re.sub(rf"\b{fusion}\b", SERVERS[fusion], text)
    return without_numbers(text)


def without_numbers(text: str) -> str:
    """The text with the log's version numbers replaced by names; in brackets they go where the name was just said."""

    def in_brackets(found: re.Match[str]) -> str:
        name = _named(found.group(1))
        said = text[: found.start()].lower()
        return "" if name is not None and name.lower() in said else f" ({name or found.group(1)})"

    return NUMBER.sub(lambda found: _named(found.group()) or found.group(), IN_BRACKETS.sub(in_brackets, text))


def _named(number: str) -> str | None:
    try:
        return recipe_name(find_method(number).name)
    except ConfigError:
        return None


def citations(names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """The names that have a publication, each with its key, once, in the order in which they come."""
    for name in dict.fromkeys(names):
        if name in CITED:
            yield name, CITED[name]
