"""What every page is made of: one frame, one style, and scripts that draw from the data in the page."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from importlib import resources
from typing import Any

from oneflare._version import __version__
from oneflare.report.lead import signed

PLACES = ("oneflare.report", "oneflare.federation")
"""packages with templates, styles and scripts"""


def render_page(template: str, data: Any, scripts: Sequence[str], styles: Sequence[str], **words: Any) -> str:
    """One self-contained page: no library, no network.

    template: a file that extends `frame.html.j2`. data: what the figures are drawn from. scripts: files that are read
    in this order into one scope. words: what the template needs; `title` among them.
    """
    from jinja2 import Environment, FunctionLoader
    from markupsafe import Markup

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, loader=FunctionLoader(part))
    environment.filters["signed"] = signed
    return environment.get_template(template).render(
        version=__version__,
        data=Markup(json_for_html(data)),
        css=Markup("\n".join(map(part, styles))),
        script=Markup("\n".join(map(part, scripts))),
        **words,
    )


def part(name: str) -> str:
    """A template, style or script by its file's name."""
    for place in PLACES:
        found = resources.files(place).joinpath(name)
        if found.is_file():
            return found.read_text()
    raise FileNotFoundError(name)


def json_for_html(value: Any) -> str:
    """JSON that no name inside it can break out of: `<`, `>` and `&` are written as escapes, infinities as null."""
    text = json.dumps(_finite(value), separators=(",", ":"), allow_nan=False)
    for sign in "<>&":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
