"""Measures the statistics of `oneflare.upload.statistics` on a client's images and adds the agreed noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from oneflare.client.job import ClientJob
from oneflare.client.mixtures import fit_mixtures
from oneflare.core.noise import Words, discrete_gaussian
from oneflare.core.privacy import FINEST, Privacy
from oneflare.core.threads import idle_cores, in_threads
from oneflare.data import ClientData
from oneflare.errors import TrainingError
from oneflare.nn import FeatureMap, build_feature_map
from oneflare.nn.decorrelation import Decorrelation
from oneflare.upload.blocks import apart, joined
from oneflare.upload.class_statistics import pack_classes
from oneflare.upload.coding import coded, coded_products, coder_of
from oneflare.upload.contract import scatter_room
from oneflare.upload.factors import pack_factor, pays
from oneflare.upload.masking.fixed_point import FIXED, FixedPoint, to_vector
from oneflare.upload.mixtures import pack_mixtures
from oneflare.upload.statistics import (
    CLASS_COVARIANCES,
    COUNTS,
    COVARIANCE,
    MIXTURES,
    SCALE,
    SCATTER,
    SUMS,
    Plan,
    Statistics,
    pack,
    scatter_around_mean,
)
from oneflare.upload.symmetric import mirrored_, symmetric
from oneflare.upload.whole import WholeFeatures, pack_whole

BLOCK = 512
"""images whose features are in memory at a time"""


STRIP = 256
"""rows of G that are updated at a time"""


SHORT = 2048
"""images over which products are added up in float32, where that is precise enough, before they are in float64"""


NOT_FINITE = "the features are not finite; check the client's images for NaN or infinite pixels"


Watch = Callable[[int], None]
"""is told how many images have been measured"""


def unwatched(images: int) -> None:
    """Nobody is told."""


def client_statistics(job: ClientJob, data: ClientData, watch: Watch = unwatched) -> dict[str, Tensor] | None:
    """The packed statistics of a client's images, noised if the federation agreed on that; None if it sends none."""
    plan, fixed = job.contract.statistics, job.contract.fixed
    image, classes = job.contract.image, len(job.contract.classes)
    if plan is None:
        return None if fixed is None else {FIXED: counted(data.labels, classes)}
    features = build_feature_map(plan.feature_map, image.channels, image.size, plan.bound)
    if fixed is not None:
        found = measure_fixed(features, data.images, data.labels, classes, fixed)
        return {FIXED: to_vector(found.counts, found.sums, found.gram)}
    if plan.privacy is None:
        if plan.whole:
            return _rounded_images(job, features, data, watch)
        if plan.coded and not (plan.factors and pays(len(data), plan.blocks)):
            return _sums_in_code(job, upper_sums(features, data, classes, plan.blocks, watch, torch.float32))
        packed = exact_statistics(plan, features, data, classes, watch)
        return _in_code(job, packed) if plan.coded else packed
    exact = measure_on_lattice(features, data.images, data.labels, classes, plan.privacy)
    return _agreed(pack(privatise(exact, plan.privacy, job.noise("statistics")), plan.dtype), plan)


def _in_code(job: ClientJob, packed: dict[str, Tensor]) -> dict[str, Tensor]:
    """The packed statistics in the agreed code, within the agreed size, of which every block has its share."""
    plan, room, coders = _code(job)
    parts = zip(apart(packed, plan.blocks), coders, strict=True)
    return joined([coded(part, coder, plan.dtype, room) for part, coder in parts])


def _sums_in_code(job: ClientJob, found: Sequence[Statistics]) -> dict[str, Tensor]:
    """The same of the sums of each block, of whose G the upper triangle is given."""
    plan, room, coders = _code(job)

    def packed(own: Statistics, coder: Decorrelation) -> dict[str, Tensor]:
        words = coded_products(scatter_around_mean(own, torch.float32), int(own.samples), coder, plan.dtype, room)
        return {SUMS: own.sums.float(), COUNTS: own.counts.long(), SCATTER: words}

    return joined(in_threads(packed, found, coders))


