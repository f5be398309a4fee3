"""The server's teacher: a network that is trained on the public split before any client starts."""

from __future__ import annotations

import torch
from torch import Tensor

from oneflare.client.loop import Aim, LocalTraining
from oneflare.client.start import shared_start
from oneflare.core.config import Experiment
from oneflare.data import Augmentation, ClientData, Split, prepare
from oneflare.nn.hardware import one_thread
from oneflare.objective import ClientFacts, build_controller
from oneflare.upload import Contract

TEACHER = -1
"""its place in the names of random streams, where clients have their number"""
BATCH = 256


def teacher_features(experiment: Experiment, contract: Contract, public: Split, flip: bool) -> Tensor:
    """`(m, d)` unit features of the public images by a teacher trained on them with the method's own terms.

    A function of the experiment and the public split alone, so every machine makes the same bank.
    """
    assert experiment.objective.bank is not None
    epochs = int(experiment.objective.bank["epochs"])
    network = shared_start(experiment, contract)
    image = contract.image
    data = ClientData.of(public, len(contract.classes))
    controller = build_controller({"name": "none"}, ClientFacts(tuple(data.counts.tolist())))
    with one_thread():
        training = LocalTraining(
            network,
            data,
            Augmentation.for_data(experiment.augment, image, flip),
            Aim(experiment.objective.without_additions(), controller),
            experiment.train.model_copy(update={"epochs": epochs}),
            (experiment.seed, TEACHER),
        )
        while training.epoch < epochs:
            training.run_epoch()
        network.eval()
        with torch.no_grad():
            parts = [network(prepare(part.to(training.device), image)).cpu() for part in public.images.split(BATCH)]
    return torch.cat(parts)
