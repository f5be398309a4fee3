"""A federation of four members with masked sums, before and after its round is closed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from hospitals import digits, rows_of, write_pngs
from masked_parts import NAMES, init, join, release, run, train
from oneflare.upload.signing import generate


@pytest.fixture(scope="module")
def enrolled(tmp_path_factory) -> Path:
    """Four members in a roster, each with its masked upload; west's has not been sent."""
    root = tmp_path_factory.mktemp("masked")
    split, _ = digits()
    for index, name in enumerate(NAMES):
        write_pngs(root / "data" / name, split, rows_of(index, 40))
        generate(root / f"{name}.key", root / f"{name}.pub")
    charter = init(root)
    for name in NAMES:
        join(root, charter, name)
    run("server", "roster", root / "fed", "--enrolments", root / "inbox")
    for name in NAMES:
        train(root, charter, name, root / f"{name}.safetensors")
    for name in NAMES[:3]:
        shutil.copy(root / f"{name}.safetensors", root / "inbox")
    return root


@pytest.fixture(scope="module")
def closed(enrolled, tmp_path_factory) -> Path:
    """The same with the round closed and answered by the three who are there."""
    root = tmp_path_factory.mktemp("closed") / "root"
    shutil.copytree(enrolled, root)
    charter = root / "fed" / "federation.yaml"
    run("server", "missing", root / "fed", "--uploads", root / "inbox")
    for name in NAMES[:3]:
        run(*release(root, charter, name))
    return root