def _rounded_images(job: ClientJob, features: FeatureMap, data: ClientData, watch: Watch) -> dict[str, Tensor]:
    """The sums of features that are rounded for each image, packed without loss."""
    plan, image, limit = job.contract.statistics, job.contract.image, job.experiment.upload.limit
    assert plan is not None
    classes = len(job.contract.classes)
    rounded = WholeFeatures(features, coder_of(plan.feature_map, image.channels, image.size))
    found = upper_sums(rounded, data, classes, plan.blocks, watch, torch.float32)
    try:
        packed = joined(in_threads(pack_whole, found))
    except ValueError as error:
        raise TrainingError(f"{error}; set upload.statistics_dtype=float32 for all members") from None
    used = sum(8 * tensor.numel() for name, tensor in packed.items() if name.startswith(SCATTER))
    if limit is not None and used > scatter_room(limit, plan.dim, classes):
        over = used - scatter_room(limit, plan.dim, classes)
        raise TrainingError(
            f"upload.limit: the whole sums of these {len(data)} images are {over / limit:.1%} larger than the limit; "
            f"all members must agree on a larger upload.limit, or on fewer features (there are {plan.dim})"
        )
    return packed


def _code(job: ClientJob) -> tuple[Plan, int | None, list[Decorrelation]]:
    """The plan, the bytes that the code of a block may have, and the change of features in each block."""
    plan, image, limit = job.contract.statistics, job.contract.image, job.experiment.upload.limit
    assert plan is not None
    sizes = plan.blocks
    room = None if limit is None else scatter_room(limit, plan.dim, len(job.contract.classes)) // len(sizes)
    return plan, room, coder_of(plan.feature_map, image.channels, image.size).apart(sizes)


def exact_statistics(
    plan: Plan, features: FeatureMap, data: ClientData, classes: int, watch: Watch = unwatched
) -> dict[str, Tensor]:
    """The packed statistics that the plan names, without noise.

    Class covariances, mixtures and the factor of few images are measured around means and in several passes, so all
    features of the client are in memory for them; the rest is streamed.
    """
    if plan.factors and pays(len(data), plan.blocks):
        phi = torch.cat([features(block) for block in data.images.split(BLOCK)])
        if not bool(torch.isfinite(phi).all()):
            raise TrainingError(NOT_FINITE)
        watch(len(data))
        return joined([pack_factor(part, data.labels, classes) for part in phi.split(list(plan.blocks), 1)])
    if not {CLASS_COVARIANCES, MIXTURES} & set(plan.parts):
        if COVARIANCE in plan.parts:
            found = measure_blocks(features, data, classes, plan.blocks, watch)
            return joined([pack(statistics, plan.dtype) for statistics in found])
        return measure_means(features, data.images, data.labels, classes)
    phi = torch.cat([features(block) for block in data.images.split(BLOCK)])
    if not bool(torch.isfinite(phi).all()):
        raise TrainingError(NOT_FINITE)
    packed = _of_features(plan, phi, data.labels, classes)
    if CLASS_COVARIANCES in plan.parts:
        packed |= pack_classes(phi, data.labels, classes, plan.dtype)
    if MIXTURES in plan.parts:
        packed |= pack_mixtures(fit_mixtures(phi, data.labels, classes, plan.components))
    return packed


def _agreed(packed: dict[str, Tensor], plan: Plan) -> dict[str, Tensor]:
    """Without the covariances that the plan does not name."""
    left_out = () if COVARIANCE in plan.parts else (SCATTER, SCALE)
    return {name: tensor for name, tensor in packed.items() if name not in left_out}


def measure_means(features: FeatureMap, images: Tensor, labels: Tensor, classes: int) -> dict[str, Tensor]:
    """The packed sums and counts of each class, streamed."""
    sums = torch.zeros(classes, features.dim, dtype=torch.float64)
    for start in range(0, len(images), BLOCK):
        sums.index_add_(0, labels[start : start + BLOCK], features(images[start : start + BLOCK]).double())
    if not bool(torch.isfinite(sums).all()):
        raise TrainingError(NOT_FINITE)
    return {SUMS: sums.float(), COUNTS: torch.bincount(labels, minlength=classes)}


