"""Four hospitals in four folders make one model, by file: no network, nothing shared but one file each.

    python examples/hospitals.py [FOLDER]

Every step is a command that a person would type; this script types them and shows what they answer. Takes about a
minute of processor time. The digits that ship with scikit-learn stand in for scans; each hospital has few of some
classes.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from PIL import Image

from oneflare.core.config import DataConfig, PartitionConfig
from oneflare.data import Split, load, split_clients

HOSPITALS = ("north", "south", "east", "west")


def write_images(folder: Path, split: Split, rows: list[int]) -> None:
    for row in rows:
        path = folder / str(int(split.labels[row])) / f"{row:04d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(split.images[row, 0].numpy()).save(path)


def make_folders(root: Path) -> None:
    """coordinator/test and HOSPITAL/images, as class folders of PNG files."""
    dataset = load(DataConfig(name="digits"))
    config = PartitionConfig(clients=len(HOSPITALS), alpha=0.3, min_samples=50)
    parts = split_clients(dataset.train.labels.numpy(), len(dataset.classes), config, seed=0).indices
    for name, rows in zip(HOSPITALS, parts, strict=True):
        write_images(root / name / "images", dataset.train, rows.tolist())
    write_images(root / "coordinator" / "test", dataset.test, list(range(len(dataset.test.labels))))


def type_in(folder: Path, command: str) -> None:
    """Run one command where a person would, and stop if it fails."""
    print(f"\n{folder.name}$ {command}", flush=True)
    words = [sys.executable, "-m", "oneflare.cli.main", *shlex.split(command)[1:]]
    subprocess.run(words, cwd=folder, check=True)


def carry(source: Path, folder: Path) -> None:
    """The only road between two places: a copied file."""
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, folder)
    print(f"\n# {source.parent.name}/{source.name} is carried to {folder.name}/")


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "hospitals").resolve()
    if root.exists():
        sys.exit(f"{root} exists; give another folder")
    started = time.monotonic()
    make_folders(root)
    office = root / "coordinator"
    for name in HOSPITALS:
        type_in(root / name, f"oneflare client keygen --name {name}")
        carry(root / name / f"{name}.pub", office / "keys")
    members = " ".join(f"--member {name}=keys/{name}.pub" for name in HOSPITALS[:3])
    type_in(
        office,
        "oneflare server init digits --classes 0,1,2,3,4,5,6,7,8,9 --image-size 8 --channels 1 --deadline 2030-01-01 "
        f'--use "Reading single handwritten digits." --limits "Not for cheques." {members} epochs=10',
    )
    for name in HOSPITALS:
        carry(office / "digits" / "federation.yaml", root / name)
    type_in(root / "north", "oneflare client train federation.yaml --data images --name north --dry-run")
    for name in HOSPITALS:
        words = f"--data images --name {name} --key {name}.key --out {name}.safetensors"
        type_in(root / name, f"oneflare client train federation.yaml {words}")
    for name in HOSPITALS[:3]:
        carry(root / name / f"{name}.safetensors", office / "inbox")
    type_in(office, "oneflare server fuse digits --uploads inbox --test test")
    type_in(office, "oneflare server admit digits west keys/west.pub")
    carry(root / "west" / "west.safetensors", office / "late")
    type_in(office, "oneflare server fuse digits --add late/west.safetensors --test test")
    type_in(office, "oneflare server fuse digits --remove north --test test")
    type_in(office, "oneflare predict digits test/3/0012.png test/7/0002.png")
    type_in(office, "oneflare evaluate digits --data test")
    type_in(office, "oneflare export digits --onnx digits.onnx")
    print(f"\n{time.monotonic() - started:.0f} s. Next: cd {office} && oneflare serve digits")


if __name__ == "__main__":
    main()
