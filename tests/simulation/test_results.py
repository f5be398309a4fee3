"""The records of a run: written and read without a change, and refused in one line where a field is wrong."""

from __future__ import annotations

import shutil

import pytest

from oneflare.core.files import read_json, write_json
from oneflare.core.records import parse_record
from oneflare.errors import RunError
from oneflare.simulation.files import RunFiles
from oneflare.simulation.results import DiagnosticsResult, FusionResult, RunResult
from oneflare.simulation.stages import read_result


@pytest.fixture
def own_copy(tmp_path, tiny_run):
    shutil.copytree(tiny_run, tmp_path / "run")
    return RunFiles(tmp_path / "run")


def changed(path, place, value="remove"):
    """The file with one field another one; place: `cost.train_seconds`."""
    content = read_json(path)
    *outer, last = place.split(".")
    inside = content
    for name in outer:
        inside = inside[int(name)] if isinstance(inside, list) else inside[name]
    if value == "remove":
        del inside[last]
    else:
        inside[last] = value
    write_json(path, content)


def test_records_are_written_as_they_were_read(own_copy):
    metrics = sorted((own_copy.folder / "fusions").glob("*/metrics.json"))
    assert metrics
    kinds = {
        own_copy.result: RunResult,
        own_copy.diagnostics: DiagnosticsResult,
        **dict.fromkeys(metrics, FusionResult),
    }
    for path, kind in kinds.items():
        before = path.read_bytes()
        kind.read(path).write(path)
        assert path.read_bytes() == before


@pytest.mark.parametrize(
    ("place", "value", "complaint"),
    [
        ("cost.train_seconds", "remove", "the field 'cost.train_seconds' is missing"),
        ("fusions.average.accuracy", "remove", "the field 'fusions.average.accuracy' is missing"),
        ("clients.1.luck", 0.5, "the field 'clients.1.luck' is unknown"),
        ("weather", "sunny", "the field 'weather' is unknown"),
        ("seed", "0", "the field 'seed' is wrong"),
        ("fusions.average.history.0.epoch", 1.5, "the field 'fusions.average.history.0.epoch' is wrong"),
    ],
)
def test_a_result_with_a_wrong_field_is_refused_in_one_line(own_copy, place, value, complaint):
    changed(own_copy.result, place, value)
    with pytest.raises(RunError) as caught:
        read_result(own_copy.folder)
    line = str(caught.value)
    assert line.startswith(f"{own_copy.result}: {complaint}")
    assert "delete it and run the same command again" in line
    assert "\n" not in line


def test_a_result_of_another_version_is_named_as_such(own_copy):
    changed(own_copy.result, "oneflare", "0.0.3")
    changed(own_copy.result, "cost")
    with pytest.raises(RunError, match=r"'cost' is missing; OneFlare 0\.0\.3 wrote it"):
        read_result(own_copy.folder)


def test_a_result_of_the_first_release_is_read(own_copy):
    """It names neither the code of its figures nor what was done to its data."""
    for place in ("code", "data.notes", "diagnostics.code", "fusions.average.code", "clients.0.precision"):
        changed(own_copy.result, place)
    content = RunResult.read(own_copy.result)
    assert content.arithmetic == content.diagnostics.arithmetic == 1
    assert "with version 1 of OneFlare's fusion arithmetic" in content.fusions["average"].older_code("average")
    assert content.data.notes == ()
    assert "code" not in content.to_dict()["fusions"]["average"]


def test_the_command_line_refuses_a_damaged_result_in_one_line(own_copy, here):
    changed(own_copy.result, "partition.kind")
    refused = here("report", "run", cwd=own_copy.folder.parent)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: run/result.json: the field 'partition.kind' is missing; ")
    assert len(refused.stderr.splitlines()) == 1


def test_a_fusion_is_read_by_field_and_as_scripts_of_the_first_release_do(tiny_run):
    row = read_result(tiny_run).fusions["average"]
    assert row.accuracy == row["accuracy"] == read_json(RunFiles(tiny_run).metrics("average"))["accuracy"]
    with pytest.raises(KeyError, match="teacher"):
        row["teacher"]


@pytest.mark.parametrize("content", [[], None, "text", 3])
def test_what_is_no_table_is_refused(content):
    with pytest.raises(RunError, match=r"^a file: it is not a table of fields; do this$"):
        parse_record(FusionResult, content, "a file", "do this")


def test_a_summary_of_a_client_with_a_wrong_field_is_refused(own_copy):
    files = own_copy.client(0)
    changed(files.summary, "samples", "many")
    with pytest.raises(RunError, match="'samples' is wrong"):
        files.read_summary()
