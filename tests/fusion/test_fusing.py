"""The fusion bench, membership and diagnostics: one set of uploads, every fusion, every change of members."""

from __future__ import annotations

import json
import shutil
import warnings

import numpy as np
import pytest
import torch

from conftest import TINY, same_answers
from oneflare.client.observer import Observer
from oneflare.core.config import DataConfig
from oneflare.core.files import load_state
from oneflare.data import load
from oneflare.errors import ConfigError, OneFlareError, RunError, UploadError
from oneflare.fusion import FUSIONS, Fused, build_fusion, logits_of_all
from oneflare.fusion.membership import Membership
from oneflare.methods.resolve import resolve
from oneflare.simulation.engines.measure import measure
from oneflare.simulation.files import RunFiles
from oneflare.simulation.stages import fuse_run, open_run, run_experiment
from oneflare.study.compare import compare_methods
from oneflare.study.fusing import DIAGNOSTICS, bench_runs
from oneflare.upload.evidence import EVIDENCE

with warnings.catch_warnings():  # typer names parts of click that are on their way out
    warnings.simplefilter("ignore", DeprecationWarning)
    from oneflare.cli.fusing import fuse

IMAGES = load(DataConfig(test_size=40)).test.images
PARTS = ("covariance", "class_covariances", "mixtures")
RICH = {
    "method": "flare_analytic",
    "data": {"name": "digits", "train_size": 260, "test_size": 60, "public": 60},
    "train": {"epochs": 1, "snapshots": 0, "holdout": 0.1},
    "objective": {"terms": {"open_set": 1.0}},
    "upload": {"evidence": list(EVIDENCE), "statistics": list(PARTS), "statistics_components": 2},
    "analytic": {"name": "random_conv", "filters": 8},
    "fusions": ["count_prototypes"],
}
"""uploads that hold everything a fusion may ask for"""
ROUND = {"rounds": 1, "generator_steps": 1, "student_steps": 1, "batch_size": 4}
QUICK = {"distill_public": {"steps": 1, "batch_size": 4}, "distill_datafree": ROUND, "coboosting": ROUND}


@pytest.fixture(scope="session")
def rich_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rich") / "run"
    run_experiment(resolve(TINY, RICH), folder)
    return folder


@pytest.fixture(scope="session")
def rich_uploads(rich_run):
    return open_run(rich_run, Observer())[1]


