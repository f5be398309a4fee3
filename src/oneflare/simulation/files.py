"""Where the files of a run are."""

from __future__ import annotations

from pathlib import Path

from oneflare.client.files import ClientFiles

EXPERIMENT = "experiment.yaml"
SCRATCH = ".flower"
"""where clients work that run on Flower, until the server has their uploads"""


class RunFiles:
    """The paths of one run's files, by what they hold."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.experiment = folder / EXPERIMENT
        self.partition = folder / "partition.json"
        self.result = folder / "result.json"
        self.diagnostics = folder / "diagnostics.json"
        self.report = folder / "report.html"
        self.bank = folder / "public_bank.safetensors"
        self.plugins = folder / "plugins.json"

    def client(self, client: int) -> ClientFiles:
        return ClientFiles(self.folder / "clients" / f"{client:03d}")

    def model(self, fusion: str) -> Path:
        return self.folder / "fusions" / fusion / "model.safetensors"

    def fusion_checkpoint(self, fusion: str) -> Path:
        return self.folder / "fusions" / fusion / "checkpoint.safetensors"

    def metrics(self, fusion: str) -> Path:
        return self.folder / "fusions" / fusion / "metrics.json"
