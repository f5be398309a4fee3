"""What a client minimises: named loss terms, and the controllers that weigh alignment against them."""

from oneflare.objective.banks import BANKS, Bank, build_bank
from oneflare.objective.controllers import CONTROLLERS, ClientFacts, Controller, build_controller
from oneflare.objective.open_set import OutlierMaker
from oneflare.objective.proximal import Proximal
from oneflare.objective.pull import Pull, PullOptions, align
from oneflare.objective.terms import TERMS, Batch, local_terms

__all__ = [
    "BANKS",
    "CONTROLLERS",
    "TERMS",
    "Bank",
    "Batch",
    "ClientFacts",
    "Controller",
    "OutlierMaker",
    "Proximal",
    "Pull",
    "PullOptions",
    "align",
    "build_bank",
    "build_controller",
    "local_terms",
]