@pytest.fixture
def own_copy(rich_run, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(rich_run, tmp_path / "run")


@pytest.mark.parametrize(
    ("second", "message"), [("nowhere", "is not a run folder"), ("run", "same settings and seed was named before")]
)
def test_a_wrong_folder_among_several_ends_before_any_work(own_copy, tmp_path, second, message):
    before = sorted(own_copy.rglob("*"))
    with pytest.raises(RunError, match=message):
        bench_runs([own_copy, tmp_path / second], names=["average"])
    assert sorted(own_copy.rglob("*")) == before


@pytest.mark.parametrize("name", list(FUSIONS))
def test_fusing_leaves_no_trace_and_batch_size_changes_no_prediction(name, rich_uploads):
    """For every fusion there is, and every one that will be: what digits uploads can feed predicts image by image."""
    fusion = build_fusion({"name": name, **QUICK.get(name, {})})
    assert fusion.needs <= rich_uploads.offered
    options = dict(vars(fusion))
    fused = fusion.fuse(rich_uploads)
    assert vars(fusion) == options, "fusing stores nothing on the fusion"
    assert isinstance(fused, Fused)
    assert bool(fused.notes) == fusion.trains
    model = fused.model
    logits = model.logits(IMAGES)
    for batch_size in (1, 7, 256):
        assert same_answers(model.predict(IMAGES, batch_size=batch_size), logits)


@pytest.mark.soak
def test_all_fusions_of_a_run_in_one_table(own_copy):
    (table,) = bench_runs([own_copy])
    slow = {name for name in FUSIONS if build_fusion({"name": name}).trains}
    assert set(table.names) == set(FUSIONS) - slow
    assert table.first == "count_prototypes"
    assert set(table.left_out) == slow
    for name in table.names:
        row = table.runs[0].fusions[name]
        assert all(np.isfinite(getattr(row, key)) for key in ("balanced_accuracy", "worst_class", "calibration_error"))


def test_figures_of_a_table_are_those_of_the_models(own_copy, rich_uploads):
    before = {path: path.read_bytes() for path in own_copy.rglob("upload.safetensors")}
    result_before = (own_copy / "result.json").read_bytes()
    (table,) = bench_runs([own_copy], names=["ties", "ensemble", "average"])
    models = {name: build_fusion({"name": name}).fuse(rich_uploads).model for name in ("ties", "ensemble", "average")}
    test = load(resolve(TINY, RICH).data).test
    for name, logits in logits_of_all(models, test.images).items():
        row = table.runs[0].fusions[name]
        assert row.accuracy == float((logits.argmax(1) == test.labels).double().mean())
        assert row.parameters == models[name].cost.parameters
        assert row.forward_passes == models[name].cost.forward_passes
    for name in table.names:
        row = table.runs[0].fusions[name]
        assert row.fuse_seconds > 0
        assert (own_copy / "fusions" / name / "model.safetensors").exists()
    assert before == {path: path.read_bytes() for path in before}
    assert (own_copy / "result.json").read_bytes() == result_before
    assert fuse_run(own_copy, [{"name": "ties"}]).fusions["ties"] == table.runs[0].fusions["ties"]


def test_bytes_needed_are_those_of_the_tensors(rich_uploads):
    upload = rich_uploads.uploads[0]
    weights = sum(tensor.numel() * tensor.element_size() for tensor in upload.weights().values())
    deep = weights + 4 * upload.prototypes.numel()
    assert upload.needed_bytes(frozenset({"weights", "prototypes"})) == deep
    assert upload.needed_bytes(frozenset({"weights", "prototypes", "counts"})) == deep + 80
    assert upload.needed_bytes(frozenset({"moments"})) == 8 * rich_uploads.contract.dim
    everything = upload.needed_bytes(upload.fields)
    assert everything < upload.file_bytes < everything + 40_000  # the rest is the manifest
    measured = upload.needed_bytes(frozenset({"kronecker"}))
    assert measured == sum(4 * t.numel() for p in ("inputs.", "gradients.") for t in upload.evidence(p).values())


def test_a_second_table_reads_back_what_is_there(own_copy, monkeypatch):
    (first,) = bench_runs([own_copy], names=["ties", "feature_mean"])
    monkeypatch.setattr("oneflare.study.fusing.measure", lambda *_, **__: pytest.fail("fused again"))
    (again,) = bench_runs([own_copy], names=["ties", "feature_mean"])
    assert again.to_dict() == first.to_dict()
    path = RunFiles(own_copy).metrics("ties")
    path.write_text(json.dumps(json.loads(path.read_text()) | {"measured": "of other uploads"}))
    with pytest.raises(pytest.fail.Exception):
        bench_runs([own_copy], names=["ties"])


def test_uploads_that_feed_little_say_why(tmp_path):
    layer = {
        "upload.counts": "withheld",
        "fusions": "feature_mean",
        "epochs": 1,
        "method": "fafi",
        "train.snapshots": 0,
    }
    run_experiment(resolve(TINY, layer), tmp_path / "run")
    (table,) = bench_runs([tmp_path / "run"])
    possible = {name for name in FUSIONS if build_fusion({"name": name}).needs <= {"weights", "prototypes"}}
    trained = {name for name in possible if build_fusion({"name": name}).trains}
    assert table.first == "feature_mean"
    assert possible - trained <= set(table.names)
    assert all(table.left_out[name].endswith("add --with-training") for name in trained)
    assert table.left_out["count_prototypes"] == (
        "needs counts, which the uploads withhold; train with upload.counts=exact"
    )
    assert "train with analytic=random_conv" in table.left_out["analytic"]
    with pytest.raises(ConfigError, match="class_experts needs counts"):
        bench_runs([tmp_path / "run"], names=["class_experts"])


def test_seeds_are_paired(tmp_path):
    settings = [{**TINY, "train": {"epochs": 1, "snapshots": 0, "batch_size": 32}, "fusions": ["feature_mean"]}]
    comparison = compare_methods(["fafi", "fedavg"], settings, seeds=2, folder=tmp_path / "c")
    tables = bench_runs([comparison.folder], names=["feature_mean", "average"])
    assert [table.experiment.method for table in tables] == ["fafi", "fedavg"]
    table = tables[0]
    accuracy = {name: [run.fusions[name].accuracy for run in table.runs] for name in table.names}
    gaps = [b - a for a, b in zip(accuracy["feature_mean"], accuracy["average"], strict=True)]
    row = table.to_dict()["fusions"]["average"]
    assert row["paired_difference"]["values"] == pytest.approx(gaps)
    assert row["paired_difference"]["mean"] == pytest.approx(np.mean(gaps))
    assert row["paired_difference"]["std"] == pytest.approx(np.std(gaps, ddof=1))
    assert row["accuracy"]["std"] == pytest.approx(np.std(accuracy["average"], ddof=1))
    assert table.to_dict()["seeds"] == [0, 1]
    with pytest.raises(RunError, match="same settings and seed was named before"):
        bench_runs([tmp_path / "c" / "fafi-s0", tmp_path / "c" / "fafi-s0"], names=[])


# --- who takes part


EXACT = ["average", "ties", "dare", "otfusion", "count_prototypes"]


def tensors(model_file) -> dict[str, torch.Tensor]:
    """Everything in a model file but where members lie."""
    flat: dict[str, torch.Tensor] = {}

    def walk(value, place):
        if isinstance(value, torch.Tensor):
            flat[place] = value
        elif isinstance(value, dict):
            for key, item in value.items():
                walk(item, f"{place}.{key}")
        elif isinstance(value, list):
            for index, item in enumerate(value):
                walk(item, f"{place}.{index}")
        elif not place.endswith(".file"):
            flat[place] = torch.tensor([ord(letter) for letter in str(value)])

    walk(load_state(model_file), "")
    return flat


def assert_same_models(one, two):
    for name in EXACT:
        first, second = tensors(RunFiles(one).model(name)), tensors(RunFiles(two).model(name))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first), name
        metrics = [json.loads(RunFiles(folder).metrics(name).read_text()) for folder in (one, two)]
        assert metrics[0]["accuracy"] == metrics[1]["accuracy"]


