"""Uploads -> one global model. The same uploads feed every fusion."""

from oneflare.fusion import (  # noqa: F401  (registers)
    analytic,
    average,
    coboosting,
    datafree,
    distill,
    ensemble,
    features,
    fisher,
    laplace,
    matching,
    moments,
    regmean,
    robust,
    suspects,
    task_vectors,
    trainable,
)
from oneflare.fusion.base import (
    FUSIONS,
    Fusion,
    UploadSet,
    build_fusion,
    check_needs,
    made_by,
    made_with,
    offered_fields,
    outdated,
    recorded_code,
)
from oneflare.fusion.faults import without_faulty
from oneflare.fusion.model import GlobalModel, MemberModel, SingleModel, load_model, logits_of_all

__all__ = [
    "FUSIONS",
    "Fusion",
    "GlobalModel",
    "MemberModel",
    "SingleModel",
    "UploadSet",
    "build_fusion",
    "check_needs",
    "load_model",
    "logits_of_all",
    "made_by",
    "made_with",
    "offered_fields",
    "outdated",
    "recorded_code",
    "without_faulty",
]
