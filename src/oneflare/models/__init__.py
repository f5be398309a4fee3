"""The global model: what a fusion returns, the rules that combine members, files, ONNX, prediction and HTTP."""

from oneflare.models import rules  # noqa: F401  (registers the rules that model files may name)
from oneflare.models.analytic import AnalyticMemberModel, AnalyticModel
from oneflare.models.base import Cost, GlobalModel, SingleModel, Task
from oneflare.models.loading import load_model
from oneflare.models.members import Member, MemberModel, logits_of_all, rule
from oneflare.models.quadratic import QuadraticModel

__all__ = [
    "AnalyticMemberModel",
    "AnalyticModel",
    "Cost",
    "GlobalModel",
    "Member",
    "MemberModel",
    "QuadraticModel",
    "SingleModel",
    "Task",
    "load_model",
    "logits_of_all",
    "rule",
]
