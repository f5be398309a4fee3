"""Networks: encoders, the prototype head, and the anchors that prototypes are pulled toward."""

from oneflare.nn.anchors import ANCHORS, build_anchors, simplex_etf
from oneflare.nn.encoders import ENCODERS, build_encoder, encoder_spec
from oneflare.nn.network import PrototypeNetwork, initial_network

__all__ = [
    "ANCHORS",
    "ENCODERS",
    "PrototypeNetwork",
    "build_anchors",
    "build_encoder",
    "encoder_spec",
    "initial_network",
    "simplex_etf",
]
