"""Reads what a model's card says of its use and its limits, for those who use the model without opening the card."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from oneflare.core.files import read_regular
from oneflare.core.plain import plain
from oneflare.models.sealing import MODELS, check_seal

CARD = "card.md"
USE, LIMITS = "Expected use", "Limits"
"""headings of the card"""
SIZE_LIMIT = 1 << 22


@dataclass(frozen=True)
class CardText:
    """What a user of a model must know, as plain lines."""

    use: str
    limits: tuple[str, ...]


def card_beside(model: Path) -> Path:
    """The card of a model's file: in its folder, or above the folder of a federation's other fusions."""
    folder = model.parent.parent if model.parent.name == MODELS else model.parent
    return folder / CARD


def read_card(path: Path, key: str | None = None, federation: str | None = None) -> CardText | None:
    """Use and limits from a card; None where there is none. key: the coordinator's, with which it must be signed."""
    if not path.exists():
        return None
    content = read_regular(path, SIZE_LIMIT)
    if key is not None:
        check_seal(path, content, key, "card", federation)
    text = content.decode("utf-8", "replace")
    use = " ".join(line for line in _section(text, USE) if not line.startswith("Classes: "))
    return CardText(use, tuple(line.removeprefix("- ") for line in _section(text, LIMITS)))


def _section(text: str, heading: str) -> list[str]:
    """The lines below a heading that are not empty, without the marks that Markdown needs."""
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    lines = [] if found is None else found.group(1).splitlines()
    return [plain(re.sub(r"\\(.)", r"\1", line.strip())) for line in lines if line.strip()]
