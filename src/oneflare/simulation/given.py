"""Images and encoders that a Python caller hands over as objects, and the settings that stand for them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from oneflare.core.config import Experiment
from oneflare.core.files import digest_of, tensor_digest
from oneflare.core.plugins import source_of
from oneflare.core.sourcecode import is_installed
from oneflare.data import Dataset, data_digest, given_data
from oneflare.errors import ConfigError
from oneflare.methods.resolve import ARRAYS
from oneflare.nn.encoders import CUSTOM


@dataclass(frozen=True)
class Given:
    """The live objects of one run; None where the settings name the data set or the encoder."""

    dataset: Dataset | None = None
    encoder: nn.Module | None = None

    @classmethod
    def among(cls, keywords: Mapping[str, Any], test: tuple[Any, Any] | None) -> Given:
        """The objects among the keyword arguments of `oneflare.run`; test: held-out arrays for data as arrays."""
        encoder = keywords.get("encoder")
        return cls(given_data(keywords.get("data"), test), encoder if isinstance(encoder, nn.Module) else None)

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
            kind = type(self.encoder).__qualname__
            layer["encoder"] = {"name": CUSTOM, "kind": kind, "digest": _module_digest(self.encoder)}
        return layer

    def images(self, experiment: Experiment) -> Dataset | None:
        """The data set that was given, with the public images set aside that the experiment asks for."""
        if self.dataset is None:
            return None
        return self.dataset.set_aside(experiment.data.public, experiment.data.seed)

    def recorded(self, experiment: Experiment) -> Experiment:
        """The experiment with the user's own classes inside the encoder as code that uploads depend on, as plugins are.

        A module that no client would train is refused.
        """
        if self.encoder is None:
            return experiment
        if not experiment.trains:
            raise ConfigError(
                f"encoder: method '{experiment.method}' trains no network, so a module of your own would not be used; "
                "leave it out, or choose a method that trains"
            )
        own = {type(module) for module in self.encoder.modules() if not is_installed(type(module).__module__)}
        found = dict(source for source in map(source_of, own) if source is not None)
        plugins = dict(sorted({**experiment.code.plugins, **found}.items()))
        return experiment.model_copy(update={"code": experiment.code.model_copy(update={"plugins": plugins})})


def _module_digest(module: nn.Module) -> str:
    state = module.state_dict()
    return digest_of([str(module), {name: tensor_digest(tensor.cpu()) for name, tensor in state.items()}])
