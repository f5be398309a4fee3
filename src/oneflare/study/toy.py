"""A loss with two wells that shows why the learning rate is restarted.

What counts is the time spent at a high rate while there is noise to use it, and how small the rate is at the end.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from oneflare.core.schedules import Schedule

FALLING = {"name": "constant", "decay": 40.0}
"""1/(1 + 40 p), the usual decay"""


@dataclass(frozen=True)
class TwoWells:
    """f(theta) = theta^4 - 2 a theta^2 + b theta: wells near -sqrt(a) (deep, for b > 0) and +sqrt(a) (shallow)"""

    a: float = 1.0
    b: float = 0.8

    def value(self, theta: float) -> float:
        return theta**4 - 2 * self.a * theta**2 + self.b * theta

    def slope(self, theta: float) -> float:
        return 4 * theta**3 - 4 * self.a * theta + self.b

    def curvature(self, theta: float) -> float:
        return 12 * theta**2 - 4 * self.a

    @property
    def ridge(self) -> float:
        """The top between the wells, by Newton from the middle."""
        theta = 0.0
        for _ in range(30):
            theta -= self.slope(theta) / self.curvature(theta)
        return theta


def descend(
    wells: TwoWells,
    schedule: Schedule,
    *,
    peak: float = 0.08,
    noise: float = 2.5,
    steps: int = 600,
    seed: int = 0,
    start: float | None = None,
) -> list[float]:
    """SGD from the shallow well, the noise of small batches included: theta after every step."""
    draws = random.Random(seed)
    theta = wells.a**0.5 if start is None else start
    path = [theta]
    for step in range(steps):
        rate = peak * schedule(step / steps)
        theta -= rate * (wells.slope(theta) + draws.gauss(0, noise))
        theta = min(max(theta, -3.0), 3.0)
        path.append(theta)
    return path


def share_that_leaves(wells: TwoWells, schedule: Schedule, *, seeds: int = 200, **options: float) -> float:
    """Part of the seeded trajectories that end in the deep well."""
    ends = [descend(wells, schedule, seed=seed, **options)[-1] for seed in range(seeds)]  # type: ignore[arg-type]
    return sum(theta < wells.ridge for theta in ends) / seeds
