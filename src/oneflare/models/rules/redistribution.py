"""The rule by which members correct an analytic model among the classes they know."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from oneflare.models.members import rule
from oneflare.upload import KNOWN


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
