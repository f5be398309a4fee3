"""Where and in which order the clients of a simulation train: the engine, its workers, who trains together."""

from __future__ import annotations

from functools import partial

from oneflare.client.cohort import cohorts, supports, train_cohort
from oneflare.client.files import ClientSummary
from oneflare.client.lending import borrow
from oneflare.client.observer import Observer, announce_client
from oneflare.core.config import Experiment
from oneflare.nn.hardware import choose_device
from oneflare.simulation.clients import Clients
from oneflare.simulation.engines import default_workers, map_tasks
from oneflare.upload.coding import coder_of


def train_clients(clients: Clients, observer: Observer, lender: Clients | None = None) -> list[ClientSummary]:
    """Train every client on its own data, where the experiment's engine says; those that are complete are skipped.

    lender: the clients of a finished run that has trained the same networks, which are then taken from it
    """
    if lender is not None:
        for client in range(len(clients)):
            borrow(clients.job(client), clients.data(client), lender.files.client(client), lender.contract)
    clients.teach(observer)
    if clients.experiment.engine == "flower":
        return _train_on_flower(clients, observer)
    return _train_here(clients, observer)


def on_gpu(experiment: Experiment) -> bool:
    return choose_device(experiment.train.device).type != "cpu"


def workers_for(experiment: Experiment) -> int:
    """How many worker processes a run uses; a GPU takes one client at a time."""
    return 1 if on_gpu(experiment) else experiment.workers or default_workers()


def _train_here(clients: Clients, observer: Observer) -> list[ClientSummary]:
    """Train in worker processes; small clients share a batch of models."""
    experiment = clients.experiment
    together = experiment.train.cohort if supports(clients.job(0)) else 1
    groups = cohorts(clients.partition.sizes, clients.dataset.image.size, together)
    plan, image = clients.contract.statistics, clients.contract.image
    if plan is not None and plan.coded:  # workers are forked with it, and the server needs it as well
        coder_of(plan.feature_map, image.channels, image.size)

    def announce(summaries: list[ClientSummary]) -> None:
        for summary in summaries:
            announce_client(summary, experiment.epochs, observer)

    results = map_tasks(
        partial(_train_group, clients), groups, workers=workers_for(experiment), observer=observer, on_result=announce
    )
    return sorted((summary for group in results for summary in group), key=lambda summary: summary.client)


def _train_group(clients: Clients, group: list[int], observer: Observer) -> list[ClientSummary]:
    """A function of the module, not a closure, because it is pickled where workers are spawned."""
    return train_cohort([clients.job(client) for client in group], [clients.data(client) for client in group], observer)


def _train_on_flower(clients: Clients, observer: Observer) -> list[ClientSummary]:
    """Train every client alone, as a node of Flower's simulation."""
    from oneflare.simulation.engines.flower import require_flower

    require_flower(simulation=True)
    from oneflare.simulation.engines.flower.simulation import train_on_flower

    return train_on_flower(
        [clients.job(client) for client in range(len(clients))],
        clients.dataset.train,
        clients.partition.indices,
        clients.files.folder,
        observer=observer,
        workers=workers_for(clients.experiment),
        gpu=on_gpu(clients.experiment),
    )
