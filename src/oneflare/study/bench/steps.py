"""The cost of one training step: the surroundings of the encoder, cohorts, and controllers."""

from __future__ import annotations

import itertools
import multiprocessing as mp
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from oneflare.client.cohort import Cohort
from oneflare.client.job import ClientJob
from oneflare.client.loop import LocalTraining, build_training
from oneflare.core.seeds import torch_generator
from oneflare.data import Augmentation, ClientData, Dataset, ImageSpec, Split
from oneflare.methods.resolve import resolve
from oneflare.nn.hardware import bfloat16_speedup, one_thread, precision_name
from oneflare.objective import CONTROLLERS
from oneflare.simulation.engines import default_workers
from oneflare.simulation.files import RunFiles
from oneflare.simulation.simulation import Simulation


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    model = next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    return {
        "processor": model,
        "cores": default_workers(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "bfloat16_speedup": bfloat16_speedup(torch.device("cpu")),
        "load_average": os.getloadavg()[0],
    }


def random_dataset(size: int, channels: int, samples: int, classes: int = 10) -> Dataset:
    """Noise in the shape of images: training it costs what real images cost."""
    generator = torch_generator(0, "benchmark")
    images = torch.randint(0, 256, (samples, channels, size, size), dtype=torch.uint8, generator=generator)
    labels = torch.arange(samples) % classes
    names = tuple(str(label) for label in range(classes))
    split = Split(images, labels)
    return Dataset("noise", split, split, names, ImageSpec.default(channels, size), flip=channels == 3)


def make_training(
    encoder: Mapping[str, Any], *, size: int, channels: int, batch: int, method: str = "flare", **layer: Any
) -> LocalTraining:
    """One client's training loop on noise, ready to step."""
    settings = {"method": method, "encoder": dict(encoder), "partition": {"kind": "iid", "clients": 1}}
    experiment = resolve(settings, {"train.batch_size": batch}, layer)
    dataset = random_dataset(size, channels, 2 * batch)
    federation = Simulation.build(experiment, RunFiles(Path("unused")), dataset)
    job = ClientJob(experiment, federation.contract, 0, Path("unused"), dataset.flip)
    return build_training(job, ClientData.of(dataset.train, 10))


def interleaved(first: Callable[[], Any], second: Callable[[], Any], repeats: int) -> tuple[float, float, float]:
    """Best seconds of both, and the median of the ratios first/second of neighbouring measurements."""
    for function in (first, second, first, second):
        function()
    pairs = []
    for _ in range(repeats):
        times = []
        for function in (first, second):
            started = time.perf_counter()
            function()
            times.append(time.perf_counter() - started)
        pairs.append((times[0], times[1]))
    ratio = statistics.median(a / b for a, b in pairs)
    return min(a for a, _ in pairs), min(b for _, b in pairs), ratio


def step_overhead(
    encoder: Mapping[str, Any], *, size: int, channels: int, batch: int, repeats: int = 15, **layer: Any
) -> dict[str, Any]:
    """A full step (two views, four terms, alignment, controller, clip, optimiser, trace) over the bare
    forward and backward pass of the same encoder on the same two views."""
    with one_thread():
        training = make_training(encoder, size=size, channels=channels, batch=batch, **layer)
        rows, draws = torch.arange(batch), torch_generator(0, "bench")
        views = training.views(rows, Augmentation.draw(batch, draws))[0]
        network = training.network.train()

        def full() -> None:
            images, labels = training.views(rows, Augmentation.draw(batch, draws))
            losses, _ = training.step(images, labels, 0.5)
            torch.stack(list(losses.values()))

        def bare() -> None:
            network.zero_grad(set_to_none=True)
            with torch.autocast("cpu", training.precision, enabled=training.precision != torch.float32):
                features = network.encoder(views)
            features.float().sum().backward()

        full_seconds, bare_seconds, ratio = interleaved(full, bare, repeats)
    return {
        "encoder": dict(encoder),
        "size": size,
        "batch": batch,
        "precision": precision_name(training.precision),
        "ratio": ratio,
        "full_ms": 1000 * full_seconds,
        "bare_ms": 1000 * bare_seconds,
        "images_per_second": batch / full_seconds,
    }


def _burn(stop: Any) -> None:
    """A neighbour that keeps one core busy with what training does."""
    torch.set_num_threads(1)
    weight, images = torch.randn(32, 32, 3, 3), torch.randn(64, 32, 16, 16)
    while not stop.is_set():
        torch.conv2d(images, weight, padding=1)


def busy_machine(
    encoder: Mapping[str, Any], *, size: int, channels: int, batch: int, repeats: int = 10
) -> dict[str, Any]:
    """Time of a step beside one busy neighbour per core, over the time alone; a fair share is 2."""
    context = mp.get_context("fork")
    with one_thread():
        training = make_training(encoder, size=size, channels=channels, batch=batch)
        rows, draws = torch.arange(batch), torch_generator(0, "bench")

        def step() -> None:
            training.step(*training.views(rows, Augmentation.draw(batch, draws)), 0.5)

        alone = _median(step, repeats)
        stop = context.Event()
        neighbours = [context.Process(target=_burn, args=(stop,), daemon=True) for _ in range(default_workers())]
        for neighbour in neighbours:
            neighbour.start()
        time.sleep(0.5)
        beside = _median(step, repeats)
        stop.set()
        for neighbour in neighbours:
            neighbour.join()
    return {
        "neighbours": len(neighbours),
        "alone_ms": 1000 * alone,
        "beside_ms": 1000 * beside,
        "ratio": beside / alone,
    }


def _median(function: Callable[[], Any], repeats: int) -> float:
    function()
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        function()
        times.append(time.perf_counter() - started)
    return statistics.median(times)


def cohort_gain(*, size: int, channels: int, samples: int, clients: int = 32, repeats: int = 5) -> dict[str, Any]:
    """How many times faster an epoch of some small clients is as one batch of models."""
    experiment = resolve({"method": "flare", "partition": {"kind": "iid", "clients": clients}})
    dataset = random_dataset(size, channels, clients * samples)
    federation = Simulation.build(experiment, RunFiles(Path("unused")), dataset)
    jobs = [federation.clients.job(client) for client in range(clients)]
    data = [federation.clients.data(client) for client in range(clients)]
    with one_thread():
        cohort = Cohort(jobs, data)
        singles = [build_training(job, part) for job, part in zip(jobs, data, strict=True)]
        epoch = itertools.count(1)

        def one_after_another() -> None:
            for training in singles:
                training.run_epoch()

        alone, together, ratio = interleaved(one_after_another, lambda: cohort.run_epoch(next(epoch)), repeats)
    return {
        "size": size,
        "samples": samples,
        "clients": clients,
        "gain": ratio,
        "alone_ms": 1000 * alone,
        "together_ms": 1000 * together,
    }


GUARDED = {"name": "meta_annealed", "floor": 1e-3, "ceiling": 1e-2, "lambda_max": 50.0}


def controller_costs(*, size: int, channels: int, batch: int, rounds: int = 40) -> dict[str, float]:
    """Time of a step under every controller over that under `fixed`; their steps alternate."""
    shape: dict[str, Any] = {"size": size, "channels": channels, "batch": batch}
    with one_thread():
        trainings = {
            name: make_training({"name": "resnet8"}, **shape, controller={"name": name})
            for name in CONTROLLERS
            if name != "none"
        }
        trainings["meta_annealed, all guards"] = make_training({"name": "resnet8"}, **shape, controller=GUARDED)
        trainings["fixed, pcgrad"] = make_training(
            {"name": "resnet8"}, **shape, controller={"name": "fixed"}, objective={"pcgrad": True}
        )
        views, labels = trainings["fixed"].views(
            torch.arange(batch), Augmentation.draw(batch, torch_generator(0, "bench"))
        )
        seconds: dict[str, list[float]] = {name: [] for name in trainings}
        for number in range(-3, rounds):  # the first few warm up
            for name, training in trainings.items():
                started = time.process_time()
                training.step(views, labels, max(number, 0) / rounds)
                if number >= 0:
                    seconds[name].append(time.process_time() - started)
    middle = {name: statistics.median(values) for name, values in seconds.items()}
    return {name: value / middle["fixed"] for name, value in middle.items()}
