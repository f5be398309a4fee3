"""Maps whose size follows from the most that an upload may have, in whole runs."""

from __future__ import annotations

import pytest
import torch

from oneflare.client.observer import Observer
from oneflare.client.sending import check_limit
from oneflare.client.start import statistics_plan
from oneflare.core.config import DataConfig
from oneflare.data import load
from oneflare.errors import ConfigError, TrainingError
from oneflare.fusion import build_fusion, load_model
from oneflare.methods.resolve import resolve
from oneflare.nn import build_feature_map, feature_map_spec
from oneflare.simulation.files import RunFiles
from oneflare.simulation.simulation import Simulation
from oneflare.upload.contract import statistics_bytes

DIGITS = load(DataConfig())
SMALL = {"method": "analytic", "data": {"train_size": 400, "test_size": 100}}


def uploads_of(folder, *layers):
    experiment = resolve(SMALL, *layers)
    made = Simulation.build(experiment, RunFiles(folder), load(experiment.data))
    return made.collect(made.train(Observer()), Observer())


def fuse(uploads):
    return build_fusion({"name": "analytic"}).fuse(uploads).model


@pytest.mark.parametrize("dtype", ["float32", "int16", "int12", "fine", "coarse"])
@pytest.mark.parametrize("limit", [100_000])
def test_uploads_are_as_large_as_the_limit_allows(tmp_path, dtype, limit):
    uploads = uploads_of(tmp_path, {"upload": {"limit": limit, "statistics_dtype": dtype}})
    sizes = [path.stat().st_size for path in tmp_path.glob("clients/*/upload.safetensors")]
    assert len(sizes) == 5
    assert 0.8 * limit < max(sizes) <= limit
    assert uploads.plan.feature_map["name"] == "paired"
    model = fuse(uploads)
    model.save(tmp_path / "model.safetensors")
    images = DIGITS.test.images[:40]
    assert torch.equal(load_model(tmp_path / "model.safetensors").logits(images), model.logits(images))


@pytest.mark.parametrize(
    ("limit", "dtype", "chosen"),
    [
        ("45MB", "coarse", (8, 10, "both")),
        ("3MB", "coarse", (2, 10, None)),
        ("45MB", "float32", (3, 10, None)),
        ("500kB", "coarse", (None, 5, None)),
        ("900GB", "coarse", (64, 10, "both")),
    ],
)
def test_a_limit_alone_chooses_blocks_and_patches_by_its_size(limit, dtype, chosen):
    upload = {"upload": {"limit": limit, "statistics_dtype": dtype}}
    own = resolve(SMALL, upload).analytic
    assert (own["blocks"], own["kept"], own["patches"]) == chosen
    assert resolve(SMALL, upload, {"analytic": {"blocks": 1}}).analytic["kept"] == 5
    assert resolve(SMALL, upload, {"analytic": {"blocks": 4}}).analytic["patches"] is None
    given = resolve(SMALL, upload, {"analytic": {"patches": "small"}}).analytic
    assert (given["blocks"], given["patches"]) == (chosen[0], "small")


@pytest.mark.parametrize(
    "layer",
    [
        {"upload": {"statistics_epsilon": 4.0, "counts": "withheld"}},
        {"analytic": {"features": 300}},
        {"analytic": {"budget": "60s"}},
        {"fusions": ["analytic", "fedncm"], "upload": {"statistics_dtype": "float32"}},
    ],
)
def test_where_blocks_are_not_for_it_a_limit_chooses_one(layer):
    assert resolve(SMALL, {"upload": {"limit": "45MB"}}, layer).analytic["blocks"] is None


def test_one_block_may_be_asked_for_by_number():
    spec = {"name": "paired", "features": 60, "mirror": False}
    one = build_feature_map({**spec, "blocks": 1}, 1, 8)
    assert one.fingerprint() == build_feature_map(spec, 1, 8).fingerprint()
    assert feature_map_spec({**spec, "blocks": 1}, flip=True) == feature_map_spec(spec, flip=True)


def test_a_finished_upload_beyond_the_limit_is_removed(tmp_path):
    path = tmp_path / "upload.safetensors"
    path.write_bytes(bytes(101))
    check_limit(path, None)
    check_limit(path, 101)
    with pytest.raises(TrainingError, match="101 bytes, more than"):
        check_limit(path, 100)
    assert not path.exists()


@pytest.mark.numeric
def test_a_map_of_several_scales_gives_the_same_predictions_for_every_split(tmp_path):
    own = {"analytic": {"name": "multi_scale", "filters": 20}}
    one = uploads_of(tmp_path / "skewed", own, {"alpha": 0.05})
    two = uploads_of(tmp_path / "iid", own, {"partition": {"kind": "iid", "clients": 8}})
    first, second = (
        build_fusion({"name": "analytic"}).fuse(each).model.logits(DIGITS.test.images) for each in (one, two)
    )
    assert torch.equal(first.argmax(1), second.argmax(1))
    rest = one.statistics() - one.uploads[1].statistics()
    others = [upload.statistics() for upload in one.uploads if upload is not one.uploads[1]]
    again = sum(others[1:], others[0])
    assert torch.allclose(rest.gram, again.gram, rtol=1e-12)


@pytest.mark.parametrize(
    "upload", [{"statistics_epsilon": 100.0, "statistics_noise_seed": 0, "counts": "withheld"}, {"masked": True}]
)
def test_private_and_fixed_point_sums_take_a_map_of_several_scales(tmp_path, upload):
    own = {"analytic": {"name": "multi_scale", "filters": 6}, "upload": upload}
    model = fuse(uploads_of(tmp_path, own))
    right = model.logits(DIGITS.test.images).argmax(1) == DIGITS.test.labels
    assert float(right.float().mean()) > 0.5


def test_a_budget_alone_chooses_the_map():
    assert resolve(SMALL, {"analytic": {"budget": "30s"}}).analytic["name"] == "paired"
    assert resolve(SMALL).analytic["name"] == "random_conv"


def test_a_budget_bounds_the_upload_too():
    """A minute would do for a map of these small images with which every member sends more than 200 MB."""

    def bytes_of(**upload) -> int:
        experiment = resolve(SMALL, {"method": "analytic", "analytic": {"budget": "60s"}, "upload": upload})
        plan = statistics_plan(experiment, DIGITS.image, 10, mirror=False)
        return statistics_bytes(build_feature_map(plan.feature_map, 1, 8).dim, 10, "float32", None)

    assert 95e6 < bytes_of() <= 100e6
    assert 190e6 < bytes_of(limit="200MB") <= 200e6
    assert bytes_of(limit="1MB") <= 1e6


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        ({"upload": {"limit": "ten"}}, "such as 500kB or 10MB"),
        ({"upload": {"limit": 0}}, "greater than 0"),
        ({"upload": {"limit": "1MB"}, "analytic": "random_conv"}, "set analytic=paired"),
        ({"upload": {"limit": "1MB"}, "analytic": "multi_scale", "method": "flare_analytic"}, "not networks"),
        ({"upload": {"limit": "1MB", "masked": True}}, "masked sums"),
        ({"upload": {"statistics_dtype": "int12"}, "fusions": "gh_qda"}, "float32 or int16"),
        ({"upload": {"statistics_dtype": "coarse"}, "fusions": "gh_lda"}, "gh_lda takes no account"),
        ({"upload": {"statistics_dtype": "fine"}, "fusions": "gh_qda"}, "float32 or int16"),
    ],
)
def test_limits_that_cannot_be_kept_are_refused(layer, words):
    with pytest.raises(ConfigError, match=words):
        resolve(SMALL, layer)
