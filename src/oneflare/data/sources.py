"""The sources of images: embedded digits, parquet in hub layout, class folders, the Hugging Face hub."""

from __future__ import annotations

import gzip
import importlib.util
import inspect
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from oneflare.core.config import DataConfig
from oneflare.core.registry import Registry
from oneflare.data.dataset import Dataset, ImageSpec, Split, draw_rows, hold_out
from oneflare.data.hub import quick_hub
from oneflare.data.images import is_grey
from oneflare.data.labelled import DamagedImages, Gathering, LabelledFile, class_files
from oneflare.data.patients import check_apart
from oneflare.data.reading import PIXELS, Reader, as_files, read_all
from oneflare.data.tables import Columns, Listing, find_table, read_listing
from oneflare.errors import ConfigError, DataError

SOURCES: Registry[Dataset] = Registry("data set")


def load(config: DataConfig, reader: Reader = PIXELS) -> Dataset:
    """The data set that an experiment names, reduced to the sizes that it asks for.

    A registered source is a function from a `DataConfig` to a `Dataset` with all its images. It reads what it needs
    from the settings (`path`, `image_size`, ...) and raises DataError with a remedy where the data cannot be had. A
    source with a second parameter `reader` has the reader read its files. The images of other sources are in memory as
    pixels, and a reader of anything else is given them as files.
    """
    source = SOURCES[config.name].factory
    reads = "reader" in inspect.signature(source).parameters
    dataset = source(config, reader=reader) if reads else source(config)
    if dataset.owners is None:  # a source whose images have owners draws from each of them itself
        dataset = dataset.subset(config.train_size, config.test_size, config.seed)
    dataset = dataset.set_aside(config.public, config.seed)
    return dataset if reads else read_again(dataset, config.image_size, reader)


def read_again(dataset: Dataset, chosen: int | None, reader: Reader) -> Dataset:
    """The data set with its pixels read by another reader, as if they came from files."""
    if reader is PIXELS:
        return dataset
    image = reader.image(dataset.image, chosen, dataset.image.size)

    def read(split: Split, part: str) -> Split:
        names = [f"{dataset.name} {part} image {row}" for row in range(len(split.labels))]
        return Split(read_all(as_files(split.images), names, image, reader), split.labels)

    public = None if dataset.public is None else read(dataset.public, "public")
    train, test = read(dataset.train, "training"), read(dataset.test, "test")
    return replace(dataset, train=train, test=test, public=public, image=image)


def check_reading(config: DataConfig) -> None:
    """Refuse settings about image files for data that are not read from files of the user's own."""
    if config.name not in ("digits", *LAYOUTS, "arrays"):
        return
    for key in ("pixels", "skip_damaged"):
        if getattr(config, key) is not None:
            raise ConfigError(f"data.{key} is for image files of your own (data=folder); data={config.name} has none")


@SOURCES.register("digits")
def digits(config: DataConfig) -> Dataset:
    """scikit-learn's 1,797 handwritten digits, 8x8 grey, with a fixed split (1,438 train, 359 test)."""
    del config
    # Read the file that scikit-learn ships without importing scikit-learn, which alone takes over a second.
    package = importlib.util.find_spec("sklearn")
    if package is None or package.origin is None:
        raise DataError("data=digits reads scikit-learn's file; pip install scikit-learn")
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(path, "rt") as file:
        table = np.loadtxt(file, delimiter=",", dtype=np.int64)
    images = torch.from_numpy(np.round(table[:, :64] * (255 / 16)).astype(np.uint8)).view(-1, 1, 8, 8)
    train, test = hold_out(Split(images, torch.from_numpy(table[:, 64])), 0.2)
    names = tuple(str(digit) for digit in range(10))
    return Dataset("digits", train, test, names, ImageSpec.default(1, 8), flip=False)


@dataclass(frozen=True)
class HubLayout:
    """Where a data set is on the Hugging Face hub: its columns and splits, and the constants of its pixels."""

    folder: str
    hub: str
    image: str
    label: str
    test: str
    size: int
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    flip: bool
    config: str | None = None


LAYOUTS = {
    "cifar10": HubLayout(
        "cifar10", "uoft-cs/cifar10", "img", "label", "test", 32,
        (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), flip=True,
    ),
    "cifar100": HubLayout(
        "cifar100", "uoft-cs/cifar100", "img", "fine_label", "test", 32,
        (0.5071, 0.4867, 0.4408), (0.2675, 0.2565, 0.2761), flip=True,
    ),
    "svhn": HubLayout(
        "svhn", "ufldl-stanford/svhn", "image", "label", "test", 32,
        (0.4377, 0.4438, 0.4728), (0.1980, 0.2010, 0.1970), flip=False, config="cropped_digits",
    ),
    "tiny-imagenet": HubLayout(
        "tiny-imagenet", "zh-plus/tiny-imagenet", "image", "label", "valid", 64,
        (0.4802, 0.4481, 0.3975), (0.2770, 0.2691, 0.2821), flip=True,
    ),
}  # fmt: skip


