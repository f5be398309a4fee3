"""Studies that are really run: figures against the runs by hand, resumption after a kill, work shared by processes."""

from __future__ import annotations

import io
import json
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from oneflare.cli import study_progress
from oneflare.cli.main import app
from oneflare.client.observer import Observer, Outcome
from oneflare.core.files import exclusive, read_json
from oneflare.fusion.base import code_of
from oneflare.simulation.stages import read_result
from oneflare.study import headline as headline_of_readme
from oneflare.study.answers import read_answers
from oneflare.study.cells import make_plan, unique_cells
from oneflare.study.claims import Trial, open_cells
from oneflare.study.declare import Statement, read_declaration
from oneflare.study.execute import is_complete, run_cells
from oneflare.study.findings import Findings, rounded
from oneflare.study.headline import END, MEASURED_AGAIN, START, headline, with_headline
from oneflare.study.markdown import to_markdown
from oneflare.study.records import StudyResult
from oneflare.study.results import collect, write_results
from oneflare.study.scales import SCALES
from oneflare.study.summary import exploratory_claims, judged_claims, summary_page, tally, waiting_claims
from oneflare.study.verdicts import difference, smallest_of_looks
from shared import Forked, forked, wait_for

ROOT = Path(__file__).parents[2]
TINY = """
title: Tiny
question: Does anything happen?
fusions: [feature_mean, count_prototypes]
baseline: fafi
arms:
  fafi: {method: fafi}
  v11: {method: uncertainty_coupled, label: V11}
places:
  smoke:
    - data: digits
      alpha: [0.3, 1.0]
      clients: 2
      settings: {data: {train_size: 120, test_size: 50}, encoder: {width: 4}, train: {epochs: 2, snapshots: 1}}
claims:
  - id: K1
    text: Alignment shortens prototypes
    tests: [{arm: v11, than: fafi, measure: g_protos_std, below: 0, alpha: 0.3}]
  - id: K2
    text: The gap grows
    tests: [{kind: trend, arm: v11, than: fafi, below: 0}]
  - id: K3
    text: Lambda stays small
    tests: [{kind: quantity, arm: v11, quantity: largest_raw, below: 1000}]
figures: [{kind: lambda, title: L}]
log: [{settings: none, values: {fafi: 50}}]
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny-study")
    (folder / "tiny.yaml").write_text(TINY)
    plan = make_plan(read_declaration(folder / "tiny.yaml"), SCALES["smoke"])
    outcomes = run_cells(unique_cells([plan]), folder / "runs", processes=2)
    assert [outcome.status for outcome in outcomes] == ["run"] * 12
    return folder, plan


def test_the_figures_are_those_of_the_runs(tiny):
    folder, plan = tiny
    content = collect(plan, folder / "runs")
    json.dumps(content.to_dict(), allow_nan=False)
    assert content.complete
    cells = {(cell.place, cell.row): cell for cell in content.cells}
    assert len(cells) == 8
    for (place, row), cell in cells.items():
        results = [read_result(folder / "runs" / run) for run in cell.runs]
        assert [result.content.seed for result in results] == list(cell.seeds) == [0, 1, 2]
        assert {result.content.method for result in results} == {cell.method}
        accuracies = [result.fusions[cell.fusion].accuracy for result in results]
        assert cell.accuracies == pytest.approx(accuracies, rel=1e-5)
        assert cell.mean == pytest.approx(statistics.fmean(accuracies), rel=1e-5)
        assert cell.std == pytest.approx(statistics.stdev(accuracies), rel=1e-5)
        assert cell.history[-1].accuracies == cell.accuracies
        fusing = [result.fusions[cell.fusion].fuse_seconds for result in results]
        assert cell.cost.fuse_seconds == pytest.approx(statistics.fmean(fusing), rel=1e-4)
        assert cell.peak.mean >= cell.mean
        if row == "fafi":
            assert cell.difference is None
            assert cell.lambda_ is None
            continue
        other = cells[place, "fafi"].accuracies
        gaps = [a - b for a, b in zip(cell.accuracies, other, strict=True)]
        assert cell.difference.values == pytest.approx(gaps, abs=1e-5)
        assert cell.difference.interval_over == "seeds and images"
        low, high = cell.difference.interval
        assert low <= cell.difference.mean <= high
    aligned = cells["digits-a0.3-c2", "v11"]
    largest = [
        max(client.lambda_raw_max for client in read_result(folder / "runs" / run).content.clients)
        for run in aligned.runs
    ]
    assert aligned.lambda_.largest_raw == pytest.approx(largest, rel=1e-5)
    assert len(aligned.lambda_.traces) == 3 * 2
    assert content.settings["digits-a0.3-c2"]["fafi"]["data"]["train_size"] == 120


def test_answers_to_the_images_are_kept(tiny):
    folder, plan = tiny
    for cell in unique_cells([plan])[:3]:
        metrics = read_result(cell.folder(folder / "runs")).fusions
        for fusion in cell.fusions:
            right = read_answers(cell.folder(folder / "runs"), fusion)
            assert right.shape == (50,)
            assert right.mean() == pytest.approx(metrics[fusion].accuracy)
    assert read_answers(folder, "average") is None


def test_claims_are_judged_on_the_runs(tiny):
    folder, plan = tiny
    claims = {claim.id: claim for claim in collect(plan, folder / "runs").claims}
    (shorter,) = claims["K1"].tests
    values = []
    for seed in range(3):
        ours, theirs = (
            read_json(plan.cells["digits-a0.3-c2", arm, seed].folder(folder / "runs") / "diagnostics.json")
            for arm in ("v11", "fafi")
        )
        values.append(100 * (ours["g_protos_std"] / theirs["g_protos_std"] - 1))
    assert shorter.values == pytest.approx(values, rel=1e-4)
    assert shorter.unit == "%"
    (trend,) = claims["K2"].tests

    def accuracy(alpha, arm, seed):
        folder_of_run = plan.cells[f"digits-a{alpha}-c2", arm, seed].folder(folder / "runs")
        return read_result(folder_of_run).fusions["feature_mean"].accuracy

    gaps = [[accuracy(alpha, "v11", s) - accuracy(alpha, "fafi", s) for s in range(3)] for alpha in ("0.3", "1")]
    assert trend.values == pytest.approx([100 * (a - b) for a, b in zip(*gaps, strict=True)], abs=1e-3)
    assert claims["K3"].verdict == "confirmed"
    assert len(claims["K3"].tests) == 2


def test_seeds_are_added_where_a_claim_is_undecided(tiny, tmp_path, monkeypatch):
    """Two seeds decide nothing, so the arms of an open claim get a third; an arm of no claim does not."""
    folder, plan = tiny
    scale = replace(SCALES["smoke"], looks=(2, 3))
    wider = {"fafi": plan.declaration.arms["fafi"], "v11": plan.declaration.arms["v11"]}
    wider["other"] = plan.declaration.arms["fafi"].model_copy(update={"settings": {"train": {"lr": 0.2}}})
    growing = make_plan(plan.declaration.model_copy(update={"arms": wider}), scale)
    assert len(growing.first_cells) == 3 * 2 * 2
    nothing = open_cells([Findings(growing, tmp_path)])
    assert {(cell.experiment.method, cell.experiment.seed) for cell in nothing} == {
        (method, seed) for method in ("fafi", "uncertainty_coupled") for seed in (0, 1)
    }
    assert {cell.experiment.train.lr for cell in nothing} == {plan.cell(plan.places[0], "fafi", 0).experiment.train.lr}
    content = collect(growing, folder / "runs")
    (lambda_stays,) = (claim for claim in content.claims if claim.id == "K3")
    assert lambda_stays.verdict == "confirmed"
    assert [len(test.values) for test in lambda_stays.tests] == [3, 3]
    once = next(claim for claim in collect(plan, folder / "runs").claims if claim.id == "K3")
    assert lambda_stays.p_value == pytest.approx(2 * once.p_value, rel=1e-4), "two looks share the error"
    monkeypatch.setitem(SCALES, "smoke", scale)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.yaml").write_text(TINY)
    invoked = CliRunner().invoke(app, ["study", "tiny.yaml", "--processes", "1", "--runs", str(folder / "runs")])
    assert invoked.exit_code == 0, invoked.output
    assert json.loads(Path("results/tiny/smoke.json").read_text())["looks"] == [2, 3]


def test_seeds_are_added_where_a_verdict_does_not_stand_among_others(tiny, monkeypatch):
    """K3 is clear with three seeds. Its arms get a fourth as long as the verdict is lost among so many claims."""
    folder, plan = tiny
    scale = replace(SCALES["smoke"], looks=(3, 4))
    claim = next(claim for claim in plan.declaration.claims if claim.id == "K3")
    findings = Findings(make_plan(plan.declaration.model_copy(update={"claims": [claim]}), scale), folder / "runs")
    assert collect(findings.plan, folder / "runs").claims[0].verdict == "confirmed"
    assert open_cells([findings]) == []
    monkeypatch.setattr("oneflare.study.claims.discoveries", lambda p_values: [False for _ in p_values])
    wanted = open_cells([findings])
    assert {cell.experiment.seed for cell in wanted} == {0, 1, 2, 3}
    assert {cell.experiment.method for cell in wanted} == {"uncertainty_coupled"}


@pytest.mark.parametrize(
    ("later", "seeds"),
    [((1.1, 0.7, 1.6, 0.9, 1.3), 10), ((-2.0, 3.0, -4.0, 2.0, 0.5), 5)],
    ids=["more seeds make it clearer", "more seeds blur it"],
)
def test_the_clearest_look_counts(later, seeds):
    """A verdict may become clearer with more seeds and is not lost by them; its error is that of all looks together."""
    values = (0.6, 1.5, 2.0, 1.0, 0.2, *later)

    class Told(Trial):
        def sample(self, first):
            return difference(values[:first])

    plan = SimpleNamespace(looks=(5, 10, 20))
    trial = Told(SimpleNamespace(plan=plan), Statement(arm="ours", than="theirs", above=0), ())
    found, judgement = trial.judged
    assert judgement.verdict == "confirmed"
    assert found.values == values[:seeds]
    assert judgement.p_value == smallest_of_looks(difference(values[:seeds]).p_value(), plan.looks)


def test_results_are_written_as_json_and_markdown(tiny, tmp_path):
    folder, plan = tiny
    content = collect(plan, folder / "runs")
    path = write_results(content, tmp_path)
    assert path == tmp_path / "tiny" / "smoke.json"
    assert json.loads(path.read_text()) == content.to_dict()
    text = path.with_suffix(".md").read_text()
    assert text == to_markdown(StudyResult.read(path))
    cell = next(cell for cell in content.cells if cell.row == "v11")
    assert f"| V11 | feature_mean | {100 * cell.mean:.1f} ± {100 * cell.std:.1f} |" in text
    assert "**K3: confirmed.** Lambda stays small." in text
    assert "One run each" in text


def test_what_is_missing_is_said(tiny):
    folder, plan = tiny
    more = make_plan(plan.declaration, plan.scale, seeds=4)
    content = collect(more, folder / "runs")
    assert not content.complete
    assert {cell.missing for cell in content.cells} == {(3,)}
    assert "Not complete" in to_markdown(content)
    nothing = collect(plan, folder / "nowhere")
    assert {claim.verdict for claim in nothing.claims} == {"undecided"}
    assert "–" in to_markdown(nothing)


def test_a_finished_study_is_not_run_again_and_fusions_are_added_without_training(tiny):
    folder, plan = tiny
    assert run_cells(unique_cells([plan]), folder / "runs") == []
    cell = unique_cells([plan])[0]
    upload = cell.folder(folder / "runs") / "clients/000/upload.safetensors"
    before = (upload.stat().st_mtime_ns, upload.read_bytes())
    wider = plan.declaration.model_copy(update={"fusions": ("feature_mean", "iffi_released")})
    (outcome,) = run_cells(unique_cells([make_plan(wider, plan.scale, seeds=1)])[:1], folder / "runs")
    assert outcome.status == "run"
    assert (upload.stat().st_mtime_ns, upload.read_bytes()) == before
    assert {"iffi_released", "count_prototypes"} <= set(read_result(cell.folder(folder / "runs")).fusions)
    assert is_complete(cell, folder / "runs")


def test_a_cell_in_use_is_left_to_its_holder(tiny, tmp_path):
    _, plan = tiny
    cells = unique_cells([plan])[:2]

    class Seen(Observer):
        waits = 0
        ended: list[Outcome] = []  # noqa: RUF012

        def cell_done(self, outcome):
            self.ended.append(outcome)

        def cells_wait(self, held):
            assert held == [cells[0].name]
            self.waits += 1
            lock.close()

    import contextlib

    lock = contextlib.ExitStack()
    lock.enter_context(exclusive(cells[0].folder(tmp_path)))
    observer = Seen()
    outcomes = run_cells(cells, tmp_path, processes=1, observer=observer)
    assert [outcome.cell for outcome in outcomes] == [cells[1].name, cells[0].name]
    assert observer.waits == 1
    assert observer.ended == outcomes


def test_a_cell_that_fails_does_not_stop_the_others(tiny, tmp_path):
    _, plan = tiny
    cells = unique_cells([plan])[:2]
    cells[0].folder(tmp_path).mkdir(parents=True)
    (cells[0].folder(tmp_path) / "experiment.yaml").write_text("method: fedavg\n")
    (cells[0].folder(tmp_path) / "partition.json").write_text("{}")
    outcomes = {outcome.cell: outcome for outcome in run_cells(cells, tmp_path, processes=2)}
    assert outcomes[cells[0].name].status == "failed"
    assert "holds another experiment" in outcomes[cells[0].name].reason
    assert outcomes[cells[1].name].status == "run"


def test_figures_are_rounded_and_what_arithmetic_leaves_is_nothing():
    gaps = [0.1, 0.2, -0.3]
    assert sum(gaps) != 0
    assert rounded({"mean": sum(gaps), "lambda": [1e-9, 123456.789012345]}) == {"mean": 0.0, "lambda": [1e-9, 123457.0]}


def test_the_display_in_a_log_file(tiny, monkeypatch):
    """Long cells weigh more, and the pace so far corrects the estimate."""
    _, plan = tiny
    cells = unique_cells([plan])[:4]
    clock = [100.0]
    monkeypatch.setattr(study_progress.time, "monotonic", lambda: clock[0])
    console = Console(file=io.StringIO(), width=120)
    seconds = dict(zip((cell.name for cell in cells), (10.0, 30.0, 40.0, 20.0), strict=True))
    observer = study_progress.StudyObserver(console, None, seconds)
    observer.cells_begin([cell.name for cell in cells], there=2, processes=2)
    clock[0] += 20
    observer.cell_done(Outcome(cells[0].name, "run", 20.0, 0.5))
    observer.cell_done(Outcome(cells[1].name, "failed", 1.0, reason="broken"))
    observer.warn("odd")
    observer.cells_wait([cells[2].name])
    observer.cells_wait([cells[2].name])
    lines = console.file.getvalue().splitlines()
    assert lines == [
        "6 cells, 2 done, 2 at once; about 50 s left",
        f"[3/6] {cells[0].name} 50.0 %, 20 s; about 3 min left",
        f"[4/6] {cells[1].name} failed: broken",
        "warning: odd",
        f"waiting for 1 cells that another process runs: {cells[2].name} ...",
    ]


def test_cells_that_turn_out_to_be_there_do_not_flatter_the_estimate(tiny, monkeypatch):
    _, plan = tiny
    cells = unique_cells([plan])[:3]
    clock = [0.0]
    monkeypatch.setattr(study_progress.time, "monotonic", lambda: clock[0])
    observer = study_progress.StudyObserver(Console(file=io.StringIO()), None, {cell.name: 60.0 for cell in cells})
    observer.cells_begin([cell.name for cell in cells], there=0, processes=1)
    clock[0] += 2
    observer.cell_done(Outcome(cells[0].name, "there"))
    clock[0] += 58
    observer.cell_done(Outcome(cells[1].name, "run", 58.0, 0.5))
    assert observer.time_left() == "60 s"


def test_a_killed_study_goes_on(tiny, tmp_path):
    folder, plan = tiny
    (tmp_path / "tiny.yaml").write_text(TINY)
    process = Forked("study", "tiny.yaml", "--processes", "1", "--seeds", "1", "workers=1", cwd=tmp_path)
    wait_for(lambda: list(tmp_path.glob("runs/cells/*/result.json")))
    process.kill_with_children()
    process.wait()
    finished = list(tmp_path.glob("runs/cells/*/result.json"))
    assert 1 <= len(finished) < 4
    stamps = {path: path.stat().st_mtime_ns for path in finished}
    shown = forked("study", "tiny.yaml", "--processes", "2", "--seeds", "1", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "left" in shown.stderr
    assert {path: path.stat().st_mtime_ns for path in finished} == stamps, "what was finished is not run again"
    resumed = json.loads((tmp_path / "results/tiny/smoke.json").read_text())
    whole = collect(make_plan(plan.declaration, plan.scale, seeds=1), folder / "runs").to_dict()
    assert resumed["complete"]
    for key in ("claims", "rows", "log"):
        assert resumed[key] == whole[key]
    assert [cell["accuracies"] for cell in resumed["cells"]] == [cell["accuracies"] for cell in whole["cells"]]


def test_two_shells_share_the_work(tmp_path):
    (tmp_path / "tiny.yaml").write_text(TINY)
    words = ["study", "tiny.yaml", "--processes", "1", "--seeds", "1", "workers=1"]
    shells = [Forked(*words, "--out", f"results-{i}", cwd=tmp_path) for i in range(2)]
    outcomes = [shell.wait() for shell in shells]
    assert [outcome.returncode for outcome in outcomes] == [0, 0], outcomes
    texts = [outcome.stdout + outcome.stderr for outcome in outcomes]
    done = [[line.split()[1] for line in text.splitlines() if line.startswith("[") and "%" in line] for text in texts]
    assert len(set(done[0]) | set(done[1])) == 4
    assert not set(done[0]) & set(done[1]), "no cell was run twice"
    first, second = (json.loads((tmp_path / f"results-{i}/tiny/smoke.json").read_text()) for i in range(2))
    assert first == second
    assert first["complete"]


def test_the_readme_shows_the_results():
    """`make headline` after a study has been run again."""
    text = (ROOT / "README.md").read_text()
    assert with_headline(text, ROOT / "results") == text
    assert START in text
    assert END in text


def test_kept_results_agree_with_their_markdown():
    for path in sorted(ROOT.glob("results/*/smoke.json")) + sorted(ROOT.glob("results/*/decisive.json")):
        content = StudyResult.read(path)
        assert path.with_suffix(".md").read_text() == to_markdown(content), path
        for cell in content.cells:
            if cell.accuracies:
                assert cell.mean == pytest.approx(np.mean(cell.accuracies), abs=1e-5)


def test_a_headline_without_results_says_that_they_are_being_measured(tmp_path):
    assert headline(tmp_path) == MEASURED_AGAIN
    assert (ROOT / "results" / "README.md").exists()


def test_a_headline_without_table_1_shows_servers_over_the_same_uploads(tmp_path):
    runs = [
        {"method": "fafi", "accuracy": {"feature_mean": 0.3, "density_ratio": 0.5}},
        {"method": "fafi", "accuracy": {"feature_mean": 0.4, "density_ratio": 0.5}},
        {"method": "flare", "accuracy": {"density_ratio": 0.625}},
    ]
    (tmp_path / "density").mkdir()
    (tmp_path / "density/svhn_16.json").write_text(json.dumps({"command": "", "runs": runs}))
    text = headline(tmp_path)
    assert "| FAFI | feature_mean | 35.0 ± 7.1 |" in text
    assert "| FLARE | density_ratio | 62.5 |" in text
    assert "| FedAvg | average | – |" in text
    assert "CIFAR-10" not in text
    assert MEASURED_AGAIN in text


def test_a_headline_takes_what_servers_over_the_same_uploads_lack_from_kept_cells(tmp_path):
    (tmp_path / "density").mkdir()
    (tmp_path / "density" / "svhn_16.json").write_text('{"runs": []}')
    (tmp_path / "cells").mkdir()
    figures = {"flare_analytic": {"accuracy": 0.875}, "density_ratio": {"accuracy": 0.75}}
    cells = {
        "s0": {},
        "s1": {"data": {"train_size": 2000, "image_size": 16}},
        "s2": {"partition": {"clients": 10, "label_noise": None}},
        "s3": {"partition": {"clients": 5, "label_noise": 0.4}},
        "s4": {"backbone": {"name": "efficientnet_lite0"}},
    }
    for seed, (name, changed) in enumerate(cells.items()):
        plain = {"data": {"train_size": 10000, "image_size": 16}, "partition": {"clients": 5, "label_noise": None}}
        experiment = {"seed": seed, "backbone": None, **plain, **changed}
        path = tmp_path / "cells" / f"flare_analytic-svhn-a0.05-{name}-0123456789.json"
        path.write_text(json.dumps({"experiment": experiment, "result": {"fusions": figures}}))
    today = {"flare_analytic": {"accuracy": 0.625, "code": code_of({"name": "flare_analytic"})}}
    (tmp_path / "cells" / "flare_analytic-svhn-a0.05-s9-0000000000.json").write_text(
        json.dumps({"experiment": {"seed": 9, "backbone": None, **plain}, "result": {"fusions": today}})
    )
    (tmp_path / "cells" / "flare_analytic-svhn-a0.05-s9-1111111111.json").write_text(
        json.dumps(
            {
                "experiment": {"seed": 9, "backbone": None, **plain},
                "result": {"fusions": {"flare_analytic": {"accuracy": 0.875}}},
            }
        )
    )
    text = headline(tmp_path)
    assert "| FLARE with statistics | flare_analytic | 75.0 ± 17.7 |" in text  # of an earlier revision, and of today's
    assert "| FLARE | density_ratio | 75.0 |" in text  # the networks are the same


def test_the_headline_takes_the_largest_scale(tiny, tmp_path, monkeypatch):
    folder, plan = tiny
    monkeypatch.setattr(headline_of_readme, "find_declaration", lambda _: plan.declaration)
    content = replace(collect(plan, folder / "runs"), study="table1")
    write_results(content, tmp_path)
    assert "results/table1/smoke.md" in headline(tmp_path)
    assert "claims" not in headline(tmp_path), "a smoke run decides nothing about the log"
    write_results(replace(content, scale="decisive"), tmp_path)
    text = headline(tmp_path)
    assert "results/table1/decisive.md" in text
    assert "Of 3 claims" in text
    assert with_headline(f"a\n{START}\nold\n{END}\nb", tmp_path) == f"a\n{START}\n\n{text}\n\n{END}\nb"


def test_claims_whose_runs_are_missing_are_not_called_undecided(tiny, tmp_path):
    """They wait, by name; a study with some of its arms judges what these decide."""
    folder, plan = tiny
    content = collect(plan, folder / "runs")
    assert content.complete
    first, second, *rest = content.claims
    some = tuple(replace(test, values=test.values[:-1]) for test in second.tests)
    unfinished = replace(second, id="C99", verdict="undecided", p_value=None, tests=some)
    gap = replace(content.cells[-1], missing=(2,))
    partial = replace(
        content,
        study="c4",
        scale="decisive",
        complete=False,
        claims=(replace(first, id="C4"), unfinished, *rest),
        cells=(*content.cells[:-1], gap),
    )
    assert [partial.measured(claim) for claim in partial.claims[:2]] == [True, False]
    write_results(partial, tmp_path)
    text = (tmp_path / "c4/decisive.md").read_text()
    assert f"not all seeds were run for {partial.rows[-1].label}." in text
    assert "**C99: not measured yet.**" in text
    found = judged_claims(tmp_path)
    assert "C99" not in {judged.name for judged in found}
    waiting = waiting_claims(found)
    assert "C4" not in waiting
    assert {"C5", "servers: servers-density"} <= set(waiting)
    assert "Not measured yet, because some of their runs have not been made: " in summary_page(found)


def test_what_was_asked_after_figures_had_been_seen_does_not_count(tiny, tmp_path):
    folder, plan = tiny
    content = collect(plan, folder / "runs")
    asked, later = (
        replace(content.claims[0], id=name, verdict="confirmed", p_value=p, exploratory=exploratory)
        for name, p, exploratory in (("C1", 0.04, False), ("C2", 0.9, True))
    )
    write_results(replace(content, study="table1", scale="decisive", claims=(asked, later)), tmp_path)
    found, apart = judged_claims(tmp_path), exploratory_claims(tmp_path)
    assert [judged.name for judged in found] == ["C1"]
    assert [judged.name for judged in apart] == ["C2"]
    assert found[0].stands  # among two claims a p value of 0.04 would not
    assert "table2: alignment-counted" not in waiting_claims([])
    page = summary_page(found, apart)
    assert "1 claims: 1 confirmed." in page
    assert page.index("[C1]") < page.index("## Asked after figures had been seen") < page.index("[C2]")
    assert "not counted among the claims" in (tmp_path / "table1/decisive.md").read_text()


def test_no_seeds_are_added_for_what_was_asked_after_figures_had_been_seen(tiny, tmp_path):
    _, plan = tiny
    assert open_cells([Findings(plan, tmp_path)])
    claims = tuple(claim.model_copy(update={"exploratory": True}) for claim in plan.declaration.claims)
    later = replace(plan, declaration=plan.declaration.model_copy(update={"claims": claims}))
    assert open_cells([Findings(later, tmp_path)]) == []


def test_the_summary_corrects_for_the_number_of_claims(tiny, tmp_path):
    """One clear and many doubtful verdicts: the doubtful ones are undecided among so many, and the page says so."""
    folder, plan = tiny
    content = collect(plan, folder / "runs")
    sure, weak = (
        replace(content.claims[0], id=f"C{n}", verdict="confirmed", p_value=p) for n, p in ((1, 0.001), (2, 0.045))
    )
    claims = (
        sure,
        *(replace(weak, id=f"C{n}") for n in range(2, 6)),
        replace(weak, id="C6", verdict="undecided", p_value=None),
    )
    write_results(replace(content, study="table1", scale="decisive", claims=claims), tmp_path)
    found = judged_claims(tmp_path)
    assert [judged.verdict for judged in found] == ["confirmed"] + 5 * ["undecided"]
    assert tally(found) == "1 confirmed, 5 undecided"
    page = summary_page(found)
    assert page.count("undecided among so many (confirmed alone)") == 4
    assert "[C1](table1/decisive.md)" in page
    assert "3 seeds" in page
