from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from oneflare.errors import ConfigError
from oneflare.nn import FEATURE_MAPS, build_feature_map, feature_map_spec
from oneflare.nn.blocks import block_order, block_sizes
from oneflare.nn.feature_maps import Bounded, soft_cells
from oneflare.nn.filter_banks import FilterBank, PairBank, View
from oneflare.nn.paired_maps import Paired, PairedShape, Size, kept_outputs, parts_of
from oneflare.nn.sized_maps import fitted
from oneflare.nn.synthetic_filters import synthetic_filters


def images(number, channels, size, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (number, channels, size, size), dtype=torch.uint8, generator=generator)


def build(channels=3, size=32, mirror=False, **options):
    return Paired(channels, size, mirror=mirror, parts=Size(**options))


def plain_responses(pixels, view, filters, seed):
    """Oracle: every patch cut out, contrast and filters applied in double precision, `(n, 2 f, positions)`."""
    x = F.avg_pool2d(pixels.double(), view.reduce)
    patches = F.unfold(x, view.kernel)
    patches = patches - patches.mean(1, keepdim=True)
    patches = patches / (patches.square().mean(1, keepdim=True) + view.eps).sqrt()
    weights = synthetic_filters(filters, view.channels, view.kernel, seed).double().flatten(1)
    response = weights @ patches
    return torch.cat([(response - view.threshold).clamp(min=0), (-response - view.threshold).clamp(min=0)], 1)


def averaged(maps, side, pool):
    """`(n, f, positions)` -> `(n, f, side / pool, side / pool)`"""
    return F.avg_pool2d(maps.unflatten(2, (side, side)), pool)


@pytest.mark.parametrize(("reduce", "eps"), [(1, 10.0), (2, 10.0), (1, 1000.0)])
def test_outputs_of_filters_are_roots_of_averages_of_thresholded_responses(reduce, eps):
    view, pixels = View(3, 32, 5, reduce, 0.35, eps), images(3, 3, 32)
    bank = FilterBank(view, 70, 4)
    maps = averaged(plain_responses(pixels, view, 70, 4), 32 // reduce - 4, bank.pool)
    expected = torch.einsum("nfyx,cyx->ncf", maps, soft_cells(bank.side).double()).sqrt()
    signs = expected.unflatten(2, (2, 70)).transpose(1, 2)  # (n, sign, cell, filter)
    assert torch.allclose(bank.outputs(view.seen(pixels.float())).double(), signs.flatten(1), atol=1e-3)


def test_outputs_of_pairs_are_roots_of_averaged_products_of_neighbours():
    view, pixels = View(3, 32, 5, 1, 0.35, 10.0), images(2, 3, 32)
    bank = PairBank(view, 30, 7)
    maps = averaged(plain_responses(pixels, view, 64, 7), 28, 2).sqrt()
    found = bank.outputs(view.seen(pixels.float())).double().unflatten(1, (30, 5))
    cells = soft_cells(12).double()
    assert sorted(set(bank.places.tolist())) == list(range(9))
    for pair in range(30):
        top, left = divmod(int(bank.places[pair]), 3)
        one = maps[:, bank.first[pair], 1:13, 1:13]
        other = maps[:, bank.second[pair], top : top + 12, left : left + 12]
        expected = torch.einsum("nyx,cyx->nc", one * other, cells).sqrt()
        assert torch.allclose(found[:, pair], expected, atol=1e-4)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("size", "banks"), [(4, 2), (8, 2), (16, 2), (28, 3), (33, 2), (64, 3)])
def test_images_of_any_size_have_features_within_their_range(channels, size, banks):
    own = build(channels, size, features=61)
    assert len(own.banks) == banks
    assert own.dim == own.shape.colours + 61
    low, high = own.range()
    for pixels in (images(5, channels, size), torch.zeros(2, channels, size, size, dtype=torch.uint8)):
        phi = own(pixels)
        assert phi.shape == (len(pixels), own.dim)
        assert bool(((phi >= low - 1e-5) & (phi <= high + 1e-5)).all())
        assert torch.allclose(own.traced(pixels.float() / 255), phi, atol=1e-4)


@pytest.mark.numeric
@pytest.mark.parametrize("mirror", [True, False])
def test_features_do_not_depend_on_neighbours(mirror):
    own = build(features=150, mirror=mirror)
    pixels = images(19, 3, 32)
    together = own(pixels)
    assert torch.equal(torch.cat([own(pixels[:3]), own(pixels[3:4]), own(pixels[4:])]), together)
    order = torch.tensor([*range(5, 19), *range(5)])
    assert torch.equal(own(pixels[order]), together[order])
    bounded = Bounded(own, 1.0)
    assert torch.equal(torch.cat([bounded(pixels[:1]), bounded(pixels[1:])]), bounded(pixels))
    assert torch.allclose(own(pixels.flip(-1)), together, atol=1e-4) == mirror


