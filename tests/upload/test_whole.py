"""Sums of whole numbers: nothing is lost, no split makes a difference, and what no images give is refused."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from oneflare.client.observer import Observer
from oneflare.client.statistics import upper_sums
from oneflare.core.config import DataConfig
from oneflare.data import ClientData, load
from oneflare.errors import ConfigError, UploadError
from oneflare.fusion.analytic.solver import Factored, Spectrum
from oneflare.methods.resolve import resolve
from oneflare.nn import build_feature_map
from oneflare.simulation.files import RunFiles
from oneflare.simulation.simulation import Simulation
from oneflare.upload import coding, read_upload
from oneflare.upload.coding import coded, coder_of
from oneflare.upload.limits import FeatureLimits
from oneflare.upload.statistics import Statistics, pack
from oneflare.upload.whole import (
    AT_A_TIME,
    LARGEST,
    WIDTH,
    WholeFeatures,
    pack_whole,
    plain_whole,
    whole,
    whole_complaint,
    whole_limits,
    whole_sums,
)
from shared import forge, forked, load_all

DIGITS = load(DataConfig())
SIZE = DIGITS.train.images.shape[-1]
SPEC = {"name": "paired", "features": 88, "mirror": False}
FEATURES = build_feature_map(SPEC, 1, SIZE)
CODER = coder_of(SPEC, 1, SIZE)
ROUNDED = WholeFeatures(FEATURES, CODER)
LIMITS = whole_limits(FeatureLimits.of(FEATURES), CODER)
WORDS = ["method=analytic", "data.train_size=600", "data.test_size=200", "clients=4", "upload.limit=60kB"]


def packed(n=300) -> dict[str, torch.Tensor]:
    data = ClientData.of(DIGITS.train.take(torch.arange(n)), 10)
    return pack_whole(upper_sums(ROUNDED, data, 10, (FEATURES.dim,), products=torch.float32)[0])


def sums_of(q: torch.Tensor, labels: torch.Tensor, classes: int) -> Statistics:
    """Oracle: in whole numbers of 64 bits."""
    whole_q, onehot = q.long(), F.one_hot(labels, classes)
    parts = (whole_q.T @ whole_q, onehot.T @ whole_q, onehot.sum(0))
    return Statistics(*(part.double() for part in parts))


def equal(one: Statistics, two: Statistics) -> bool:
    pairs = ((one.gram, two.gram), (one.sums, two.sums), (one.counts, two.counts))
    return all(torch.equal(left, right) for left, right in pairs)


@pytest.mark.numeric
def test_the_numbers_of_an_image_do_not_depend_on_its_neighbours():
    images = DIGITS.train.images[: 3 * AT_A_TIME + 5]
    together = ROUNDED(images)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    assert torch.equal(ROUNDED(images[order]), together[order])
    assert torch.equal(torch.cat([ROUNDED(images[:1]), ROUNDED(images[1:30])]), together[:30])
    assert torch.equal(together, together.round())
    assert float((together * WIDTH - CODER.changed(FEATURES(images))).abs().max()) <= 0.5001 * WIDTH


def test_large_features_are_cut():
    assert whole(torch.tensor([0.2, -0.4, 1e6, -1e6])).tolist() == [0, -1, LARGEST, -LARGEST]
    assert 2048 * LARGEST**2 < 1 << 24


@settings(max_examples=25)
@given(st.integers(1, 40), st.integers(1, 60), st.integers(1, 4), st.integers(0, 10**6), st.sampled_from([1, 7, 90]))
def test_nothing_is_lost_and_sums_of_any_split_are_those_of_all(dim, images, members, seed, size):
    generator = torch.Generator().manual_seed(seed)
    q = (torch.randn(images, dim, generator=generator) * size).round().clamp(-LARGEST, LARGEST) + (seed % 3)
    labels = torch.randint(0, 3, (images,), generator=generator)
    owner = torch.randint(0, members, (images,), generator=generator)
    total = Statistics.zeros(dim, 3)
    for member in range(members):
        own = owner == member
        total = total + whole_sums(pack_whole(sums_of(q[own], labels[own], 3)))
    assert equal(total, sums_of(q, labels, 3))


def test_memory_that_is_given_makes_no_difference():
    into = torch.full((FEATURES.dim, FEATURES.dim), float("nan"), dtype=torch.float64)
    made = packed()
    assert equal(whole_sums(made, into), whole_sums(made))
    assert whole_sums(made, into).gram.data_ptr() == into.data_ptr()


def test_sums_of_streamed_images_are_those_of_all_their_numbers():
    n = 700  # more than are in memory at a time
    q, labels = ROUNDED(DIGITS.train.images[:n]), DIGITS.train.labels[:n]
    assert equal(whole_sums(packed(n)), sums_of(q, labels, 10))


def test_plain_sums_are_those_of_features_to_the_rounding():
    n = 1000
    phi = FEATURES(DIGITS.train.images[:n]).double()
    found = plain_whole(packed(n), CODER)
    onehot = F.one_hot(DIGITS.train.labels[:n], 10).double()
    means = found["sums"].double() / onehot.sum(0)[:, None]
    deviation = phi.std(0)
    assert float(((means - onehot.T @ phi / onehot.sum(0)[:, None]) / deviation).abs().max()) < 0.2
    exact = Statistics(phi.T @ phi, onehot.T @ phi, onehot.sum(0))
    far = (found["scatter"] - pack(exact)["scatter"]).norm() / pack(exact)["scatter"].norm()
    assert float(far) < 0.1


def test_limits_hold_for_any_image():
    noise = torch.randint(0, 256, (100, 1, SIZE, SIZE), generator=torch.Generator().manual_seed(0)).float()
    extremes = torch.stack([torch.zeros(1, SIZE, SIZE), torch.full((1, SIZE, SIZE), 255.0)])
    q = ROUNDED(torch.cat([DIGITS.test.images, noise, extremes]).to(DIGITS.test.images.dtype))
    assert bool((q >= LIMITS.low).all() and (q <= LIMITS.high).all())


@pytest.mark.parametrize("n", range(1, 25))
def test_the_sums_of_a_few_images_are_not_refused(n):
    """Two images of a class foretell halves, of which nobody knows how they are rounded elsewhere."""
    assert whole_complaint(packed(n), LIMITS) is None


def test_sums_that_no_images_have_are_refused():
    made = packed()
    found = whole_sums(made)
    with pytest.raises(ValueError, match="no images have"):
        pack_whole(Statistics(-found.gram, found.sums, found.counts))
    wide = pack_whole(Statistics(found.gram + 1e6 * torch.eye(FEATURES.dim), found.sums, found.counts))
    assert "more than its feature can have" in str(whole_complaint(wide, LIMITS))
    moved = {**made, "sums": made["sums"].clone()}
    moved["sums"][0] += 3 * made["counts"][0]
    moved["sums"][1] -= 3 * made["counts"][0]
    assert "not in the code" in str(whole_complaint(moved, LIMITS))
    assert "whole numbers" in str(whole_complaint({**made, "sums": made["sums"] + 0.5}, LIMITS))


def test_damaged_code_is_refused():
    made = packed()
    words = made["scatter"]
    rounded = coded(pack(Statistics(*_of_features())), CODER, "coarse")["scatter"]
    for damaged in (words[:-1], words[:0], words ^ 1 << 40, words[1:], rounded):
        assert "not in the code" in str(whole_complaint({**made, "scatter": damaged}, LIMITS))


def _of_features():
    phi = FEATURES(DIGITS.train.images[:300]).double()
    onehot = F.one_hot(DIGITS.train.labels[:300], 10).double()
    return phi.T @ phi, onehot.T @ phi, onehot.sum(0)


@pytest.mark.parametrize(("products", "sums"), [(2.0**53, 0.0), (1.0, 2.0**25)])
def test_more_images_than_whole_numbers_hold_are_refused(products, sums):
    large = products * torch.eye(2, dtype=torch.float64)
    with pytest.raises(ValueError, match="too large"):
        pack_whole(Statistics(large, torch.full((1, 2), sums, dtype=torch.float64), torch.tensor([10.0])))


@pytest.mark.parametrize("kind", [Spectrum, Factored])
def test_the_criterion_knows_that_images_are_asked_without_rounding(kind):
    """Oracle: classifiers of rounded features asked features of a hundred times as many images as they are."""
    generator = torch.Generator().manual_seed(3)
    dim, step = 60, 3.0
    centres = 0.5 * torch.randn(4, dim, dtype=torch.float64, generator=generator)

    def drawn(n):
        labels = torch.randint(0, 4, (n,), generator=generator)
        return centres[labels] + torch.randn(n, dim, dtype=torch.float64, generator=generator), labels

    (x, labels), (asked, answers) = drawn(600), drawn(60_000)
    rounded = (x / step).round() * step
    onehot = F.one_hot(labels, 4).double()
    sums = Statistics(rounded.T @ rounded, onehot.T @ rounded, onehot.sum(0))
    aware, unaware = kind(sums, blurred=step**2 / 12), kind(sums)
    wanted = F.one_hot(answers, 4).double() - aware.prior
    for ridge in (0.01, 0.1, 1.0):
        weight, bias = aware.in_features(ridge, *aware.regression(ridge))
        scores = asked @ weight + bias - aware.prior
        cosine = float((scores * wanted).sum() / (scores.norm() * wanted.norm()))
        assert aware.criterion(ridge) == pytest.approx(cosine, abs=0.02)
        assert abs(unaware.criterion(ridge) - cosine) > 2 * abs(aware.criterion(ridge) - cosine)


@pytest.mark.numeric
def test_every_split_has_the_same_model_to_the_last_bit(tmp_path):
    """Other members, other files, and one model; also without a member, and by blocks."""
    models = {}
    for blocks in (1, 2):
        for alpha in (0.05, 5.0):
            folder = f"{blocks}-{alpha}"
            own = [f"alpha={alpha}", "upload.statistics_dtype=whole", f"analytic.blocks={blocks}", "--out", folder]
            done = forked("run", *WORDS, *own, "--quiet", cwd=tmp_path)
            assert done.returncode == 0, done.stderr
            models[folder] = (tmp_path / folder / "fusions/analytic/model.safetensors").read_bytes()
            assert max(path.stat().st_size for path in (tmp_path / folder).glob("clients/*/upload*")) <= 60_000
    assert models["1-0.05"] == models["1-5.0"]
    assert models["2-0.05"] == models["2-5.0"]
    assert models["1-0.05"] != models["2-0.05"]


def test_sums_beyond_the_limit_are_refused_and_not_rounded(tmp_path, monkeypatch):
    monkeypatch.setitem(coding.BITS, "whole", 3.0)
    done = forked("run", *WORDS, "alpha=0.5", "upload.statistics_dtype=whole", "--quiet", cwd=tmp_path)
    assert done.returncode == 2
    assert "larger than the limit" in done.stderr
    assert "upload.limit" in done.stderr


@pytest.mark.parametrize("dtype", ["coarse", "fine", "whole"])
def test_larger_blocks_of_whole_sums_are_planned_with_fewer_bits(dtype):
    small, large = coding.planned_bits(dtype, 100), coding.planned_bits(dtype, 3000)
    assert small == coding.BITS[dtype]
    assert large == small - (coding.WHOLE_SAVED if dtype == "whole" else 0)


def test_factors_and_published_rules_take_no_whole_sums():
    with pytest.raises(ConfigError, match=r"upload\.factors"):
        resolve({"method": "analytic", "upload": {"statistics_dtype": "whole", "factors": True}})
    with pytest.raises(ConfigError, match="takes no account"):
        resolve({"method": "analytic", "fusions": ["afl"], "upload": {"statistics_dtype": "whole"}})


def test_an_honest_file_is_read_again_and_a_forged_one_refused(tmp_path):
    own = {"method": "analytic", "data": {"train_size": 400, "test_size": 100}, "upload": {"statistics_dtype": "whole"}}
    experiment = resolve(own)
    made = Simulation.build(experiment, RunFiles(tmp_path), load(experiment.data))
    uploads = made.collect(made.train(Observer()), Observer())
    for upload in uploads:
        means, all_sums = upload.class_means(), upload.statistics()
        assert torch.allclose(means.sums, all_sums.sums, rtol=1e-5, atol=1e-4)
        assert float(means.counts.sum()) == upload.samples
    total = sum(float(upload.solved_statistics()[0].counts.sum()) for upload in uploads)
    assert total == 400
    path = uploads.uploads[0].path
    content = load_all(path)
    forge(path, {"statistics.sums": content["statistics.sums"] + 0.5 * (content["statistics.counts"] > 0)[:, None]})
    with pytest.raises(UploadError, match="sums is not in whole numbers") as caught:
        read_upload(path, uploads.contract)
    assert "\n" not in str(caught.value)
