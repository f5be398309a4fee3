"""Data and numbers at the edge: every run ends with finite figures, or with a refusal that names the reason."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hostile import honest_uploads

import oneflare
from oneflare.data import ImageSpec
from oneflare.errors import OneFlareError, UploadError
from oneflare.nn import initial_network
from oneflare.upload import Contents, SentForm, read_upload, write_upload

SMALL = {"encoder": {"name": "conv4", "width": 4}, "epochs": 1, "train.batch_size": 32, "workers": 1}
FUSIONS = "count_prototypes,feature_mean,average,ensemble,iffi"


def images(number: int, classes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """A bright square per class on noise."""
    generator = np.random.default_rng(seed)
    labels = np.arange(number) % classes
    pixels = generator.integers(0, 80, (number, 8, 8), dtype=np.uint8)
    pixels[np.arange(number), labels % 8, labels // 8 % 8] = 255
    return pixels, labels


def finite(value: object) -> bool:
    if isinstance(value, dict):
        return all(finite(item) for item in value.values())
    if isinstance(value, list):
        return all(finite(item) for item in value)
    return not isinstance(value, float) or math.isfinite(value)


def check(folder, clients, test, **options) -> oneflare.Result:
    settings = SMALL | {"fusions": FUSIONS} | options
    result = oneflare.run(data=clients, test=test, out=folder, **settings)
    assert finite(result.to_dict()), result.to_dict()
    for fusion in result.fusions:
        logits = result.model(fusion).logits(torch.from_numpy(test[0]).unsqueeze(1))
        assert bool(torch.isfinite(logits).all()), fusion
        assert bool(torch.isfinite(result.model(fusion).predict_proba(torch.from_numpy(test[0]).unsqueeze(1))).all())
    return result


def case_empty_class():
    x, y = images(60, 4)
    return [(x[:30][y[:30] != 2], y[:30][y[:30] != 2]), (x[30:][y[30:] != 2], y[30:][y[30:] != 2])], images(20, 4, 1)


def case_one_sample():
    x, y = images(40, 4)
    return [(x[:1], y[:1]), (x[1:], y[1:])], images(20, 4, 1)


def case_one_class():
    x, y = images(40, 4)
    return [(x[y == c], y[y == c]) for c in range(4)], images(20, 4, 1)


def case_identical_images():
    x, y = images(40, 4)
    x[:] = x[0]
    return [(x[:20], y[:20]), (x[20:], y[20:])], images(20, 4, 1)


def case_constant_pixels():
    x, y = images(40, 4)
    return [(np.zeros_like(x[:20]), y[:20]), (np.full_like(x[20:], 255), y[20:])], images(20, 4, 1)


def case_label_noise():
    x, y = images(80, 4)
    generator = np.random.default_rng(0)
    wrong = generator.random(80) < 0.4
    y = np.where(wrong, generator.integers(0, 4, 80), y)
    return [(x[:40], y[:40]), (x[40:], y[40:])], images(20, 4, 1)


def case_two_classes():
    x, y = images(40, 2)
    return [(x[:20], y[:20]), (x[20:], y[20:])], images(20, 2, 1)


def case_two_hundred_classes():
    x, y = images(400, 200)
    return [(x[:200], y[:200]), (x[200:], y[200:])], images(200, 200, 1)


def case_a_thousand_times_larger():
    x, y = images(2002, 4)
    return [(x[:2], y[:2]), (x[2:], y[2:])], images(20, 4, 1)


CASES = [value for name, value in list(globals().items()) if name.startswith("case_")]


@pytest.mark.parametrize("method", ["flare", "analytic"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__[5:])
def test_edges_end_with_finite_figures(tmp_path, case, method):
    clients, test = case()
    more = {"fusions": "analytic", "analytic.filters": 4} if method == "analytic" else {}
    result = check(tmp_path / "run", clients, test, method=method, **more)
    assert result.content.fused_clients == tuple(range(len(clients)))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_training_that_overflows_is_a_named_refusal(tmp_path, precision):
    """bfloat16 is also refused by name on processors that announce it and die of it."""
    clients, test = case_one_sample()
    with pytest.raises(OneFlareError, match=r"the loss became NaN or infinite|cannot be trained in bfloat16"):
        check(tmp_path / "run", clients, test, **{"train.lr": 1e30, "train.clip": 1e30, "train.precision": precision})


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("value", [3.4e38, 7e4, 1e7, -1e30])
def test_weights_that_a_short_format_cannot_hold(tmp_path, dtype, value):
    """70000 is beyond float16, 3.4e38 rounds to infinity in bfloat16: read back near the truth, or refused."""
    contract = honest_uploads(tmp_path)[0].contract
    network = initial_network(contract.encoder, ImageSpec.default(1, 8), 4, seed=0)
    name, weight = next((n, w) for n, w in network.encoder.state_dict().items() if w.ndim == 4)
    weight.view(-1)[0] = value
    path = tmp_path / "upload.safetensors"
    write_upload(
        path, network, contract, Contents(client=0, counts=torch.tensor([1, 1, 1, 1]), epoch=1), SentForm(dtype=dtype)
    )
    if abs(value) < 1e6:
        assert float(read_upload(path, contract).weights()[name].view(-1)[0]) == pytest.approx(value, rel=0.01)
    else:
        with pytest.raises(UploadError, match=r"beyond the plausible|not finite"):
            read_upload(path, contract)


def test_images_with_impossible_pixels_are_refused(tmp_path):
    x, y = images(20, 4)
    for bad in (float("nan"), float("inf"), -1.0, 3.0):
        pixels = x.astype(np.float32) / 255
        pixels[3, 2, 2] = bad
        with pytest.raises(OneFlareError, match="finite and lie in"):
            oneflare.run(data=(pixels, y), test=(x, y), out=tmp_path / "run", **SMALL)
