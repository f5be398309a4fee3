"""The evidence in an upload: what a client measures of its finished network on its own images.

Measured once, in evaluation mode, on the images as they are (no augmentation), with the loss

    l(x, y) = cross-entropy of z P^T,    z = f(x)/|f(x)|

and means over the client's n images. A linear map is a linear or convolutional layer of the encoder, or the
prototypes: s = W a, with W `(outputs, inputs)` and, where the layer has a bias, a last column for it and a last 1 in a.
A convolution is the same W at every place t of the image, a_t the patch there.

    moments       mean and variance of z, each `(d,)`
    raw_moments   mean and variance of the raw feature f(x), each `(d,)`
    class_means   mean z of each class, `(C, d)`; zero where the client has no image of the class
    fisher        F = E[(dl/dw)^2] for every weight w (diagonal empirical Fisher)
    gram          A = E[sum_t a_t a_t^T] of every linear map: X^T X / n
    kronecker     A, and G = E[mean_t g_t g_t^T] with g_t = dl/ds_t: F of a layer is about A (x) G (K-FAC)
    unknown       the prototype u of the class "unknown", `(d,)`, which the term `open_set` trains
    density       of u = root(f(x)), the signed square root of the raw feature: the mean of each class `(C, d)`, the
                  covariance within classes, and mean and covariance over background images (`client.background`);
                  of the encoder's own features where a projection widens them to d

Symmetric matrices travel as their upper triangle, so whoever has `kronecker` also has `gram`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from oneflare.nn import PrototypeNetwork
from oneflare.nn.encoders import own_dim
from oneflare.upload.symmetric import (
    ROUNDING,
    SLACK,
    correlations,
    positive,
    products_complaint,
    triangle_size,
    unpack_symmetric,
)

EVIDENCE = {
    "moments": "mean and variance of the unit features",
    "raw_moments": "mean and variance of the raw features",
    "class_means": "mean unit feature of each class",
    "fisher": "diagonal empirical Fisher information of the weights",
    "gram": "second moments of what enters every linear map",
    "kronecker": "Kronecker factors of every linear map's Fisher information",
    "unknown": "prototype of the class unknown, where the objective has one",
    "density": "class means and covariance of the features, and the same of destroyed images",
}
IMPLIED = {"kronecker": "gram"}
"""what comes with it"""

LABELLED = ("class_means", "fisher", "kronecker", "density")
"""what is measured with the images' labels, so that it tells which classes there are"""

MEAN, VARIANCE, CLASS_MEANS = "moments.mean", "moments.variance", "class_means"
RAW_MEAN, RAW_VARIANCE = "raw_moments.mean", "raw_moments.variance"
FISHER, INPUTS, GRADIENTS = "fisher.", "inputs.", "gradients."
UNKNOWN = "unknown"
MEASURED = tuple(name for name in EVIDENCE if name != UNKNOWN)
"""what every trained network has"""
DENSITY = "density."
DENSITY_MEANS, WITHIN = "density.means", "density.within"
BACKGROUND_MEAN, BACKGROUND = "density.background_mean", "density.background"
FIELDS = {
    "moments.": "moments",
    "raw_moments.": "raw_moments",
    CLASS_MEANS: CLASS_MEANS,
    UNKNOWN: UNKNOWN,
    FISHER: "fisher",
    INPUTS: "gram",
    GRADIENTS: "kronecker",
    DENSITY: "density",
}
"""how tensors' names begin -> the evidence they are part of"""
HEAD = "prototypes"


def offers(names: Iterable[str]) -> frozenset[str]:
    """What uploads with this evidence hold."""
    names = set(names)
    return frozenset(names | {IMPLIED[name] for name in names & set(IMPLIED)})


def linear_maps(network: PrototypeNetwork) -> dict[str, nn.Module | None]:
    """Linear maps by name, the prototypes (no module of their own) last.

    Grouped convolutions and unusual paddings are not one matrix on patches, and are left out.
    """
    found: dict[str, nn.Module | None] = {}
    for name, module in network.encoder.named_modules():
        if isinstance(module, nn.Linear) or (isinstance(module, nn.Conv2d) and _plain(module)):
            found[f"encoder.{name}" if name else "encoder"] = module
    return {**found, HEAD: None}


def _plain(module: nn.Conv2d) -> bool:
    return module.groups == 1 and module.padding_mode == "zeros" and not isinstance(module.padding, str)


def map_shape(network: PrototypeNetwork, module: nn.Module | None) -> tuple[int, int]:
    """(outputs, inputs) of W, a bias counted as one more input"""
    weight = network.prototypes if module is None else module.weight
    assert isinstance(weight, Tensor)
    return len(weight), weight[0].numel() + int(module is not None and module.bias is not None)


def map_matrix(state: Mapping[str, Tensor], name: str) -> Tensor:
    """W of a linear map from the network's state, float64."""
    if name == HEAD:
        return state[HEAD].double()
    weight, bias = state[f"{name}.weight"].double().flatten(1), state.get(f"{name}.bias")
    return weight if bias is None else torch.cat([weight, bias.double()[:, None]], dim=1)


