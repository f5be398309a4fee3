"""Fusions of additive statistics: what they give does not depend on who holds what."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oneflare.errors import ConfigError
from oneflare.fusion.base import FUSIONS, Fusion, UploadSet
from oneflare.fusion.discriminant import solve
from oneflare.fusion.model import BATCH, Cost, GlobalModel, Member, MemberModel, Rule, Task, rule
from oneflare.fusion.sums import doubtful_sums
from oneflare.nn import build_feature_map
from oneflare.upload import KNOWN


class AnalyticModel(GlobalModel):
    """phi(x) W + bias, with features phi that need no training."""

    kind = "analytic"

    def __init__(
        self, task: Task, feature_map: Mapping[str, Any], bound: float | None, weight: Tensor, bias: Tensor
    ) -> None:
        """feature_map: its spec; bound: largest norm of features; weight `(D, C)`, bias `(C,)`"""
        super().__init__(task)
        self.spec, self.bound = dict(feature_map), bound
        self.features = build_feature_map(self.spec, task.image.channels, task.image.size, bound)
        self.weight, self.bias = weight, bias

    @property
    def cost(self) -> Cost:
        return Cost(self.features.parameters + self.weight.numel() + self.bias.numel(), 1)

    def logits(self, images: Tensor, batch_size: int = BATCH) -> Tensor:
        self.check_images(images)
        parts = [self.features(batch) @ self.weight + self.bias for batch in images.split(batch_size)]
        return torch.cat(parts) if parts else torch.empty(0, len(self.task.classes))

    def state(self, reference_from: Path | None) -> dict[str, Any]:
        del reference_from
        return {"feature_map": self.spec, "bound": self.bound, "weight": self.weight, "bias": self.bias}

    @classmethod
    def from_state(
        cls, task: Task, state: Mapping[str, Any], encoder: Callable[[], nn.Module], source: Path
    ) -> AnalyticModel:
        del encoder, source
        return cls(task, state["feature_map"], state["bound"], state["weight"], state["bias"])


@FUSIONS.register("analytic")
class Analytic(Fusion):
    """the statistics of all clients added up and solved: the same answer for every split"""

    needs = frozenset({"statistics"})

    def __init__(
        self, *, solver: Literal["lda", "ridge"] = "lda", ridge: float | None = None, leave_out: bool = False
    ) -> None:
        """ridge: strength; default: chosen from the statistics. leave_out: members whose class means are others'"""
        if ridge is not None and not ridge > 0:
            raise ConfigError(f"fusion analytic.ridge: must be greater than 0 (got {ridge})")
        self.solver = solver
        self.ridge = ridge
        self.leave_out = leave_out

    def fuse(self, uploads: UploadSet) -> AnalyticModel:
        total = uploads.statistics()
        doubtful = doubtful_sums(uploads)
        what = " and is left out" if self.leave_out else ""
        self.remarks = tuple(f"client {client} is suspect{what}: {reason}" for client, reason in doubtful.items())
        if self.leave_out and doubtful:
            for upload in uploads:
                if upload.client in doubtful:
                    total = total - upload.statistics()
        solved = solve(total, kind=self.solver, ridge=self.ridge)
        return AnalyticModel(uploads.task, uploads.plan.feature_map, uploads.plan.bound, solved.weight, solved.bias)


@rule
@dataclass(frozen=True)
class Redistribution:
    """Members move probability only among classes they know.

    Member i knows the classes K_i of which it has enough images, n_ic. Its log-likelihood ratios, its own prior
    removed and as far as it may be trusted, are L_ic = beta_i (z_i.P_ic - log n_ic) with unit features z_i. From the
    analytic posterior p it makes

        log p_c + w_i (L_ic - log sum_{k in K_i} p(k | K_i) e^{L_ik}),   c in K_i,

    which for w_i = 1 leaves p(K_i) as it was, and p outside K_i untouched. Members add up; w_i is the member's share
    in all images of the classes it knows, so that members who know the same classes average.
    """

    counts: Tensor
    """`(N, C)`, 0 where a member does not know the class"""
    trust: Tensor
    """`(N,)` beta"""
    shares: Tensor
    """`(N,)` w"""
    prototypes: Tensor
    """`(N, C, d)`"""

    @classmethod
    def of(cls, counts: Tensor, trust: Tensor, prototypes: Tensor) -> Redistribution:
        """counts: `(N, C)` images of each class at each member"""
        known = counts >= KNOWN
        shares = (counts * known).sum(1) / (counts.sum(0) * known).sum(1).clamp(min=1)
        return cls((counts * known).float(), trust * (known.sum(1) >= 2), shares.float(), prototypes)

    def start(self, images: int) -> Tensor:
        """`(n, 2, C)`: the analytic log posterior, and what members add to it"""
        return torch.zeros(images, 2, self.prototypes.shape[1])

    def add(self, state: Tensor, rows: slice, member: int, features: Tensor) -> None:
        if not float(self.trust[member]) > 0:
            return
        known = self.counts[member] > 0
        logits = F.normalize(features, dim=1) @ self.prototypes[member][known].T
        ratios = self.trust[member] * (logits - self.counts[member][known].log())
        among = state[rows, 0][:, known].log_softmax(1)
        shift = ratios - (among + ratios).logsumexp(1, keepdim=True)
        state[rows, 1, known] += self.shares[member] * shift

    def finish(self, state: Tensor) -> Tensor:
        return state.sum(1)


class AnalyticMemberModel(MemberModel):
    """An analytic model whose posterior every client's network corrects among the classes it has seen."""

    kind = "analytic_members"

    def __init__(
        self, task: Task, members: Sequence[Member], rule: Rule, encoder: nn.Module, analytic: AnalyticModel
    ) -> None:
        super().__init__(task, members, rule, encoder)
        self.analytic = analytic

    @property
    def cost(self) -> Cost:
        deep, own = super().cost, self.analytic.cost
        return Cost(deep.parameters + own.parameters, deep.forward_passes + own.forward_passes)

    def start(self, images: Tensor, batch_size: int) -> Tensor:
        state = super().start(images, batch_size)
        state[:, 0] = self.analytic.logits(images, batch_size).log_softmax(1)
        return state

    def state(self, reference_from: Path | None) -> dict[str, Any]:
        return super().state(reference_from) | {"analytic": self.analytic.state(reference_from)}

    @classmethod
    def from_state(
        cls, task: Task, state: Mapping[str, Any], encoder: Callable[[], nn.Module], source: Path
    ) -> AnalyticMemberModel:
        analytic = AnalyticModel.from_state(task, state["analytic"], encoder, source)
        return cls(task, *cls.parts(state, source), encoder(), analytic)


@FUSIONS.register("flare_analytic")
class FlareAnalytic(Fusion):
    """the analytic posterior, corrected by what each client's network knows among the classes it has seen"""

    needs = frozenset({"weights", "prototypes", "counts", "statistics", "calibration"})

    def fuse(self, uploads: UploadSet) -> AnalyticMemberModel:
        trust = torch.tensor([upload.trust or 0.0 for upload in uploads])
        members = uploads.members(Redistribution.of(uploads.counts, trust, uploads.prototypes))
        sums = Analytic()
        analytic = sums.fuse(uploads)
        self.remarks = sums.remarks
        return AnalyticMemberModel(uploads.task, members.members, members.rule, members.encoder, analytic)
