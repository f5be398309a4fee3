"""Networks: encoders, the prototype head, and the anchors that prototypes are pulled toward."""

from oneflare.nn.anchors import ANCHORS, Anchors, Target, build_anchors, build_target, simplex_etf
from oneflare.nn.encoders import ENCODERS, build_encoder, encoder_spec
from oneflare.nn.network import PrototypeNetwork, initial_network

__all__ = [
    "ANCHORS",
    "ENCODERS",
    "Anchors",
    "PrototypeNetwork",
    "Target",
    "build_anchors",
    "build_encoder",
    "build_target",
    "encoder_spec",
    "initial_network",
    "simplex_etf",
]