@pytest.mark.parametrize(("copies", "moves"), [(2, ((0, 0), (2, -2))), (None, ((0, 0), (2, -2), (-2, 2)))])
def test_features_of_moved_copies_are_averaged(copies, moves):
    """Oracle: the images moved by hand, with their border repeated."""
    pixels, plain = images(3, 3, 32), build(features=150)
    wide = F.pad(pixels.float(), (2, 2, 2, 2), mode="replicate").to(torch.uint8)
    moved = [wide[:, :, 2 + down : 34 + down, 2 + right : 34 + right] for down, right in moves]
    expected = torch.stack([plain(copy) for copy in moved]).mean(0)
    own = build(features=150, moved=2, copies=copies)
    assert torch.allclose(own(pixels), expected, atol=1e-5)
    assert own.fingerprint() != plain.fingerprint()
    assert len({build(features=150, moved=2, copies=other).fingerprint() for other in (2, 3, None)}) == 2
    assert own.shape.seconds(150) > (len(moves) - 0.1) * plain.shape.seconds(150)


def test_copies_without_a_move_are_refused():
    with pytest.raises(ConfigError, match=r"analytic\.moved"):
        build(features=150, copies=2)


def test_the_map_is_a_function_of_its_spec():
    spec = {"name": "paired", "features": 60, "mirror": False}
    one = build_feature_map(spec, 3, 32)
    assert build_feature_map(spec, 3, 32).fingerprint() == one.fingerprint()
    changes = {"seed": 4, "features": 70, "threshold": 0.3, "mirror": True, "kept": 4, "colour_grid": 2, "contrast": 10}
    changes["patches"] = "large"
    for change in ({name: value} for name, value in changes.items()):
        assert build_feature_map(spec | change, 3, 32).fingerprint() != one.fingerprint()
    assert feature_map_spec({"name": "paired"}, flip=True)["mirror"] is True


def test_each_filter_keeps_as_many_of_its_outputs():
    chosen = kept_outputs(70, 4, seed=0)
    assert len(chosen.unique()) == 280
    assert torch.equal((chosen % 70).bincount(), torch.full((70,), 4))


@pytest.mark.parametrize(
    "options",
    [
        *({"features": 1}, {"features": 99999}, {"kept": 0}, {"kept": 11}, {"budget": "0.01s"}, {"threshold": -1}),
        {"patches": "huge"},
        *({"contrast": 0}, {"contrast": -1}, {"contrast": float("nan")}, {"contrast": float("inf")}),
        {"moved": 0},
        {"moved": 5},
    ],
)
def test_options_that_do_not_fit_are_refused(options):
    with pytest.raises(ConfigError, match=r"analytic|paired\.patches"):
        build_feature_map({"name": "paired", **options}, 3, 32)


def test_shares_follow_the_weights_and_add_up():
    shape = PairedShape(3, 32, True, 4, Size(features=803))
    assert [(part.kind, part.reduce, share) for part, share in shape.shares(803)] == [
        ("filters", 1, 301), ("pairs", 1, 301), ("filters", 2, 201),
    ]  # fmt: skip
    assert all(sum(share for _, share in shape.shares(number)) == number for number in range(3, 50))


def seen(size, patches):
    """What the banks are, and the side of their patches in pixels of the image."""
    return [(part.kind, part.kernel * part.reduce) for part in parts_of(size, patches)]


def test_patches_are_small_or_large_as_asked_for():
    assert seen(32, None) == [("filters", 5), ("pairs", 5), ("filters", 10)]
    both = [("pairs", 5), ("pairs", 5)], [("pairs", 3), ("pairs", 3)]
    assert seen(32, "small") == [("filters", 5), *both[0], ("filters", 10), ("filters", 3), *both[1]]
    assert seen(32, "large") == [("filters", 10), ("pairs", 10), ("filters", 14)]
    assert "patches" not in feature_map_spec({"name": "paired"}, flip=True)  # as before there was a choice


