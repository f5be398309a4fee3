from __future__ import annotations

import io
import json
import socket

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_digits

from oneflare.core.config import DataConfig
from oneflare.data import from_arrays, given_data, load, prepare
from oneflare.data.sources import LAYOUTS
from oneflare.errors import ConfigError, DataError


def png(value: int, size: int = 32, mode: str = "RGB", mark: int = 0) -> bytes:
    """One colour, with a white pixel in row `mark` if it is given."""
    buffer = io.BytesIO()
    colour = value if mode == "L" else (value, 255 - value, 7)
    image = Image.new(mode, (size, size), colour)
    if mark:
        image.putpixel((size - 1, mark), 255 if mode == "L" else (255, 255, 255))
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def write_hub_split(path, layout, labels, names=None):
    images = [{"bytes": png(label * 20), "path": None} for label in labels]
    table = pa.table({layout.image: images, layout.label: pa.array(labels, pa.int64())})
    if names:
        info = {"info": {"features": {layout.label: {"names": names}}}}
        table = table.replace_schema_metadata({"huggingface": json.dumps(info)})
    pq.write_table(table, path)


def test_digits_are_scikit_learns_with_a_fixed_split():
    dataset = load(DataConfig())
    assert len(dataset.train.labels) + len(dataset.test.labels) == 1797
    assert (len(dataset.train.labels), len(dataset.test.labels)) == (1438, 359)
    bunch = load_digits()
    mine = torch.cat([dataset.train.images, dataset.test.images]).flatten(1).sum(1).double().sort().values
    theirs = torch.tensor(np.round(bunch.data * (255 / 16)).sum(1)).sort().values
    assert torch.equal(mine, theirs)
    assert torch.equal(dataset.test.labels.bincount(), load(DataConfig()).test.labels.bincount())
    assert dataset.flip is False


def test_subsets_are_seeded_and_bounded():
    one, two = (load(DataConfig(train_size=100, test_size=50)) for _ in range(2))
    assert len(one.train.labels) == 100
    assert torch.equal(one.train.images, two.train.images)
    other = load(DataConfig(train_size=100, test_size=50, seed=1))
    assert not torch.equal(one.train.images, other.train.images)
    with pytest.raises(DataError, match=r"data\.train_size=9999 is more than the 1438"):
        load(DataConfig(train_size=9999))


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_parquet_in_hub_layout(tmp_path, name, monkeypatch):
    layout = LAYOUTS[name]
    folder = tmp_path / layout.folder
    folder.mkdir()
    write_hub_split(folder / "train-00000-of-00001.parquet", layout, [0, 1, 2, 1], ["a", "b", "c"])
    write_hub_split(folder / f"{layout.test}-00000-of-00001.parquet", layout, [2, 0])
    monkeypatch.setenv("ONEFLARE_DATA", str(tmp_path))
    from_environment = load(DataConfig(name=name))
    assert from_environment.train.labels.tolist() == [0, 1, 2, 1]
    assert from_environment.train.images.shape == (4, 3, layout.size, layout.size)
    assert from_environment.train.images[1, :, 0, 0].tolist() == [20, 235, 7]
    assert from_environment.classes == ("a", "b", "c")
    monkeypatch.delenv("ONEFLARE_DATA")
    for path in (tmp_path, folder):
        assert torch.equal(load(DataConfig(name=name, path=str(path))).test.labels, torch.tensor([2, 0]))


def test_wrong_columns_and_damaged_images_are_named(tmp_path):
    layout = LAYOUTS["cifar10"]
    write_hub_split(tmp_path / "train-0.parquet", LAYOUTS["svhn"], [0, 1])
    write_hub_split(tmp_path / "test-0.parquet", layout, [0, 1])
    with pytest.raises(DataError, match="does not have the columns 'img' and 'label'"):
        load(DataConfig(name="cifar10", path=str(tmp_path)))
    table = pa.table({"img": [{"bytes": b"no image", "path": None}], "label": [0]})
    pq.write_table(table, tmp_path / "train-0.parquet")
    with pytest.raises(DataError, match="train row 0"):
        load(DataConfig(name="cifar10", path=str(tmp_path)))
    (tmp_path / "train-0.parquet").write_bytes(b"broken")
    with pytest.raises(DataError, match=r"train-0\.parquet"):
        load(DataConfig(name="cifar10", path=str(tmp_path)))


def test_absent_data_says_what_was_wanted(tmp_path):
    with pytest.raises(DataError, match=r"no train-\*\.parquet in .* uoft-cs/cifar10"):
        load(DataConfig(name="cifar10", path=str(tmp_path)))
    with pytest.raises(DataError, match=r"ONEFLARE_DATA .*svhn/train-\*\.parquet .* ufldl-stanford/svhn"):
        load(DataConfig(name="svhn"))


@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_class_folders(tmp_path, mode):
    for name, value in (("cat", 10), ("dog", 90)):
        (tmp_path / name).mkdir()
        for index in range(10):
            (tmp_path / name / f"{index}.png").write_bytes(png(value, size=20, mode=mode, mark=index + 1))
    dataset = load(DataConfig(name="folder", path=str(tmp_path), image_size=16))
    assert dataset.classes == ("cat", "dog")
    assert dataset.train.images.shape == (16, 1 if mode == "L" else 3, 16, 16)
    assert dataset.test.labels.bincount().tolist() == [2, 2]