@SOURCES.register("cifar10")
def cifar10(config: DataConfig, reader: Reader = PIXELS) -> Dataset:
    """CIFAR-10: 10 classes, 32x32 colour (Krizhevsky 2009)."""
    return _hub_layout("cifar10", config, reader)


@SOURCES.register("cifar100")
def cifar100(config: DataConfig, reader: Reader = PIXELS) -> Dataset:
    """CIFAR-100: 100 classes, 32x32 colour (Krizhevsky 2009)."""
    return _hub_layout("cifar100", config, reader)


@SOURCES.register("svhn")
def svhn(config: DataConfig, reader: Reader = PIXELS) -> Dataset:
    """SVHN: street-view house numbers, 10 classes, 32x32 colour (Netzer et al. 2011)."""
    return _hub_layout("svhn", config, reader)


@SOURCES.register("tiny-imagenet")
def tiny_imagenet(config: DataConfig, reader: Reader = PIXELS) -> Dataset:
    """Tiny-ImageNet: 200 classes, 64x64 colour."""
    return _hub_layout("tiny-imagenet", config, reader)


@SOURCES.register("folder")
def folder(config: DataConfig, reader: Reader = PIXELS) -> Dataset:
    """Your images: data.path/train/CLASS/*.png with an optional test/ beside it, data.path/CLASS/*.png, or a table.

    Class folders may hold one folder per patient. The table labels.csv in data.path, or data.path itself, has the
    columns file and label, and may have patient and split.
    """
    if config.path is None:
        raise DataError("data=folder needs data.path=FOLDER with one folder per class, or a table labels.csv")
    found = _found(Path(config.path))
    files, held_out = (
        None if part is None else [file._replace(patient=None) for file in part] if config.patients is False else part
        for part in (found.train, found.test)
    )
    if not files:
        raise DataError(f"{found.table} has no training images; at least one is needed")
    image = reader.image(ImageSpec.default(_channels(files), 32, config.pixels), config.image_size)
    gathering = _gather(files, found.classes, image, reader)
    train, notes = _usable(gathering, config), (*found.notes, *gathering.notes())
    if held_out is None:
        train, test = hold_out(train, config.test_fraction)
    else:
        remedy = "move them to one side, or set data.patients=false if these are not patients"
        check_apart((file.patient for file in files), (file.patient for file in held_out), remedy)
        gathered = _gather(held_out, found.classes, image, reader)
        test, notes = _usable(gathered, config), (*notes, *(f"of the test part, {note}" for note in gathered.notes()))
    if train.patients is not None:
        number = len(train.patients.unique()) + (0 if test.patients is None else len(test.patients.unique()))
        notes = (*notes, f"the images belong to {number} patients, none of whom is in both training and test images")
    name = f"folder:{Path(config.path).name}"
    return Dataset(name, train, test, found.classes, image, flip=False, notes=notes)


def _found(root: Path) -> Listing:
    """The files of class folders or of a table, not yet read."""
    table = find_table(root, Columns()) if root.exists() else None
    if table is not None:
        return read_listing(table, None, Columns())
    root = _existing(root)
    train_root = root / "train" if (root / "train").is_dir() else root
    names = tuple(sorted(entry.name for entry in train_root.iterdir() if entry.is_dir() and entry.name[0] != "."))
    if len(names) < 2:
        raise DataError(f"{train_root} holds {len(names)} class folders; at least two are needed, or a labels.csv")
    train, _ = class_files(train_root, names)
    test_root = next((root / part for part in ("test", "valid", "val") if (root / part).is_dir()), None)
    if test_root is None or train_root == root:
        return Listing(root, names, train, None, ())
    unknown = {entry.name for entry in test_root.iterdir() if entry.is_dir()} - set(names)
    if unknown:
        raise DataError(f"{test_root} has classes that {train_root} lacks: {', '.join(sorted(unknown))}")
    return Listing(root, names, train, class_files(test_root, names)[0], ())


def _existing(path: Path) -> Path:
    if not path.is_dir():
        raise DataError(f"no folder and no table at {path}; set data.path to where the images are")
    return path


def _channels(files: Sequence[LabelledFile]) -> int:
    """Grey if the first image that can be read is."""
    grey = next((answer for answer in (is_grey(file.path) for file in files) if answer is not None), False)
    return 1 if grey else 3


def _gather(files: Sequence[LabelledFile], names: Sequence[str], image: ImageSpec, reader: Reader) -> Gathering:
    gathering = Gathering(image, names, reader)
    gathering.add_files(files)
    return gathering


def _usable(gathering: Gathering, config: DataConfig) -> Split:
    try:
        return gathering.split(skip_damaged=bool(config.skip_damaged))
    except DamagedImages as error:
        if not gathering.labels:
            raise
        raise DataError(f"{error}; repair or remove them, or go on without them: data.skip_damaged=true") from None


