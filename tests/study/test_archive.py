"""Figures that outlive their runs: on another machine they give the same results, and damaged ones are named."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from oneflare.simulation.results import RunResult
from oneflare.study.answers import FILE as ANSWERS
from oneflare.study.answers import has_answers, read_answers
from oneflare.study.archive import keep_figures
from oneflare.study.cells import make_plan
from oneflare.study.declare import find_declaration
from oneflare.study.scales import find_scale
from shared import forked

KEPT = Path(__file__).parents[2] / "results" / "cells"

MINIATURE = """
title: Miniature
question: Does anything happen?
fusions: [feature_mean, count_prototypes]
baseline: fafi
arms:
  fafi: {method: fafi}
  v11: {method: uncertainty_coupled, label: V11}
places:
  smoke:
    - data: digits
      clients: 2
      settings: {data: {train_size: 80, test_size: 40}, encoder: {width: 4}, train: {epochs: 2}}
claims:
  - id: K1
    text: Lambda stays small
    tests: [{kind: quantity, arm: v11, quantity: largest_raw, below: 1000}]
figures: [{kind: lambda, title: L}]
"""


def _study(folder, *words):
    return forked("study", "miniature.yaml", "--seeds", "1", "-p", "1", *words, cwd=folder)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("archive")
    (folder / "miniature.yaml").write_text(MINIATURE)
    done = _study(folder, "--out", str(folder / "out"), "--figures", str(folder / "kept"))
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def elsewhere(finished, tmp_path):
    """Another machine: the declaration and the kept figures, and no runs."""
    shutil.copy(finished / "miniature.yaml", tmp_path)
    shutil.copytree(finished / "kept", tmp_path / "kept")
    return tmp_path


def test_kept_figures_give_the_same_results_without_a_run(finished, elsewhere):
    assert len(list((elsewhere / "kept").iterdir())) == 2
    done = _study(elsewhere, "--out", "out", "--figures", "kept")
    assert done.returncode == 0, done.stderr
    assert "2 cells, 2 done" in done.stderr
    assert not list(elsewhere.glob("runs/cells/*/clients/*/upload.safetensors"))
    here, there = ((folder / "out/miniature/smoke.json").read_text() for folder in (finished, elsewhere))
    assert json.loads(here) == json.loads(there)


def test_a_fusion_that_was_not_kept_is_trained_for_again(elsewhere):
    path = elsewhere / "miniature.yaml"
    path.write_text(path.read_text().replace("count_prototypes]", "count_prototypes, iffi_released]"))
    done = _study(elsewhere, "--out", "out", "--figures", "kept")
    assert done.returncode == 0, done.stderr
    assert len(list(elsewhere.glob("runs/cells/*/clients/000/upload.safetensors"))) == 2
    assert all("iffi_released" in json.loads(kept.read_text())["answers"] for kept in (elsewhere / "kept").iterdir())


def test_runs_that_finished_without_being_kept_are_kept_later(finished, tmp_path):
    done = _study(finished, "--out", str(tmp_path / "out"), "--figures", str(tmp_path / "kept"), "--collect")
    assert done.returncode == 0, done.stderr
    names = {path.name: path.read_text() for path in (finished / "kept").iterdir()}
    assert {path.name: path.read_text() for path in (tmp_path / "kept").iterdir()} == names


@pytest.mark.parametrize(
    ("damage", "complaint"),
    [
        (lambda content: content | {"schema": 99}, "does not hold the figures of a cell"),
        (lambda content: {key: content[key] for key in content if key != "answers"}, "answers"),
        (lambda content: content | {"result": content["result"] | {"seed": "zero"}}, "seed"),
        (
            lambda content: content | {"experiment": content["experiment"] | {"seed": 5}},
            "another cell than its name says",
        ),
    ],
)
def test_a_damaged_file_is_named_in_one_line(elsewhere, damage, complaint):
    path = sorted((elsewhere / "kept").iterdir())[0]
    path.write_text(json.dumps(damage(json.loads(path.read_text()))))
    refused = _study(elsewhere, "--out", "out", "--figures", "kept")
    assert refused.returncode == 2
    (line,) = refused.stderr.splitlines()
    assert path.name in line
    assert complaint in line
    assert "delete the file" in line
    assert not (elsewhere / "runs/cells" / path.stem / "experiment.yaml").exists()


def test_answers_are_those_of_the_networks_that_were_trained_last(elsewhere):
    """Figures were laid down, then a fusion is missing: all networks are trained again, and every model is asked."""
    path = elsewhere / "miniature.yaml"
    for kept in (elsewhere / "kept").iterdir():
        content = json.loads(kept.read_text())
        for row in content["answers"].values():
            row["right"], row["model"] = "0" * len(row["right"]), "another"
        kept.write_text(json.dumps(content))
    path.write_text(path.read_text().replace("count_prototypes]", "count_prototypes, iffi_released]"))
    assert _study(elsewhere, "--out", "out", "--figures", "kept").returncode == 0
    for kept in (elsewhere / "kept").iterdir():
        assert all(int(row["right"], 16) for row in json.loads(kept.read_text())["answers"].values())


def test_other_seeds_are_other_cells(finished, tmp_path):
    shutil.copy(finished / "miniature.yaml", tmp_path)
    done = _study(tmp_path, "--first-seed", "7", "--dry-run", "--json")
    assert done.returncode == 0, done.stderr
    assert {row["layer"]["seed"] for row in json.loads(done.stdout)} == {7}


def test_a_fusion_without_answers_is_not_kept(finished, tmp_path):
    """Somebody stopped the study between a fusion and the answers of its model."""
    plan = make_plan(find_declaration(str(finished / "miniature.yaml")), find_scale("smoke"), seeds=1)
    cell = plan.first_cells[0]
    runs = tmp_path / "runs"
    shutil.copytree(cell.folder(finished / "runs"), cell.folder(runs))
    path = cell.folder(runs) / ANSWERS
    answers = json.loads(path.read_text())
    del answers["count_prototypes"]
    path.write_text(json.dumps(answers))
    keep_figures(cell, runs, tmp_path / "kept")
    kept = json.loads((tmp_path / "kept" / f"{cell.name}.json").read_text())
    assert set(kept["result"]["fusions"]) == set(answers)


def test_the_answers_that_this_project_keeps_belong_to_their_figures(tmp_path):
    """Else every study would train all cells again, as it must where a fusion's arithmetic has changed."""
    kept = sorted(KEPT.glob("*.json"))
    assert kept
    for path in kept:
        content = json.loads(path.read_text())
        (tmp_path / ANSWERS).write_text(json.dumps(content["answers"]))
        (tmp_path / "result.json").write_text(json.dumps(content["result"]))
        for name, metrics in RunResult.read(tmp_path / "result.json").fusions.items():
            assert has_answers(tmp_path, name, metrics), (path.name, name)
            right = read_answers(tmp_path, name)
            assert right is None or abs(float(right.mean()) - metrics.accuracy) <= 0.005, (path.name, name)
