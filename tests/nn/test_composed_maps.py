"""Random Fourier features and one-hot buckets of another map's features."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
import torch

from oneflare.errors import ConfigError
from oneflare.nn import FEATURE_MAPS, build_feature_map, feature_map_spec, feature_range
from oneflare.nn.composed_maps import Buckets, RandomFeatures, centred_unit

BELOW = {"name": "random_conv", "filters": 3}
PIXELS = torch.randint(0, 256, (19, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def test_products_of_random_features_are_a_gaussian_kernel():
    features = RandomFeatures(3, 16, of=BELOW, dim=4096, bandwidth=0.7)
    z = centred_unit(build_feature_map(BELOW, 3, 16)(PIXELS)).double()
    kernel = torch.exp(-torch.cdist(z, z).square() / (2 * 0.7**2))
    psi = features(PIXELS).double()
    assert kernel.min() < 0.9
    assert torch.allclose(psi @ psi.T, kernel, atol=5 / math.sqrt(4096))


def test_buckets_are_the_one_hot_codes_of_the_definition():
    features = Buckets(3, 16, of=BELOW, levels=2, group=3, seed=4)
    below = build_feature_map(BELOW, 3, 16)(PIXELS).numpy()
    z = below - below.mean(1, keepdims=True)
    z = z / np.linalg.norm(z, axis=1, keepdims=True) * math.sqrt(z.shape[1])
    wanted = np.zeros((len(z), features.dim), dtype=np.float32)
    thresholds = [NormalDist().inv_cdf(level / 3) for level in (1, 2)]
    for row, values in enumerate(z):
        bits = [float(value) > threshold for threshold in thresholds for value in values]
        shuffled = [bits[int(place)] for place in features.order]
        for start in range(0, len(shuffled), 3):
            code = sum(2**position for position, bit in enumerate(shuffled[start : start + 3]) if bit)
            wanted[row, start // 3 * 8 + code] = 1
    assert np.array_equal(features(PIXELS).numpy(), wanted)
    assert (wanted.sum(1) == features.groups).all()


@pytest.mark.numeric
@pytest.mark.parametrize("spec", [{"name": "random_features", "dim": 65}, {"name": "buckets", "levels": 2}])
def test_features_do_not_depend_on_neighbours_and_stay_in_their_range(spec):
    features = build_feature_map(spec | {"of": BELOW}, 3, 16)
    together = features(PIXELS)
    order = torch.tensor([*range(5, 19), *range(5)])
    assert torch.equal(features(PIXELS[order]), together[order])
    assert torch.equal(torch.cat([features(PIXELS[:3]), features(PIXELS[3:4]), features(PIXELS[4:])]), together)
    low, high = feature_range(features)
    assert bool(((together >= low) & (together <= high)).all())
    assert torch.allclose(features.traced(PIXELS.float() / 255), together, atol=1e-4)
    assert features(PIXELS[:0]).shape == (0, features.dim)


@pytest.mark.parametrize("name", ["random_features", "buckets"])
def test_every_option_changes_the_fingerprint(name):
    base = {"name": name, "of": BELOW}
    other = {"random_features": [{"dim": 64}, {"bandwidth": 1.0}], "buckets": [{"levels": 2}, {"group": 3}]}[name]
    specs = [base, base | {"of": BELOW | {"seed": 1}}, base | {"seed": 1}, *(base | change for change in other)]
    found = {build_feature_map(spec, 3, 16).fingerprint() for spec in specs}
    assert len(found) == len(specs)
    assert build_feature_map(base, 3, 16).fingerprint() in found


def test_specs_are_completed_below_and_mirrored():
    assert FEATURE_MAPS.complete({"name": "buckets"})["of"]["filters"] == 115
    assert feature_map_spec({"name": "buckets", "of": "random_conv"}, flip=True)["of"]["mirror"] is True
    assert FEATURE_MAPS.complete({"name": "buckets", "of": BELOW})["of"]["filters"] == 3


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ({"name": "buckets", "of": "none"}, "must be a map of images"),
        ({"name": "buckets", "of": "buckets"}, "must be a map of images"),
        ({"name": "buckets", "of": {"name": "random_conv", "of": "x"}}, "must be a map of images"),
        ({"name": "buckets", "of": 3}, "must name a feature map"),
        ({"name": "buckets", "of": "random_con"}, "did you mean 'random_conv'"),
        ({"name": "buckets", "of": {"name": "random_conv", "filter": 3}}, "analytic.of.filter"),
        ({"name": "buckets", "levels": 0, "of": BELOW}, "levels must lie between"),
        ({"name": "buckets", "levels": 16, "group": 8, "of": BELOW}, "more than 16,384"),
        ({"name": "random_features", "dim": 0, "of": BELOW}, "dim must lie between"),
        ({"name": "random_features", "bandwidth": 0, "of": BELOW}, "bandwidth be greater than 0"),
    ],
)
def test_impossible_maps_are_refused(spec, words):
    with pytest.raises(ConfigError, match=words):
        build_feature_map(spec, 3, 16)
