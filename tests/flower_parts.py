"""A tiny federation of three members with images on disk, shared by the tests on Flower."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from oneflare.federation.charter import FILE, Charter, new_charter

MEMBERS = ("east", "north", "south")
SETTINGS = {
    "method": "flare",
    "encoder": {"name": "conv4", "width": 4},
    "train": {"epochs": 2, "batch_size": 32},
}


def make_federation(folder: Path, **settings) -> Charter:
    """`folder/federation/federation.yaml`, and digits of three members and a test part as PNG in class folders."""
    charter = make_charter(folder, **settings)
    write_images(folder)
    return charter


def make_charter(folder: Path, **settings) -> Charter:
    charter = new_charter(
        "digits",
        SETTINGS | settings,
        classes=[str(label) for label in range(10)],
        image={"size": 8, "channels": 1},
        members=dict.fromkeys(MEMBERS),
    )
    charter.write(folder / "federation" / FILE)
    return charter


def write_images(folder: Path, each: int = 60) -> None:
    from PIL import Image
    from sklearn.datasets import load_digits

    digits = load_digits()
    images = (digits.images * 15.9375).astype(np.uint8)
    for part, name in enumerate((*MEMBERS, "test")):
        for row in range(part * each, (part + 1) * each):
            place = folder / name / str(digits.target[row])
            place.mkdir(parents=True, exist_ok=True)
            Image.fromarray(images[row]).save(place / f"{row}.png")
