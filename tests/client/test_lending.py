"""Networks that another run has trained already: what is sent with them is what training would have given."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from safetensors import safe_open

from conftest import TINY
from oneflare.client.lending import can_lend
from oneflare.client.loop import LocalTraining
from oneflare.core.layers import merge
from oneflare.methods.resolve import resolve
from oneflare.simulation.stages import run_experiment

PLAIN = {"fusions": ["feature_mean"], "upload": {"evidence": []}}


def _experiment(method: str, **changes: object):
    return resolve(merge(TINY, PLAIN, {"method": method}, changes))


def _content(path: Path) -> tuple[dict[str, bytes], dict[str, str]]:
    with safe_open(path, "np") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}, file.metadata()  # noqa: SIM118


LENDER = {"train": {"snapshots": 1}}
BORROWERS = {
    "statistics": _experiment("flare_analytic", fusions=["flare_analytic"], upload={"evidence": ["density"]}),
    "evidence": _experiment("flare", upload={"evidence": ["moments", "kronecker"]}),
    "no snapshots": _experiment("flare", train={"snapshots": 0}),
}


@pytest.fixture(scope="module")
def lender(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_experiment(_experiment("flare", **LENDER), tmp_path_factory.mktemp("lender")).folder


@pytest.mark.parametrize("name", BORROWERS)
def test_borrowed_networks_give_the_files_of_a_training(name, lender, tmp_path, monkeypatch):
    experiment = BORROWERS[name]
    trained = run_experiment(experiment, tmp_path / "trained")
    with monkeypatch.context() as patch:
        patch.setattr(LocalTraining, "run_epoch", None)  # whoever trains fails
        borrowed = run_experiment(experiment, tmp_path / "borrowed", lender=lender)
    sent = sorted(path.relative_to(trained.folder) for path in trained.folder.glob("clients/*/**/*.safetensors"))
    assert sent
    for path in sent:
        assert _content(trained.folder / path) == _content(borrowed.folder / path)
    traces = [folder / "clients/000/trace.jsonl" for folder in (trained.folder, borrowed.folder)]
    assert traces[0].read_text() == traces[1].read_text()
    for fusion, row in trained.fusions.items():
        assert borrowed.fusions[fusion].accuracy == row.accuracy
        assert borrowed.fusions[fusion].history == row.history


CANNOT = {
    "another objective": (_experiment("flare"), _experiment("fafi")),
    "another seed": (_experiment("flare"), _experiment("flare", seed=1)),
    "more snapshots": (_experiment("flare", train={"snapshots": 0}), _experiment("flare")),
    "rounded weights": (_experiment("flare", upload={"dtype": "int8"}), _experiment("flare")),
    "images kept back": (_experiment("flare", train={"holdout": 0.1}), _experiment("flare", train={"holdout": 0.1})),
    "nothing to train": (_experiment("analytic", fusions=["analytic"]), _experiment("analytic", fusions=["analytic"])),
}


@pytest.mark.parametrize("name", CANNOT)
def test_other_networks_are_not_borrowed(name):
    assert not can_lend(*CANNOT[name])


def test_a_run_whose_uploads_are_gone_lends_nothing(lender, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(lender, copy)
    for path in copy.glob("clients/*/upload.safetensors"):
        path.unlink()
    result = run_experiment(BORROWERS["no snapshots"], tmp_path / "own", lender=copy)
    assert result.accuracy == run_experiment(_experiment("flare"), lender).accuracy