@pytest.mark.soak
def test_leaving_is_never_having_been_there_and_coming_late_is_having_always_been(rich_run, tmp_path):
    whole, never = (shutil.copytree(rich_run, tmp_path / name) for name in ("whole", "never"))
    content = json.loads((never / "result.json").read_text())
    content["clients"] = [row for row in content["clients"] if row["client"] != 1]
    (never / "result.json").write_text(json.dumps(content))  # a federation that never had client 1
    late = tmp_path / "late.safetensors"
    shutil.move(never / "clients" / "001" / "upload.safetensors", late)
    shutil.rmtree(never / "clients" / "001")

    (all_three,) = bench_runs([whole], names=EXACT)
    (two,) = bench_runs([never], names=EXACT)
    kept = {path: path.read_bytes() for path in whole.glob("fusions/*/*")}
    (left,) = bench_runs([whole], names=EXACT, membership=Membership(without=(1,)))
    assert left.runs[0].clients == two.runs[0].clients == (0, 2)
    assert left.runs[0].folder.parent == whole / "memberships"
    assert_same_models(left.runs[0].folder, never)
    assert kept == {path: path.read_bytes() for path in kept}, "the run's own fusions were touched"

    (joined,) = bench_runs([never], names=EXACT, membership=Membership(joining=(late,)))
    assert joined.runs[0].clients == all_three.runs[0].clients == (0, 1, 2)
    assert_same_models(joined.runs[0].folder, whole)
    (replaced,) = bench_runs([whole], names=EXACT, membership=Membership(without=(1,), joining=(late,)))
    assert_same_models(replaced.runs[0].folder, whole)


def test_impossible_members_are_named(rich_run, tmp_path):
    upload = rich_run / "clients" / "002" / "upload.safetensors"

    def members(**changes):
        return bench_runs([rich_run], names=["average"], membership=Membership(**changes))

    with pytest.raises(RunError, match="--without 7: no such client; the run has 0, 1, 2"):
        members(without=(7,))
    with pytest.raises(RunError, match="--without 0, 1, 2: nobody is left"):
        members(without=(0, 1, 2))
    with pytest.raises(RunError, match="client 2 takes part already; add --without 2"):
        members(joining=(upload,))
    with pytest.raises(UploadError, match="no such file"):
        members(joining=(tmp_path / "nothing",))
    broken = tmp_path / "broken"
    broken.write_bytes(upload.read_bytes()[:-1] + b"!")
    with pytest.raises(UploadError, match=r"broken: .*"):
        members(without=(2,), joining=(broken,))


# --- what it costs, what it shows