def _of_features(plan: Plan, phi: Tensor, labels: Tensor, classes: int) -> dict[str, Tensor]:
    """The packed sums and counts of features `(n, D)`, with G where the plan names it."""
    wide = phi.double()
    sums = torch.zeros(classes, phi.shape[1], dtype=torch.float64).index_add_(0, labels, wide)
    counts = torch.bincount(labels, minlength=classes)
    if COVARIANCE not in plan.parts:
        return {SUMS: sums.float(), COUNTS: counts}
    return pack(Statistics(wide.T @ wide, sums, counts.double()), plan.dtype)


def measure(
    features: FeatureMap,
    images: Tensor,
    labels: Tensor,
    classes: int,
    watch: Watch = unwatched,
    products: torch.dtype = torch.float64,
) -> Statistics:
    """Statistics of some images, streamed: G of all features. See `measure_blocks`."""
    data = ClientData(images, labels, torch.bincount(labels, minlength=classes))
    return measure_blocks(features, data, classes, (features.dim,), watch, products)[0]


def measure_blocks(
    features: FeatureMap,
    data: ClientData,
    classes: int,
    sizes: Sequence[int],
    watch: Watch = unwatched,
    products: torch.dtype = torch.float64,
) -> list[Statistics]:
    """Statistics of some images in each block of features; the rest as in `upper_sums`."""
    totals = upper_sums(features, data, classes, sizes, watch, products)
    return [Statistics(mirrored_(total.gram.double()), total.sums, total.counts) for total in totals]


def upper_sums(
    features: Callable[[Tensor], Tensor],
    data: ClientData,
    classes: int,
    sizes: Sequence[int],
    watch: Watch = unwatched,
    products: torch.dtype = torch.float64,
) -> list[Statistics]:
    """Statistics of some images in each block of features, streamed; of G the upper triangle alone counts.

    Features are float32, all sums float64. Memory: G of the blocks and the features of some images.
    sizes: of the blocks, one after the other
    products: the numbers in which products are added up (`UpperProducts`). float32 is faster, and precise enough for
    sums that are rounded far more coarsely when they are sent; G of fewer images is then left in float32
    """
    grams = [UpperProducts(size, products) for size in sizes]
    sums = torch.zeros(classes, sum(sizes), dtype=torch.float64)
    for start in range(0, len(data.images), BLOCK):
        images, labels = data.images[start : start + BLOCK], data.labels[start : start + BLOCK]
        phi = _in_halves(features, images)
        sums.index_add_(0, labels, phi.double())
        in_threads(UpperProducts.add, grams, phi.split(list(sizes), 1))
        watch(start + len(labels))
    if not bool(torch.isfinite(sums).all()):
        raise TrainingError(NOT_FINITE)
    counts = torch.bincount(data.labels, minlength=classes).double()
    parts = zip(grams, sums.split(list(sizes), 1), strict=True)
    return [Statistics(gram.total(), own.contiguous(), counts) for gram, own in parts]


