"""Images with labels: where they come from, which client owns them, and how they are augmented."""

from oneflare.data.augment import Augmentation
from oneflare.data.dataset import ClientData, Dataset, ImageSpec, Split, from_arrays, prepare
from oneflare.data.given import data_digest, given_data
from oneflare.data.natural import digit_sources
from oneflare.data.partition import PARTITIONS, Partition, split_clients
from oneflare.data.sources import SOURCES, load

__all__ = [
    "PARTITIONS",
    "SOURCES",
    "Augmentation",
    "ClientData",
    "Dataset",
    "ImageSpec",
    "Partition",
    "Split",
    "data_digest",
    "digit_sources",
    "from_arrays",
    "given_data",
    "load",
    "prepare",
    "split_clients",
]
