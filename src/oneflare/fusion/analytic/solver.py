"""The closed-form head of `analytic`: solved from summed statistics, ridge and temperature chosen without data.

Features are centred and divided by their deviations, both from the summed statistics, so that their covariance is the
correlation matrix K; classes have prior p, means M `(D, C)`, and y is the centred one-hot label.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from oneflare.core.seeds import torch_generator
from oneflare.errors import UploadError
from oneflare.fusion.analytic.calibration import inverse_temperature, simulated_scores
from oneflare.upload.statistics import Statistics
from oneflare.upload.symmetric import positive

RIDGES: tuple[float, ...] = tuple(10.0 ** (e / 4) for e in range(-16, 9))
MIDDLE = 10
"""of the ridges, where a search begins: 10^-1.5"""
FACTORED_FROM = 3000
"""features from which on a factorisation per ridge is faster than a spectrum"""
SINGLE_PRECISION = 2000 * 2.0**-24
"""of the length of K: from there on what rounding adds to its eigenvalues hides the error of single precision"""
PROBES = 64
"""random vectors that estimate a trace"""
CAUTION = 0.65
"""what is left of the inverse temperature because classes also differ in shape; measured, see docs/analytic.md"""
NEVER = -1e4
"""logit of a class without a single image"""


@dataclass(frozen=True)
class LinearClassifier:
    """logits = phi W + bias"""

    weight: Tensor
    """`(D, C)` float32"""
    bias: Tensor
    """`(C,)` float32"""
    ridge: float
    cosine: float = 1.0
    """between scores of left-out images and their labels, by `Correlations.criterion`"""
    spread: float = 1.0
    """of the scores of left-out images around their mean over classes, root mean square"""
    shares: tuple[float, ...] = ()
    """of a committee: the weight of each member"""


class Correlations:
    """K and the covariance of features and labels, from summed statistics; how (K + r)^-1 is had, subclasses say."""

    def __init__(self, statistics: Statistics, rounding: float = 0.0, blurred: float = 0.0) -> None:
        """rounding: the variance that rounding added to each entry of G

        blurred: the variance that rounding each image added to its features, which the model asks without it
        """
        self.n = statistics.samples
        self.present = statistics.counts > 0
        if not bool(self.present.any()):
            raise UploadError("the statistics hold no images; collect more uploads or use a larger epsilon")
        self.mean = statistics.sums.sum(0) / self.n
        self.prior = statistics.counts[self.present] / self.n
        self.matrix = (statistics.gram / self.n).addr_(self.mean, self.mean, alpha=-1)
        """`(D, D)` K"""
        deviation = self.matrix.diagonal().clamp(min=0).sqrt()
        alive = deviation > 1e-6 * deviation.max()
        self.inverse = torch.where(alive, 1 / deviation.clamp(min=1e-30), torch.zeros(()))
        self.matrix.mul_(self.inverse[:, None]).mul_(self.inverse)
        class_sums = statistics.sums[self.present].T / self.n - torch.outer(self.mean, self.prior)
        self.cross = class_sums * self.inverse[:, None]
        """`(D, C)` covariance of features and labels: M diag(p)"""
        self.blur = rounding / self.n**2 * float(self.inverse.square().mean()) ** 2
        """s^2: the variance that rounding added to an entry of K, on average"""
        self.blurred = blurred * float(self.inverse.square().mean())
        """the variance that rounding added to a standardised feature, on average"""

    def solved(self, ridge: float) -> Tensor:
        """(K + r)^-1 M diag(p) `(D, C)`"""
        raise NotImplementedError

    def freedom(self, ridge: float) -> float:
        """df = tr K (K + r)^-1"""
        raise NotImplementedError

    def moments(self, ridge: float) -> tuple[Tensor, Tensor]:
        """cov(f, y) and cov(f, f), both `(C, C)`, of the ridge regression's predictions f = b^T (K + r)^-1 x"""
        raise NotImplementedError

    def squares(self, ridge: float) -> Tensor:
        """A^T A `(C, C)` with A = (K + r)^-1 M diag(p)"""
        solved = self.solved(ridge)
        return solved.T @ solved

    def choose_ridge(self, least: float = 0.0) -> float:
        """The best by `criterion` among those of at least twice the size of K's most negative eigenvalue.

        Rounding and privacy noise make K indefinite, and so bound the ridge from below. least: another such bound,
        which is taken itself where no larger ridge of the table is better than the smallest above it
        """
        raise NotImplementedError

    def above_noise(self, ridge: float) -> bool:
        """Whether K + r/2 is positive semidefinite"""
        raise NotImplementedError

    def shared_ridge(self, ridge: float, least: float, blocks: int) -> float:
        """r / K for the mean of K such classifiers, r / K^2 where each image was rounded.

        The best ridge of one classifier weighs its variance against its bias. The mean of K classifiers of different
        features has the same bias and, as far as their errors are unrelated, one K-th of the variance. What rounding
        adds is unrelated as well, so that `least` is divided too. Rounding each image is itself a ridge, of `blurred`,
        beside which the other may be weaker still; measured, see docs/analytic.md.
        """
        return ridge if blocks == 1 else max(ridge, least) / blocks ** (2 if self.blurred > 0 else 1)

    @cached_property
    def labels(self) -> Tensor:
        """cov(y, y) `(C, C)`"""
        return torch.diag(self.prior) - torch.outer(self.prior, self.prior)

    def resolvent_trace(self, ridge: float) -> float:
        """tr R with R = (K + r)^-1; df = D - r tr R"""
        return (len(self.inverse) - self.freedom(ridge)) / ridge

    def leverage(self, ridge: float) -> float:
        """h = (df + 1)/n: the mean influence of an image on its own prediction.

        Where K = K_0 + E was rounded, df = tr K_0 R is tr K R - tr E R. For unrelated errors of variance s^2 the mean
        of tr E R is -s^2 ((tr R)^2 + tr R^2), by Gaussian integration by parts and dR = -R dE R; the first part counts.
        """
        freedom = self.freedom(ridge) + self.blur * self.resolvent_trace(ridge) ** 2
        return (freedom + 1) / self.n

    def left_out(self, ridge: float) -> tuple[Tensor, Tensor] | None:
        """The same moments of g = (f - h y)/(1 - h), what generalised cross-validation takes for predictions of
        left-out images; None where nothing would be left.

        Where K was rounded, cov(f, f) = A^T K_0 A with A = R M diag(p) is A^T K A + 2 s^2 tr(R) A^T A, by the same
        integration: R leans to where rounding made K smaller than it is.

        Where each image was rounded, f is told of features x + e, and left-out images are asked with x alone: their
        errors e have nothing to do with A, so that cov(g, g) loses v A^T A, v the variance of e.
        """
        h = self.leverage(ridge)
        if h > 0.999:
            return None
        fy, ff = self.moments(ridge)
        if self.blur > 0:
            ff = ff + 2 * self.blur * self.resolvent_trace(ridge) * self.squares(ridge)
        gg = (ff - 2 * h * fy + h * h * self.labels) / (1 - h) ** 2
        if self.blurred > 0:
            gg = gg - self.blurred * self.squares(ridge)
        return (fy - h * self.labels) / (1 - h), gg

    def criterion(self, ridge: float) -> float:
        """Cosine-GCV: tr cov(g, y) / sqrt(tr cov(g, g) tr cov(y, y)), the larger the better.

        Unlike the squared error of plain GCV it ignores the overall scale of the predictions, which does not matter
        to an argmax but makes GCV prefer far too strong a ridge when there are many classes.
        """
        moments = self.left_out(ridge)
        if moments is None:
            return -math.inf
        gy, gg = moments
        return float(gy.trace()) / math.sqrt(max(float(gg.trace() * self.labels.trace()), 1e-300))

    def regression(self, ridge: float) -> tuple[Tensor, Tensor]:
        """f + p as a function of f: least squares on one-hot labels. `(C, C)`, `(C,)`"""
        del ridge
        return torch.eye(len(self.prior), dtype=torch.float64), self.prior

    def discriminant(self, ridge: float) -> tuple[Tensor, Tensor]:
        """Linear discriminant analysis as a function f T + bias of the regression. `(C, C)`, `(C,)`

        With the pooled within-class covariance S = K - M diag(p) M^T it is w_c = (S + r)^-1 m_c and
        bias_c = log p_c - m_c.w_c/2. By Woodbury (S + r)^-1 M = A (I - diag(p) M^T A)^-1 with A = (K + r)^-1 M, and
        f = diag(p) A^T x, so T = (diag(p) - diag(p) M^T A diag(p))^-1: no second decomposition. cov(f, y) is
        diag(p) M^T A diag(p).
        """
        fy, _ = self.moments(ridge)
        prior = self.prior
        transform: Tensor = torch.linalg.inv(torch.diag(prior) - fy)
        return transform, prior.log() - 0.5 * ((fy @ transform) / prior[:, None]).diagonal()

    def in_features(self, ridge: float, transform: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        """W `(D, C)` and bias `(C,)` in the features' own units, of a function f T + bias."""
        weight = (self.solved(ridge) @ transform) * self.inverse[:, None]
        return weight, bias - self.mean @ weight

    def simulate(self, ridge: float) -> tuple[Tensor, Tensor]:
        """Left-out predictions g `(SIMULATED, C)` of pseudo images, and their labels.

        The means of g in each class and its covariance within classes follow from the moments of `left_out`; the
        shape is Student's t.
        """
        gy, gg = self.left_out(ridge) or self.moments(ridge)
        means = gy / self.prior  # column c: mean of g in class c
        return simulated_scores(means.T, gg - means @ (self.prior[:, None] * means.T), self.prior)


class Spectrum(Correlations):
    """K = V diag(e) V^T: one costly step, after which every ridge is cheap.

    Noise in K makes some e negative, which no features could; they count as 0. A ridge may then be far smaller than
    K + r > 0 would ask for.

    Single precision is taken where its own error, about 8 |K| 2^-24, is hundreds of times smaller than the eigenvalues
    that rounding added to K (`rounding_eigenvalue`): less than half the time.
    """

    def __init__(self, statistics: Statistics, rounding: float = 0.0, blurred: float = 0.0) -> None:
        super().__init__(statistics, rounding, blurred)
        added = 2 * math.sqrt(len(self.matrix) * self.blur)
        single = added >= SINGLE_PRECISION * float(self.matrix.norm())
        values, vectors = torch.linalg.eigh(self.matrix.float() if single else self.matrix)
        values, self.vectors = values.double(), vectors.double()
        self.noise = max(0.0, -float(values[0]))
        """size of the most negative eigenvalue"""
        self.values = values.clamp(min=0)
        self.rotated = self.vectors.T @ self.cross
        """`(D, C)` M diag(p) in the eigenbasis"""
        self.means = self.rotated / self.prior

    def solved(self, ridge: float) -> Tensor:
        solved: Tensor = self.vectors @ (self.rotated / (self.values + ridge)[:, None])
        return solved

    def freedom(self, ridge: float) -> float:
        return float((self.values / (self.values + ridge)).sum())

    def moments(self, ridge: float) -> tuple[Tensor, Tensor]:
        solved = self.rotated / (self.values + ridge)[:, None]
        return self.rotated.T @ solved, solved.T @ (self.values[:, None] * solved)

    def squares(self, ridge: float) -> Tensor:
        """In the eigenbasis, where it is the same."""
        solved = self.rotated / (self.values + ridge)[:, None]
        squares: Tensor = solved.T @ solved
        return squares

    def above_noise(self, ridge: float) -> bool:
        return ridge >= 2 * self.noise

    def choose_ridge(self, least: float = 0.0) -> float:
        floor = 2 * self.noise
        scores = {ridge: self.criterion(ridge) for ridge in (max(floor, RIDGES[0]), *RIDGES) if ridge >= floor}
        return max(least, max(scores, key=lambda ridge: (scores[ridge], ridge)))


class Factored(Correlations):
    """K + r = L L^T anew for each ridge: half the time of a spectrum, and less memory.

    df = D - r tr (K + r)^-1, and the trace is the mean of z^T (K + r)^-1 z over fixed random signs z (Hutchinson
    1990). Its deviation is at most sqrt(2 D / PROBES) in df, which is about D/3: less than one per cent.
    """

    def __init__(self, statistics: Statistics, rounding: float = 0.0, blurred: float = 0.0) -> None:
        super().__init__(statistics, rounding, blurred)
        dim = len(self.matrix)
        signs = torch.randint(0, 2, (dim, PROBES), generator=torch_generator(0, "probes")).double() * 2 - 1
        self.probes = torch.eye(dim, dtype=torch.float64) if dim <= PROBES else signs
        self._known: dict[float, tuple[Tensor, float] | None] = {}

    def _factor(self, shift: float) -> Tensor | None:
        """L, or None where K + shift is not positive definite"""
        shifted = self.matrix.clone()
        shifted.diagonal().add_(shift)
        factor, info = torch.linalg.cholesky_ex(shifted)
        return None if int(info) else factor

    def _at(self, ridge: float) -> tuple[Tensor, float] | None:
        """(K + r)^-1 M diag(p) and df"""
        if ridge not in self._known:
            factor = self._factor(ridge)
            self._known[ridge] = None if factor is None else self._from(factor, ridge)
        return self._known[ridge]

    def _from(self, factor: Tensor, ridge: float) -> tuple[Tensor, float]:
        half = torch.linalg.solve_triangular(factor, self.probes, upper=False)
        exact = self.probes.shape[1] == len(self.matrix)
        trace = float(half.square().sum()) / (1 if exact else self.probes.shape[1])
        return torch.cholesky_solve(self.cross, factor), len(self.matrix) - ridge * trace

    def _definite(self, ridge: float) -> tuple[Tensor, float]:
        found = self._at(ridge)
        if found is None:
            raise UploadError(f"fusion analytic.ridge: {ridge:g} is too small for the noise in the sums; leave it out")
        return found

    def solved(self, ridge: float) -> Tensor:
        return self._definite(ridge)[0]

    def freedom(self, ridge: float) -> float:
        return self._definite(ridge)[1]

    def moments(self, ridge: float) -> tuple[Tensor, Tensor]:
        """K (K + r)^-1 = I - r (K + r)^-1, so cov(f, f) = cov(f, y) - r S^T S with S of `solved`."""
        solved = self.solved(ridge)
        fy = self.cross.T @ solved
        return fy, fy - ridge * solved.T @ solved

    def choose_ridge(self, least: float = 0.0) -> float:
        """By steps of a decade, then of a half and of a quarter, from the middle: the criterion has one peak."""
        scores: dict[int, float] = {}
        lowest = min(bisect.bisect_left(RIDGES, least), len(RIDGES) - 1)

        def score(place: int) -> float:
            if place not in scores:
                ridge = RIDGES[place]
                scores[place] = self.criterion(ridge) if self._at(ridge) is not None else -math.inf
            return scores[place]

        best = max(MIDDLE, lowest)
        for step in (4, 2, 1):
            moving = True
            while moving:
                around = [place for place in (best - step, best, best + step) if lowest <= place < len(RIDGES)]
                better = max(around, key=lambda place: (score(place), place))
                moving, best = better != best, better
        best = max(scores, key=lambda place: (scores[place], place))
        if best == lowest and least > 0 and self.above_noise(least):
            return least
        while best < len(RIDGES) - 1 and not self.above_noise(RIDGES[best]):
            best += 1
        return max(least, RIDGES[best])

    def above_noise(self, ridge: float) -> bool:
        """By a factorisation, where a smaller ridge that was tried has not shown it already."""
        shown = any(tried <= ridge / 2 for tried, found in self._known.items() if found is not None)
        return shown or positive(self.matrix, ridge / 2)


def correlations(statistics: Statistics, rounding: float = 0.0, blurred: float = 0.0) -> Correlations:
    """The faster way for so many features."""
    return (Spectrum if len(statistics.gram) < FACTORED_FROM else Factored)(statistics, rounding, blurred)


def solve(
    statistics: Statistics,
    *,
    kind: str = "lda",
    ridge: float | None = None,
    least: float = 0.0,
    rounding: float = 0.0,
    blurred: float = 0.0,
    blocks: int = 1,
) -> LinearClassifier:
    """The calibrated classifier of the summed statistics; its ridge strength is chosen, from `least` on, or given.

    rounding: the variance that rounding added to each entry of G; blurred: that which it added to each feature of an
    image, before G was summed
    blocks: how many such classifiers are averaged (`oneflare.fusion.analytic.committee`), whose ridge is then weaker
    """
    noise = {"rounding": rounding, "blurred": blurred}
    spectrum = correlations(statistics, **noise) if blocks == 1 or rounding == 0 else Spectrum(statistics, **noise)
    alone = spectrum.choose_ridge(least) if ridge is None else ridge
    strength = spectrum.shared_ridge(alone, least, blocks) if ridge is None else ridge
    if blocks > 1 and not spectrum.above_noise(strength):
        spectrum = spectrum if isinstance(spectrum, Spectrum) else Spectrum(statistics, **noise)  # may be indefinite
    transform, offset = (spectrum.discriminant if kind == "lda" else spectrum.regression)(strength)
    weight, bias = spectrum.in_features(strength, transform, offset)
    predictions, labels = spectrum.simulate(strength)
    caution = 1 - (1 - CAUTION) / blocks ** (1 / 3)
    logits = predictions @ transform + offset
    beta = caution * inverse_temperature(logits, labels)
    spread = beta * float((logits - logits.mean(1, keepdim=True)).square().mean().sqrt())
    present = spectrum.present
    full_weight = torch.zeros(len(weight), len(present))
    full_bias = torch.full((len(present),), NEVER)
    full_weight[:, present] = (beta * weight).float()
    full_bias[present] = (beta * bias).float()
    return LinearClassifier(full_weight, full_bias, strength, spectrum.criterion(alone), spread)
