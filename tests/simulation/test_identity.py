"""A run belongs to the code that made it: an edited plugin or another arithmetic never passes for what was there."""

from __future__ import annotations

import json
import sys

import pytest
import yaml

from conftest import TINY
from oneflare import _version
from oneflare.client.observer import Observer
from oneflare.core.plugins import VARIABLE, _loaded
from oneflare.core.sourcecode import module_digest
from oneflare.errors import RunError
from oneflare.fusion.base import FUSIONS, made_by, outdated
from oneflare.methods.resolve import resolve
from oneflare.objective import CONTROLLERS
from oneflare.simulation.files import RunFiles
from oneflare.simulation.kept import diagnose_into
from oneflare.simulation.stages import (
    default_folder,
    fuse_run,
    open_run,
    read_experiment,
    read_result,
    run,
    run_experiment,
)
from oneflare.study.answers import read_answers
from oneflare.study.cells import Cell
from oneflare.study.compare import compare_methods
from oneflare.study.execute import is_complete, run_cells
from shared import forked

PULL = """
from oneflare.objective import CONTROLLERS, Controller
from strength import STRENGTH


@CONTROLLERS.register("pull")
class Pull(Controller):
    def loss(self, local, align, progress):
        self.record(STRENGTH, STRENGTH)
        return local + STRENGTH * align
"""
VOTE = """
from oneflare.fusion.base import FUSIONS
from oneflare.fusion.features.sums import CountPrototypes, FeatureMean


@FUSIONS.register("vote")
class Vote({base}):
    pass
"""
SMALL = {**TINY, "train": {"epochs": 1}, "fusions": ["feature_mean"]}
PULLED = {**SMALL, "method": "flare", "controller": {"name": "pull"}}


class Said(Observer):
    def __init__(self):
        self.lines = []

    def warn(self, text):
        self.lines.append(text)


