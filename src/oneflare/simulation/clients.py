"""The clients of a simulation: what each owns, and what each is asked to do."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from oneflare.client.job import ClientJob
from oneflare.client.observer import Observer
from oneflare.client.public_teacher import teacher_features
from oneflare.client.start import shared_start
from oneflare.core.config import Experiment
from oneflare.core.files import save_state
from oneflare.data import ClientData, Dataset, Partition
from oneflare.errors import ConfigError
from oneflare.nn import PrototypeNetwork
from oneflare.nn.hardware import Workload, choose_device, choose_precision, precision_name
from oneflare.simulation.files import RunFiles
from oneflare.upload import Contract


@dataclass(frozen=True)
class Setup:
    """One experiment with its data at hand: who owns what, and what uploads must look like."""

    experiment: Experiment
    files: RunFiles
    dataset: Dataset
    partition: Partition
    contract: Contract

    def template(self) -> PrototypeNetwork:
        """A fresh copy of the network that every client begins with."""
        return shared_start(self.experiment, self.contract)


class Clients(Setup):
    """Data and jobs of all clients, by number."""

    def __len__(self) -> int:
        return len(self.partition.indices)

    def data(self, client: int) -> ClientData:
        """The images that this client owns."""
        rows = torch.from_numpy(self.partition.indices[client])
        return ClientData.of(self.dataset.train.take(rows), len(self.dataset.classes))

    def job(self, client: int) -> ClientJob:
        """What this client is asked to do, and in which folder."""
        return ClientJob(
            self.experiment,
            self.contract,
            client,
            self.files.client(client).folder,
            self.dataset.flip,
            self.files.bank if self.experiment.objective.public_bank else None,
            precision=self.precision,
        )

    @cached_property
    def precision(self) -> str:
        """The precision in which all clients train. It is decided here once, so that workers do not decide apart."""
        if not self.experiment.trains:
            return "float32"
        image, train = self.dataset.image, self.experiment.train
        workload = Workload(self.template().encoder, image.channels, image.size)
        return precision_name(choose_precision(train.precision, choose_device(train.device), workload))

    def teach(self, observer: Observer) -> None:
        """Make the teacher's view of the public images, where clients are to have it; a rerun finds it in its file."""
        public = self.dataset.public
        if not self.experiment.objective.public_bank or self.files.bank.exists():
            return
        if public is None:
            raise ConfigError("objective.bank=public needs images that nobody owns; set data.public=NUMBER")
        observer.stage(f"training the teacher on {len(public.labels)} public images")
        features = teacher_features(self.experiment, self.contract, public, self.dataset.flip)
        save_state(self.files.bank, {"features": features})
