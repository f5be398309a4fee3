"""Features of images: computed once, kept by content, found again after a kill, and fed to every method."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn

from oneflare import load_model, run
from oneflare.client.background import background, channels_of, displaced_features
from oneflare.client.observer import Observer
from oneflare.core.config import Experiment
from oneflare.data.images import ImageFiles, Tally
from oneflare.errors import ConfigError, DataError
from oneflare.methods.resolve import resolve
from oneflare.nn.backbones import frozen, give_backbone, input_spec
from oneflare.simulation.features import CHUNK, FeatureReader, Rehearsal, reader_of


class Eyes(nn.Module):
    """A small stand-in for a pretrained network: random filters, pooled."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(5)
        self.filters = nn.Parameter(torch.randn(24, 3, 4, 4, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.conv2d(x, self.filters, stride=2).relu()
        return torch.cat([y.mean((2, 3)), y.amax((2, 3))], 1)


class Count(Observer):
    def __init__(self) -> None:
        self.computed: list[tuple[int, int]] = []

    def features(self, done: int, total: int) -> None:
        self.computed.append((done, total))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("ONEFLARE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def png(seed: int, size: tuple[int, int] = (20, 16)) -> bytes:
    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def reader(observer: Observer | None = None, workers: int = 1) -> tuple[FeatureReader, object]:
    spec = give_backbone(Eyes())
    return FeatureReader(spec, "cpu", workers, observer or Observer()), input_spec(spec, None, 16)


def names(number: int) -> list[str]:
    return [f"image {row}" for row in range(number)]


def test_features_are_those_of_the_backbone_image_by_image():
    features, image = reader()
    files = [png(seed) for seed in range(20)]
    found, damaged = features.read(ImageFiles(files, names(20)), image)
    from oneflare.data.reading import read_all

    expected = torch.cat([frozen(image.backbone)(read_all([file], ["one"], image.decoded)) for file in files])
    assert not damaged
    assert found.shape == (20, 48, 1, 1)
    assert torch.allclose(found, expected, atol=1e-5)


def test_features_are_computed_once_whatever_the_file_is_called(own_cache):
    files = [png(seed) for seed in range(10)]
    first, second = Count(), Count()
    features, image = reader(first)
    one, _ = features.read(ImageFiles([*files, files[0]], names(11)), image)
    assert first.computed[-1] == (10, 10)  # the same image twice is computed once
    other, _ = reader(second)[0].read(ImageFiles(files[::-1], ["x"] * 10), image)
    assert second.computed == []
    assert torch.equal(one[:10].flip(0), other)
    assert torch.equal(one[10], one[0])
    assert {path.stat().st_mode & 0o077 for path in (own_cache / "features").glob("*")} == {0}


def test_workers_give_the_same_features_as_one_process(own_cache, tmp_path, monkeypatch):
    files = [png(seed) for seed in range(40)]
    features, image = reader(workers=3)
    several, _ = features.read(ImageFiles(files, names(40)), image)
    monkeypatch.setenv("ONEFLARE_CACHE", str(tmp_path / "another"))
    alone, _ = reader()[0].read(ImageFiles(files, names(40)), image)
    assert torch.allclose(several, alone, atol=1e-5)


def test_a_chunk_that_is_missing_or_damaged_is_computed_again_and_nothing_else():
    files = [png(seed) for seed in range(CHUNK + 30)]
    features, image = reader()
    before, _ = features.read(ImageFiles(files, names(len(files))), image)
    from oneflare.simulation.feature_cache import FeatureCache

    folder = FeatureCache.of(image, refuse_constant=False).folder
    chunks = sorted(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    assert len(chunks) == 2
    content = chunks[0].read_bytes()
    chunks[0].write_bytes(content[: len(content) // 2])
    count = Count()
    again, _ = reader(count)[0].read(ImageFiles(files, names(len(files))), image)
    assert count.computed[-1] == (30, 30)
    assert torch.equal(before, again)


def test_another_size_or_backbone_has_features_of_its_own():
    features, image = reader()
    count = Count()
    features.read(ImageFiles([png(0)], ["one"]), image)
    other = reader(count)[0]
    other.read(ImageFiles([png(0)], ["one"]), input_spec(other.backbone, None, 12))
    assert count.computed == [(0, 1), (1, 1)]


def test_images_that_cannot_be_used_are_named_by_row_and_what_was_done_is_told_from_the_cache():
    image = reader()[1]
    buffer = io.BytesIO()
    Image.new("RGB", (9, 9), (4, 4, 4)).save(buffer, "PNG")
    files = [png(0), b"no image", png(1), buffer.getvalue()]
    for _ in range(2):  # computed, then found
        tally = Tally(image.decoded)
        found, damaged = reader()[0].read(ImageFiles(files, names(4), refuse_constant=True), image, tally)
        assert sorted(damaged) == [1, 3]
        assert "damaged or not an image" in str(damaged[1])
        assert "every pixel is the same" in str(damaged[3])
        assert len(found) == 2
        assert any("not square, and only their middle" in note for note in tally.notes())


def test_a_rehearsal_checks_every_image_and_computes_no_features(own_cache):
    image = reader()[1]
    rehearsal = reader_of(image, kind=Rehearsal)
    found, damaged = rehearsal.read(ImageFiles([png(0), b"no image"], names(2)), image)
    assert (len(found), sorted(damaged)) == (1, [1])
    assert rehearsal.seconds > 0
    assert not own_cache.exists()


def test_displaced_features_keep_how_strong_an_image_is_and_move_half_of_its_features():
    x = torch.randn(50, 9, 1, 1, generator=torch.Generator().manual_seed(0))
    wide = (torch.full((9,), -9.0), torch.full((9,), 9.0))
    found = displaced_features(x, wide, torch.Generator().manual_seed(1))
    assert torch.equal(found.sort(1).values, x.sort(1).values)
    moved = (found != x).flatten(1)
    assert moved.sum(1).tolist() == [4] * 50  # half of nine, rounded down: in a circle none stays where it was
    assert bool(moved.any(0).all())  # every feature is displaced in some image
    assert len({tuple(row) for row in moved.tolist()}) > 25  # and every image has a half of its own


def test_the_background_of_features_stays_within_what_each_feature_reaches():
    x = (
        torch.rand(50, 6, 1, 1, generator=torch.Generator().manual_seed(0))
        * torch.tensor([1, 1, 1, 100, 100, 100.0])[:, None, None]
    )
    blocks = list(background(x, 16))
    assert [len(block) for block in blocks[:4]] == [16, 16, 16, 2]
    found = torch.cat(blocks)
    assert len(found) == 200  # few images are displaced in four ways
    assert bool((found <= x.amax(0)).all())
    assert bool((found >= x.amin(0)).all())
    assert bool((found[:50] != x).any())
    assert all(torch.equal(one, other) for one, other in zip(blocks, background(x, 16), strict=True))


@pytest.mark.parametrize("shape", [(6, 2, 2), (2, 3, 6), (4, 6)])
def test_where_a_backbone_was_cut_channels_move_as_wholes(shape):
    """Channels that hold their own number everywhere: afterwards every place of a channel still holds one number."""
    first = shape == (6, 2, 2)
    own = torch.arange(6.0).view(6, 1, 1) if first else torch.arange(6.0)
    x = own.expand(shape).flatten().repeat(8, 1)[:, :, None, None].clone()
    x[4:] = 5 - x[4:]  # so that channels reach several numbers
    (found, *_) = background(x.half(), 8, shape)
    maps = found.view(8, *shape)
    maps = maps.flatten(2) if first else maps.movedim(-1, 1).flatten(2)
    assert found.shape == x.shape
    assert bool((maps == maps[:, :, :1]).all())
    assert bool((found != x).any())
    assert torch.equal(channels_of((5,)), torch.arange(5)[:, None])


def digits_with(tmp_path: Path, **settings: object):
    given = {"clients": 3, "alpha": 0.5, "epochs": 8, "data": {"name": "digits", "train_size": 300, "test_size": 150}}
    module = Eyes()
    return run(**{**given, "backbone": module, "out": tmp_path / "run", **settings})


def test_every_kind_of_fusion_works_over_features(tmp_path):
    fusions = ["density_ratio", "count_prototypes", "iffi", "ensemble", "average", "robust_prototypes", "laplace"]
    result = digits_with(
        tmp_path, method="flare", fusions=fusions, upload={"evidence": ["density", "kronecker"]}, train={"snapshots": 0}
    )
    assert set(result.fusions) == set(fusions)
    assert result.fusions["density_ratio"].accuracy > 0.4
    assert result.content.encoder["name"] == "mlp"


def test_opinions_that_rest_on_the_same_features_are_not_counted_twice(tmp_path):
    """(log p_c + t score_c) / (1 + t^2/4) with t at most 0.2, and the scores of `density_ratio` before sharpening"""
    fusions = ["analytic", "density_ratio", "flare_analytic"]
    result = digits_with(tmp_path, method="flare_analytic", fusions=fusions, epochs=2, train={"snapshots": 0})
    analytic, ratio, both = (result.model(name) for name in fusions)
    images = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scores, t = ratio.logits(images) / ratio.rule.sharpness, float(both.rule.sharpness)
    assert 0 < t <= 0.2 + 1e-6
    expected = (analytic.logits(images).log_softmax(1) + t * scores) / (1 + t * t / 4)
    assert torch.allclose(both.predict_proba(images), expected.softmax(1), atol=1e-4)


def test_statistics_of_features_do_not_depend_on_the_split(tmp_path):
    results = [
        digits_with(tmp_path, method="analytic", alpha=alpha, out=tmp_path / f"{alpha}") for alpha in (0.05, 100.0)
    ]
    assert results[0].accuracy > 0.8
    assert abs(results[0].accuracy - results[1].accuracy) < 0.02


CLASSES = 1000


@pytest.fixture(scope="module")
def thousand():
    """Two members, who share 200 of 1,000 classes and have 400 each that the other lacks; two images of each class."""
    generator = torch.Generator().manual_seed(3)
    shown = torch.rand(CLASSES, 3, 8, 8, generator=generator)

    def images(labels: Tensor) -> np.ndarray:
        noisy = shown[labels] + 0.02 * torch.randn(len(labels), 3, 8, 8, generator=generator)
        return (noisy.clamp(0, 1) * 255).to(torch.uint8).permute(0, 2, 3, 1).numpy()

    owned = [torch.arange(0, 600).repeat(2), torch.arange(400, 1000).repeat(2)]
    test = torch.arange(0, CLASSES, 2)
    return [(images(labels), labels.numpy()) for labels in owned], (images(test), test.numpy())


@pytest.mark.parametrize(
    ("settings", "dim", "least", "cosine"),
    [
        ({"method": "analytic"}, None, 0.5, None),
        pytest.param(  # widened to hold the 999 directions of a simplex
            {"method": "flare", "encoder.width": 64}, 1024, 0.02, -1 / 999, marks=pytest.mark.soak
        ),
        pytest.param(
            {"method": "flare", "encoder.width": 64, "encoder.dim": 64, "anchors": "packing"},
            64,
            0.001,  # two images of a class and three epochs are too few for 1,000 classes in 64 dimensions
            0.17,
            marks=pytest.mark.soak,
        ),
    ],
)
def test_a_thousand_classes_of_which_every_member_lacks_four_hundred(settings, dim, least, cosine, thousand, tmp_path):
    data, test = thousand
    words = {"fusions": "density_ratio", "epochs": 3} if dim else {}
    train = {"snapshots": 0, "precision": "float32"}
    result = run(data=data, test=test, backbone=Eyes(), out=tmp_path / "run", train=train, **words, **settings)
    assert len(result.content.data.classes) == CLASSES
    table = np.array(result.content.partition.table)
    assert ((table == 0).sum(1) == 400).all()
    assert result.accuracy > least  # 0.001 by chance
    if dim:
        assert result.content.encoder["dim"] == dim
        assert result.content.anchors["worst_cosine"] < cosine + 1e-6


def test_a_simplex_that_does_not_fit_names_the_anchors_that_do(thousand, tmp_path):
    words = {"method": "flare", "encoder.width": 64, "encoder.dim": 64, "fusions": "density_ratio"}
    with pytest.raises(ConfigError, match=r"1000 equiangular directions do not fit into 64.*anchors=packing"):
        run(data=thousand[0], test=thousand[1], backbone=Eyes(), out=tmp_path / "run", **words)


def test_a_model_takes_images_or_features_and_knows_its_backbone(tmp_path):
    result = digits_with(tmp_path, method="analytic")
    model = result.model()
    assert model.task.image.backbone is not None
    images = torch.randint(0, 256, (4, 3, *[model.task.image.decoded.size] * 2), dtype=torch.uint8)
    features = frozen(model.task.image.backbone)(images)
    assert torch.equal(model.predict_proba(images), model.predict_proba(features))
    with pytest.raises(DataError, match="do not fit"):
        model.predict(images[:, :1])
    stored = load_model(tmp_path / "run/fusions/analytic/model.safetensors")
    assert stored.task == model.task
    assert (tmp_path / "run/fusions/analytic/model.safetensors").stat().st_size < 40_000


def test_the_digest_counts_in_the_identity_and_the_place_of_the_file_does_not():
    pinned = {"name": "efficientnet_lite0", "digest": "a" * 64, "dim": 1280}
    experiments: list[Experiment] = [
        resolve({"backbone": pinned | change}) for change in ({}, {"weights": "here.pth"}, {"digest": "b" * 64})
    ]
    digests = [experiment.training_digest() for experiment in experiments]
    assert digests[0] == digests[1] != digests[2]
    assert experiments[0].encoder["name"] == "mlp"
    assert resolve({"backbone": pinned, "method": "analytic"}).analytic["name"] == "root"
    assert resolve({"backbone": pinned, "method": "afl"}).analytic["name"] == "identity"
    composed = resolve({"backbone": pinned, "method": "safle"}).analytic
    assert (composed["name"], composed["of"]["name"]) == ("buckets", "identity")
    assert resolve({}).training_digest() == resolve({"backbone": "none"}).training_digest()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"encoder": "mlp"}, "set backbone"),
        ({"method": "analytic", "analytic": "identity"}, "set backbone"),
        ({"backbone": "efficientnet_lite0", "encoder": "resnet8"}, "set encoder=mlp"),
        ({"backbone": "efficientnet_lite0", "method": "analytic", "analytic": "random_conv"}, "set analytic=identity"),
        ({"backbone": "efficientnet_lite0", "augment.kind": "crop"}, "changes images"),
        ({"backbone": "efficientnet_lite0", "backbone.weights": "nowhere.pth"}, "no file nowhere.pth"),
    ],
)
def test_parts_that_do_not_go_with_a_backbone_are_refused(settings, message):
    with pytest.raises(ConfigError, match=message):
        resolve(settings)
