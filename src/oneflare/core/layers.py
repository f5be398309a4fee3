"""Layers of settings (a recipe, a file, `key=value` words): read, merged key by key, and checked as an experiment."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from oneflare.core.config import Experiment, named
from oneflare.core.registry import one_line
from oneflare.core.strict import YAML_CHARACTERS, strict_yaml
from oneflare.errors import ConfigError, did_you_mean

Layer = Mapping[str, Any]

SHORT_FORMS = {"alpha": "partition.alpha", "clients": "partition.clients", "epochs": "train.epochs"}


def validate(content: Layer) -> Experiment:
    """Shape and ranges; the named components are checked by `methods.resolve`."""
    known = set(Experiment.model_fields) | set(SHORT_FORMS)
    for key in content:
        if key not in known:
            raise ConfigError(f"unknown key '{key}'{did_you_mean(key, known)}")
    try:
        return Experiment.model_validate(content)
    except ValidationError as error:
        raise ConfigError(one_line(error, Experiment)) from None


def merge(*layers: Layer) -> dict[str, Any]:
    """Later layers win key by key; a component that is renamed loses the options of the one it replaces."""
    result: dict[str, Any] = {}
    for layer in layers:
        _merge_into(result, expand(layer))
    return result


def _merge_into(target: dict[str, Any], layer: Layer) -> None:
    for key, value in layer.items():
        old = target.get(key)
        if isinstance(old, str) and isinstance(value, dict):
            old = {"name": old}
        if isinstance(old, dict) and isinstance(value, str):
            value = {"name": value}
        if isinstance(old, dict) and isinstance(value, Mapping):
            renamed = "name" in value and "name" in old and value["name"] != old["name"] and key != "data"
            merged = {} if renamed else dict(old)
            _merge_into(merged, value)
            target[key] = merged
        else:
            target[key] = dict(value) if isinstance(value, Mapping) else value


def expand(layer: Layer) -> dict[str, Any]:
    """Short forms and dotted keys as nested sections: `{"alpha": 1}` -> `{"partition": {"alpha": 1}}`.

    A setting that is given twice in one layer, such as `alpha` and `partition.alpha`, is an error.
    """
    result: dict[str, Any] = {}
    for key, value in layer.items():
        path = SHORT_FORMS.get(key, key).split(".")
        node: dict[str, Any] = {path[-1]: value}
        for part in reversed(path[:-1]):
            node = {part: node}
        twice = _given_twice(result, node)
        if twice is not None:
            raise ConfigError(f"{twice} is given twice, also as '{key}'; remove one of the two")
        _merge_into(result, node)
    return result


def _given_twice(old: Layer, new: Layer) -> str | None:
    """The first setting that both layers have; a component's name and its options do not collide."""
    for key in new:
        if key in old:
            both = [named(layer[key]) for layer in (old, new)]
            if not all(isinstance(value, Mapping) for value in both):
                return str(key)
            inner = _given_twice(*both)
            if inner is not None:
                return f"{key}.{inner}"
    return None


def parse_overrides(words: Iterable[str], *, once: bool = False) -> dict[str, Any]:
    """`["alpha=0.1", "train.lr=0.05"]` as a layer; values are read as YAML.

    once: a setting that is given twice is an error; without it the last one counts.
    """
    layer: dict[str, Any] = {}
    for word in words:
        key, separator, text = word.partition("=")
        if not separator or not key:
            raise ConfigError(f"'{word}' is not key=value; for example alpha=0.1 or train.lr=0.05")
        try:
            value = strict_yaml(text)
        except ValueError as error:
            reason = str(error).removeprefix("line 1: ")
            raise ConfigError(f"{key}: '{text:.80}' is not a YAML value ({reason}); quote it if it is text") from None
        setting = expand({key: _number(value)})
        twice = _given_twice(layer, setting) if once else None
        if twice is not None:
            raise ConfigError(f"{twice} is given twice, the second time by '{word:.80}'; remove one of the two")
        layer = merge(layer, setting)
    return layer


def _number(value: Any) -> Any:
    """YAML reads 1e-3 as text; people mean a number."""
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def read_yaml(path: Path, what: str = "an experiment file") -> dict[str, Any]:
    """The mapping in a YAML file, read strictly (`strict.strict_yaml`); every YAML file of a user comes through here.

    what: the kind of file that is wanted, for the error where there is none.
    """
    try:
        if path.exists() and not path.is_file():
            raise ConfigError(f"{path}: is a directory, pipe or device; give the path of {what}")
        with path.open("rb") as file:
            content = strict_yaml(file.read(4 * YAML_CHARACTERS + 1))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; give the path of {what}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid YAML: {error}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must be a mapping such as 'method: flare'")
    for key in content:
        if not isinstance(key, str):
            raise ConfigError(f"{path}: the key {key} is a number; keys are words such as 'method'")
    return content
