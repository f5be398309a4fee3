"""Shared pieces: a tiny federation on the embedded digits that trains in about a second."""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

import pytest

from masked_parts import closed, enrolled  # noqa: F401

if TYPE_CHECKING:
    import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.pop("ONEFLARE_DATA", None)
_HOME = tempfile.TemporaryDirectory(prefix="oneflare-home-")
os.environ["ONEFLARE_HOME"] = _HOME.name


def pytest_configure(config: pytest.Config) -> None:
    """Nothing is imported by a process that only hands out tests: the workers would begin seconds later."""
    if config.getoption("numprocesses", None) and not hasattr(config, "workerinput"):
        return
    import torch
    from hypothesis import HealthCheck, settings

    torch.set_num_threads(1)
    settings.register_profile(
        "oneflare",
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    settings.load_profile("oneflare")


def pytest_collection_finish() -> None:
    """What was imported until now stays to the end, so neither the collector nor forked processes look at it again."""
    gc.collect()
    gc.freeze()


TINY = {
    "data": {"name": "digits", "train_size": 200, "test_size": 60},
    "partition": {"clients": 3, "alpha": 0.3},
    "encoder": {"name": "conv4", "width": 4},
    "train": {"epochs": 2, "batch_size": 32, "snapshots": 1},
    "workers": 1,
}
SERVERS = ["count_prototypes", "feature_mean", "iffi", "ensemble", "average"]
"""fusions of the tiny run: uploads that tests write by hand then need no evidence"""


def same_answers(answers: torch.Tensor, logits: torch.Tensor) -> bool:
    """Whether every answer is the best class of its row; two classes as good as each other to rounding are both best.

    A product of another shape is rounded differently on some processors, so nobody promises which of the two it is.
    """
    best, chosen = logits.max(1).values, logits.gather(1, answers[:, None]).squeeze(1)
    return bool((best - chosen <= 1e-5 * (1 + best.abs())).all())


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every test is a member that has spent nothing of its privacy budget yet."""
    monkeypatch.setenv("ONEFLARE_HOME", str(tmp_path / ".home"))


@pytest.fixture
def here(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    """`here(*words, cwd=folder)`: what `oneflare WORDS` answers in that folder.

    The entry point runs in the process of the test, which spares the seconds in which a new one imports torch.
    """
    from hospitals import typed
    from oneflare.cli import manners

    def answer(*words: str, cwd: Path) -> SimpleNamespace:
        monkeypatch.chdir(cwd)
        monkeypatch.setattr(manners, "_quiet", False)
        code, out, err = typed(capsys, *words)
        return SimpleNamespace(returncode=code, stdout=out, stderr=err)

    return answer


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose files tests may read but must not change."""
    from oneflare.methods.resolve import resolve
    from oneflare.simulation.stages import run_experiment

    folder = tmp_path_factory.mktemp("tiny") / "run"
    run_experiment(resolve(TINY, {"method": "flare", "fusions": SERVERS}), folder)
    return folder


@pytest.fixture
def tiny_uploads(tiny_run: Path):
    """The verified uploads of the tiny run."""
    from oneflare.client.observer import Observer
    from oneflare.data import load
    from oneflare.simulation.files import RunFiles
    from oneflare.simulation.simulation import Simulation
    from oneflare.simulation.stages import read_experiment

    experiment, files = read_experiment(tiny_run), RunFiles(tiny_run)
    federation = Simulation.build(experiment, files, load(experiment.data))
    summaries = [files.client(client).read_summary() for client in range(3)]
    return federation.collect(summaries, Observer())


@pytest.fixture(scope="session")
def tiny_comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two methods, two seeds; to be read, not changed."""
    from oneflare.study import compare_methods

    folder = tmp_path_factory.mktemp("tiny") / "comparison"
    compare_methods(
        ["fafi", "flare"], [TINY, {"fusions": ["count_prototypes", "feature_mean"]}], seeds=2, folder=folder
    )
    return folder


TINY_STUDY = """\
title: A study in miniature <of two arms>
question: Does anything happen at all?
fusions: [feature_mean, count_prototypes]
baseline: fafi
arms:
  fafi: {method: fafi, label: FAFI}
  lambda_5: {method: etf_annealed, label: lambda 5, settings: {controller: {lambda_0: 5.0}}}
  lambda_20: {method: etf_annealed, label: lambda 20}
places:
  smoke: [{data: digits, alpha: [0.1, 0.5], clients: 3}]
claims:
  - id: M1
    text: Anchors win by a hundred points
    log: "the log says nothing & means it"
    tests: [{arm: lambda_20, than: fafi, above: 100}]
figures:
  - {kind: sensitivity, title: Accuracy over lambda_0}
  - {kind: lambda, title: What lambda did}
log:
  - settings: nowhere, one seed
    values: {fafi: 12.5, lambda_20: "1,000"}
"""


@pytest.fixture(scope="session")
def tiny_study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Results (JSON) and the folder of runs; three arms, two settings, two seeds."""
    from oneflare.study.cells import make_plan, unique_cells
    from oneflare.study.declare import find_declaration
    from oneflare.study.execute import run_cells
    from oneflare.study.results import collect, write_results
    from oneflare.study.scales import find_scale

    folder = tmp_path_factory.mktemp("study")
    (folder / "miniature.yaml").write_text(TINY_STUDY)
    declaration = find_declaration(str(folder / "miniature.yaml"))
    tiny = {key: TINY[key] for key in ("encoder", "train", "workers")} | {"data": {"train_size": 120, "test_size": 60}}
    plan = make_plan(declaration, find_scale("smoke"), seeds=2, overrides=tiny)
    run_cells(unique_cells([plan]), folder / "runs", processes=1)
    return write_results(collect(plan, folder / "runs"), folder / "results"), folder / "runs"


@pytest.fixture(scope="session")
def chromium() -> str:
    """Path of a Chromium; installed if that is possible, otherwise the test is skipped and says why."""
    from browser import find_or_install

    path, reason = find_or_install()
    if path is None:
        pytest.skip(f"no Chromium: {reason}")
    return path


@pytest.fixture(scope="module")
def browser(chromium):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        running = play.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture
def visit(browser):
    from browser import DESK, Opened

    contexts = []

    def opened(path: Path, size=None, scheme: str = "light", **options) -> Opened:
        context = browser.new_context(viewport=size or DESK, color_scheme=scheme, **options)
        contexts.append(context)
        page = context.new_page()
        found = Opened(page, [], [])
        page.on("console", lambda message: found.errors.append(message.text))
        page.on("pageerror", lambda error: found.errors.append(str(error)))
        page.on("request", lambda request: found.requests.append(request.url))
        page.goto(path.as_uri())
        page.wait_for_function("document.documentElement.dataset.ready === 'yes'", timeout=60_000)
        return found

    yield opened
    for context in contexts:
        context.close()


@pytest.fixture(scope="session")
def knowing_members(tmp_path_factory):
    """Uploads of three members with evidence of densities, as a run leaves them."""
    return members_that_know(tmp_path_factory.mktemp("density") / "run", {})


@pytest.fixture(scope="session")
def widened_members(tmp_path_factory):
    """The same with the 16 features of the encoder brought to 24 by a linear layer."""
    return members_that_know(tmp_path_factory.mktemp("widened") / "run", {"encoder.dim": 24})


def members_that_know(folder, layer):
    from oneflare.client.observer import Observer
    from oneflare.data import load
    from oneflare.methods.resolve import resolve
    from oneflare.simulation.files import RunFiles
    from oneflare.simulation.simulation import Simulation
    from oneflare.simulation.stages import run_experiment

    experiment = resolve(TINY, {"method": "flare", "epochs": 3, "train.snapshots": 0}, layer)
    run_experiment(experiment, folder)
    files = RunFiles(folder)
    run = Simulation.build(experiment, files, load(experiment.data))
    return run.collect([files.client(client).read_summary() for client in range(3)], Observer())
