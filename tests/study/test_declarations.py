"""Declarations of studies: they resolve at every scale, share cells and partitions, and say what is wrong with them."""

from __future__ import annotations

import json

import pytest

from oneflare.errors import ConfigError
from oneflare.study.cells import Place, cell_name, make_plan, unique_cells
from oneflare.study.declare import LABORATORY, PAPER, QUESTIONS, declared, find_declaration, read_declaration
from oneflare.study.estimate import duration, estimate
from oneflare.study.scales import SCALES, find_scale

SMALLEST = """
title: T
question: Q
baseline: fafi
arms: {fafi: {method: fafi}, v7: {method: etf_annealed}}
places: {smoke: [{data: digits}]}
"""


def plan_of(study, scale, **options):
    return make_plan(find_declaration(study), SCALES[scale], **options)


def test_there_is_a_study_for_every_table_figure_and_claim():
    assert list(declared()) == [*PAPER, *QUESTIONS, *LABORATORY, *(f"c{number}" for number in range(1, 16))]
    for number in range(1, 16):
        declaration = find_declaration(f"C{number}")
        assert declaration.claims
        assert all(claim.id.startswith(f"C{number}") for claim in declaration.claims)
        assert any(claim.log for claim in declaration.claims), "the log's figures stand beside ours"


@pytest.mark.parametrize("scale", list(SCALES))
@pytest.mark.parametrize("study", list(declared()))
def test_every_study_resolves_at_every_scale(study, scale):
    if not find_declaration(study).grids(scale):
        wanted = ("small", "decisive", "paper") if study in LABORATORY else ("small",)
        assert scale in wanted, "a study of real images runs at the scale that decides, and at the paper's"
        with pytest.raises(ConfigError, match=f"declares no places for --scale {scale}"):
            plan_of(study, scale)
        return
    plan = plan_of(study, scale, seeds=3)
    assert len(plan.seeds) >= 3
    rows = {row.id for row in plan.declaration.rows()}
    for reference in plan.declaration.log:
        assert set(reference.values) <= rows
    for place in plan.places:
        for seed in plan.seeds:
            arms = [plan.cell(place, arm, seed).experiment for arm in plan.declaration.arms]
            clean = [one.partition.model_copy(update={"label_noise": None}) for one in arms]
            digests = {
                one.model_copy(update={"partition": split}).partition_digest()
                for one, split in zip(arms, clean, strict=True)
            }
            assert len(digests) == 1, "methods are compared on shared partitions, whose labels some arms spoil"
    for row in plan.declaration.rows():
        assert row.fusion in plan.cell(plan.places[0], row.arm, 0).fusions


def test_small_cells_keep_their_names():
    """Hours of computation are found by these names."""
    plan = plan_of("table1", "small")
    place = Place("cifar10", 0.05, 5)
    assert plan.cell(place, "flare", 0).name == "flare-cifar10-a0.05-s0-caf833a032"
    assert plan.cell(place, "fafi", 2).name == "fafi-cifar10-a0.05-s2-9792a2c0cb"
    assert plan.cell(Place("cifar10", 0.05, 5), "fedavg", 1).name == "fedavg-cifar10-a0.05-s1-2b782b1313"
    assert {place.alpha for place in plan.places} == {0.05, 0.5}
    assert {place.alpha for place in plan_of("table1", "small", full=True).places} == {0.05, 0.1, 0.3, 0.5}


WHOLE = {
    "cifar10": (50000, 10000),
    "cifar100": (50000, 10000),
    "svhn": (73257, 26032),
    "tiny-imagenet": (100000, 10000),
}


def test_the_paper_scale_is_the_logs_settings():
    for study in ("table1", "c1", "c4", "c11", "c14"):
        for cell in plan_of(study, "paper").cells.values():
            experiment = cell.experiment
            assert experiment.encoder["name"] == "resnet18"
            assert experiment.encoder["width"] == 64
            assert (experiment.data.train_size, experiment.data.test_size) == WHOLE[experiment.data.name]
            assert experiment.train.batch_size == 512
            assert (experiment.train.lr, experiment.train.momentum, experiment.train.clip) == (0.05, 0.9, 1.0)
            assert experiment.partition.kind == "dirichlet"
    by_data = {cell.experiment.data.name: cell.experiment.epochs for cell in plan_of("c15", "paper").cells.values()}
    assert by_data == {"cifar10": 50, "cifar100": 100, "svhn": 50}
    assert {cell.experiment.epochs for cell in plan_of("c1", "paper").cells.values()} == {21}
    assert {cell.experiment.objective.supcon_temperature for cell in plan_of("c1", "paper").cells.values()} == {0.5}
    assert {cell.experiment.objective.supcon_temperature for cell in plan_of("c1", "small").cells.values()} == {0.07}
    rates = {
        arm: cell.experiment.controller.get("sigma_lr") for (_, arm, _), cell in plan_of("c11", "paper").cells.items()
    }
    assert (rates["uncertainty_rescaled"], rates["slow"]) == (0.005, 0.0001)
    lambdas = [
        cell.experiment.controller["lambda_0"]
        for (place, arm, seed), cell in plan_of("lambda_sensitivity", "paper").cells.items()
        if arm != "fafi" and seed == 0 and place.startswith("svhn")
    ]
    assert lambdas == [1.0, 2.5, 5.0, 10.0, 20.0, 50.0]


