"""Outliers for a class "unknown": a client's own images destroyed, and moved to where its network takes them in.

FedOV (Diao, Li and He, ICLR 2023): data destruction and adversarial outlier enhancement, after PROSER (Zhou et al.
2021). Beside the prototypes P of the classes a network learns the prototype u of everything that it knows nothing of.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oneflare.objective.terms import TERMS, Batch, Outliers

NAME = "open_set"
STEPS, STEP = 5, 0.008
"""of the attack; 0.002 for pixels in [0, 1], and inputs are four times as wide"""
MIXED = 0.01
"""weight of the mixed features"""
HIDDEN = -1e4
"""logit of a class that does not take part"""


@TERMS.register(NAME)
def open_set(batch: Batch) -> Tensor:
    """cross-entropies with the class "unknown" (FedOV)

    With logits s = (z P^T, z u): CE(s, y) + CE(s without y, unknown) for the images; CE(s, unknown) for destroyed
    images and for destroyed images moved by five gradient signs toward the classes; 0.01 CE(s, unknown) for features
    mixed from two classes.
    """
    outliers = batch.outliers
    if outliers is None:
        raise ValueError("the term open_set needs outliers, which the training loop of one client makes")
    scores = torch.cat([batch.logits, (batch.features @ outliers.unknown)[:, None]], dim=1)
    second = scores.scatter(1, batch.labels[:, None], HIDDEN)
    unknown = torch.full_like(batch.labels, scores.shape[1] - 1)
    loss = F.cross_entropy(scores, batch.labels) + F.cross_entropy(second, unknown)
    loss = loss + _as_unknown(outliers.destroyed, batch, outliers) + _as_unknown(outliers.moved, batch, outliers)
    if len(outliers.mixed):
        loss = loss + MIXED * _as_unknown(outliers.mixed, batch, outliers)
    return loss


def _as_unknown(features: Tensor, batch: Batch, outliers: Outliers) -> Tensor:
    scores = torch.cat([features @ batch.prototypes.T, (features @ outliers.unknown)[:, None]], dim=1)
    return F.cross_entropy(scores, torch.full((len(scores),), scores.shape[1] - 1, device=scores.device))


def small_crop(images: Tensor, generator: torch.Generator) -> Tensor:
    """A part of 10 to 33 % of the area, enlarged to the whole; the proportions of the part vary by a third."""
    draws = torch.rand(len(images), 4, generator=generator)
    area, ratio = 0.1 + 0.23 * draws[:, 0], torch.exp((2 * draws[:, 1] - 1) * torch.tensor(4 / 3).log())
    sides = torch.stack([(area * ratio).sqrt(), (area / ratio).sqrt()], dim=1).clamp(max=1)
    centres = (1 - sides) * (2 * draws[:, 2:] - 1)
    grid = torch.cat([torch.diag_embed(sides), centres[:, :, None]], dim=2)
    places = F.affine_grid(grid, list(images.shape), align_corners=False).to(images.device)
    return F.grid_sample(images, places.to(images.dtype), align_corners=False, padding_mode="border")


def blurred(images: Tensor, generator: torch.Generator) -> Tensor:
    """The mean over a window of 3 to 9 by 1 to 5 pixels, lying or standing; one window for all images.

    FedOV's Gaussian windows have deviations from 10 pixels on, so within the window they are all but flat.
    """
    wide, narrow = (2 * int(torch.randint(low, high, (), generator=generator)) + 1 for low, high in ((1, 5), (0, 3)))
    window = (wide, narrow) if torch.rand((), generator=generator) < 0.5 else (narrow, wide)
    height, width = window
    padded = F.pad(images, (width // 2, width // 2, height // 2, height // 2), mode="reflect")
    return F.avg_pool2d(padded, window, stride=1)


def erased(images: Tensor, generator: torch.Generator) -> Tensor:
    """A rectangle of 33 to 50 % of the area is grey; its sides are in a proportion of up to 3."""
    n, _, height, width = images.shape
    draws = torch.rand(n, 4, generator=generator)
    area, ratio = 0.33 + 0.17 * draws[:, 0], torch.exp((2 * draws[:, 1] - 1) * torch.tensor(3.0).log())
    tall = (area * ratio).sqrt().clamp(max=1)
    sides = torch.stack([tall, (area / tall).clamp(max=1)], dim=1)
    low = (1 - sides) * draws[:, 2:]
    rows, columns = (torch.arange(size) + 0.5 for size in (height, width))
    inside = _between(rows / height, low[:, 0], sides[:, 0])[:, :, None]
    inside = inside & _between(columns / width, low[:, 1], sides[:, 1])[:, None, :]
    return images.masked_fill(inside[:, None].to(images.device), 0.0)


def _between(places: Tensor, low: Tensor, length: Tensor) -> Tensor:
    """`(n, places)`"""
    return (places >= low[:, None]) & (places < (low + length)[:, None])


def pasted(images: Tensor, generator: torch.Generator) -> Tensor:
    """A strip of half the image is pasted over another one, or (a third of the images) both halves change places."""
    n, size = len(images), images.shape[3]
    half = size // 2
    least = (half + 1) // 2  # the two strips are at least so far apart
    distance = torch.randint(least, max(half, least + 1), (n,), generator=generator)
    first = (torch.rand(n, generator=generator) * (half - distance).clamp(min=1)).long()
    onto, source = first, first + distance
    turned = torch.rand(n, generator=generator) < 0.5
    onto, source = torch.where(turned, source, onto)[:, None], torch.where(turned, onto, source)[:, None]
    places = torch.arange(size).expand(n, size)
    strip = torch.where((places >= onto) & (places < onto + half), places - onto + source, places)
    swap = (places + half) % size
    order = torch.where(torch.rand(n, 1, generator=generator) < 1 / 3, swap, strip)
    return _reordered(images, order, torch.rand(n, generator=generator) < 0.5)


def _reordered(images: Tensor, order: Tensor, rows: Tensor) -> Tensor:
    """Columns, or where `rows` says so rows, in the order `(n, size)`."""
    order, rows = order.to(images.device), rows.to(images.device)[:, None, None, None]
    columns = images.gather(3, order[:, None, None, :].expand_as(images))
    return torch.where(rows, images.gather(2, order[:, None, :, None].expand_as(images)), columns)


def part_turned(images: Tensor, generator: torch.Generator) -> Tensor:
    """Two squares side by side, which fill half the image, are each turned by a quarter, a half or three quarters."""
    n, _, size, _ = images.shape
    half = size // 2
    first = torch.randint(0, half, (n,), generator=generator)
    turns = torch.randint(1, 4, (n,), generator=generator).to(images.device)[:, None, None, None]
    rows = (first[:, None] + torch.arange(half)).to(images.device)[:, None, :, None]
    result = images.clone()
    for start in (0, half):
        side = images[..., start : start + half]
        square = side.gather(2, rows.expand(-1, side.shape[1], -1, half))
        for number in (1, 2, 3):
            square = torch.rot90(square, 1, (2, 3))
            inserted = side.scatter(2, rows.expand_as(square), square)
            result[..., start : start + half] = torch.where(
                turns == number, inserted, result[..., start : start + half]
            )
    return result


WAYS: tuple[Callable[[Tensor, torch.Generator], Tensor], ...] = (
    small_crop,
    blurred,
    erased,
    pasted,
    pasted,
    part_turned,
    part_turned,
)
"""as often as FedOV draws them"""


def destroy(images: Tensor, generator: torch.Generator) -> Tensor:
    """Each image `(n, c, size, size)` destroyed in one way, drawn anew for every image."""
    ways = torch.randint(len(WAYS), (len(images),), generator=generator).to(images.device)
    destroyed = torch.stack([way(images, generator) for way in dict.fromkeys(WAYS)])
    kinds = list(dict.fromkeys(WAYS))
    kind = torch.tensor([kinds.index(way) for way in WAYS]).to(images.device)[ways]
    return destroyed[kind, torch.arange(len(images), device=images.device)]


def mixed_pairs(labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, float]:
    """Rows, their partners of another class, and the share of the first: lambda f_i + (1 - lambda) f_j."""
    partners = torch.randperm(len(labels), generator=generator).to(labels.device)
    rows = (labels != labels[partners]).nonzero().flatten()
    return rows, partners[rows], float(torch.rand((), generator=generator))


@dataclass
class OutlierMaker:
    """Makes the outliers of one client's batches."""

    generator: torch.Generator

    def images(self, views: Tensor, encoder: nn.Module, prototypes: Tensor, unknown: Tensor) -> Tensor:
        """views `(2B, ...)` -> `(2B, ...)`: the first view of every image destroyed, and those moved by the attack."""
        destroyed = destroy(views[: len(views) // 2].detach(), self.generator)
        heads = torch.cat([prototypes, unknown[None]]).detach()
        return torch.cat([destroyed, moved(destroyed, encoder, heads)])

    def outliers(self, features: Tensor, views: Tensor, labels: Tensor, unknown: Tensor) -> Outliers:
        """features `(2B, d)` of `images`, raw; views `(2B, d)` raw features of the views -> unit features"""
        rows, partners, share = mixed_pairs(labels, self.generator)
        mixed = share * views[rows] + (1 - share) * views[partners]
        destroyed, attacked = F.normalize(features, dim=1).chunk(2)
        return Outliers(unknown, destroyed, attacked, F.normalize(mixed, dim=1))


def moved(images: Tensor, encoder: nn.Module, heads: Tensor) -> Tensor:
    """Outliers that the network takes for less of an outlier: x <- x + STEP sign(d CE(s, unknown)/dx), STEPS times.

    heads: `(C+1, d)`, the last one for "unknown". The encoder is asked in evaluation mode, so that the attack leaves no
    trace in its batch-norm statistics, and is handed back in the mode it had.
    """
    mode = encoder.training
    encoder.eval()
    result = images.detach().clone()
    unknown = torch.full((len(images),), len(heads) - 1, device=images.device)
    with torch.enable_grad():
        for _ in range(STEPS):
            result.requires_grad_()
            scores = F.normalize(encoder(result).float(), dim=1) @ heads.T
            (slope,) = torch.autograd.grad(F.cross_entropy(scores, unknown), result)
            result = (result + STEP * slope.sign()).detach()
    encoder.train(mode)
    return result
