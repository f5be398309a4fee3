"""Networks: encoders, the prototype head, anchors that prototypes are pulled toward, and fixed feature maps."""

from oneflare.nn import backbone_kinds, composed_maps, multi_scale_maps, paired_maps  # noqa: F401  (registers)
from oneflare.nn.anchors import ANCHORS, Anchors, Target, build_anchors, build_target, simplex_etf
from oneflare.nn.backbones import BACKBONES
from oneflare.nn.encoders import ENCODERS, build_encoder, check_size, encoder_spec
from oneflare.nn.feature_maps import FEATURE_MAPS, FeatureMap, build_feature_map, feature_range
from oneflare.nn.feature_specs import feature_map_spec
from oneflare.nn.network import PrototypeNetwork, add_unknown, freeze_prototypes, initial_network

__all__ = [
    "ANCHORS",
    "BACKBONES",
    "ENCODERS",
    "FEATURE_MAPS",
    "Anchors",
    "FeatureMap",
    "PrototypeNetwork",
    "Target",
    "add_unknown",
    "build_anchors",
    "build_encoder",
    "build_feature_map",
    "build_target",
    "check_size",
    "encoder_spec",
    "feature_map_spec",
    "feature_range",
    "freeze_prototypes",
    "initial_network",
    "simplex_etf",
]
