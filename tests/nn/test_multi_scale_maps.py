from __future__ import annotations

import pytest
import torch

from oneflare.errors import ConfigError
from oneflare.nn import FEATURE_MAPS, build_feature_map, feature_map_spec
from oneflare.nn.feature_maps import Bounded, Patches, RandomConv
from oneflare.nn.multi_scale_maps import (
    OUTPUTS,
    SEED_STRIDE,
    MapShape,
    MultiScale,
    Scales,
    fitted,
    kept_outputs,
    largest,
)


def images(number, channels, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (number, channels, size, size), dtype=torch.uint8, generator=generator)


def build(channels=3, size=32, mirror=False, **options):
    return MultiScale(channels, size, mirror=mirror, parts=Scales(**options))


@pytest.mark.parametrize("filters", [3, 64, 70])
def test_each_filter_keeps_as_many_of_its_outputs(filters):
    """Oracle: number the outputs as `RandomConv` orders them, and count per filter."""
    owner = []
    for start in range(0, filters, 64):
        block = min(64, filters - start)
        owner += [start + number for _sign in range(2) for number in range(block) for _cell in range(5)]
    chosen = kept_outputs(filters, 4, seed=0, scale=1)
    assert len(chosen.unique()) == 4 * filters
    assert torch.equal(torch.tensor(owner)[chosen].bincount(), torch.full((filters,), 4))
    assert torch.equal(kept_outputs(filters, OUTPUTS, 0, 0), torch.arange(OUTPUTS * filters))


def test_with_all_outputs_it_is_random_conv_at_each_scale_side_by_side():
    pixels = images(9, 3, 32)
    own = build(filters=7, kept=10, mirror=True, shifted=False)
    fine = RandomConv(3, 32, filters=4, mirror=True, patches=Patches(reduce=1))
    coarse = RandomConv(3, 32, filters=3, mirror=True, colour_grid=0, patches=Patches(reduce=2, seed=SEED_STRIDE))
    assert torch.equal(own(pixels), torch.cat([fine(pixels), coarse(pixels)], 1))
    part = build(filters=7, kept=5, mirror=True, shifted=False)
    assert torch.equal(part(pixels), own(pixels)[:, part.kept])
    assert part.dim == part.shape.dim(7) == 48 + 35


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("size", "scales"), [(8, 1), (16, 1), (28, 2), (33, 1), (64, 2)])
def test_images_of_any_size_have_features_within_their_range(channels, size, scales):
    own = build(channels, size, filters=6)
    assert len(own.maps) == scales
    low, high = own.range()
    for pixels in (images(5, channels, size), torch.zeros(2, channels, size, size, dtype=torch.uint8)):
        phi = own(pixels)
        assert phi.shape == (len(pixels), own.dim)
        assert bool(((phi >= low - 1e-5) & (phi <= high + 1e-5)).all())
        assert torch.allclose(own.traced(pixels.float() / 255), phi, atol=1e-4)


@pytest.mark.numeric
@pytest.mark.parametrize("mirror", [True, False])
def test_features_do_not_depend_on_neighbours(mirror):
    own = build(filters=9, mirror=mirror)
    pixels = images(19, 3, 32)
    together = own(pixels)
    assert torch.equal(torch.cat([own(pixels[:3]), own(pixels[3:4]), own(pixels[4:])]), together)
    order = torch.tensor([*range(5, 19), *range(5)])
    assert torch.equal(own(pixels[order]), together[order])
    bounded = Bounded(own, 1.0)
    assert torch.equal(torch.cat([bounded(pixels[:1]), bounded(pixels[1:])]), bounded(pixels))
    assert torch.allclose(own(pixels.flip(-1)), together, atol=1e-4) == mirror


def test_the_map_is_a_function_of_its_spec():
    spec = {"name": "multi_scale", "filters": 6, "mirror": False}
    one = build_feature_map(spec, 3, 32)
    assert build_feature_map(spec, 3, 32).fingerprint() == one.fingerprint()
    changes = {"seed": 4, "filters": 7, "threshold": 0.3, "mirror": True, "kept": 4, "scales": 1, "shifted": False}
    for change in ({name: value} for name, value in changes.items()):
        assert build_feature_map(spec | change, 3, 32).fingerprint() != one.fingerprint()
    assert feature_map_spec({"name": "multi_scale"}, flip=True)["mirror"] is True


@pytest.mark.parametrize(
    "options", [{"filters": 1}, {"filters": 9999}, {"kept": 0}, {"kept": 11}, {"scales": 9}, {"budget": "0.01s"}]
)
def test_options_that_do_not_fit_are_refused(options):
    with pytest.raises(ConfigError, match="analytic"):
        build_feature_map({"name": "multi_scale", **options}, 3, 32)


def test_a_budget_takes_the_most_filters_that_its_table_allows():
    shapes = [MapShape(3, 32, True, 4, Scales(budget=budget)) for budget in (2.0, 10.0, 60.0)]
    for shape, budget in zip(shapes, (2.0, 10.0, 60.0), strict=True):
        assert shape.seconds(shape.filters) <= budget < shape.seconds(shape.filters + 1)
    complete = FEATURE_MAPS.complete({"name": "multi_scale", "budget": "2min"})
    assert complete["budget"] == 120
    with pytest.raises(ConfigError, match="duration"):
        FEATURE_MAPS.complete({"name": "multi_scale", "budget": "soon"})


def test_the_cost_of_convolutions_is_counted_position_by_position():
    """One filter on grey images of 8 pixels: 6 x 6 positions of 9 products and sums, and (32 + 5) squared products."""
    shape = MapShape(1, 8, False, 4, Scales(filters=1))
    assert shape.dim(1) == 37
    assert shape.seconds(1) == pytest.approx(1e4 * (2 * 9 * 36 / 3e10 + 37**2 / 2e10))


def test_filters_are_as_many_as_fit():
    spec = feature_map_spec({"name": "multi_scale"}, flip=True)
    found = fitted(spec, 3, 32, lambda dim: dim <= 100)
    assert found["filters"] == 10
    assert build_feature_map(found, 3, 32).dim == 98
    assert fitted({**spec, "budget": 0.5}, 3, 32, lambda dim: dim <= 10_000)["filters"] < 20
    with pytest.raises(ConfigError, match="smallest"):
        fitted(spec, 3, 32, lambda dim: dim <= 50)
    with pytest.raises(ConfigError, match="set 10"):
        fitted({**spec, "filters": 30}, 3, 32, lambda dim: dim <= 100)


def test_the_largest_that_fits_is_found():
    for limit in range(3, 12):
        assert largest(lambda number, limit=limit: number <= limit, 4, 9) == (min(limit, 9) if limit >= 4 else None)


def test_its_models_have_an_onnx_form(tmp_path):
    import oneflare
    from oneflare.models.onnx import export_onnx

    settings = {"data": {"name": "digits", "train_size": 200, "test_size": 40}, "method": "analytic", "clients": 2}
    result = oneflare.run(**settings, analytic={"name": "multi_scale", "filters": 10}, out=tmp_path / "run")
    assert export_onnx(result.model(), tmp_path / "model.onnx").difference < 1e-4
