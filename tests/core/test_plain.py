"""Text of others, written for people: it stays on its line and does nothing."""

from __future__ import annotations

import sys

import pytest

from oneflare.core.plain import LONGEST, csv_cell, markdown, plain


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("north", "north"),
        ("São Paulo 東京", "São Paulo 東京"),
        ("a\nerror: north was removed", "a\\nerror: north was removed"),
        ("a\r\x1b[2K\x07", "a\\r\\x1b[2K\\x07"),
        ("\x9b31m", "\\x9b31m"),
        ("a\u2028b\u202eb\u200b", "a\\u2028b\\u202eb\\u200b"),
        ("\udcff.png", "\\xff.png"),
        ("\ud800", "\\ud800"),
        (None, "None"),
    ],
)
def test_what_cannot_be_seen_is_spelt(text, shown):
    assert plain(text) == shown


def test_every_character_becomes_printable_and_can_be_written():
    characters = "".join(map(chr, range(0, sys.maxunicode + 1, 7)))
    shown = plain(characters, len(characters))
    assert shown.isprintable()
    assert shown.encode()


def test_a_long_text_is_cut():
    assert plain("a" * 10**7) == "a" * LONGEST + "..."
    assert plain("abc", 3) == "abc"
    assert plain("abcd", 3) == "abc..."


def test_markdown_and_spreadsheets():
    assert markdown("a | b\n# <b>") == "a \\| b \\# \\<b\\>"
    for text in ("=1+1", "+1", "-1", "@SUM(A1)", " =1"):
        assert csv_cell(text) == f"'{text}"
    assert csv_cell("north") == "north"
