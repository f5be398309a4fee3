"""The documentation says what is so: the page of commands, and the script that runs its code blocks."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def module(path: str):
    spec = importlib.util.spec_from_file_location(Path(path).stem + "_page", ROOT / path)
    found = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = found
    spec.loader.exec_module(found)
    return found


def test_the_page_of_commands_is_made_from_their_help():
    page = module("docs/reference/cli.py").page()
    kept = (ROOT / "docs" / "reference" / "cli.md").read_text()
    assert kept == page, "run: python docs/reference/cli.py"


@pytest.mark.parametrize(
    ("expected", "printed", "same"),
    [
        ("a 63.2 *", "a  71.9 *", True),
        ("a\n...\nz", "a\nb\nc\nz", True),
        ("a\n...\nz", "a\nb\nc", False),
        ("3 clients", "4 clients", False),
        ("│ fafi   │       63.2 * │", "│ fafi │ 8.1 * │", True),
    ],
)
def test_figures_may_differ_and_words_may_not(expected, printed, same):
    assert module("docs/run_blocks.py").agrees(expected, printed) is same


def test_a_page_that_lies_is_told(tmp_path):
    runner = module("docs/run_blocks.py")
    page = tmp_path / "page.md"
    page.write_text('```python title="a.py"\nprint("hello")\n```\n\n```console\n$ python a.py\nhello\n```\n')
    assert runner.run_page(page) == []
    page.write_text("```console\n$ echo one\ntwo\n```\n\n```python\nprint(1 + 1)\n#> 3\n```\n")
    complaints = runner.run_page(page)
    assert len(complaints) == 2
    assert "page.md:1" in complaints[0]


def test_the_pages_name_every_command():
    from oneflare.cli.main import app

    text = (ROOT / "docs" / "reference" / "cli.md").read_text()
    for command in app.registered_commands:
        assert f"## `oneflare {command.name}`" in text
