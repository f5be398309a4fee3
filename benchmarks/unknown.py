"""How well familiarity tells unknown digits, noise and permuted images from known ones: `python -m benchmarks.unknown`

FLARE is trained on eight of the ten digits. Printed are, for every score, the area under the ROC curve of known against
unknown test images, and the share of unknown images that is found where 95 % of known ones are kept.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from torch import Tensor

import oneflare
from oneflare.core.config import DataConfig
from oneflare.core.seeds import torch_generator
from oneflare.data import Split, load
from oneflare.fusion import load_model
from oneflare.metrics.ranking import auroc
from oneflare.models import GlobalModel
from oneflare.simulation.files import RunFiles

SETTINGS = (((8, 9), 0.3, 0), ((0, 3), 0.05, 1), ((4, 7), 0.05, 2))
"""digits that are left out, alpha, seed"""
KEEP = 0.95
IMAGES = 300


def main() -> None:
    dataset = load(DataConfig(name="digits"))
    for left_out, alpha, seed in SETTINGS:
        kept = [digit for digit in range(10) if digit not in left_out]
        train, test = (_renamed(split, kept) for split in (dataset.train, dataset.test))
        with tempfile.TemporaryDirectory() as folder:
            arrays = {"data": train, "test": test, "out": folder}
            oneflare.run(method="flare", clients=5, alpha=alpha, seed=seed, epochs=20, **arrays)
            model = load_model(RunFiles(Path(folder)).model("density_ratio"))
            known = _scores(model, torch.from_numpy(test[0]))
            for what, images in _unknown(dataset.test, dataset.train, left_out, test[0]).items():
                found = _scores(model, images)
                told = [f"{name} {_figures(known[name], found[name])}" for name in known]
                print(f"without {left_out}, alpha {alpha}, seed {seed}; {what}: {', '.join(told)}", flush=True)


def _renamed(split: Split, kept: list[int]):
    """Images and labels of the digits that are kept, numbered from 0."""
    rows = torch.tensor([int(label) in kept for label in split.labels])
    labels = [kept.index(int(label)) for label in split.labels[rows]]
    return split.images[rows].numpy(), torch.tensor(labels).numpy()


def _unknown(test: Split, train: Split, left_out: tuple[int, ...], known) -> dict[str, Tensor]:
    generator = torch_generator(0, "unknown")
    rows = [torch.tensor([int(label) in left_out for label in split.labels]) for split in (train, test)]
    shuffled = torch.from_numpy(known[:IMAGES]).flatten(1)[:, torch.randperm(64, generator=generator)]
    return {
        "digits left out": torch.cat([train.images[rows[0]], test.images[rows[1]]]),
        "noise": torch.randint(0, 256, (IMAGES, 1, 8, 8), generator=generator, dtype=torch.uint8),
        "permuted pixels": shuffled.reshape(-1, 1, 8, 8),
    }


def _scores(model: GlobalModel, images: Tensor) -> dict[str, Tensor]:
    answers = model.answers(images)
    assert answers.familiarity is not None
    return {"familiarity": answers.familiarity, "highest probability": answers.logits.softmax(1).amax(1)}


def _figures(known: Tensor, unknown: Tensor) -> str:
    positive = torch.cat([torch.ones(len(known)), torch.zeros(len(unknown))]).bool().numpy()
    area = auroc(torch.cat([known, unknown]).numpy(), positive)
    floor = known.quantile(1 - KEEP)
    return f"{area:.3f} ({float((unknown < floor).double().mean()):.0%})"


if __name__ == "__main__":
    main()