@pytest.fixture
def edit(tmp_path, monkeypatch):
    """Write modules and load the plugins anew, as the next command of a user would."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    names = set()

    def forget():
        for name in [name for name in sys.modules if name.split(".")[0] in names]:
            del sys.modules[name]
        _loaded.difference_update(names)
        for registry, part in ((CONTROLLERS, "pull"), (FUSIONS, "vote")):
            registry._entries.pop(part, None)
        module_digest.cache_clear()

    def write(**texts):
        names.update(texts)
        for name, text in texts.items():
            (tmp_path / f"{name}.py").write_text(text)
        forget()
        monkeypatch.setenv(VARIABLE, ",".join(name for name in ("pull", "vote") if (tmp_path / f"{name}.py").exists()))

    yield write
    forget()


def largest(result) -> float:
    """The lambda that the plugin has really used."""
    return max(client.lambda_raw_max for client in result.content.clients)


def test_an_edited_plugin_begins_a_new_run_and_is_named(edit, tmp_path):
    said = Said()
    edit(pull=PULL, strength="STRENGTH = 1.0")
    first = run(observer=said, **PULLED)
    assert run(observer=said, **PULLED).complete_before
    assert not said.lines
    edit(strength="STRENGTH = 3.0")  # what the plugin imports from its own folder is part of it
    second = run(observer=said, **PULLED)
    assert (largest(first), largest(second)) == (1.0, 3.0)
    assert second.folder != first.folder
    assert said.lines == [
        f"{first.folder} was made with another version of the plugin pull; it is kept, and a new run begins in "
        f"{second.folder}"
    ]
    assert run(observer=said, **PULLED).folder == second.folder
    with pytest.raises(RunError, match=r"another version of the plugin pull; choose another --out .*this one is kept"):
        run(out=first.folder, **PULLED)
    edit(strength="STRENGTH = 1.0")
    assert run(**PULLED).folder == first.folder
    assert len(said.lines) == 1


def test_plugins_that_a_run_does_not_use_do_not_count(edit):
    plain = resolve(SMALL).training_digest()
    edit(pull=PULL, strength="STRENGTH = 1.0", vote=VOTE.format(base="FeatureMean"))
    assert resolve(SMALL).training_digest() == plain
    pulled = resolve(PULLED)
    assert set(pulled.code.plugins) == {"pull"}
    assert resolve(PULLED, {"fusions": "vote"}).training_digest() == pulled.training_digest()
    assert resolve(yaml.safe_load(pulled.to_yaml())).training_digest() == pulled.training_digest()


def test_an_edited_fusion_is_made_anew_from_the_same_uploads(edit, tmp_path):
    layer, said = {**SMALL, "fusions": ["vote"]}, Said()
    edit(vote=VOTE.format(base="FeatureMean"))
    folder = run(out=tmp_path / "run", **layer).folder
    uploads = {path: path.stat().st_mtime_ns for path in folder.rglob("upload.safetensors")}
    edit(vote=VOTE.format(base="CountPrototypes"))
    again = run(out=folder, observer=said, **layer)
    assert said.lines == [
        "vote: its figures were made with another version of the plugin vote; they are made anew from the same uploads"
    ]
    right = run(out=tmp_path / "right", **SMALL | {"fusions": ["count_prototypes"]})
    assert again.fusions["vote"].per_class == right.fusions["count_prototypes"].per_class
    assert uploads == {path: path.stat().st_mtime_ns for path in folder.rglob("upload.safetensors")}
    assert run(out=folder, **layer).complete_before


def test_fusing_uploads_of_an_edited_plugin_says_so(edit, tmp_path):
    edit(pull=PULL, strength="STRENGTH = 1.0")
    folder, said = run(out=tmp_path / "run", **PULLED).folder, Said()
    edit(strength="STRENGTH = 2.0")
    fuse_run(folder, [{"name": "average"}], said)
    assert said.lines == [
        f"{folder} was trained with another version of the plugin pull; its uploads are used as they are"
    ]


def test_studies_and_comparisons_notice_an_edited_plugin(edit, tmp_path):
    edit(pull=PULL, strength="STRENGTH = 1.0")
    before = Cell(PULLED, resolve(PULLED))
    run_cells([before], tmp_path)
    assert is_complete(before, tmp_path)
    layers = [{key: value for key, value in PULLED.items() if key != "method"}]
    first = compare_methods(["flare"], layers, seeds=1)
    edit(strength="STRENGTH = 2.0")
    after, said = Cell(PULLED, resolve(PULLED)), Said()
    (outcome,) = run_cells([after], tmp_path, observer=said)
    assert outcome.status == "run"
    assert is_complete(before, tmp_path)
    second = compare_methods(["flare"], layers, seeds=1, observer=said)
    assert [largest(one.results["flare"][0]) for one in (first, second)] == [1.0, 2.0]
    assert len(said.lines) == 2
    assert all("was made with another version of the plugin pull; it is kept" in line for line in said.lines)


def test_the_command_line_names_the_edited_plugin(tmp_path):
    words = ["--plugin", "vote", "run", "method=fafi", "fusions=vote", "epochs=1", "clients=2", "data.train_size=64"]
    for base in ("FeatureMean", "CountPrototypes"):
        (tmp_path / "vote.py").write_text(VOTE.format(base=base))
        done = forked(*words, "--out", "run", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert "another version of the plugin vote" in " ".join(done.stderr.split())
    assert "nothing to do" not in done.stdout


def as_the_first_release_wrote_it(folder):
    """Without a word about code."""
    files = RunFiles(folder)
    content = yaml.safe_load(files.experiment.read_text())
    content.pop("code")
    files.experiment.write_text(yaml.safe_dump(content, sort_keys=False))
    for path in (files.diagnostics, *folder.glob("fusions/*/metrics.json")):
        path.write_text(json.dumps({key: value for key, value in read(path).items() if key != "code"}))
    result = read(files.result)
    result.pop("code")
    for part in (result["diagnostics"], *result["fusions"].values()):
        part.pop("code")
    files.result.write_text(json.dumps(result))


def read(path):
    return json.loads(path.read_text())


def test_runs_of_the_first_release_are_read_while_the_arithmetic_is_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(_version, "FUSION_ARITHMETIC", 1)
    first = run_experiment(resolve(SMALL), tmp_path / "run")
    as_the_first_release_wrote_it(first.folder)
    assert run_experiment(resolve(SMALL), first.folder).complete_before
    assert read_result(first.folder).accuracy == first.accuracy
    federation, uploads = open_run(first.folder, Observer())
    assert len(uploads) == 3
    assert federation.contract.federation == resolve(SMALL).training_digest()


def test_a_run_keeps_what_it_was_when_its_methods_recipe_gains_an_option(tmp_path):
    """A file from before there was `align_reduction` means the mean, whatever the recipe says today."""
    before = resolve(TINY, {"method": "flare", "objective": {"align_reduction": None}})
    content = yaml.safe_load(before.to_yaml())
    del content["objective"]["align_reduction"]
    (tmp_path / "experiment.yaml").write_text(yaml.safe_dump(content))
    found = read_experiment(tmp_path)
    assert found.objective.align_reduction is None
    assert found.training_digest() == before.training_digest()
    assert found.training_digest() != resolve(TINY, {"method": "flare"}).training_digest()


def test_another_fusion_arithmetic_makes_figures_anew_and_keeps_the_uploads(tmp_path, monkeypatch):
    cell, said = Cell(SMALL, resolve(SMALL)), Said()
    monkeypatch.setattr(_version, "FUSION_ARITHMETIC", 1)
    run_cells([cell], tmp_path)
    folder = cell.folder(tmp_path)
    as_the_first_release_wrote_it(folder)
    answers = read(folder / "answers.json")
    (folder / "answers.json").write_text(
        json.dumps({name: {key: row[key] for key in ("images", "right")} for name, row in answers.items()})
    )
    assert is_complete(cell, tmp_path)
    uploads = {path: path.stat().st_mtime_ns for path in folder.rglob("upload.safetensors")}
    monkeypatch.setattr(_version, "FUSION_ARITHMETIC", 2)
    assert not is_complete(cell, tmp_path)
    with pytest.raises(RunError, match=r"figures of feature_mean .* version 1 of .* fusion arithmetic \(today: 2"):
        read_result(folder)
    (outcome,) = run_cells([cell], tmp_path, observer=said)
    assert outcome.status == "run"
    (line,) = said.lines
    assert "feature_mean: its figures were made with version 1 of OneFlare's fusion arithmetic (today: 2)" in line
    assert is_complete(cell, tmp_path)
    assert read(folder / "diagnostics.json")["code"] == {"arithmetic": 2}
    assert read_answers(folder, "feature_mean").mean() == pytest.approx(read_result(folder).accuracy)
    assert uploads == {path: path.stat().st_mtime_ns for path in folder.rglob("upload.safetensors")}


def test_one_table_never_holds_figures_of_two_arithmetics(tmp_path, monkeypatch):
    monkeypatch.setattr(_version, "FUSION_ARITHMETIC", 1)
    folder = run_experiment(resolve(SMALL), tmp_path / "run").folder
    as_the_first_release_wrote_it(folder)
    monkeypatch.setattr(_version, "FUSION_ARITHMETIC", 2)
    found = fuse_run(folder, [{"name": "average"}]).fusions
    assert {name: row["code"]["arithmetic"] for name, row in found.items()} == {"average": 2, "feature_mean": 2}
    assert read_result(folder).fusions == found


def test_another_revision_of_one_fusion_makes_only_its_figures_anew(tmp_path, monkeypatch):
    both = SMALL | {"fusions": ["average", "feature_mean"]}
    cell, said = Cell(both, resolve(both)), Said()
    run_cells([cell], tmp_path)
    folder = cell.folder(tmp_path)
    before = {name: (folder / "fusions" / name / "metrics.json").read_text() for name in ("average", "feature_mean")}
    monkeypatch.setattr(FUSIONS["average"].factory, "revision", 1)
    assert not is_complete(cell, tmp_path)
    with pytest.raises(RunError, match=r"figures of average were made with another revision of the fusion"):
        read_result(folder)
    run_cells([cell], tmp_path, observer=said)
    (line,) = said.lines
    assert "average: its figures were made with another revision of the fusion average" in line
    after = {name: (folder / "fusions" / name / "metrics.json").read_text() for name in before}
    assert json.loads(after["average"])["code"]["revisions"] == {"average": 1}
    assert after["feature_mean"] == before["feature_mean"]
    assert read_result(folder).fusions["average"].accuracy == json.loads(before["average"])["accuracy"]


def test_a_student_is_outdated_when_its_teacher_is(monkeypatch):
    spec = FUSIONS.complete({"name": "distill_public", "teacher": "average"}, "fusion")
    figures = made_by(spec)
    assert outdated(figures, spec) is None
    monkeypatch.setattr(FUSIONS["average"].factory, "revision", 2)
    assert outdated(figures, spec) == "with another revision of the fusion average"


def test_diagnostics_are_measured_once(tmp_path, tiny_run, monkeypatch):
    federation, uploads = open_run(tiny_run, Observer())
    path = tmp_path / "diagnostics.json"
    first = diagnose_into(path, uploads, federation.dataset)
    monkeypatch.setattr("oneflare.simulation.kept.diagnose", lambda *_: pytest.fail("measured again"))
    assert diagnose_into(path, uploads, federation.dataset) == first


def test_another_training_arithmetic_is_another_run(tmp_path, monkeypatch):
    first = run_experiment(resolve(SMALL), tmp_path / "run")
    as_the_first_release_wrote_it(first.folder)
    name = default_folder(resolve(SMALL))
    monkeypatch.setattr(_version, "TRAINING_ARITHMETIC", 2)
    assert default_folder(resolve(SMALL)) != name
    with pytest.raises(RunError, match=r"another version of OneFlare's training arithmetic; choose another --out"):
        run_experiment(resolve(SMALL), first.folder)
    with pytest.raises(RunError, match="was trained with version 1 of OneFlare's training arithmetic"):
        read_result(first.folder)
    with pytest.raises(RunError, match="was trained with another version of OneFlare's training arithmetic"):
        fuse_run(first.folder, [{"name": "average"}])


def test_the_digest_of_a_package_covers_all_its_files(tmp_path, monkeypatch):
    package = tmp_path / "bundle"
    (package / "deep").mkdir(parents=True)
    for path in (package / "__init__.py", package / "deep" / "__init__.py", package / "deep" / "rule.py"):
        path.write_text("import json\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    __import__("bundle")

    def digest(name="bundle"):
        module_digest.cache_clear()
        return module_digest(name)

    try:
        first = digest()
        (package / "deep" / "rule.py").write_text("import json  # edited\n")
        assert digest() != first
        (package / "deep" / "rule.py").write_text("import json\n")
        assert digest() == first
        assert digest("nowhere") is None
    finally:
        module_digest.cache_clear()
        for name in ("bundle", "bundle.deep"):
            sys.modules.pop(name, None)
