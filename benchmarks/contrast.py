"""How much variance is added before a patch's contrast is divided out: `python -m benchmarks.contrast [DATA ...]`

Features of `paired` in blocks, for one value of `analytic.contrast` after the other, and as its patches have it by
themselves. Every training image is classified by sums of the four fifths of the training images without it: least
squares in each block, mean of the blocks' scores, the best of a few ridges. No test image is read. Figures go to
`results/analytic/contrast.json`; what is there already is kept. Data: $ONEFLARE_DATA.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from oneflare._version import __version__
from oneflare.core.config import DataConfig
from oneflare.core.files import read_json, write_json
from oneflare.core.threads import in_threads
from oneflare.data import load
from oneflare.nn import build_feature_map, feature_map_spec
from oneflare.nn.blocks import blocks_of

RESULTS = Path("results/analytic/contrast.json")
CONTRASTS = (10, 100, 1000, None)
"""None: each bank its own"""
ROWS = [(data, patches) for patches in ("small", None) for data in ("cifar10", "cifar100")]
ROWS += [("svhn", "large"), ("svhn", None)]
FEATURES, BLOCKS = 6000, 4
RIDGES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)
FOLDS = 5


def held_out(phi: Tensor, labels: Tensor, blocks: tuple[int, ...]) -> list[float]:
    """Accuracy in per cent on images that were not in the sums, for each ridge."""
    order = torch.randperm(len(phi), generator=torch.Generator().manual_seed(0))
    folds, target = order.chunk(FOLDS), F.one_hot(labels).float()
    target -= target.mean(0)
    scores = torch.zeros(len(RIDGES), len(phi), target.shape[1])
    for part in phi.split(blocks, dim=1):
        z = (part - part.mean(0)) / part.std(0).clamp_min(1e-6)
        grams, sums = [z[fold].T @ z[fold] for fold in folds], [z[fold].T @ target[fold] for fold in folds]
        for fold, gram, own in zip(folds, grams, sums, strict=True):
            number = len(phi) - len(fold)
            products = (torch.stack(grams).sum(0) - gram).double() / number
            wanted = (torch.stack(sums).sum(0) - own).double() / number
            for place, ridge in enumerate(RIDGES):
                factor = torch.linalg.cholesky(products + ridge * torch.eye(len(products), dtype=torch.float64))
                scores[place, fold] += z[fold] @ torch.cholesky_solve(wanted, factor).float()
    return [100 * float((own.argmax(1) == labels).float().mean()) for own in scores]


def measure(data: str, patches: str | None, contrast: float | None) -> dict[str, object]:
    dataset = load(DataConfig(name=data))
    options = {"features": FEATURES, "blocks": BLOCKS, "kept": 10, "patches": patches, "contrast": contrast}
    spec = feature_map_spec({"name": "paired", **options}, flip=data != "svhn")
    features = build_feature_map(spec, 3, 32)
    phi = torch.cat(in_threads(features, dataset.train.images.split(500)))
    found = held_out(phi, dataset.train.labels, blocks_of(features))
    return {"images": len(phi), "best": max(found), "by_ridge": dict(zip(map(str, RIDGES), found, strict=True))}


def main(chosen: list[str]) -> None:
    torch.set_num_threads(1)
    for data, patches in ROWS:
        for contrast in CONTRASTS:
            stored = read_json(RESULTS) if RESULTS.exists() else {}
            name = f"{data}, patches {patches or 'even'}, contrast {contrast or 'of each bank'}"
            if name in stored or (chosen and data not in chosen):
                continue
            row = {"version": __version__, **measure(data, patches, contrast)}
            write_json(RESULTS, {**stored, name: row})
            print(name, row["best"], flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
