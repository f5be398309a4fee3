from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from oneflare.errors import ConfigError
from oneflare.nn import FEATURE_MAPS, build_feature_map, feature_map_spec
from oneflare.nn.feature_maps import Bounded, Patches, RandomConv, grid_means, soft_cells, windowed_cells
from oneflare.nn.synthetic_filters import synthetic_filters


def images(number, channels, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (number, channels, size, size), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("size", [8, 15, 28, 33, 64])
@pytest.mark.parametrize("mirror", [True, False])
def test_any_image_of_8_to_64_pixels_has_finite_features(channels, size, mirror):
    features = RandomConv(channels, size, filters=3, mirror=mirror)
    for pixels in (images(5, channels, size), torch.zeros(2, channels, size, size, dtype=torch.uint8)):
        phi = features(pixels)
        assert phi.shape == (len(pixels), features.dim)
        assert phi.dtype == torch.float32
        assert torch.isfinite(phi).all()
        assert torch.equal(features(pixels.float() / 255), phi)


@pytest.mark.numeric
@pytest.mark.parametrize(("channels", "size"), [(1, 8), (3, 16), (3, 32)])
@pytest.mark.parametrize("filters", [1, 7, 51, 64])
@pytest.mark.parametrize("mirror", [True, False])
def test_features_do_not_depend_on_neighbours(channels, size, filters, mirror):
    """Bit for bit, at every place of a batch and beside every image, whatever the number of filters."""
    features = RandomConv(channels, size, filters=filters, mirror=mirror)
    pixels = images(19, channels, size)
    together = features(pixels)
    for places in (range(19), reversed(range(19)), [*range(5, 19), *range(5)]):
        order = torch.tensor(list(places))
        assert torch.equal(features(pixels[order]), together[order])
    assert torch.equal(torch.cat([features(pixels[:3]), features(pixels[3:4]), features(pixels[4:])]), together)
    bounded = Bounded(features, 1.0)
    assert torch.equal(torch.cat([bounded(pixels[:1]), bounded(pixels[1:])]), bounded(pixels))


def test_a_mirrored_image_has_the_same_features():
    features = RandomConv(3, 32, filters=8, mirror=True)
    pixels = images(6, 3, 32)
    assert torch.allclose(features(pixels), features(pixels.flip(-1)), atol=1e-4)
    handed = RandomConv(3, 32, filters=8, mirror=False)
    assert not torch.allclose(handed(pixels), handed(pixels.flip(-1)), atol=1e-2)


def test_symmetrised_features_are_the_mean_over_explicit_flips_of_a_closed_bank():
    """Filter by filter: sqrt-pooled responses of the image and of its mirror image, averaged."""
    symmetric = RandomConv(3, 16, filters=4, mirror=True, colour_grid=0)
    plain = RandomConv(3, 16, filters=4, mirror=False, colour_grid=0)
    pixels = images(5, 3, 16)
    straight = plain(pixels).view(5, 2, 4, 5)
    mirrored = plain(pixels.flip(-1)).view(5, 2, 4, 5)
    assert torch.allclose(symmetric(pixels).view(5, 2, 4, 5), (straight + mirrored) / 2, atol=1e-4)


def test_one_feature_by_hand():
    """sqrt of the cell average of relu(r - t), with r the filter on the contrast-normalised patch."""
    features = RandomConv(1, 8, filters=2, mirror=False, colour_grid=0, patches=Patches(threshold=0.2))
    pixels = images(1, 1, 8)
    weight = synthetic_filters(2, 1, 3, 0)
    patches = F.unfold(pixels.float(), 3)[0].T  # (36, 9)
    normalised = (patches - patches.mean(1, keepdim=True)) / (patches.var(1, correction=0, keepdim=True) + 10).sqrt()
    response = (normalised @ weight.flatten(1).T).T.view(2, 6, 6)
    cells = soft_cells(6)
    for sign, row in ((1, 0), (-1, 1)):
        expected = torch.einsum("fhw,chw->fc", (sign * response - 0.2).clamp(min=0), cells).sqrt()
        assert torch.allclose(features(pixels).view(2, 2, 5)[row], expected, atol=1e-5)


def test_the_map_is_a_function_of_its_spec():
    spec = {"name": "random_conv", "filters": 4, "mirror": False, "seed": 3}
    one, two = (build_feature_map(spec, 3, 16) for _ in range(2))
    assert one.fingerprint() == two.fingerprint()
    for change in ({"seed": 4}, {"filters": 5}, {"threshold": 0.3}, {"mirror": True}, {"kernel": 3}):
        assert build_feature_map(spec | change, 3, 16).fingerprint() != one.fingerprint()


def test_mirroring_is_decided_by_the_data_unless_it_is_set():
    assert feature_map_spec({"name": "random_conv"}, flip=True)["mirror"] is True
    assert feature_map_spec({"name": "random_conv"}, flip=False)["mirror"] is False
    assert feature_map_spec({"name": "random_conv", "mirror": True}, flip=False)["mirror"] is True
    assert feature_map_spec({"name": "none"}, flip=True) == {"name": "none"}


@pytest.mark.parametrize("options", [{"filters": 0}, {"kernel": 16}, {"reduce": 3}, {"threshold": -1.0}])
def test_options_that_do_not_fit_are_refused(options):
    with pytest.raises(ConfigError, match="analytic"):
        build_feature_map({"name": "random_conv", **options}, 3, 16)


def test_no_features_are_explained():
    assert "random_conv" in FEATURE_MAPS
    with pytest.raises(ConfigError, match="set analytic=random_conv"):
        build_feature_map({"name": "none"}, 3, 16)


@pytest.mark.parametrize("mirror", [True, False])
def test_shifted_features_are_means_over_windows_of_the_image(mirror):
    """Oracle: the map of 28 pixels on each of nine windows of an image of 32; contrast is that of the same patches."""
    images = torch.randint(0, 256, (3, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    own = RandomConv(3, 32, filters=3, mirror=mirror, patches=Patches(shifted=True))
    small = RandomConv(3, 28, filters=3, mirror=mirror, patches=Patches(kernel=5, reduce=1))
    small.pool, small.cells = 2, soft_cells(12).flatten(1).T.contiguous()
    small.mirrored_cells = soft_cells(12).flip(-1).flatten(1).T.contiguous()
    windows = [small(images[:, :, y : y + 28, x : x + 28]) for y in (0, 2, 4) for x in (0, 2, 4)]
    assert torch.allclose(own(images), torch.stack(windows).mean(0), atol=1e-4)
    assert own.fingerprint() != RandomConv(3, 32, filters=3, mirror=mirror).fingerprint()


def test_cells_of_a_window_add_up_to_one_inside_it():
    cells = windowed_cells(6, [(0, 0), (0, 1), (1, 0), (1, 1)])
    assert cells.shape == (20, 6, 6)
    assert torch.allclose(cells.sum((1, 2)), torch.ones(20))
    assert float(cells[5:10, :, 0].abs().max()) == 0
    assert torch.equal(cells[15:20, 1:, 1:], soft_cells(5))


@pytest.mark.parametrize(("side", "grid"), [(6, 4), (7, 3), (8, 4), (5, 5), (13, 4)])
def test_means_over_a_grid_are_those_of_torch(side, grid):
    x = torch.rand(3, 2, side, side, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(grid_means(x, side, grid), F.adaptive_avg_pool2d(x, grid))
