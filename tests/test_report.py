from __future__ import annotations

import re

import pytest

from oneflare.errors import RunError
from oneflare.report import write_report
from oneflare.stages import read_result


def test_the_page_of_a_run_shows_its_figures_and_needs_no_network(tiny_run):
    text = write_report(tiny_run).read_text()
    result = read_result(tiny_run)
    for name, row in result.fusions.items():
        assert f"<td>{name}</td><td>{100 * row['accuracy']:.1f}</td>" in text
    assert text.count("<svg") == 3
    assert "valve 50" in text
    assert not re.search(r"(src|href)=[\"']?(https?:)?//", text.replace("http://www.w3.org", ""))
    assert "lambda_max: 50.0" in text


def test_writing_it_again_gives_the_same_page(tiny_run):
    assert write_report(tiny_run).read_bytes() == write_report(tiny_run).read_bytes()


def test_a_folder_without_a_run(tmp_path):
    with pytest.raises(RunError, match="is not a run folder"):
        write_report(tmp_path)