def test_the_bench_and_a_run_write_the_same_metrics(own_copy):
    """Everything but the clock: a distilled fusion has notes and a teacher, and both are kept either way."""
    spec = {"name": "distill_public", **QUICK["distill_public"]}
    row = fuse_run(own_copy, [spec]).fusions["distill_public"].to_dict()
    (table,) = bench_runs([own_copy], names=[spec])
    benched = table.runs[0].fusions["distill_public"].to_dict()
    assert row["training"]["steps"] == 1
    assert row["teacher"]["name"] == "density_ratio"
    clock = {"fuse_seconds"}
    assert {key: benched[key] for key in row.keys() - clock} == {key: row[key] for key in row.keys() - clock}
    assert benched.keys() - row.keys() == {"fuse_cpu_seconds", "peak_memory_bytes", "needed_bytes", "measured"}


def test_memory_and_time_are_those_of_the_work(tmp_path):
    def work(mebibytes):
        return lambda: torch.ones(mebibytes << 18)

    small, large = (measure(work(size), lambda result: None)[0] for size in (1, 60))
    assert 50 << 20 < large.peak_memory_bytes < 75 << 20
    assert small.peak_memory_bytes < 10 << 20
    _, written = measure(work(1), lambda result: (tmp_path / "kept").write_text(str(len(result))))
    assert (tmp_path / "kept").read_text() == str(1 << 18)
    assert written == len(str(1 << 18)), "what is said beside the file arrives here"


def test_errors_of_the_measured_work_arrive():
    def fail():
        raise ConfigError("as it should")

    with pytest.raises(ConfigError, match="as it should"):
        measure(fail, lambda result: None)


def test_diagnostics_of_any_run(own_copy):
    (table,) = bench_runs([own_copy], names=[], diagnostics=True)
    content = table.runs[0].diagnostics
    assert content.to_dict() == json.loads((own_copy / "diagnostics.json").read_text())
    assert set(content.to_dict()) == {*DIAGNOSTICS, "code"}
    (less,) = bench_runs([own_copy], names=[], diagnostics=True, membership=Membership(without=(0,)))
    assert less.runs[0].diagnostics.cka != content.cka
    assert len(less.runs[0].diagnostics.client_entropy) == 2


def test_the_command(own_copy, tmp_path, here):
    shown = here("fuse", "run", "-f", "ties", "-f", "average", "--without", "2", "--diagnostics", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    for text in ("ties", "average", "worst class %", "server s", "clients 0, 1", "nc1", "cka", "etf_distance"):
        assert text in shown.stdout
    assert "memberships/without-2-" in shown.stdout


def test_a_fusion_may_have_options(own_copy, capsys):
    fuse([own_copy], fusion=["{name: median_prototypes, kind: trimmed}"], json=True, quiet=True)
    found = json.loads(capsys.readouterr().out)["fusions"]["median_prototypes"]
    assert found["options"]["kind"] == "trimmed"


def test_other_options_after_a_table_are_made_anew(own_copy):
    """Whoever measured it first, a fusion's figures say with which options it was made."""
    bench_runs([own_copy], names=["median_prototypes"])
    trimmed = {"name": "median_prototypes", "kind": "trimmed"}
    found = fuse_run(own_copy, [trimmed]).fusions["median_prototypes"]
    assert found.options["kind"] == "trimmed"
    (table,) = bench_runs([own_copy], names=[{"name": "median_prototypes", "kind": "median"}])
    again = table.runs[0].fusions["median_prototypes"]
    assert again.options["kind"] == "median"
    assert len(again.history) == 1  # checkpoints of the trimmed one are not its own


def test_without_a_name_the_members_are_fused_as_the_run_was(own_copy, capsys):
    fuse([own_copy], without=[2], json=True, quiet=True)
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    assert list(table["fusions"]) == ["count_prototypes"]
    assert table["clients"] == [[0, 1]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "nothing to do"),
        ({"everything": True, "fusion": ["ties"]}, "give --all or --fusion"),
        ({"fusion": ["ties"], "with_training": True}, "belongs to --all"),
        ({"fusion": ["tyes"]}, "did you mean 'ties'"),
        ({"fusion": ["{name: ties, denisty: 0.5}"]}, "did you mean 'density'"),
        ({"fusion": ["{density: 0.5}"]}, "neither a name nor"),
        ({"fusion": ["{name: ties"]}, "neither a name nor"),
    ],
)
def test_mistakes_are_named(options, message, rich_run):
    with pytest.raises(OneFlareError, match=message):
        fuse([rich_run], quiet=True, **options)
