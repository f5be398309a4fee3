from __future__ import annotations

import pytest
import torch

from oneflare.core.config import AugmentConfig
from oneflare.core.seeds import torch_generator
from oneflare.data import Augmentation, ImageSpec, prepare

COLOUR = ImageSpec(3, 16, (0.4, 0.5, 0.6), (0.2, 0.25, 0.3))


def images(number: int = 6, channels: int = 3, size: int = 16) -> torch.Tensor:
    return torch.randint(0, 256, (number, channels, size, size), dtype=torch.uint8, generator=torch_generator(0))


def with_draws(pixels: torch.Tensor, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return pixels, Augmentation.draw(len(pixels), torch_generator(seed))


def augmentation(image: ImageSpec = COLOUR, flip: bool = True, **options) -> Augmentation:
    return Augmentation.for_data(AugmentConfig(**options), image, flip)


def test_views_are_independent_per_view_and_per_image():
    same = images(1).repeat(4, 1, 1, 1)
    views = augmentation().two_views(*with_draws(same, 1))
    assert views.shape == (8, 3, 16, 16)
    for i in range(8):
        for j in range(i):
            assert not torch.allclose(views[i], views[j])


def test_same_stream_same_views():
    one, two = (augmentation().two_views(*with_draws(images(), 3)) for _ in range(2))
    assert torch.equal(one, two)


def test_nothing_to_do_equals_the_test_time_pixels():
    views = augmentation(kind="none").two_views(*with_draws(images(), 0))
    assert torch.allclose(views[:6], prepare(images(), COLOUR), atol=1e-6)
    assert torch.equal(views[:6], views[6:])


def test_identity_crop_keeps_the_image():
    plain = augmentation(flip=False, min_scale=1.0, jitter=0, hue=0, grayscale=0)
    stretched = plain.two_views(*with_draws(images(), 0))
    assert stretched.isfinite().all()
    exact = augmentation(flip=False, kind="affine", degrees=0, shift=0)
    assert exact.kind == "affine"


def test_flip_mirrors_about_half_of_the_images_and_only_if_allowed():
    still = {"kind": "crop", "min_scale": 1.0, "jitter": 0, "hue": 0, "grayscale": 0}
    ramp = (torch.arange(16).float() / 15).expand(200, 3, 16, 16).contiguous()
    views = augmentation(flip=True, **still).two_views(*with_draws(ramp, 0))
    falling = (views[:, 0, 8, 0] > views[:, 0, 8, 15]).float().mean()
    assert 0.4 < falling < 0.6
    kept = augmentation(flip=False, **still).two_views(*with_draws(ramp, 0))
    assert (kept[:, 0, 8, 0] < kept[:, 0, 8, 15]).all()


def test_grayscale_makes_channels_equal():
    spec = ImageSpec(3, 16, (0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
    views = augmentation(spec, grayscale=1.0).two_views(*with_draws(images(), 0))
    assert torch.allclose(views[:, 0], views[:, 1], atol=1e-4)


def test_hue_turns_colours_but_keeps_luma():
    spec = ImageSpec(3, 16, (0.0, 0.0, 0.0), (1.0, 1.0, 1.0))
    only_hue = augmentation(spec, flip=False, min_scale=1.0, jitter=0, hue=0.5, grayscale=0)
    flat = torch.rand(50, 3, 1, 1, generator=torch_generator(0)).expand(50, 3, 16, 16).contiguous()
    views = only_hue.two_views(*with_draws(flat, 0))
    luma = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    assert torch.allclose((views * luma).sum(1)[:50], (flat * luma).sum(1), atol=1e-2)
    assert not torch.allclose(views[:50], flat, atol=1e-2)


@pytest.mark.parametrize(("channels", "size"), [(1, 8), (1, 28), (3, 8), (3, 64)])
def test_all_supported_shapes(channels, size):
    chosen = augmentation(ImageSpec.default(channels, size), flip=False)
    assert chosen.kind == ("affine" if channels == 1 else "crop")
    views = chosen.two_views(*with_draws(images(3, channels, size), 0))
    assert views.shape == (6, channels, size, size)
    assert views.isfinite().all()


def test_digits_are_never_mirrored():
    grey = ImageSpec.default(1, 16)
    ramp = (torch.arange(16).float() / 15).expand(100, 1, 16, 16).contiguous()
    views = augmentation(grey, flip=False).two_views(*with_draws(ramp, 0))
    assert (views[:, 0, 8, 4] < views[:, 0, 8, 11]).all()
