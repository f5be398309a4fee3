"""Registries of parts that are chosen by name: encoders, anchors, controllers, fusions, methods and others.

One convention serves them all: **positional parameters of a registered class or function are given by the
framework, keyword-only parameters are its configuration.** The signature therefore is the schema: defaults live
on the class, a misspelt option is answered with "did you mean", and a new entry needs no other file. Options that
several entries share form a frozen dataclass that extends `Options`: a keyword-only parameter of that type stands for
all its fields, and users give each field by its own name.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Generic, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, ValidationError, create_model

from oneflare.core.plugins import source_of
from oneflare.errors import ConfigError, did_you_mean

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class Options:
    """The base of a frozen dataclass of options that travel as one parameter of a registered part."""


@dataclass(frozen=True)
class Entry(Generic[T]):
    """One registered part: its name, what builds it, and the schema of its options."""

    name: str
    factory: Callable[..., T]
    schema: type[BaseModel]
    groups: Mapping[str, type[Options]]
    """keyword-only parameters that stand for several options"""

    def build(self, given: Iterable[Any], options: Mapping[str, Any]) -> T:
        """given: what the framework provides. options: every option by its own name."""
        left = dict(options)
        grouped = {
            name: group(**{field.name: left.pop(field.name) for field in fields(group)})  # type: ignore[arg-type]
            for name, group in self.groups.items()
        }
        return self.factory(*given, **left, **grouped)

    @property
    def document(self) -> str:
        """Its equations, as the docstring gives them."""
        return inspect.getdoc(self.factory) or ""

    @property
    def summary(self) -> str:
        """The first line of its docstring."""
        return self.document.split("\n", 1)[0]


class Registry(Generic[T]):
    """A set of parts of one kind (classes or functions), each under a name of its own.

    kind: what such a part is called in error messages, for example "fusion".
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, Entry[T]] = {}

    def register(self, name: str) -> Callable[[F], F]:
        """A decorator that adds a class or function under this name. A name that is taken raises ValueError.

        The positional parameters of the part are given by the framework; its keyword-only parameters, with their types
        and defaults, are the options that users set. The first line of its docstring is shown by `oneflare methods`.
        """

        def add(factory: F) -> F:
            if name in self._entries:
                raise ValueError(f"{self.kind} '{name}' is registered twice")
            groups = {parameter.name: kind for parameter, kind in _options(factory) if _is_group(kind)}
            self._entries[name] = Entry(name, factory, _schema(self.kind, name, factory), groups)
            return factory

        return add

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __getitem__(self, name: str) -> Entry[T]:
        if name not in self._entries:
            raise ConfigError(f"unknown {self.kind} '{name}'{did_you_mean(name, self._entries)}")
        return self._entries[name]

    def complete(self, spec: Mapping[str, Any], where: str = "") -> dict[str, Any]:
        """The spec with every option checked and every default written out.

        spec: `{name: ..., option: ...}`. where: the setting that holds it, which begins the line of an error. An
        unknown name, an unknown option or a value of the wrong type is a ConfigError.
        """
        options = {key: value for key, value in spec.items() if key != "name"}
        entry = self[spec["name"]]
        try:
            checked = entry.schema.model_validate(options)
        except ValidationError as error:
            raise ConfigError(one_line(error, entry.schema, where or f"{self.kind} {entry.name}")) from None
        return {"name": entry.name, **checked.model_dump(mode="json")}

    def build(self, spec: Mapping[str, Any], *given: Any) -> T:
        """The part that `spec` names, with its options checked; given: its positional arguments."""
        options = self.complete(spec)
        return self[options.pop("name")].build(given, options)


def sources_used(registries: Iterable[Registry[Any]], content: Any) -> dict[str, str]:
    """The user's own modules whose parts are named anywhere in a configuration, each with the digest of its source."""
    factories = [factory for registry in registries for factory in parts_named(registry, content).values()]
    return dict(sorted(source for source in map(source_of, factories) if source is not None))


def parts_named(registry: Registry[T], content: Any) -> dict[str, Callable[..., T]]:
    """The parts of a registry that are named anywhere in a configuration."""
    words = set(_words(content))
    return {name: registry[name].factory for name in registry if name in words}


def _words(content: Any) -> Iterator[str]:
    if isinstance(content, str):
        yield content
    elif isinstance(content, Mapping):
        for key, value in content.items():
            yield str(key)
            yield from _words(value)
    elif isinstance(content, list | tuple):
        for item in content:
            yield from _words(item)


def _schema(kind: str, name: str, factory: Callable[..., Any]) -> type[BaseModel]:
    schema: dict[str, Any] = {}
    for parameter, hint in _options(factory):
        if _is_group(hint):
            hints = get_type_hints(hint, include_extras=True)
            for field in fields(hint):
                schema[field.name] = (hints[field.name], getattr(parameter.default, field.name))
        else:
            schema[parameter.name] = (hint, ... if parameter.default is inspect.Parameter.empty else parameter.default)
    return create_model(
        f"{kind} {name}", __config__=ConfigDict(extra="forbid", frozen=True, validate_default=True), **schema
    )


def _options(factory: Callable[..., Any]) -> Iterator[tuple[inspect.Parameter, Any]]:
    """The keyword-only parameters with their types."""
    hints = get_type_hints(factory.__init__ if inspect.isclass(factory) else factory, include_extras=True)
    for parameter in inspect.signature(factory).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            yield parameter, hints.get(parameter.name, Any)


def _is_group(hint: Any) -> bool:
    return inspect.isclass(hint) and issubclass(hint, Options)


def one_line(error: ValidationError, model: type[BaseModel], where: str = "") -> str:
    """The first complaint of a pydantic error as one line with the dotted place and a suggestion."""
    first = error.errors(include_url=False)[0]
    place = [str(part) for part in first["loc"]]
    prefix = [where] if where else []
    if first["type"] == "extra_forbidden":
        options = _options_at(model, place[:-1])
        return f"unknown key '{'.'.join([*prefix, *place])}'{did_you_mean(place[-1], options)}"
    message = first["msg"].removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    given = first.get("input")
    shown = f" (got {given!r})" if isinstance(given, str | int | float | bool | type(None)) else ""
    return f"{'.'.join([*prefix, *place]) or 'configuration'}: {message}{shown}"


def _options_at(model: type[BaseModel], place: list[str]) -> list[str]:
    current: Any = model
    for part in place:
        field = current.model_fields.get(part)
        annotation = field.annotation if field is not None else None
        if not (inspect.isclass(annotation) and issubclass(annotation, BaseModel)):
            return []
        current = annotation
    return list(current.model_fields)
