"""Turns text from others into one harmless line for a terminal, log, table, page, Markdown or spreadsheet.

File names, members' names, reasons and notes come from people who may want to forge a line of a log, colour a terminal
or start a formula. Whatever is written for people goes through `plain`; the two forms below add what their format
needs.
"""

from __future__ import annotations

import unicodedata
from typing import Any

LONGEST = 4000
_FORMULA = ("=", "+", "-", "@")
_MARKDOWN = "\\`*_[]<>|#"


def plain(value: Any, longest: int = LONGEST) -> str:
    """One line in which every character is visible: others are spelt as their code, too long a text is cut.

    Spelt out are control characters (line ends, escape sequences), marks that reverse the reading direction, invisible
    separators, and bytes of file names that are not UTF-8.
    """
    text = str(value)
    shown = "".join(character if _visible(character) else _spelt(character) for character in text[: longest + 1])
    return shown if len(text) <= longest else shown[:longest] + "..."


def _visible(character: str) -> bool:
    return character == " " or unicodedata.category(character)[0] not in "CZ"


def _spelt(character: str) -> str:
    code = ord(character)
    if 0xDC80 <= code <= 0xDCFF:  # a byte of a file name that is not UTF-8
        return f"\\x{code - 0xDC00:02x}"
    return character.encode("unicode_escape").decode()


def markdown(value: Any) -> str:
    """The text for a cell or a line of Markdown, without marks that format anything."""
    text = plain(" ".join(str(value).split()))
    for mark in _MARKDOWN:
        text = text.replace(mark, "\\" + mark)
    return text


def csv_cell(value: Any) -> str:
    """The text for a cell of a CSV file; what a spreadsheet would run as a formula gets an apostrophe before it."""
    text = plain(value)
    return f"'{text}" if text.lstrip().startswith(_FORMULA) else text
