"""Reads JSON and YAML from others, and refuses what is ambiguous or would take too much memory."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any, ClassVar

import yaml

LONGEST_NUMBER = 20
"""characters of a whole number"""
YAML_DEPTH = 20
YAML_CHARACTERS = 1 << 20


def strict_json(text: str | bytes) -> Any:
    """Parse JSON as UTF-8; a key given twice, NaN, infinity and numbers that overflow are a ValueError."""
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    try:
        return json.loads(
            text, object_pairs_hook=_distinct, parse_constant=_no_constant, parse_float=_finite, parse_int=_integer
        )
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _distinct(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a key is given twice")
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a number overflows")
    return value


def _integer(text: str) -> int:
    if len(text) > LONGEST_NUMBER:
        raise ValueError("a whole number is too long")
    return int(text)


def strict_yaml(text: str | bytes) -> Any:
    """Parse YAML as UTF-8 into mappings, lists, text, numbers, booleans and null; anything else is a ValueError.

    The error is one line with the place. Refused are: a key given twice or one that is no text or number, anchors and
    aliases (`&`, `*`, `<<`), tags, more than 20 levels, more than a million characters, numbers that overflow, that
    have more than 20 digits, or that YAML's versions read differently (010, 0x10, 1:30, 1_000). Dates stay text.
    """
    if isinstance(text, bytes):
        try:
            text = text.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            line = bytes(error.object[: error.start]).count(b"\n") + 1
            raise ValueError(f"line {line} is not UTF-8 text; save the file as UTF-8") from None
    if len(text) > YAML_CHARACTERS:
        raise ValueError(f"it has more than {YAML_CHARACTERS} characters")
    loader: _StrictLoader | None = None
    try:
        loader = _StrictLoader(text)
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f"line {mark.line + 1}: " if mark is not None else ""
        raise ValueError(f"{place}{' '.join(str(error.problem).split()):.200}") from None
    except yaml.YAMLError:
        raise ValueError("it has characters that YAML does not allow") from None
    finally:
        if loader is not None:
            loader.dispose()


class _StrictLoader(yaml.SafeLoader):
    """YAML's safe loader without dates, aliases, tags of others and doubtful numbers."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {  # type: ignore[misc]  # the stubs say it is an instance variable
        first: [(tag, pattern) for tag, pattern in resolvers if not tag.endswith((":timestamp", ":merge"))]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }
    yaml_constructors: ClassVar[dict[Any, Any]] = {
        tag: constructor
        for tag, constructor in yaml.SafeLoader.yaml_constructors.items()
        if tag is not None and tag.rsplit(":", 1)[1] in ("null", "bool", "seq", "map")
    }
    depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise _problem("anchors and aliases (& and *) are not read here; write the value out", event.start_mark)
        if getattr(event, "tag", None) is not None:
            raise _problem(f"the tag {event.tag!s:.60} is not read here; write plain values", event.start_mark)
        if self.depth >= YAML_DEPTH:
            raise _problem(f"more than {YAML_DEPTH} levels are nested in each other", event.start_mark)
        self.depth += 1
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, bool) or not isinstance(key, str | int | float):
                raise _problem("a key is neither text nor a number; put it in quotes", key_node.start_mark)
            if key == "<<":
                raise _problem("merge keys (<<) are not read here; write the values out", key_node.start_mark)
            if str(key) in seen:
                raise _problem(f"'{key!s:.80}' is given twice; remove one of the two lines", key_node.start_mark)
            seen.add(str(key))
        return super().construct_mapping(node, deep)

    def flatten_mapping(self, node: Any) -> None:
        """Merge keys are refused above."""

    def whole_number(self, node: Any) -> int:
        text = node.value
        if not re.fullmatch(r"[-+]?(0|[1-9][0-9]*)", text):
            raise _problem(
                f"'{text:.40}' is read as different numbers by different programs; write it in decimal without leading "
                "zeros or underscores, or in quotes if it is text",
                node.start_mark,
            )
        if len(text) > LONGEST_NUMBER:
            raise _problem(f"a whole number has {len(text)} digits; at most {LONGEST_NUMBER} are read", node.start_mark)
        return int(text)

    def real_number(self, node: Any) -> float:
        if ":" in node.value or "_" in node.value:
            raise _problem(f"'{node.value:.40}' is not a decimal number; put text in quotes", node.start_mark)
        value = float(self.construct_yaml_float(node))
        if not math.isfinite(value):
            raise _problem(f"'{node.value:.40}' is not a finite number", node.start_mark)
        return value

    def text(self, node: Any) -> str:
        if any("\ud800" <= character <= "\udfff" for character in node.value):
            raise _problem("a text holds half a character (\\ud800 to \\udfff)", node.start_mark)
        return str(node.value)


def _problem(text: str, mark: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=text, problem_mark=mark)


_StrictLoader.add_constructor("tag:yaml.org,2002:int", _StrictLoader.whole_number)
_StrictLoader.add_constructor("tag:yaml.org,2002:float", _StrictLoader.real_number)
_StrictLoader.add_constructor("tag:yaml.org,2002:str", _StrictLoader.text)
