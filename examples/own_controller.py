"""A rule for lambda in thirty lines, compared with FLARE on the same partition."""

from pathlib import Path
from tempfile import mkdtemp

from torch import Tensor

import oneflare
from oneflare.objective import CONTROLLERS, ClientFacts, Controller
from oneflare.testing import check_controller


@CONTROLLERS.register("half_time")
class HalfTime(Controller):
    """lambda = lambda_0 in the first half of training, 0 in the second"""

    def __init__(self, facts: ClientFacts, *, lambda_0: float = 10.0) -> None:
        super().__init__(facts)
        self.lambda_0 = lambda_0

    def loss(self, local: Tensor, align: Tensor, progress: float) -> Tensor:
        effective = self.lambda_0 if progress < 0.5 else 0.0
        self.record(self.lambda_0, effective)
        return local + effective * align


check_controller("half_time")
folder = Path(mkdtemp())
shared = {"data": "digits", "alpha": 0.05, "clients": 5, "epochs": 4}
flare = oneflare.run(method="flare", out=folder / "flare", **shared)
mine = oneflare.run(method="flare", controller="half_time", out=folder / "half_time", **shared)
for fusion in flare.fusions:
    difference = 100 * (mine.fusions[fusion].accuracy - flare.fusions[fusion].accuracy)
    print(f"{fusion:18} {difference:+5.1f} points against FLARE (one seed: this proves nothing yet)")
