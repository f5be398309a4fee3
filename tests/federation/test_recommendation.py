"""The advice of `server init` rests on figures of results/, and every line of the charter is explained."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from statistics import mean, stdev

import pytest

from hospitals import tiny_charter, typed
from oneflare.federation.charter import read_charter
from oneflare.federation.comments import EXPLAINED, LINE
from oneflare.federation.recommendation import MEASURED, Measurement, Situation, recommend

USE = "first line\nexperiment: {\nmembers: none # at all\n  method: mine"
"""a text that looks like terms"""
RESULTS = Path(__file__).parents[2] / "results"


def figures_in(row: Measurement) -> list[float]:
    """The accuracies that the file of a row holds for it, over seeds."""
    content = json.loads((RESULTS / row.file).read_text())
    if row.file.startswith("photographs"):
        start = f"{row.method}, {row.images}, 0.05"
        return [run["accuracy"][row.fusion] for name, run in content.items() if name.startswith(start)]
    if row.file.endswith("compared.json"):
        return [run["accuracy"] for run in content["runs"] if run["data"] == row.data.split()[0]]
    if row.file.startswith("density"):
        return [run["accuracy"][row.fusion] for run in content["runs"] if run["method"] == row.method]
    if row.file.endswith("privacy.json"):
        level = row.data.split(", ")[1].removeprefix("epsilon ")
        start = f"12/{'None' if level == 'exact' else f'{float(level)}'}/"
    else:
        start = f"{row.data}/115/0.05/"
    return [cell["fusions"]["analytic"]["accuracy"] for name, cell in content.items() if name.startswith(start)]


@pytest.mark.parametrize("row", MEASURED, ids=lambda row: f"{row.data}-{row.method}")
def test_figures_are_those_of_the_results(row):
    found = figures_in(row)
    assert found
    assert row.accuracy == pytest.approx(100 * sum(found) / len(found), abs=0.051)
    assert (row.deviation is None) == (len(found) == 1)
    if row.deviation is not None:
        assert row.deviation == pytest.approx(100 * stdev(found), abs=0.051)


def test_the_summary_of_the_compared_runs_is_that_of_its_runs():
    content = json.loads((RESULTS / "analytic" / "compared.json").read_text())
    for data, told in content["summary"].items():
        found = [run["accuracy"] for run in content["runs"] if run["data"] == data]
        assert (told["mean"], told["deviation"]) == pytest.approx((mean(found), stdev(found)), abs=5.1e-5)
        assert told["seeds"] == len(found) >= 3


def test_what_is_recommended_is_what_was_best():
    for data in {row.data for row in MEASURED}:
        rows = [row for row in MEASURED if row.data == data]
        assert max(rows, key=lambda row: row.accuracy).method == "analytic"
    for privacy in ("open", "masked", "private"):
        assert recommend(Situation(3, 64, 3), privacy).settings["method"] == "analytic"
        assert len(recommend(Situation(3, 64, 3), privacy).why) == 2


@pytest.mark.parametrize(
    ("words", "method", "private"),
    [
        ([], "analytic", (None, None)),
        (["--privacy", "masked"], "analytic", ("masked", None)),
        (["--privacy", "private"], "analytic", (None, 10.0)),
        (["--privacy", "private", "upload.statistics_epsilon=3"], "analytic", (None, 3.0)),
        (["epochs=3"], "flare", (None, None)),
        (["method=fafi"], "fafi", (None, None)),
    ],
)
def test_init_recommends_unless_the_user_decides(tmp_path, capsys, words, method, private):
    shape = ["--classes", "a,b", "--image-size", "8", "--channels", "1"]
    code, out, err = typed(capsys, "server", "init", str(tmp_path / "fed"), *shape, *words)
    assert code == 0, err
    terms = read_charter(tmp_path / "fed").terms
    assert terms.method == method
    assert (None if terms.upload.masked is None else "masked", terms.upload.statistics_epsilon) == private
    assert ("method analytic" in out.splitlines()[0]) == (method == "analytic")


def test_privacy_and_another_method_exclude_each_other(tmp_path, capsys):
    code, _, err = typed(
        capsys, "server", "init", str(tmp_path / "fed"), "--classes", "a,b", "--privacy", "masked", "method=fafi"
    )
    assert code == 2
    assert "needs method=analytic" in err
    assert not (tmp_path / "fed").exists()


@pytest.mark.parametrize("method", ["analytic", "flare", "fafi", "fedavg", "flare_analytic"])
def test_every_line_of_the_charter_is_explained(tmp_path, method):
    charter = tiny_charter(settings={"method": method}, members={"north": None}, deadline="2030-01-01", use=USE)
    charter.write(tmp_path / "federation.yaml")
    lines = (tmp_path / "federation.yaml").read_text().splitlines()
    for before, line in pairwise(lines):
        if LINE.match(line) and not line.endswith("}") and not line.strip().startswith("north:"):
            assert before.strip().startswith("#"), line
    again = read_charter(tmp_path / "federation.yaml")
    assert again.fingerprint == charter.fingerprint
    assert again == charter


def test_nothing_is_explained_that_does_not_exist():
    from oneflare.core.config import Experiment
    from oneflare.federation.charter import Charter

    for path in EXPLAINED:
        first, *rest = path.split(".")
        assert first in Charter.model_fields
        if rest and rest[0] not in ("controller",):
            fields = Experiment.model_fields
            assert rest[0] in fields
            if len(rest) > 1:
                assert rest[1] in fields[rest[0]].annotation.model_fields
