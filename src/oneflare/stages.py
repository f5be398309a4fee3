"""The stages in order: data, clients, uploads, fusions, metrics. Each leaves complete files; a rerun skips them."""

from __future__ import annotations

import dataclasses
import itertools
import resource
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from oneflare._version import __version__
from oneflare.client import ClientFiles, ClientJob, ClientSummary, snapshot_epochs, train_client
from oneflare.config import Experiment, Layer, parse_overrides, read_yaml
from oneflare.data import ClientData, Dataset, Partition, Split, from_arrays, load, split_clients
from oneflare.data.partition import partition_of
from oneflare.engine import default_workers, map_tasks
from oneflare.errors import ConfigError, DataError, RunError, UploadError
from oneflare.files import digest_of, exclusive, read_json, remove_partial, write_json, write_text
from oneflare.fusion import GlobalModel, UploadSet, build_fusion, check_needs, load_model, logits_of_all
from oneflare.fusion.base import FUSIONS
from oneflare.methods.resolve import ARRAYS, resolve
from oneflare.metrics import diagnose, score
from oneflare.metrics.diagnostics import FeatureSummary
from oneflare.nn import ANCHORS, encoder_spec, initial_network
from oneflare.nn.encoders import CUSTOM
from oneflare.nn.hardware import choose_device, choose_precision, one_thread
from oneflare.upload import Contract, Upload, read_upload, tensor_digest


class Observer:
    """Watches a run; does nothing. Progress displays and trackers override what they need."""

    def begin(self, experiment: Experiment, dataset: Dataset, partition: Partition) -> None:
        """Before the first client."""

    def epoch(self, client: int, epoch: int, row: Mapping[str, float], samples: int) -> None:
        """A client ended an epoch over `samples` images."""

    def client_done(self, summary: ClientSummary, samples_seen: int) -> None:
        """A client is complete; `samples_seen` counts images x epochs."""

    def stage(self, text: str) -> None:
        """Another stage begins."""

    def warn(self, text: str) -> None:
        """Something the user should know."""


class RunFiles:
    """Where a run's files are."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.experiment = folder / "experiment.yaml"
        self.partition = folder / "partition.json"
        self.result = folder / "result.json"
        self.diagnostics = folder / "diagnostics.json"
        self.report = folder / "report.html"

    def client(self, client: int) -> ClientFiles:
        return ClientFiles(self.folder / "clients" / f"{client:03d}")

    def model(self, fusion: str) -> Path:
        return self.folder / "fusions" / fusion / "model.safetensors"

    def metrics(self, fusion: str) -> Path:
        return self.folder / "fusions" / fusion / "metrics.json"


@dataclass(frozen=True)
class Result:
    """A finished run: its figures, and its models on demand."""

    folder: Path
    content: dict[str, Any]
    complete_before: bool = False
    """nothing had to be done"""

    @property
    def fusions(self) -> dict[str, dict[str, Any]]:
        return dict(self.content["fusions"])

    @property
    def headline(self) -> str:
        """the method's own fusion"""
        return str(self.content["headline"])

    @property
    def accuracy(self) -> float:
        return float(self.fusions[self.headline]["accuracy"])

    def model(self, fusion: str | None = None, encoder: nn.Module | None = None) -> GlobalModel:
        return load_model(RunFiles(self.folder).model(fusion or self.headline), encoder)

    def to_dict(self) -> dict[str, Any]:
        return self.content


def run(
    *overrides: str,
    config: Path | str | None = None,
    out: Path | str | None = None,
    test: tuple[Any, Any] | None = None,
    observer: Observer | None = None,
    **keywords: Any,
) -> Result:
    """Run one federation; the same names as on the command line.

    `oneflare.run("train.lr=0.1", data="digits", alpha=0.05, method="flare", epochs=10)`

    data: a name, `(x, y)` arrays, a list of `(x, y)` (one per client), a `Dataset`, or any torch data set.
    encoder: a name, a mapping of options, or your own `nn.Module` that returns `(batch, d)`.
    test: `(x, y)` held-out arrays for data given as arrays.
    """
    given_data, given_encoder = keywords.get("data"), keywords.get("encoder")
    dataset, parts = _own_data(given_data, test)
    if dataset is not None:
        keywords["data"] = {"name": ARRAYS, "digest": _data_digest(dataset)}
    if parts is not None:
        keywords["partition"] = {"kind": "given", "clients": len(parts)}
    encoder = given_encoder if isinstance(given_encoder, nn.Module) else None
    if encoder is not None:
        keywords["encoder"] = {
            "name": CUSTOM,
            "kind": type(encoder).__qualname__,
            "digest": _module_digest(encoder),
        }
    layers: list[Layer] = [read_yaml(Path(config))] if config is not None else []
    experiment = resolve(*layers, parse_overrides(overrides), keywords)
    folder = Path(out) if out is not None else default_folder(experiment)
    return run_experiment(experiment, folder, dataset=dataset, parts=parts, encoder=encoder, observer=observer)