def _in_halves(features: Callable[[Tensor], Tensor], images: Tensor) -> Tensor:
    """The features of images, each part of them in a thread of its own where cores are idle."""
    threads = idle_cores()
    if threads == 1:
        return features(images)
    return torch.cat(in_threads(features, images.split(-(-len(images) // threads))))


class UpperProducts:
    """The upper triangle of G = sum phi phi^T: in float64, or in float32 over `SHORT` images at a time."""

    def __init__(self, dim: int, dtype: torch.dtype) -> None:
        self.recent = torch.zeros(dim, dim, dtype=dtype)
        self.images = 0
        self.earlier: Tensor | None = None
        """float64: the products of images before the recent ones"""

    def add(self, phi: Tensor) -> None:
        """phi: features `(n, D)`"""
        if self.recent.dtype == torch.float32 and self.images >= SHORT:
            self.earlier = self.total()
            self.recent.zero_()
            self.images = 0
        phi = phi.to(self.recent.dtype)
        for row in range(0, phi.shape[1], STRIP):  # strip by strip
            self.recent[row : row + STRIP, row:].addmm_(phi[:, row : row + STRIP].T, phi[:, row:])
        self.images += len(phi)

    def total(self) -> Tensor:
        """`(D, D)`, float32 where these are few images; what lies below the triangle does not count."""
        if self.earlier is not None:
            return self.earlier.add_(self.recent)
        return self.recent.double() if self.images >= SHORT else self.recent


@dataclass(frozen=True)
class LatticeSums:
    """The sums that noise is added to: whole numbers, added up without rounding, int64."""

    gram: Tensor
    """`(D, D)` upper triangle of G, in steps of (B/2^q)^2"""
    sums: Tensor
    """`(C, D)` rows b_c, in steps of B/2^q"""
    counts: Tensor
    """`(C,)` n_c"""


def measure_on_lattice(
    features: FeatureMap, images: Tensor, labels: Tensor, classes: int, privacy: Privacy
) -> LatticeSums:
    """The sums of images whose features are clipped to norm B and cut to whole multiples of B/2^q.

    One image's features come from that image alone: in a batch, rounding may depend on its neighbours, and then
    replacing one image would change others as well.
    """

    def whole(block: Tensor) -> Tensor:
        return on_lattice(torch.cat([features(image[None]) for image in block]), privacy)

    return _whole_sums(whole, images, labels, (features.dim, classes))


def measure_fixed(features: FeatureMap, images: Tensor, labels: Tensor, classes: int, fixed: FixedPoint) -> LatticeSums:
    """The sums of images whose features are rounded to fixed point."""
    return _whole_sums(lambda block: fixed.round(features(block)), images, labels, (features.dim, classes))


def counted(labels: Tensor, classes: int) -> Tensor:
    """n_c `(C,)` int64"""
    return torch.bincount(labels, minlength=classes)


def _whole_sums(
    whole: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor, shape: tuple[int, int]
) -> LatticeSums:
    """whole: images -> features in whole steps, float64; shape: (D, C)"""
    dim, classes = shape
    shapes = (dim, dim), (classes, dim), (classes,)
    total = LatticeSums(*(torch.zeros(size, dtype=torch.int64) for size in shapes))
    for start in range(0, len(images), BLOCK):
        phi = whole(images[start : start + BLOCK])
        y = labels[start : start + BLOCK]
        total.counts.add_(counted(y, classes))
        total.sums.index_add_(0, y, phi.long())
        for row in range(0, dim, STRIP):  # whole numbers below 2^53: exact in any order of adding
            total.gram[row : row + STRIP, row:].add_((phi[:, row : row + STRIP].T @ phi[:, row:]).long())
    return total


def on_lattice(phi: Tensor, privacy: Privacy) -> Tensor:
    """Features `(n, D)` as whole numbers of steps B/2^q, float64, of norm at most 2^q: cut towards zero."""
    if not bool(torch.isfinite(phi).all()):
        raise TrainingError(NOT_FINITE)
    steps = 2.0**privacy.bits
    scaled = phi.double() / privacy.clip
    shorten = (1 / scaled.norm(dim=1, keepdim=True).clamp(min=1e-30)).clamp(max=1) * (1 - 2.0**-40)
    whole: Tensor = (scaled * shorten * steps).trunc()
    if bool((whole.long().square().sum(1) > int(steps) ** 2).any()):
        raise TrainingError("a feature is longer than statistics_clip allows; choose another statistics_clip")
    return whole


def privatise(sums: LatticeSums, privacy: Privacy, words: Words) -> Statistics:
    """Discrete Gaussian noise on (G/B^2, b/B, n/2), whose joint sensitivity `Privacy` bounds; G stays symmetric.

    An off-diagonal entry of G stands twice in the Frobenius norm, so its noise has half the variance.
    """
    bound, step = privacy.clip, 2.0**privacy.bits
    dim = len(sums.gram)

    def noise(shape: tuple[int, ...], size: float) -> Tensor:
        number = int(torch.Size(shape).numel())
        return torch.from_numpy(discrete_gaussian(number, privacy.steps(size), words)).view(shape)

    upper = sums.gram.triu()
    rows, columns = torch.triu_indices(dim, dim, 1)
    upper[rows, columns] += noise((len(rows),), step**2 / 2**0.5)
    upper.diagonal().add_(noise((dim,), step**2))
    finer = 1 << FINEST  # counts in steps of 2^-20, so that their noise is as good as continuous
    counts = (sums.counts * finer + noise(tuple(sums.counts.shape), 2 * finer)).double() / finer
    return Statistics(
        symmetric(upper.double() * (bound / step) ** 2),
        (sums.sums + noise(tuple(sums.sums.shape), step)).double() * (bound / step),
        counts.round().clamp(min=0),
    )
