"""Records: frozen dataclasses that are kept as JSON files, with one writer and one strict reader for all of them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from oneflare.core.files import read_json
from oneflare.errors import RunError

Record = TypeVar("Record")


def json_name(field: str) -> str:
    """A field's name in the file: `lambda_` is `lambda`, which Python does not take as a name."""
    return field.removesuffix("_")


STRICT = ConfigDict(extra="forbid", strict=True, alias_generator=json_name)


def record_to_dict(record: Any) -> dict[str, Any]:
    """The JSON form of a record; a field whose default is None is left out while it is None."""
    optional = {field.name for field in dataclasses.fields(record) if field.default is None}
    values = {field.name: getattr(record, field.name) for field in dataclasses.fields(record)}
    return {json_name(name): _json(value) for name, value in values.items() if not (name in optional and value is None)}


def read_record(kind: type[Record], path: Path, remedy: str) -> Record:
    """The record in a JSON file; the remedy ends the line that refuses a damaged file."""
    return parse_record(kind, read_json(path, remedy), str(path), remedy)


def parse_record(kind: type[Record], content: Any, place: str, remedy: str) -> Record:
    """The record that parsed JSON holds. A missing, unknown or wrong field is a RunError that names the first one.

    place: begins the error's line, for example the path of the file.
    """
    try:
        (record,) = _adapter(cast("Any", kind)).validate_json(json.dumps([content]))
    except ValidationError as error:
        raise RunError(f"{place}: {_complaint(error)}; {remedy}") from None
    return cast("Record", record)


@cache
def _adapter(kind: Any) -> TypeAdapter[list[Any]]:
    """Of a list: its strictness reaches the dataclasses inside, while a dataclass itself takes no configuration."""
    return TypeAdapter(list[kind], config=STRICT)


def _complaint(error: ValidationError) -> str:
    """What is wrong with the first field that is wrong; an unknown field is named before others that are missing."""
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    unknown = ("unexpected_keyword_argument", "extra_forbidden")
    first = next((one for one in errors if one["type"] in unknown), errors[0])
    name = ".".join(str(part) for part in first["loc"][1:])
    if first["type"] == "value_error":
        return f"{f'{name}: ' if name else ''}{first['msg'].removeprefix('Value error, ')}"
    if not name:
        return "it is not a table of fields"
    if first["type"] in unknown:
        return f"the field '{name:.200}' is unknown to this version of OneFlare"
    if first["type"] == "missing":
        return f"the field '{name:.200}' is missing"
    return f"the field '{name:.200}' is wrong ({first['msg'][:1].lower()}{first['msg'][1:]})"


def _json(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = getattr(value, "to_dict", None)
        return own() if own is not None else record_to_dict(value)
    if isinstance(value, BaseModel):
        return value.model_dump(mode="json")
    if isinstance(value, Mapping):
        return {key: _json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json(item) for item in value]
    return value
