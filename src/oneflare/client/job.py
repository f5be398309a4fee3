"""What one client is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from oneflare.core.config import Experiment
from oneflare.core.noise import Words, noise_words
from oneflare.upload import Contract


@dataclass(frozen=True)
class ClientJob:
    """Everything one client needs to know, apart from its data."""

    experiment: Experiment
    contract: Contract
    client: int
    folder: Path
    flip: bool
    bank: Path | None = None
    """the teacher's features of the public images, where the objective has a public bank"""
    precision: str | None = None
    """float32 or bfloat16, as the run decided for all its clients; None: the machine that trains decides"""

    def noise(self, purpose: str) -> Words:
        """The random words from which this client's privacy noise for one purpose is drawn."""
        return noise_words(self.experiment.upload.statistics_noise_seed, self.client, purpose)