def test_class_folders_with_their_own_test_part(tmp_path):
    for part, number in (("train", 3), ("test", 2)):
        for name in ("x", "y"):
            folder = tmp_path / part / name
            folder.mkdir(parents=True)
            for index in range(number):
                (folder / f"{index}.png").write_bytes(png(50, mark=index + 1))
    dataset = load(DataConfig(name="folder", path=str(tmp_path)))
    assert (len(dataset.train.labels), len(dataset.test.labels)) == (6, 4)
    (tmp_path / "test" / "z").mkdir()
    with pytest.raises(DataError, match=r"classes that .* lacks: z"):
        load(DataConfig(name="folder", path=str(tmp_path)))


def test_folder_mistakes(tmp_path):
    with pytest.raises(DataError, match=r"needs data\.path"):
        load(DataConfig(name="folder"))
    with pytest.raises(DataError, match="no folder and no table at"):
        load(DataConfig(name="folder", path=str(tmp_path / "nowhere")))
    (tmp_path / "one").mkdir()
    with pytest.raises(DataError, match="holds 1 class folders"):
        load(DataConfig(name="folder", path=str(tmp_path)))
    (tmp_path / "two").mkdir()
    with pytest.raises(DataError, match="no images below"):
        load(DataConfig(name="folder", path=str(tmp_path)))
    (tmp_path / "one" / "broken.png").write_bytes(b"not an image")
    with pytest.raises(DataError, match=r"broken\.png"):
        load(DataConfig(name="folder", path=str(tmp_path)))


def test_arrays_in_every_layout():
    x = np.random.default_rng(0).integers(0, 255, (40, 12, 12), dtype=np.uint8)
    y = np.arange(40) % 4
    grey = from_arrays((x, y))
    assert grey.train.images.shape[1:] == (1, 12, 12)
    colour = np.repeat(x[..., None], 3, axis=3)
    assert from_arrays((colour, y)).train.images.shape[1:] == (3, 12, 12)
    assert from_arrays((colour.transpose(0, 3, 1, 2), y)).train.images.shape[1:] == (3, 12, 12)
    floats = from_arrays((x / 255.0, y), (x / 255.0, y))
    assert floats.train.images.dtype == torch.float32


@pytest.mark.parametrize(
    ("x", "y", "message"),
    [
        (np.zeros((4, 12, 13)), np.zeros(4, int), "do not fit"),
        (np.zeros((4, 4, 4)), np.zeros(4, int), "between 8 and 64"),
        (np.zeros((4, 12, 12)), np.zeros(3, int), "one label per image"),
        (np.zeros((4, 12, 12)), np.zeros(4), "whole numbers"),
        (np.full((4, 12, 12), 7.0), np.zeros(4, int), r"\[0, 1\]"),
        (np.full((4, 12, 12), np.nan), np.zeros(4, int), "finite"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(x, y, message):
    with pytest.raises(DataError, match=message):
        from_arrays((x, y), (x, y))


def test_train_and_test_pixels_are_normalised_alike():
    dataset = load(DataConfig(train_size=50))
    stored = dataset.train.images
    as_floats = stored.float() / 255
    assert torch.allclose(prepare(stored, dataset.image), prepare(as_floats, dataset.image))
    assert torch.allclose(prepare(stored, dataset.image), (as_floats - 0.5) / 0.25)


def test_owners_travel_with_the_images():
    pair = np.zeros((4, 8, 8), np.uint8), np.arange(4) % 2
    dataset = given_data([pair, pair, pair], pair)
    assert [rows.tolist() for rows in dataset.owners] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    with pytest.raises(ConfigError, match=r"data\.public: images that have owners cannot be set aside"):
        dataset.set_aside(2, seed=0)
    with pytest.raises(DataError, match="images that have owners cannot be drawn from"):
        dataset.subset(5, None, seed=0)
    assert given_data(pair, pair).owners is None


def test_a_public_split_is_taken_from_everybody():
    whole, split, again = (load(DataConfig(train_size=200, public=public)) for public in (None, 50, 50))
    assert whole.public is None
    assert (len(split.train.labels), len(split.public.labels)) == (150, 50)
    assert torch.equal(split.public.images, again.public.images)
    both = torch.cat([split.train.images, split.public.images]).flatten(1)
    assert sorted(both.tolist()) == sorted(whole.train.images.flatten(1).tolist())
    other = load(DataConfig(train_size=200, public=50, seed=1))
    assert not torch.equal(split.public.images, other.public.images)
    assert torch.equal(split.test.images, whole.test.images)
    with pytest.raises(DataError, match=r"data\.public=200 leaves none of the 200 training images"):
        load(DataConfig(train_size=200, public=200))


def test_without_a_connection_the_hub_is_given_up_at_once(monkeypatch, caplog):
    datasets = pytest.importorskip("datasets")
    from huggingface_hub import constants

    from oneflare.data import hub

    for name in hub.OFFLINE:
        monkeypatch.delenv(name, raising=False)
    for module in (datasets.config, constants):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", False)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    with pytest.raises(DataError, match=r"set ONEFLARE_DATA .*the hub did not answer \(no connection to 127.0.0.1\)"):
        load(DataConfig(name="cifar10"))
    assert not [record for record in caplog.records if "Retry" in record.getMessage()]
    assert (datasets.config.HF_HUB_OFFLINE, constants.HF_HUB_OFFLINE) == (False, False)


def test_a_hub_that_answers_is_asked_also_through_a_proxy(monkeypatch):
    from oneflare.data.hub import unreachable

    for name in ("no_proxy", "NO_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        assert unreachable(f"http://127.0.0.1:{port}") is None
        monkeypatch.setenv("https_proxy", f"http://127.0.0.1:{port}")
        assert unreachable("https://nowhere.invalid") is None
    assert unreachable("https://nowhere.invalid") == "127.0.0.1"
    monkeypatch.setenv("no_proxy", "nowhere.invalid")
    assert unreachable("https://nowhere.invalid") == "nowhere.invalid"