def default_folder(experiment: Experiment) -> Path:
    """A readable name that is unique to the experiment, so that the same command finds its own folder."""
    split = experiment.partition
    skew = f"a{split.alpha:g}" if "dirichlet" in split.kind else split.kind.replace(":", "-")
    parts = [experiment.data.name, experiment.method, skew, f"c{split.clients}", f"s{experiment.seed}"]
    return Path("runs") / "-".join([*parts, experiment.training_digest()[:8]])


def run_experiment(
    experiment: Experiment,
    folder: Path,
    *,
    dataset: Dataset | None = None,
    parts: Sequence[np.ndarray[Any, Any]] | None = None,
    encoder: nn.Module | None = None,
    observer: Observer | None = None,
) -> Result:
    """All stages; those whose files are complete are skipped."""
    observer = observer or Observer()
    files = RunFiles(folder)
    with exclusive(folder):
        remove_partial(folder)
        claim_folder(files, experiment)
        finished = _finished(files, experiment)
        if finished is not None:
            return finished
        choose_device(experiment.train.device)
        if dataset is None:
            observer.stage("reading data")
            dataset = load(experiment.data)
        federation = Federation.build(experiment, files, dataset, parts, encoder)
        write_json(files.partition, federation.partition.to_dict())
        observer.begin(experiment, dataset, federation.partition)
        with one_thread():
            summaries = federation.train(observer)
            uploads = federation.collect(summaries, observer)
            federation.fuse(experiment.fusions, uploads, observer)
        content = federation.result(summaries, uploads)
        write_json(files.result, content)
    return Result(folder, content)


def fuse_run(folder: Path, specs: Sequence[Mapping[str, Any]], observer: Observer | None = None) -> Result:
    """Add fusions to a finished run without training; the same uploads feed them."""
    observer = observer or Observer()
    files = RunFiles(folder)
    experiment = read_experiment(folder)
    if not files.result.exists():
        raise RunError(f"{folder} is not finished; run it to the end first")
    if experiment.data.name == ARRAYS or experiment.encoder["name"] == CUSTOM:
        raise RunError(
            f"{folder} used arrays or an encoder given in Python; add the fusion to `fusions` and run it again"
        )
    complete = [FUSIONS.complete(spec, f"fusion {spec['name']}") for spec in specs]
    with exclusive(folder):
        content = read_json(files.result)
        missing = [spec for spec in complete if not files.metrics(spec["name"]).exists()]
        federation = Federation.build(experiment, files, load(experiment.data), None, None)
        summaries = [ClientSummary(**row) for row in content["clients"]]
        with one_thread():
            uploads = federation.collect(summaries, observer)
            offered = frozenset.intersection(*(upload.fields for upload in uploads))
            check_needs(complete, offered, "; choose another fusion")
            federation.fuse(missing, uploads, observer)
        for spec in complete:
            content["fusions"][spec["name"]] = read_json(files.metrics(spec["name"]))
        write_json(files.result, content)
    return Result(folder, content)


def read_experiment(folder: Path) -> Experiment:
    path = RunFiles(folder).experiment
    if not path.exists():
        raise RunError(f"{folder} is not a run folder (no experiment.yaml)")
    return resolve(read_yaml(path))


def read_result(folder: Path) -> Result:
    files = RunFiles(folder)
    if not files.experiment.exists():
        raise RunError(f"{folder} is not a run folder (no experiment.yaml)")
    if not files.result.exists():
        raise RunError(f"{folder} is not finished; run the same command again to go on")
    return Result(folder, read_json(files.result), complete_before=True)