def map_state(matrix: Tensor, name: str, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inverse of `map_matrix`: the tensors of the state that W fills."""
    if name == HEAD:
        return {HEAD: matrix}
    weight = like[f"{name}.weight"]
    inputs = weight[0].numel()
    filled = {f"{name}.weight": matrix[:, :inputs].reshape(weight.shape)}
    return filled | ({f"{name}.bias": matrix[:, inputs]} if f"{name}.bias" in like else {})


def layout(network: PrototypeNetwork, names: Iterable[str]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors that an upload with this evidence holds."""
    classes, dim = network.prototypes.shape
    offered = offers(names)
    shapes: dict[str, tuple[int, ...]] = {}
    if "moments" in offered:
        shapes |= {MEAN: (dim,), VARIANCE: (dim,)}
    if "raw_moments" in offered:
        shapes |= {RAW_MEAN: (dim,), RAW_VARIANCE: (dim,)}
    if "class_means" in offered:
        shapes[CLASS_MEANS] = (classes, dim)
    if "fisher" in offered:
        shapes |= {FISHER + name: tuple(tensor.shape) for name, tensor in network.named_parameters()}
    if UNKNOWN in offered:
        shapes[UNKNOWN] = (dim,)
    if "density" in offered:
        own = own_dim(network.encoder, dim)
        triangular = (triangle_size(own),)
        shapes |= {DENSITY_MEANS: (classes, own), WITHIN: triangular, BACKGROUND_MEAN: (own,), BACKGROUND: triangular}
    for name, module in linear_maps(network).items():
        outputs, inputs = map_shape(network, module)
        if "gram" in offered:
            shapes[INPUTS + name] = (triangle_size(inputs),)
        if "kronecker" in offered:
            shapes[GRADIENTS + name] = (triangle_size(outputs),)
    return shapes


ROOT_LIMIT = 1e3
"""largest entry of the root of a feature: no entry of an honest network's feature is beyond its square"""
FEATURE_LIMIT = ROOT_LIMIT**2
MOST = {
    FISHER + HEAD: 1.0,
    INPUTS + HEAD: 1.0,
    GRADIENTS + HEAD: 2.0,
    DENSITY_MEANS: ROOT_LIMIT,
    BACKGROUND_MEAN: ROOT_LIMIT,
    RAW_MEAN: FEATURE_LIMIT,
    RAW_VARIANCE: FEATURE_LIMIT**2,
}
"""Largest number, or sum of the diagonal: features z have length one, and |p - y|^2 <= 2 for probabilities p."""


def complaint(tensors: Mapping[str, Tensor], counts: Tensor | None) -> str | None:
    """What no network and no images could give, in evidence whose names, shapes and types are right; else None.

    The values are known to be finite. counts: of the classes, or None where they were withheld.
    """
    for name, tensor in tensors.items():
        if name == UNKNOWN:
            reason = _too_large(float(tensor.abs().max()), FEATURE_LIMIT)
        elif name.startswith((INPUTS, GRADIENTS)) or name in (WITHIN, BACKGROUND):
            matrix = unpack_symmetric(tensor)
            most = len(matrix) * ROOT_LIMIT**2 if name in (WITHIN, BACKGROUND) else MOST.get(name)
            reason = _factor_complaint(matrix, most)
        elif name in (DENSITY_MEANS, BACKGROUND_MEAN, RAW_MEAN):
            reason = _too_large(float(tensor.abs().max()), MOST[name])
        elif name in (VARIANCE, RAW_VARIANCE) or name.startswith(FISHER):
            negative = bool((tensor < 0).any())
            reason = "has a negative number" if negative else _too_large(float(tensor.max()), MOST.get(name))
        else:
            longest = float(tensor.double().norm(dim=-1).max())
            reason = "is longer than a mean of unit features can be" if longest > 1 + SLACK else None
        if reason is not None:
            return f"{name} {reason}"
    for name in {CLASS_MEANS, DENSITY_MEANS} & set(tensors):
        if counts is not None and bool((tensors[name][counts == 0] != 0).any()):
            return f"{name} has a mean of a class without images"
    if MEAN in tensors and VARIANCE in tensors:
        square = float(tensors[MEAN].double().square().sum() + tensors[VARIANCE].double().sum())
        if square > 1 + SLACK:
            return f"{VARIANCE} and {MEAN} belong to features of mean square {square:.3g}, where unit features have 1"
    return None


def _factor_complaint(matrix: Tensor, most: float | None) -> str | None:
    """Of a matrix of second moments, which has no negative eigenvalue."""
    impossible = products_complaint(matrix, "square", "product")
    if impossible is not None:
        return f"has {impossible}"
    if not positive(correlations(matrix), SLACK + 4 * ROUNDING * len(matrix)):
        return "is not positive semidefinite, which second moments are"
    return _too_large(float(matrix.trace()), most)


def _too_large(value: float, most: float | None) -> str | None:
    if most is None or value <= (1 + SLACK) * most:
        return None
    return f"reaches {value:.3g}, where honest features allow {most:g}"
