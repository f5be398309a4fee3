"""Controllers: the rules that decide lambda, one class each, chosen by name."""

from oneflare.objective.controllers import balanced, coupled, decoupled, simple  # noqa: F401  (registers)
from oneflare.objective.controllers.base import CONTROLLERS, ClientFacts, Controller, build_controller

__all__ = ["CONTROLLERS", "ClientFacts", "Controller", "build_controller"]