def claim_folder(files: RunFiles, experiment: Experiment) -> None:
    """A folder belongs to one experiment; only the list of fusions may grow."""
    if files.experiment.exists():
        old = resolve(read_yaml(files.experiment))
        if old.training_digest() != experiment.training_digest():
            place = _first_difference(old.model_dump(mode="json"), experiment.model_dump(mode="json"))
            raise RunError(f"{files.folder} holds another experiment ({place}); choose another --out")
    write_text(files.experiment, experiment.to_yaml())


def _first_difference(old: Any, new: Any, place: str = "") -> str:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            if old.get(key) != new.get(key) and key not in (
                "fusions",
                "workers",
                "engine",
                "checkpoint_seconds",
            ):
                return _first_difference(old.get(key), new.get(key), f"{place}.{key}" if place else key)
    return f"{place} was {old!r}, now {new!r}"


def _finished(files: RunFiles, experiment: Experiment) -> Result | None:
    wanted = [spec["name"] for spec in experiment.fusions]
    if not files.result.exists():
        return None
    content = read_json(files.result)
    if any(name not in content["fusions"] for name in wanted):
        return None
    return Result(files.folder, content, complete_before=True)


@dataclass(frozen=True)
class Federation:
    """One experiment with its data at hand."""

    experiment: Experiment
    files: RunFiles
    dataset: Dataset
    partition: Partition
    contract: Contract
    encoder: nn.Module | None

    @classmethod
    def build(
        cls,
        experiment: Experiment,
        files: RunFiles,
        dataset: Dataset,
        parts: Sequence[np.ndarray[Any, Any]] | None,
        encoder: nn.Module | None,
    ) -> Federation:
        labels, classes = dataset.train.labels.numpy(), len(dataset.classes)
        if parts is not None:
            partition = partition_of("given", parts, labels, classes)
        else:
            partition = split_clients(labels, classes, experiment.partition, experiment.seed)
        spec = experiment.encoder if encoder is not None else encoder_spec(experiment.encoder, classes)
        network = initial_network(spec, dataset.image.channels, dataset.image.size, classes, experiment.seed, encoder)
        contract = Contract.of(
            network,
            federation=experiment.training_digest(),
            method=experiment.method,
            encoder=spec,
            anchors=experiment.anchors,
            image=dataset.image,
            classes=dataset.classes,
        )
        return cls(experiment, files, dataset, partition, contract, encoder)

    @property
    def worst_cosine(self) -> float | None:
        """Of the two closest anchors; None without anchors."""
        anchors = ANCHORS.build(self.contract.anchors, len(self.contract.classes), self.contract.dim)
        return None if anchors is None else anchors.worst_cosine

    @property
    def workers(self) -> int:
        if choose_device(self.experiment.train.device).type != "cpu":
            return 1
        return self.experiment.workers or default_workers()

    def template(self) -> Any:
        image = self.contract.image
        return initial_network(
            self.contract.encoder,
            image.channels,
            image.size,
            len(self.contract.classes),
            self.experiment.seed,
            self.encoder,
        )

    def client_data(self, client: int) -> ClientData:
        rows = torch.from_numpy(self.partition.indices[client])
        return ClientData.of(self.dataset.train.take(rows), len(self.dataset.classes))

    def train(self, observer: Observer) -> list[ClientSummary]:
        """Every client alone; the largest first, so that no worker ends up alone with it."""
        sizes = self.partition.sizes
        order = sorted(range(len(sizes)), key=lambda client: -sizes[client])

        def work(client: int, report: Any) -> ClientSummary:
            job = ClientJob(
                self.experiment,
                self.contract,
                client,
                self.files.client(client).folder,
                self.dataset.flip,
                self.encoder,
            )
            return train_client(job, self.client_data(client), lambda epoch, row: report((epoch, row)))

        def seen(client: int, message: tuple[int, dict[str, float]]) -> None:
            observer.epoch(client, message[0], message[1], sizes[client])

        def done(client: int, summary: ClientSummary) -> None:
            observer.client_done(summary, sizes[client] * self.experiment.train.epochs)
            if summary.status == "failed":
                observer.warn(f"client {client} is left out: {summary.reason}")
            elif summary.status == "empty":
                observer.warn(f"client {client} is left out: it owns no samples")
            elif summary.stable_lr is not None and summary.peak_lr > summary.stable_lr:
                observer.warn(
                    f"client {client}: the peak rate {summary.peak_lr:g} exceeds 2/L = {summary.stable_lr:.2g} at the "
                    "start, the largest stable rate of plain gradient descent; lower train.lr or add a warm-up"
                )

        results = map_tasks(work, order, workers=self.workers, on_report=seen, on_result=done)
        return sorted(results, key=lambda summary: summary.client)

    def collect(self, summaries: Sequence[ClientSummary], observer: Observer, epoch: int | None = None) -> UploadSet:
        """Read and verify the uploads of all trained clients; one that is refused is named and left out."""
        uploads: list[Upload] = []
        for summary in summaries:
            if summary.status != "trained":
                continue
            files = self.files.client(summary.client)
            try:
                uploads.append(read_upload(files.upload if epoch is None else files.snapshot(epoch), self.contract))
            except UploadError as error:
                observer.warn(f"client {summary.client} is left out: {error}")
        if not uploads:
            reasons = "; ".join(f"client {s.client}: {s.reason}" for s in summaries if s.reason)
            raise RunError(f"no client produced a usable upload ({reasons})")
        return UploadSet(tuple(uploads), self.contract, self.template())

    def fuse(self, specs: Sequence[Mapping[str, Any]], uploads: UploadSet, observer: Observer) -> None:
        """Models, metrics and the simulated fusions at the snapshots, for the fusions that are not there yet."""
        missing = [spec for spec in specs if not self.files.metrics(spec["name"]).exists()]
        if not missing:
            return
        observer.stage(f"fusing {len(uploads)} uploads in {len(missing)} ways")
        clients = [upload.client for upload in uploads]
        epochs = snapshot_epochs(self.experiment.train.epochs, self.experiment.train.snapshots)

        def work(epoch: int | None, report: Any) -> dict[str, Any]:
            del report
            if epoch is None:
                return self._evaluate(missing, uploads)
            return self._simulate(missing, clients, epoch)

        outcomes = map_tasks(work, [None, *epochs], workers=self.workers)
        final = outcomes[0]
        for spec in missing:
            name = spec["name"]
            history = [
                {"epoch": epoch, "accuracy": outcome[name]} for epoch, outcome in zip(epochs, outcomes[1:], strict=True)
            ]
            history.append({"epoch": self.experiment.train.epochs, "accuracy": final[name]["accuracy"]})
            write_json(self.files.metrics(name), final[name] | {"history": history})

    def _evaluate(self, specs: Sequence[Mapping[str, Any]], uploads: UploadSet) -> dict[str, dict[str, Any]]:
        test = self.dataset.test
        models: dict[str, GlobalModel] = {}
        seconds: dict[str, float] = {}
        for spec in specs:
            started = time.monotonic()
            models[spec["name"]] = build_fusion(spec).fuse(uploads)
            seconds[spec["name"]] = time.monotonic() - started
        probe = FeatureSummary(uploads.size_weights.float())
        fresh = not self.files.diagnostics.exists()
        asked = dict(models)
        if fresh:
            asked["·"] = build_fusion({"name": "feature_mean"}).fuse(uploads)  # streams every encoder for the probe
        logits = logits_of_all(asked, test.images, probes=[probe] if fresh else [])
        if fresh:
            write_json(self.files.diagnostics, diagnose(uploads, probe, test.labels).to_dict())
        outcome = {}
        for name, model in models.items():
            model.save(self.files.model(name), embed=False)
            outcome[name] = score(logits[name], test.labels).to_dict() | {
                "parameters": model.cost.parameters,
                "forward_passes": model.cost.forward_passes,
                "fuse_seconds": seconds[name],
            }
        return outcome

    def _simulate(self, specs: Sequence[Mapping[str, Any]], clients: Sequence[int], epoch: int) -> dict[str, float]:
        """What fusion would have given had clients stopped here; nothing flows back to them."""
        uploads = UploadSet(
            tuple(read_upload(self.files.client(client).snapshot(epoch), self.contract) for client in clients),
            self.contract,
            self.template(),
        )
        models = {spec["name"]: build_fusion(spec).fuse(uploads) for spec in specs}
        logits = logits_of_all(models, self.dataset.test.images)
        labels = self.dataset.test.labels
        return {name: float((value.argmax(1) == labels).double().mean()) for name, value in logits.items()}

    def result(self, summaries: Sequence[ClientSummary], uploads: UploadSet) -> dict[str, Any]:
        experiment = self.experiment
        device = choose_device(experiment.train.device)
        precision = choose_precision(experiment.train.precision, device, self.dataset.image.size)
        return {
            "oneflare": __version__,
            "method": experiment.method,
            "seed": experiment.seed,
            "data": {
                "name": self.dataset.name,
                "train": len(self.dataset.train.labels),
                "test": len(self.dataset.test.labels),
                "classes": list(self.dataset.classes),
            },
            "partition": {
                **self.partition.to_dict(),
                "alpha": experiment.partition.alpha if "dirichlet" in experiment.partition.kind else None,
                "clients": experiment.partition.clients,
                "digest": experiment.partition_digest(),
            },
            "encoder": self.contract.encoder,
            "anchors": {**self.contract.anchors, "worst_cosine": self.worst_cosine},
            "epochs": experiment.train.epochs,
            "device": device.type,
            "precision": str(precision).removeprefix("torch."),
            "headline": experiment.fusions[0]["name"],
            "fusions": {spec["name"]: read_json(self.files.metrics(spec["name"])) for spec in experiment.fusions},
            "diagnostics": read_json(self.files.diagnostics),
            "clients": [summary.to_dict() for summary in summaries],
            "fused_clients": [upload.client for upload in uploads],
            "cost": {
                "train_seconds": sum(summary.train_seconds for summary in summaries),
                "upload_bytes": sum(upload.file_bytes for upload in uploads),
                "peak_memory_bytes": _peak_memory_bytes(),
            },
        }