def test_one_contrast_may_be_given_for_all_patches():
    assert {part.contrast for part in parts_of(32, "small")} == {100.0, 1000.0}
    assert {part.contrast for part in parts_of(32, "small", 10.0)} == {10.0}
    pale = images(4, 3, 32) // 26 + 120  # a tenth of the contrast
    usual, lower = build(features=150), build(features=150, contrast=10)
    colours = usual.shape.colours
    assert bool((lower(pale)[:, colours:] > 1.5 * usual(pale)[:, colours:]).all())


def test_patches_fit_small_images():
    """Half of 28 pixels are 14, where patches have two pixels less; 8 pixels are not halved."""
    assert seen(28, "large") == [("filters", 6), ("pairs", 6), ("filters", 10)]
    assert seen(8, "large") == [("filters", 3), ("pairs", 3), ("filters", 5)]
    assert set(seen(8, "small")) == {("filters", 3), ("pairs", 3)}
    for size in (8, 33):
        own = build(size=size, channels=1, features=40, patches="large")
        assert torch.isfinite(own(images(2, 1, size))).all()


def test_patches_of_both_sizes_are_in_blocks_of_their_own():
    for features, blocks in ((150, 2), (301, 5), (407, 8)):
        shape = PairedShape(3, 32, True, 4, Size(features=features, blocks=blocks, patches="both"))
        small = [share for part, share in shape.shares(features) if part.reduce == 1]
        large = [share for part, share in shape.shares(features) if part.reduce == 2]
        assert (len(small), len(large), sum(small) + sum(large)) == (4, 3, features)
        first = sum(block_sizes(shape.dim(features), blocks)[: (blocks + 1) // 2])
        assert sum(small) + shape.colours == first
        order = block_order(shape.dim(features), blocks, shape.groups(features))
        assert torch.equal(order.sort().values, torch.arange(shape.dim(features)))
        assert int(order[:first].max()) < first
    with pytest.raises(ConfigError, match="between"):
        PairedShape(3, 32, True, 4, Size(features=100, blocks=2, patches="both"))
    mixed = PairedShape(3, 32, True, 4, Size(features=70, patches="both"))
    assert [share for _, share in mixed.shares(70)] == [10] * 7  # in one block, side by side
    grey = PairedShape(1, 8, False, 4, Size(features=70, blocks=2, patches="both"))
    assert {part.reduce for part in grey.parts} == {1}  # nothing to see at half of 8 pixels


def test_banks_of_the_same_kind_have_filters_of_their_own():
    own = build(channels=1, size=8, features=300, patches="small")
    prints = [bank.fingerprint() for bank in own.banks]
    assert len(set(prints)) == len(prints) == 6


def test_a_budget_takes_the_most_features_that_its_table_allows():
    for budget in (8.0, 20.0, 60.0):
        shape = PairedShape(3, 32, True, 4, Size(budget=budget))
        assert shape.seconds(shape.features) <= budget < shape.seconds(shape.features + 1) * 1.02
    assert FEATURE_MAPS.complete({"name": "paired", "budget": "2min"})["budget"] == 120


def test_the_cost_is_counted_position_by_position():
    """Grey images of 8 pixels, patches of 3: 6 x 6 positions; 5 filters, 64 more below 5 pairs, 25 + 25 features."""
    shape = PairedShape(1, 8, False, 0, Size(features=50))
    convolutions, pairs = 2 * 9 * 36 * (5 + 64), 36 * 5
    assert shape.seconds(50) == pytest.approx(1e4 * (convolutions / 3e10 + pairs / 5e8 + 50**2 / 2e10))


def test_features_are_as_many_as_fit():
    spec = feature_map_spec({"name": "paired"}, flip=True)
    found = fitted(spec, 3, 32, lambda dim: dim <= 100)
    assert found["features"] == 52
    assert build_feature_map(found, 3, 32).dim == 100
    assert fitted({**spec, "budget": 8.0}, 3, 32, lambda dim: dim <= 10_000)["features"] < 1000
    with pytest.raises(ConfigError, match="smallest"):
        fitted(spec, 3, 32, lambda dim: dim <= 50)
    with pytest.raises(ConfigError, match="set 52"):
        fitted({**spec, "features": 90}, 3, 32, lambda dim: dim <= 100)


def test_its_models_have_an_onnx_form(tmp_path):
    import oneflare
    from oneflare.models.onnx import export_onnx

    settings = {"data": {"name": "digits", "train_size": 200, "test_size": 40}, "method": "analytic", "clients": 2}
    result = oneflare.run(**settings, analytic={"name": "paired", "features": 60}, out=tmp_path / "run")
    assert export_onnx(result.model(), tmp_path / "model.onnx").difference < 1e-4
