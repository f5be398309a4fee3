"""Images, encoders and backbones that a Python caller hands over as objects, and the settings that stand for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from oneflare.core.config import Experiment
from oneflare.core.plugins import source_of
from oneflare.core.sourcecode import is_installed
from oneflare.data import Dataset, data_digest, given_data
from oneflare.errors import ConfigError
from oneflare.methods.resolve import ARRAYS
from oneflare.nn.backbones import give_backbone
from oneflare.nn.given import give


@dataclass(frozen=True)
class Given:
    """The live objects of one run; None where the settings name them."""

    dataset: Dataset | None = None
    encoder: nn.Module | None = None
    backbone: nn.Module | None = None

    @classmethod
    def among(cls, keywords: Mapping[str, Any], test: tuple[Any, Any] | None) -> Given:
        """The objects among the keyword arguments of `oneflare.run`; test: held-out arrays for data as arrays."""
        modules = (keywords.get(part) for part in ("encoder", "backbone"))
        encoder, backbone = (module if isinstance(module, nn.Module) else None for module in modules)
        return cls(given_data(keywords.get("data"), test), encoder, backbone)

    def settings(self) -> dict[str, Any]:
        """What stands for the objects in the settings: digests, so that other objects make another experiment."""
        layer: dict[str, Any] = {}
        if self.dataset is not None:
            layer["data"] = {"name": ARRAYS, "digest": data_digest(self.dataset)}
            if self.dataset.public is not None:
                layer["data"]["public"] = len(self.dataset.public.labels)
            if self.dataset.owners is not None:
                layer["partition"] = {"kind": "given", "clients": len(self.dataset.owners)}
        if self.encoder is not None:
            layer["encoder"] = give(self.encoder)
        if self.backbone is not None:
            layer["backbone"] = give_backbone(self.backbone)
        return layer

    def images(self, experiment: Experiment) -> Dataset | None:
        """The data set that was given, with the public images set aside that the experiment asks for."""
        if self.dataset is None:
            return None
        return self.dataset.set_aside(experiment.data.public, experiment.data.seed)

    def recorded(self, experiment: Experiment) -> Experiment:
        """The experiment with the user's own classes inside its modules as code that uploads depend on, as plugins are.

        An encoder that no client would train is refused.
        """
        given = [module for module in (self.encoder, self.backbone) if module is not None]
        if self.encoder is not None and not experiment.trains:
            raise ConfigError(
                f"encoder: method '{experiment.method}' trains no network, so a module of your own would not be used; "
                "leave it out, or choose a method that trains"
            )
        kinds = {type(module) for one in given for module in one.modules()}
        own = {kind for kind in kinds if not is_installed(kind.__module__)}
        found = dict(source for source in map(source_of, own) if source is not None)
        plugins = dict(sorted({**experiment.code.plugins, **found}.items()))
        return experiment.model_copy(update={"code": experiment.code.model_copy(update={"plugins": plugins})})
