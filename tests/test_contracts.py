"""Every registered part keeps the contract that `oneflare.testing` states, and a broken one is told apart."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from oneflare.fusion import FUSIONS, build_fusion
from oneflare.nn import ENCODERS, FEATURE_MAPS
from oneflare.nn.encoders import ON_FEATURES
from oneflare.objective import CONTROLLERS, Controller
from oneflare.testing import (
    check_controller,
    check_encoder,
    check_feature_map,
    check_fusion,
    check_method,
    check_source,
)
from oneflare.upload.evidence import EVIDENCE
from oneflare.upload.statistics import FIELDS as STATISTICS
from oneflare.upload.statistics import parts_for

SMALL_MAP = {"name": "random_conv", "filters": 8}
COMPOSED = {"random_features": {"of": SMALL_MAP, "dim": 40}, "buckets": {"of": SMALL_MAP}}
OWN_METHOD = {"open_set_votes": {"method": "fedov"}}
"""fusions whose uploads only one method makes"""


@pytest.mark.parametrize("name", list(CONTROLLERS))
def test_controllers(name):
    check_controller(name)


@pytest.mark.parametrize("name", [name for name in ENCODERS if name not in ON_FEATURES])
def test_encoders(name):
    check_encoder(name, width=4, sizes=(8, 16))


@pytest.mark.parametrize("name", ON_FEATURES)
def test_encoders_of_features(name):
    check_encoder(name, width=4, channels=(7, 40), sizes=(1,))


@pytest.mark.parametrize("name", [name for name in FEATURE_MAPS if name not in ("none", "identity", "root")])
def test_feature_maps(name):
    small = {"features": 40} if name == "paired" else {"filters": 8}
    check_feature_map(name, **COMPOSED.get(name, small))


@pytest.mark.parametrize("name", ["identity", "root"])
def test_maps_of_features(name):
    check_feature_map(name, channels=12, size=1)


@pytest.mark.parametrize("name", [name for name in FUSIONS if not getattr(FUSIONS[name].factory, "trains", False)])
def test_fusions(name):
    needs = build_fusion({"name": name}).needs
    statistics = {"analytic": SMALL_MAP, "upload.statistics": parts_for(needs)} if needs & STATISTICS else {}
    check_fusion(
        name, settings={"upload.evidence": sorted(needs & set(EVIDENCE))} | statistics | OWN_METHOD.get(name, {})
    )


def test_sources_and_methods():
    check_source("digits")
    check_method("balanced")


class Forgetful(Controller):
    """counts its steps and does not save the count"""

    def __init__(self, facts) -> None:
        super().__init__(facts)
        self.steps = 0

    def loss(self, local, align, progress):
        self.steps += 1
        self.record(float(self.steps), float(self.steps))
        return local + self.steps * align


class Negative(Controller):
    """a lambda that pushes away"""

    def loss(self, local, align, progress):
        self.record(-1.0, -1.0)
        return local - align


class Chatty(nn.Module):
    """features that depend on the neighbours"""

    def __init__(self, channels: int, *, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Conv2d(channels, width, 3)

    def forward(self, x):
        features = self.layer(x).mean((2, 3))
        return features - features.mean(0)


@pytest.mark.parametrize(
    ("kind", "message"), [(Forgetful, "after load_state_dict"), (Negative, "lambda_raw became -1")]
)
def test_a_broken_controller_is_told_apart(kind, message, monkeypatch):
    monkeypatch.setattr(CONTROLLERS, "_entries", dict(CONTROLLERS._entries))
    CONTROLLERS.register("broken")(kind)
    with pytest.raises(AssertionError, match=message):
        check_controller("broken")


def test_a_broken_encoder_is_told_apart(monkeypatch):
    monkeypatch.setattr(ENCODERS, "_entries", dict(ENCODERS._entries))
    ENCODERS.register("chatty")(Chatty)
    torch.manual_seed(0)
    with pytest.raises(AssertionError, match="depend on who is in its batch"):
        check_encoder("chatty")