def test_studies_share_cells_and_rows_share_uploads():
    first, second = plan_of("c8", "smoke"), plan_of("c4", "smoke")
    shared = unique_cells([first, second])
    assert len(shared) == 9, "fafi, random_annealed and drcl"
    fafi = next(cell for cell in shared if cell.experiment.method == "fafi")
    assert {"feature_mean", "iffi", "iffi_released", "count_prototypes"} <= set(fafi.fusions)
    assert fafi.fusions[0] == "feature_mean", "the method's own comes first"
    assert cell_name(fafi.experiment) == first.cell(Place("digits", 0.05, 5), "fafi", 0).name


def test_a_declaration_of_ones_own(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(SMALLEST)
    assert [row.id for row in read_declaration(path).rows()] == ["fafi", "v7"]
    path.write_text(SMALLEST + "fusions: [iffi, average]\n")
    assert [row.id for row in read_declaration(path).rows()] == ["fafi", "fafi:average", "v7", "v7:average"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("claim: []", "unknown key 'claim'; did you mean 'claims'"),
        (
            "claims: [{id: a, text: b, tests: [{arm: v8, than: fafi, above: 0}]}]",
            "'v8' is no arm; choose from fafi, v7",
        ),
        ("claims: [{id: a, text: b, tests: [{arm: v7, than: fafi}]}]", "set one of above and below"),
        ("claims: [{id: a, text: b, tests: [{arm: v7, above: 0}]}]", "need than"),
        ("figures: [{kind: pie, title: x}]", "figures.0.kind"),
        ("places: [", "not valid YAML"),
    ],
)
def test_a_wrong_declaration_is_answered_in_one_line(tmp_path, change, message):
    path = tmp_path / "mine.yaml"
    path.write_text(SMALLEST + change + "\n")
    with pytest.raises(ConfigError, match=message) as caught:
        read_declaration(path)
    assert "\n" not in str(caught.value)


def test_wrong_names_and_settings():
    with pytest.raises(ConfigError, match="did you mean 'table1'"):
        find_declaration("tabel1")
    with pytest.raises(ConfigError, match="unknown scale 'smal'; did you mean 'small'"):
        find_scale("smal")
    with pytest.raises(ConfigError, match="seed= is what a study varies"):
        plan_of("c4", "smoke", overrides={"seed": 3})
    with pytest.raises(ConfigError, match="did you mean"):
        plan_of("c4", "smoke", overrides={"epoch": 3})
    with pytest.raises(ConfigError, match="cannot read"):
        find_declaration("nowhere.yaml")


def test_the_scale_is_described_as_it_was_run(tmp_path):
    assert plan_of("c4", "smoke").summary == (
        "the embedded digits stand in for all data, a small network, 6 epochs: to try things out, not to judge"
    )
    assert plan_of("table1", "small").summary.endswith("a strided ResNet-8, 5 epochs")
    changed = plan_of("c4", "smoke", overrides={"epochs": 2, "train.lr": 0.1}).summary
    assert "6 epochs" not in changed
    assert "a small network, 2 epochs: " in changed
    assert changed.endswith("; changed for these runs: train.epochs=2, train.lr=0.1")


def test_time_is_estimated_from_what_is_finished(tmp_path, tiny_run):
    cells = unique_cells([plan_of("c4", "smoke")])
    rough = estimate(cells, tmp_path)
    folder = cells[0].folder(tmp_path)
    folder.mkdir(parents=True)
    seconds = 10 * rough[cells[0].name]
    content = json.loads((tiny_run / "result.json").read_text())
    content["cost"]["train_seconds"] = seconds - 1.0
    (folder / "result.json").write_text(json.dumps(content))
    assert estimate(cells, tmp_path)[cells[-1].name] == pytest.approx(10 * rough[cells[-1].name])
    assert [duration(value) for value in (30, 600, 7200, 400000)] == ["30 s", "10 min", "2.0 h", "4.6 days"]


def test_dry_run_lists_the_cells_and_runs_none(tmp_path, here):
    shown = here("study", "c4", "c8", "--dry-run", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "9 cells, 0 done; about" in shown.stdout
    assert "drcl-digits-a0.05-s2-" in shown.stdout
    rows = json.loads(here("study", "c4", "epochs=3", "--seeds", "1", "--dry-run", "--json", cwd=tmp_path).stdout)
    assert [row["layer"]["method"] for row in rows] == ["fafi", "drcl"]
    assert all(row["layer"]["train"]["epochs"] == 3 and row["seconds"] > 0 for row in rows)
    assert list(tmp_path.iterdir()) == []
    listing = here("study", cwd=tmp_path)
    assert "lambda_sensitivity" in listing.stdout
    assert "c15" in listing.stdout
