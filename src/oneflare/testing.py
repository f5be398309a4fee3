"""Contracts that every part must keep, for the parts of OneFlare and for those of users.

    from oneflare.testing import check_controller
    import my_module                     # registers "mine"

    def test_mine():
        check_controller("mine")

A check raises AssertionError with one line that says which promise was broken.
"""

from __future__ import annotations

import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from oneflare.core.config import DataConfig
from oneflare.data import Dataset, ImageSpec, load
from oneflare.data.sources import SOURCES
from oneflare.fusion import (
    FUSIONS,
    QUIET,
    Fused,
    Fusion,
    GlobalModel,
    SingleModel,
    UploadSet,
    build_fusion,
    load_model,
)
from oneflare.nn import build_encoder, build_feature_map, encoder_spec, initial_network
from oneflare.nn.encoders import feature_dim
from oneflare.objective import CONTROLLERS, ClientFacts, Controller, build_controller

LOSSES = ((2.3, 0.4), (1.1, 0.2), (0.5, 0.05), (0.2, 1e-3), (0.1, 1e-6))
"""(local, align) as training brings them down"""
TINY_DATA: dict[str, Any] = {"name": "digits", "train_size": 160, "test_size": 40}


def check_controller(name: str, **options: Any) -> None:
    """Finite losses with a gradient, lambda >= 0 in every trace and as recorded, state that resumes bit for bit."""
    spec = CONTROLLERS.complete({"name": name, **options})
    facts = ClientFacts((5, 0, 12))
    one, other = build_controller(spec, facts), build_controller(spec, facts)
    _require(isinstance(one, Controller), f"{name}: is not a Controller; derive it from oneflare.objective.Controller")
    steps = [(local, align, index / (3 * len(LOSSES))) for index, (local, align) in enumerate(LOSSES * 3)]
    for index, (local, align, progress) in enumerate(steps):
        if index == len(steps) // 2:
            other.load_state_dict(one.state_dict())
        for chosen in (one, other) if index >= len(steps) // 2 else (one,):
            _step(chosen, name, local, align, progress)
        row = one.trace()
        for key in ("lambda_raw", "lambda_effective"):
            _require(math.isfinite(row[key]) and row[key] >= 0, f"{name}: {key} became {row[key]}")
        if index >= len(steps) // 2:
            again = other.trace()
            for key in ("lambda_raw", "lambda_effective"):
                _require(row[key] == again[key], f"{name}: after load_state_dict {key} is {again[key]}, not {row[key]}")


def _step(controller: Any, name: str, local: float, align: float, progress: float) -> None:
    losses = torch.tensor(local, requires_grad=True), torch.tensor(align, requires_grad=True)
    loss = controller.loss(*losses, progress)
    _require(isinstance(loss, Tensor), f"{name}: loss() returns {type(loss).__name__}, not a tensor")
    _require(loss.shape == () and bool(torch.isfinite(loss)), f"{name}: loss is not one finite number ({loss})")
    _require(loss.requires_grad, f"{name}: the loss does not reach the weights")
    loss.backward()
    on_local, on_align = (0.0 if part.grad is None else float(part.grad) for part in losses)
    _require(on_local >= 1e-9, f"{name}: the local loss counts {on_local:g} times; it must count")
    effective = float(controller.trace()["lambda_effective"])
    _require(
        math.isclose(on_align / on_local, effective, rel_tol=1e-3, abs_tol=1e-6),
        f"{name}: alignment counts {on_align / on_local:g} times the local loss, but {effective:g} is recorded; "
        "call self.record(raw, effective) with what loss() uses",
    )
    controller.step()