def _hub_layout(name: str, config: DataConfig, reader: Reader) -> Dataset:
    layout = LAYOUTS[name]
    roots = [Path(config.path) / layout.folder, Path(config.path)] if config.path else []
    if not config.path and os.environ.get("ONEFLARE_DATA"):
        roots = [Path(os.environ["ONEFLARE_DATA"]) / layout.folder]
    for place in [*roots, *(root / "data" for root in roots)]:
        if any(place.glob("train-*.parquet")):
            train, test = _parquet(place, "train", layout), _parquet(place, layout.test, layout)
            return _from_tables(name, (train, test), config, reader)
    if config.path:
        raise DataError(
            f"data={name}: no train-*.parquet in {config.path} or {config.path}/{layout.folder}; "
            f"put the files of the hub page {layout.hub} there"
        )
    return _from_hub(name, config, reader)


@dataclass(frozen=True)
class _Table:
    """Encoded images and labels of one split, still on disk as far as the format allows."""

    images: Any
    labels: torch.Tensor
    classes: tuple[str, ...] | None
    where: str


def _parquet(place: Path, split: str, layout: HubLayout) -> _Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    files = sorted(place.glob(f"{split}-*.parquet"))
    if not files:
        raise DataError(f"no {split}-*.parquet in {place}; the hub page {layout.hub} has it")
    try:
        table = pa.concat_tables([pq.read_table(file, columns=[layout.image, layout.label]) for file in files])
    except (pa.ArrowInvalid, pa.ArrowKeyError, KeyError, OSError) as error:
        raise DataError(
            f"{files[0]} does not have the columns '{layout.image}' and '{layout.label}' of {layout.hub}: "
            f"{str(error).splitlines()[0]}"
        ) from None
    labels = torch.from_numpy(table[layout.label].to_numpy().astype(np.int64))
    return _Table(table[layout.image].combine_chunks(), labels, _class_names(files[0], layout), str(place / split))


def _class_names(file: Path, layout: HubLayout) -> tuple[str, ...] | None:
    """Hub files carry the class names in the schema's metadata."""
    import json

    import pyarrow.parquet as pq

    metadata = (pq.read_schema(file).metadata or {}).get(b"huggingface")
    try:
        return tuple(json.loads(metadata)["info"]["features"][layout.label]["names"]) if metadata else None
    except (KeyError, TypeError, ValueError):
        return None


def _from_hub(name: str, config: DataConfig, reader: Reader) -> Dataset:
    layout = LAYOUTS[name]
    remedy = (
        f"data={name} was not found locally; set ONEFLARE_DATA (or data.path) to a folder with "
        f"{layout.folder}/train-*.parquet and {layout.folder}/{layout.test}-*.parquet "
        f"as on the hub page {layout.hub}"
    )
    try:
        import datasets
    except ImportError:
        raise DataError(f"{remedy}, or pip install 'oneflare[hub]' to download it") from None
    with quick_hub() as silent:
        try:
            pages = datasets.load_dataset(layout.hub, layout.config)
        except Exception as error:  # the hub library raises many kinds; all mean that the data could not be had
            reason = str(error).splitlines()[0][:120] if str(error) else type(error).__name__
            reason = reason if silent is None else f"no connection to {silent}"
            raise DataError(f"{remedy}; the hub did not answer ({reason})") from None
    tables = []
    for split in ("train", layout.test):
        page = pages[split].cast_column(layout.image, datasets.Image(decode=False))
        names = getattr(page.features[layout.label], "names", None)
        labels = torch.tensor(page[layout.label])
        images = page.data.column(layout.image).combine_chunks()
        tables.append(_Table(images, labels, tuple(names) if names else None, f"{layout.hub}/{split}"))
    return _from_tables(name, (tables[0], tables[1]), config, reader)


def _from_tables(name: str, tables: tuple[_Table, _Table], config: DataConfig, reader: Reader) -> Dataset:
    """Read only the rows that the subset sizes ask for. tables: training and test images"""
    layout, (train, test) = LAYOUTS[name], tables
    image = reader.image(ImageSpec(3, layout.size, layout.mean, layout.std), config.image_size, layout.size)
    splits = []
    for table, wanted, purpose in ((train, config.train_size, "train"), (test, config.test_size, "test")):
        rows = draw_rows(len(table.labels), wanted, config.seed, purpose)
        contents = table.images.take(rows.numpy()).field("bytes").to_pylist()
        places = [f"{table.where} row {int(row)}" for row in rows]
        splits.append(Split(read_all(contents, places, image, reader), table.labels[rows]))
    number = int(max(train.labels.max(), test.labels.max())) + 1
    names = train.classes or tuple(str(label) for label in range(number))
    return Dataset(name, splits[0], splits[1], names, image, layout.flip)
