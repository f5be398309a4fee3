"""Explanations, pictures and studies, as the command line offers them."""

from __future__ import annotations

import json
import shutil

import pytest

from oneflare.core.schedules import build_schedule
from oneflare.methods import METHODS, find_method
from oneflare.methods.explain import explain
from oneflare.methods.recipes import REUSED
from oneflare.study.claims import end_over_peak, largest_raw, rise
from oneflare.study.toy import FALLING, TwoWells, descend, share_that_leaves


@pytest.mark.parametrize(
    ("number", "name"),
    [
        ("V4", "fafi"),
        ("V5", "drcl"),
        ("V6", "random_annealed"),
        ("V7", "etf_annealed"),
        ("V8", "progressive"),
        ("V9", "entropy"),
        ("V10", "uncertainty"),
        ("v10-rescaled", "uncertainty_rescaled"),
        ("V11", "uncertainty_coupled"),
        ("V11-Linear", "uncertainty_coupled"),
        ("V11-Cosine", "uncertainty_coupled_cosine"),
        ("V12", "meta_annealed"),
        ("V13", "floor"),
        ("V13.1", "ceiling"),
        ("V14", "flare"),
    ],
)
def test_every_version_of_the_log_is_a_method(number, name):
    assert find_method(number).name == name


def test_numbers_find_one_method_each():
    numbers = [number for method in METHODS.values() for number in method.numbers]
    assert len(set(numbers)) == len(numbers)
    assert set(REUSED) <= set(numbers)
    assert all(method.reference for method in METHODS.values())


@pytest.mark.parametrize("method", list(METHODS))
def test_every_method_explains_itself(method):
    content = explain(method).to_dict()
    assert content["terms"] or content["feature_map"]
    assert all(row["equation"] for row in content["terms"].values())
    assert content["controller"]
    assert content["anchors"]
    assert all(content["fusions"].values())
    assert content["reference"]
    json.dumps(content)


def test_explain_prints_the_equations(tmp_path, here):
    shown = here("explain", "V12", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    for text in (
        "meta_annealed (V12)",
        "L_l/(2 s_l) + s(p) L_a/(2 s_a) + (log s_l + log s_a)/2",
        "weights: L_l + [raw] s(p) L_a",
        "1 x supcon",
        "largest cosine for 10 classes: -0.1111",
        "from: research log\n",
        "note: file 000",
        "sigma_lr: 0.02",
    ):
        assert text in shown.stdout, text
    content = json.loads(here("explain", "flare", "--json", cwd=tmp_path).stdout)
    assert content["defaults"]["controller"]["lambda_max"] == 50.0


def test_schedules_are_drawn(tmp_path, here):
    words = ["schedule", "cosine_restarts", "cycles=3", "growth=2", "decay=1.5"]
    shown = here(*words, "--out", "curve.png", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    shown = here(*words, "--toy", "--out", "toy.svg", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "end in the deep well" in (tmp_path / "toy.svg").read_text()


def test_a_falling_rate_stays_in_the_shallow_well_and_restarts_leave_it():
    wells = TwoWells()
    assert wells.slope(wells.ridge) == pytest.approx(0, abs=1e-9)
    assert wells.value(-1) < wells.value(1) < wells.value(wells.ridge)
    falling, restarts = build_schedule(FALLING), build_schedule({"name": "cosine_restarts", "cycles": 8})
    assert descend(wells, falling)[-1] > wells.ridge > descend(wells, restarts)[-1]
    assert share_that_leaves(wells, falling, seeds=60) < 0.25
    assert share_that_leaves(wells, restarts, seeds=60) > 0.8


def test_lambda_is_drawn_for_one_run_and_for_several(tmp_path, tiny_run, here):
    other = tmp_path / "other"
    shutil.copytree(tiny_run, other)
    shown = here("lambda", str(tiny_run), "--out", "one.svg", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    text = (tmp_path / "one.svg").read_text()
    for words in ("raw lambda", "effective lambda", "L_local", "L_align", "conflicting steps", "client 2", "by hand"):
        assert words in text, words
    shown = here("lambda", str(tiny_run), str(other), "--out", "two.svg", "--reference", "5", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    text = (tmp_path / "two.svg").read_text()
    assert "flare (other)" in text
    assert "by hand: 5 (1 - p)" in text


def test_the_figures_of_a_trace():
    trace = [{"lambda_raw": raw, "lambda_raw_max": raw + 1} for raw in (4.0, 9.0, 5.0, 3.0, 1.0)]
    assert end_over_peak(trace) == pytest.approx(0.1)
    assert rise(trace) == pytest.approx(0.2)
    assert largest_raw(trace) == 10


def test_the_study_of_lambda_by_its_name(tmp_path, here):
    words = ["data.train_size=150", "data.test_size=50", "clients=2", "encoder.width=4", "epochs=3", "workers=1"]
    shown = here("study", "lambda", "lambda_short", *words, "--seeds", "1", "--quiet", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    content = json.loads((tmp_path / "results/lambda/smoke.json").read_text())
    assert [claim["id"] for claim in content["claims"]][-1] == "lambda-own-accord"
    cells = {cell["row"]: cell for cell in content["cells"]}
    (largest,) = cells["flare"]["lambda"]["largest_raw"]
    assert largest <= 51.02
    assert cells["balanced"]["lambda"]["last_raw"][0] < cells["balanced"]["lambda"]["largest_raw"][0]
    assert (tmp_path / "results/lambda_short/smoke.md").exists()
