"""Fusions: pure functions from verified uploads to one global model."""

from oneflare.fusion import analytic, averaging, density, distillation, features, trust  # noqa: F401  (registers)
from oneflare.fusion.base import (
    FUSIONS,
    Fused,
    Fusion,
    Suspect,
    UploadSet,
    build_fusion,
    check_needs,
    made_by,
    made_with,
    offered_fields,
    older_code,
    outdated,
    single_network_fusions,
)
from oneflare.fusion.faults import without_faulty
from oneflare.fusion.workspace import QUIET, Workspace
from oneflare.models import GlobalModel, MemberModel, SingleModel, load_model, logits_of_all

__all__ = [
    "FUSIONS",
    "QUIET",
    "Fused",
    "Fusion",
    "GlobalModel",
    "MemberModel",
    "SingleModel",
    "Suspect",
    "UploadSet",
    "Workspace",
    "build_fusion",
    "check_needs",
    "load_model",
    "logits_of_all",
    "made_by",
    "made_with",
    "offered_fields",
    "older_code",
    "outdated",
    "single_network_fusions",
    "without_faulty",
]
