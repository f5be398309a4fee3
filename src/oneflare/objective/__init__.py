"""What a client minimises: named loss terms, and the controllers that weigh alignment against them."""

from oneflare.objective.controllers import CONTROLLERS, ClientFacts, Controller, build_controller
from oneflare.objective.pull import Pull
from oneflare.objective.terms import TERMS, Batch, align, local_terms

__all__ = [
    "CONTROLLERS",
    "TERMS",
    "Batch",
    "ClientFacts",
    "Controller",
    "Pull",
    "align",
    "build_controller",
    "local_terms",
]