def check_encoder(
    name: str, *, channels: tuple[int, ...] = (1, 3), sizes: tuple[int, ...] = (8, 32), **options: Any
) -> None:
    """`(batch, d)` for every kind of image, the same in any batch, trainable, weights that can be loaded."""
    for colours in channels:
        for size in sizes:
            spec = encoder_spec({"name": name, **options}, 10)
            encoder = build_encoder(spec, colours)
            dim = feature_dim(encoder, colours, size)
            images = torch.rand(5, colours, size, size, generator=torch.Generator().manual_seed(0))
            encoder.eval()
            with torch.no_grad():
                whole, single = encoder(images), torch.cat([encoder(image[None]) for image in images])
            _require(whole.shape == (5, dim), f"{name}: features of shape {tuple(whole.shape)}, not (5, {dim})")
            _require(bool(torch.isfinite(whole).all()), f"{name}: features are not finite")
            _require(
                torch.allclose(whole, single, atol=1e-4, rtol=1e-4),
                f"{name}: an image's features depend on who is in its batch",
            )
            encoder.train()
            encoder(images).square().mean().backward()
            deaf = [key for key, weight in encoder.named_parameters() if weight.requires_grad and weight.grad is None]
            _require(not deaf, f"{name}: no gradient reaches {', '.join(deaf)}")
            _same_start(name, spec, colours, size)


def _same_start(name: str, spec: dict[str, Any], channels: int, size: int) -> None:
    one, other = (initial_network(spec, ImageSpec.default(channels, size), 10, seed=3).state_dict() for _ in range(2))
    for key, tensor in one.items():
        _require(torch.equal(tensor, other[key]), f"{name}: {key} differs between two starts with one seed")


def check_feature_map(name: str, *, channels: int = 3, size: int = 16, **options: Any) -> None:
    """The same features for the same seed, whatever the batch; finite; `(n, dim)` float32; fingerprints agree."""
    spec = {"name": name, **options}
    one, other = (build_feature_map(spec, channels, size) for _ in range(2))
    images = torch.randint(0, 256, (9, channels, size, size), generator=torch.Generator().manual_seed(0)).byte()
    features = one(images)
    _require(features.shape == (9, one.dim), f"{name}: features of shape {tuple(features.shape)}, not (9, {one.dim})")
    _require(features.dtype == torch.float32, f"{name}: features are {features.dtype}, not float32")
    _require(bool(torch.isfinite(features).all()), f"{name}: features are not finite")
    _require(torch.equal(features, other(images)), f"{name}: two maps with one seed give different features")
    _require(one.fingerprint() == other.fingerprint(), f"{name}: two maps with one seed have different fingerprints")
    singles = torch.cat([one(image[None]) for image in images])
    _require(torch.allclose(features, singles, atol=1e-4), f"{name}: features depend on who is in the batch")


def check_source(name: str, **options: Any) -> Dataset:
    """Images and labels of one shape and range, every class known, the same rows for the same seed."""
    config = DataConfig(name=name, **options)
    made = SOURCES.build({"name": name}, config)
    _require(isinstance(made, Dataset), f"{name}: returns {type(made).__name__}, not an oneflare.Dataset")
    dataset, again = load(config), load(config)
    for part, split in (("train", dataset.train), ("test", dataset.test)):
        wanted = (dataset.image.channels, dataset.image.size, dataset.image.size)
        _require(tuple(split.images.shape[1:]) == wanted, f"{name}: {part} images have shape {split.images.shape[1:]}")
        _require(len(split.images) == len(split.labels) > 0, f"{name}: {part} has {len(split.labels)} labels")
        inside = bool(((split.labels >= 0) & (split.labels < len(dataset.classes))).all())
        _require(inside, f"{name}: {part} has a label outside its {len(dataset.classes)} classes")
        if split.images.is_floating_point():
            _require(0 <= float(split.images.min()) <= float(split.images.max()) <= 1, f"{name}: pixels leave [0, 1]")
    _require(torch.equal(dataset.train.labels, again.train.labels), f"{name}: two readings give different rows")
    return dataset


def check_method(name: str, **settings: Any) -> None:
    """Resolves, trains an epoch on a few images, and every fusion it names gives a finite answer."""
    with tempfile.TemporaryDirectory() as folder:
        result = _tiny_run(Path(folder), {"method": name, **settings})
        for fusion, row in result.fusions.items():
            _require(math.isfinite(row.accuracy), f"{name}: accuracy of {fusion} is {row.accuracy}")


