"""Shared pieces: a tiny federation on the embedded digits that trains in about a second."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.pop("ONEFLARE_DATA", None)
torch.set_num_threads(1)

settings.register_profile(
    "oneflare",
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("oneflare")

TINY = {
    "data": {"name": "digits", "train_size": 200, "test_size": 60},
    "partition": {"clients": 3, "alpha": 0.3},
    "encoder": {"name": "conv4", "width": 4},
    "train": {"epochs": 2, "batch_size": 32, "snapshots": 1},
    "workers": 1,
}


@pytest.fixture(scope="session")
def tiny_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run whose files tests may read but must not change."""
    from oneflare.methods.resolve import resolve
    from oneflare.stages import run_experiment

    folder = tmp_path_factory.mktemp("tiny") / "run"
    run_experiment(resolve(TINY, {"method": "flare"}), folder)
    return folder


@pytest.fixture
def tiny_uploads(tiny_run: Path):
    """The verified uploads of the tiny run."""
    from oneflare.data import load
    from oneflare.federation import Federation, Observer, RunFiles
    from oneflare.stages import read_experiment

    experiment, files = read_experiment(tiny_run), RunFiles(tiny_run)
    federation = Federation.build(experiment, files, load(experiment.data), None, None)
    summaries = [files.client(client).read_summary() for client in range(3)]
    return federation.collect(summaries, Observer())
