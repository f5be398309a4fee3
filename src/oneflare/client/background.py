"""Background images: a client's own images destroyed, so that they keep its pixels and lose what they show.

What a network answers to them is what it answers to images that it knows nothing of, as far as that can be had without
anybody else's images. Four ways of destroying take turns, because no single one is best on all data:

    phases       the amplitudes of the Fourier transform stay, its phases are those of noise
    turned       a quarter turn
    quadrants    the four quadrants in another order, none in its place
    tiles        sixteen tiles in a random order

A backbone's features have a way of their own:

    displaced    a random half of an image's features change places among themselves; where a backbone was cut, a
                 feature is a whole channel of what its tail is fed, with all places of the image
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import permutations

import torch
from torch import Tensor

from oneflare.core.seeds import torch_generator
from oneflare.data.dataset import to_unit

FEWEST = 1024
"""a client with fewer images destroys each of them in several ways, to have about so many"""
DERANGED = tuple(order for order in permutations(range(4)) if all(place != index for index, place in enumerate(order)))


def scrambled_phases(images: Tensor, generator: torch.Generator) -> Tensor:
    """Images `(n, c, h, w)` in [0, 1] with the phases of white noise, the same for all colours of an image."""
    noise = torch.rand(len(images), 1, *images.shape[2:], generator=generator)
    phases = torch.fft.fft2(noise).angle()
    phases[..., 0, 0] = 0
    turned = torch.fft.fft2(images) * torch.polar(torch.ones_like(phases), phases)
    restored: Tensor = torch.fft.ifft2(turned).real
    return restored.clamp(0, 1)


def quarter_turn(images: Tensor, generator: torch.Generator) -> Tensor:
    """Turned to the left or to the right."""
    left = torch.rand(len(images), 1, 1, 1, generator=generator) < 0.5
    return torch.where(left, torch.rot90(images, 1, (2, 3)), torch.rot90(images, -1, (2, 3)))


def shuffled_tiles(images: Tensor, orders: Tensor, side: int) -> Tensor:
    """The `side` x `side` tiles of every image in the order `orders` `(n, side^2)`; remainders at the edges stay."""
    n, channels, height, width = images.shape
    h, w = height // side, width // side
    tiles = images[..., : h * side, : w * side].reshape(n, channels, side, h, side, w).permute(0, 2, 4, 1, 3, 5)
    tiles = tiles.reshape(n, side * side, channels, h, w)
    tiles = tiles[torch.arange(n)[:, None], orders].reshape(n, side, side, channels, h, w)
    result = images.clone()
    result[..., : h * side, : w * side] = tiles.permute(0, 3, 1, 4, 2, 5).reshape(n, channels, h * side, w * side)
    return result


def shuffled_quadrants(images: Tensor, generator: torch.Generator) -> Tensor:
    """No quadrant stays in its place."""
    orders = torch.tensor(DERANGED)[torch.randint(len(DERANGED), (len(images),), generator=generator)]
    return shuffled_tiles(images, orders, 2)


def sixteen_tiles(images: Tensor, generator: torch.Generator) -> Tensor:
    """Sixteen tiles in any order."""
    return shuffled_tiles(images, torch.rand(len(images), 16, generator=generator).argsort(1), 4)


WAYS: tuple[Callable[[Tensor, torch.Generator], Tensor], ...] = (
    scrambled_phases,
    quarter_turn,
    shuffled_quadrants,
    sixteen_tiles,
)


def displaced_features(features: Tensor, span: tuple[Tensor, Tensor], generator: torch.Generator) -> Tensor:
    """`(n, D, ...)`: of each image another half of the features, drawn at random, moves round in a random circle.

    How strong an image's features are stays, and half of what goes together in a photograph does. With all features
    displaced nothing is left of a photograph, and members with few images get too narrow a background. Drawing every
    feature from another image would leave the average image: sums over many features, which a network takes, would
    hardly vary, so that every real image would seem to be known.

    span: the lowest and the highest value `(D,)` of each feature over the client's images, within which the moved ones
    are kept, for features that differ in scale.
    """
    flat = features.flatten(2)
    orders = torch.rand(flat.shape[:2], generator=generator).argsort(1)
    places = orders[:, : flat.shape[1] // 2, None].expand(-1, -1, flat.shape[2])
    moved = flat.scatter(1, places.roll(1, 1), flat.gather(1, places))
    return torch.minimum(torch.maximum(moved, span[0][:, None]), span[1][:, None]).view_as(features)


def channels_of(shape: Sequence[int]) -> Tensor:
    """`(D, m)`: where in a flat row the m numbers of each of the D channels are.

    shape: of what a network gives for one image: `(D, h, w)`, `(h, w, D)`, tokens `(m, D)`, or plain features `(D,)`
    """
    rows = torch.arange(math.prod(shape)).reshape(tuple(shape))
    first = len(shape) == 1 or (len(shape) == 3 and shape[1] == shape[2])
    return (rows if first else rows.movedim(-1, 0)).reshape(shape[0] if first else shape[-1], -1)


def background(images: Tensor, block: int, shape: Sequence[int] | None = None) -> Iterator[Tensor]:
    """A client's images `(n, c, h, w)` destroyed, in blocks, floats in [0, 1]; the same for the same images.

    Each image is destroyed in one way, which take turns; where there are few images, in up to all four. Features, which
    are images of one pixel, are displaced instead, as often. shape: of what the tail of a backbone is fed for one image
    """
    if len(images) == 0:
        return
    copies = max(1, min(len(WAYS), FEWEST // max(len(images), 1)))
    if images.shape[2:] == (1, 1):
        channels = channels_of(shape or images.shape[1:2])
        lowest, highest = (edge.flatten().float()[channels] for edge in images.aminmax(dim=0))
        span = (lowest.amin(1), highest.amax(1))
        for copy in range(copies):
            for number, part in enumerate(images.split(block)):
                generator = torch_generator(0, "displaced features", copy, number)
                moved = displaced_features(part.flatten(1)[:, channels].float(), span, generator)
                back = torch.empty_like(moved.flatten(1))
                back[:, channels.flatten()] = moved.flatten(1)
                yield back[:, :, None, None]
        return
    for copy in range(copies):
        for number, part in enumerate(images.split(block)):
            generator = torch_generator(0, "background", copy, number)
            pixels = to_unit(part)
            ways = (torch.arange(len(part)) + copy) % len(WAYS)
            destroyed = torch.stack([way(pixels, generator) for way in WAYS])
            yield destroyed[ways, torch.arange(len(part))]
