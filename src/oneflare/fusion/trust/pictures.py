"""Pictures that a member's network takes for one of its classes, shown to the other members' networks.

Nobody at the server has images, but every network has learnt what its classes look like. A picture that is changed step
by step until one member is sure that it shows a `3` is also a `3` to most other members that know threes, because all
networks began alike and saw images of the same kind. A member that trained with two classes exchanged calls it by the
other name. `oneflare.fusion.trust.exchanged` judges these answers.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from oneflare.core.seeds import torch_generator
from oneflare.data import ImageSpec, prepare
from oneflare.fusion.base import UploadSet
from oneflare.fusion.densities import MemberDensities
from oneflare.fusion.trust.probes import probe_images
from oneflare.nn.encoders import both_features

EACH = 8
"""pictures of a class from one member"""
GIVERS = 8
"""members from whom there are pictures of one class: those that claim the most images of it"""
STEPS = 60
RATE = 0.05
SHIFT = 1
"""pixels by which a picture is moved at random in each step, so that no single pixel decides"""
NOISE = 0.05
"""deviation of the noise on every pixel in each step, for the same reason"""
NEVER = -1e4
"""answer for a class that a member does not have"""


def drawn_pictures(
    encoder: nn.Module, densities: MemberDensities, member: int, labels: Tensor, image: ImageSpec
) -> Tensor:
    """`(n, c, h, w)` in [0, 1]: pictures that one member takes for the classes `labels` `(n,)`, `EACH` times each.

    From probes, Adam maximises r_c / sqrt(d) + log softmax(r / sqrt(d))_c over the logits of the pixels, with r the
    member's density ratios of its own classes: what is likely for the class, and for no other.
    """
    generator = torch_generator(0, "pictures", member)
    start = probe_images(image, EACH, seed=1).clamp(0.05, 0.95).repeat(len(labels) // EACH, 1, 1, 1)
    pixels = torch.logit(start).requires_grad_(True)
    optimiser = torch.optim.Adam([pixels], lr=RATE)
    unknown, device = ~densities.held[member], next(encoder.parameters()).device
    for _ in range(STEPS):
        moved = torch.randint(-SHIFT, SHIFT + 1, (2,), generator=generator).tolist()
        shown = torch.sigmoid(pixels).roll(moved, (2, 3))
        shown = shown + NOISE * torch.randn(shown.shape, generator=generator)
        features = both_features(encoder, prepare(shown.to(device), image)).own.cpu()
        ratios = densities.ratios(member, features) / features.shape[1] ** 0.5
        likely = ratios.gather(1, labels[:, None]).sum()
        loss = F.cross_entropy(ratios.masked_fill(unknown, NEVER), labels, reduction="sum") - likely
        optimiser.zero_grad()
        (pixels.grad,) = torch.autograd.grad(loss, [pixels])
        optimiser.step()
    return torch.sigmoid(pixels).detach()


def givers(held: Tensor, counts: Tensor) -> Tensor:
    """`(N, C)` from whom there are pictures of which class.

    held: `(N, C)` who may give some; counts: `(N, C)` what they claim
    """
    order = torch.where(held, counts, -1.0).argsort(dim=0, descending=True, stable=True)
    rank = torch.empty_like(order).scatter_(0, order, torch.arange(len(held))[:, None].expand_as(order))
    return held & (rank < GIVERS)


def answers(uploads: UploadSet, densities: MemberDensities, judged: Tensor) -> Tensor:
    """`(N, N, C, C)`: mean r_k / sqrt(d) of the asked member (first) for the giver's (second) pictures of class c.

    NaN where the giver has no pictures of c. judged: `(N, C)` the classes of which a member has enough images to be
    asked, and to give pictures.
    """
    image, members, classes = uploads.contract.image, len(uploads), judged.shape[1]
    giving = givers(judged, uploads.counts)
    shown, places = [], []
    for member, encoder in enumerate(uploads.encoders()):
        labels = giving[member].nonzero().flatten().repeat_interleave(EACH)
        if len(labels):
            shown.append(drawn_pictures(encoder, densities, member, labels, image))
            places += [(member, label) for label in labels.tolist()[::EACH]]
    found = torch.full((members, members, classes, classes), torch.nan)
    if not shown:
        return found
    rows, columns = (torch.tensor(part) for part in zip(*places, strict=True))
    for asked, features in enumerate(uploads.features(prepare(torch.cat(shown), image))):
        ratios = densities.ratios(asked, features.own) / features.own.shape[1] ** 0.5
        found[asked, rows, columns] = ratios.view(len(places), EACH, classes).mean(1)
    return found
