"""Digits from several sources, each the images of one member."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from oneflare.core.config import DataConfig
from oneflare.data import Dataset, ImageSpec, Split, natural
from oneflare.data.sources import digits, load
from oneflare.errors import ConfigError, DataError


@pytest.fixture
def house_numbers(monkeypatch):
    """Ten colour images stand in for a data set of gigabytes; every other part is the real one."""
    colours = torch.randint(0, 256, (10, 3, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    split = Split(colours, torch.arange(10))
    names = tuple(str(digit) for digit in range(10))
    made = Dataset("svhn", split, split, names, ImageSpec.default(3, 16), flip=False)
    monkeypatch.setattr(natural, "svhn", lambda config: made)
    return colours


def test_each_source_is_a_member(house_numbers):
    dataset = load(DataConfig(name="digit_sources", train_size=100, test_size=20))
    assert [len(rows) for rows in dataset.owners] == [100, 10]
    assert dataset.train.images.shape == (110, 1, 16, 16)
    assert dataset.train.images.dtype == torch.uint8
    assert len(dataset.test.labels) == 30
    assert np.concatenate(dataset.owners).tolist() == list(range(110))
    assert set(dataset.train.labels[:100].tolist()) <= set(digits(DataConfig()).train.labels.tolist())


def test_grey_is_what_pillow_makes_of_it(house_numbers):
    found = load(DataConfig(name="digit_sources", train_size=100)).train.images[100:, 0].numpy().astype(int)
    for image, grey in zip(house_numbers, found, strict=True):
        expected = np.asarray(Image.fromarray(image.permute(1, 2, 0).numpy()).convert("L")).astype(int)
        assert np.abs(expected - grey).max() <= 1


def test_a_third_source_of_ones_own(house_numbers, tmp_path):
    for digit in range(10):
        for number in range(5):
            path = tmp_path / "own" / str(digit) / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray((np.arange(400).reshape(20, 20) % 200 + digit + number).astype(np.uint8)).save(path)
    dataset = load(DataConfig(name="digit_sources", train_size=100, path=str(tmp_path / "own")))
    assert len(dataset.owners) == 3
    assert 0 < len(dataset.owners[2]) < 50
    (tmp_path / "own" / "9").rename(tmp_path / "own" / "nine")
    with pytest.raises(DataError, match="class folders must be named 0 to 9"):
        load(DataConfig(name="digit_sources", path=str(tmp_path / "own")))


def test_their_owners_are_not_divided_again(house_numbers, tmp_path):
    import oneflare

    settings = {"data": {"name": "digit_sources", "train_size": 100, "test_size": 20}, "method": "analytic"}
    with pytest.raises(ConfigError, match=r"come with their owners; set partition\.kind=given clients=2"):
        oneflare.run(**settings, out=tmp_path / "a")
    result = oneflare.run(**settings, partition={"kind": "given"}, clients=2, out=tmp_path / "b")
    assert len(result.content.clients) == 2