def _peak_memory_bytes() -> int:
    """Largest resident size of this process or of any of its workers."""
    unit = 1 if sys.platform == "darwin" else 1024
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return unit * max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)


def _own_data(given: Any, test: tuple[Any, Any] | None) -> tuple[Dataset | None, list[np.ndarray[Any, Any]] | None]:
    """Data handed over in Python: a Dataset, arrays, one pair of arrays per client, or a torch data set."""
    if given is None or isinstance(given, str | dict):
        if test is not None:
            raise ConfigError("test= goes with data given as arrays; named data sets bring their own test images")
        return None, None
    if isinstance(given, Dataset):
        return dataclasses.replace(given, test=from_arrays(test, test).test) if test else given, None
    if isinstance(given, list):
        if not given or not all(isinstance(pair, tuple) and len(pair) == 2 for pair in given):
            raise DataError("a list of clients must hold one (x, y) pair of arrays per client")
        bounds = np.cumsum([0] + [len(y) for _, y in given])
        if test is None:
            raise DataError("data as a list of clients needs held-out images: test=(x, y)")
        images = np.concatenate([np.asarray(x) for x, _ in given])
        labels = np.concatenate([np.asarray(y) for _, y in given])
        parts = [np.arange(start, stop) for start, stop in itertools.pairwise(bounds)]
        return from_arrays((images, labels), test), parts
    if isinstance(given, tuple) and len(given) == 2:
        if isinstance(given[0], tuple):
            return from_arrays(given[0], given[1]), None
        return from_arrays(given, test), None
    if hasattr(given, "__getitem__") and hasattr(given, "__len__"):
        pairs = [given[index] for index in range(len(given))]
        arrays = (np.stack([np.asarray(x) for x, _ in pairs]), np.asarray([int(y) for _, y in pairs]))
        return from_arrays(arrays, test), None
    raise DataError(
        f"data of type {type(given).__name__} is not understood; give a name, (x, y) arrays or a torch data set"
    )


def _split_digest(split: Split) -> list[str]:
    return [tensor_digest(split.images), tensor_digest(split.labels)]


def _data_digest(dataset: Dataset) -> str:
    return digest_of([_split_digest(dataset.train), _split_digest(dataset.test), list(dataset.classes)])


def _module_digest(module: nn.Module) -> str:
    state: Mapping[str, Tensor] = module.state_dict()
    return digest_of([str(module), {name: tensor_digest(tensor.cpu()) for name, tensor in state.items()}])