def check_fusion(name: str, *, settings: dict[str, Any] | None = None, **options: Any) -> None:
    """One answer for the same uploads: finite, whatever the batch size, fused twice, or saved and loaded again.

    Also that `fuse` returns a `Fused`, stores nothing on the fusion, and gives the kind of model it declares.

    settings: what the uploads of the fusion need beside the defaults, for example {"upload.evidence": ["moments"]}
    """
    spec = FUSIONS.complete({"name": name, **options})
    fusion = build_fusion(spec)
    _require(isinstance(fusion, Fusion), f"{name}: is not a Fusion; derive it from oneflare.fusion.Fusion")
    before = dict(vars(fusion))
    images = load(DataConfig(**TINY_DATA)).test.images
    with tempfile.TemporaryDirectory() as folder:
        uploads = tiny_uploads(Path(folder), settings)
        fused = fusion.fuse(uploads, QUIET)
        _require(isinstance(fused, Fused), f"{name}: fuse() returns {type(fused).__name__}; return Fused(model)")
        stored = sorted(key for key, value in vars(fusion).items() if key not in before or before[key] is not value)
        _require(not stored, f"{name}: fuse() sets {', '.join(stored)} on the fusion; return it in Fused instead")
        model = fused.model
        _require(isinstance(model, GlobalModel), f"{name}: Fused holds {type(model).__name__}, not a GlobalModel")
        _require(
            isinstance(model, SingleModel) == fusion.single_network,
            f"{name}: its model is a {type(model).__name__}; set single_network = {isinstance(model, SingleModel)}",
        )
        logits = model.logits(images)
        _require(logits.shape == (len(images), len(uploads.contract.classes)), f"{name}: logits {tuple(logits.shape)}")
        _require(bool(torch.isfinite(logits).all()), f"{name}: logits are not finite")
        for size in (1, 7, 256):
            _close(model.logits(images, size), logits, f"{name}: a batch of {size} changes the answer")
        _close(fusion.fuse(uploads, QUIET).model.logits(images), logits, f"{name}: fusing twice gives two answers")
        path = Path(folder) / "model.safetensors"
        model.save(path)
        _close(load_model(path).logits(images), logits, f"{name}: a saved model gives another answer")
        _require(model.cost.parameters > 0 and model.cost.forward_passes >= 1, f"{name}: cost is {model.cost}")


def tiny_uploads(folder: Path, settings: dict[str, Any] | None = None) -> UploadSet:
    """Three clients' uploads after one epoch on a few digits, read back and verified."""
    from oneflare.client.observer import Observer
    from oneflare.simulation.features import load_data
    from oneflare.simulation.files import RunFiles
    from oneflare.simulation.simulation import Simulation
    from oneflare.simulation.stages import read_experiment

    result = _tiny_run(folder, {"fusions": "average"} | (settings or {}))
    experiment, files = read_experiment(result.folder), RunFiles(result.folder)
    federation = Simulation.build(experiment, files, load_data(experiment))
    found = [files.client(client).read_summary() for client in range(experiment.partition.clients)]
    return federation.collect([summary for summary in found if summary is not None], Observer())


def _tiny_run(folder: Path, settings: dict[str, Any]) -> Any:
    from oneflare.methods.resolve import resolve
    from oneflare.simulation.stages import run_experiment

    base = {
        "data": TINY_DATA,
        "partition": {"clients": 3, "alpha": 0.3},
        "encoder": {"name": "conv4", "width": 4},
        "train": {"epochs": 1, "snapshots": 0},
        "workers": 1,
    }
    return run_experiment(resolve(base, settings), folder / "run")


def _close(one: Tensor, other: Tensor, complaint: str) -> None:
    _require(torch.allclose(one, other, atol=1e-4, rtol=1e-4), complaint)


def _require(holds: bool, complaint: str) -> None:
    if not holds:
        raise AssertionError(complaint)


__all__ = [
    "check_controller",
    "check_encoder",
    "check_feature_map",
    "check_fusion",
    "check_method",
    "check_source",
    "tiny_uploads",
]
