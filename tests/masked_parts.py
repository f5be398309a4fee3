"""Four members whose sums are masked, by the real commands."""

from __future__ import annotations

import contextlib
import io
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

NAMES = ("east", "north", "south", "west")
SHAPE = ["--classes", "0,1,2,3,4,5,6,7,8,9", "--image-size", "8", "--channels", "1"]
TERMS = [
    "method=analytic",
    "encoder=conv4",
    "encoder.width=4",
    "analytic.filters=2",
    "analytic.colour_grid=1",
    "upload.masked=true",
]


class Sink:
    """Stands in for pytest's capsys where a whole module shares what is made."""

    def readouterr(self):
        return SimpleNamespace(out="", err="")


def run(*words: str | Path) -> None:
    """A command that must work."""
    from hospitals import typed

    sink = io.StringIO()
    with contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
        code, _, _ = typed(Sink(), *map(str, words))
    assert code == 0, sink.getvalue()


def init(root: Path, name: str = "fed") -> Path:
    members = [word for one in NAMES for word in ("--member", f"{one}={root / one}.pub")]
    run("server", "init", root / name, *SHAPE, *members, *TERMS)
    return root / name / "federation.yaml"


def join(root: Path, charter: Path, name: str, *words: str) -> None:
    out = root / "inbox" / f"{name}.join.json"
    run("client", "join", charter, "--key", root / f"{name}.key", "--images", "100", "--out", out, *words)


def train(root: Path, charter: Path, name: str, out: Path) -> Path:
    run("client", "train", charter, "--data", root / "data" / name, "--key", root / f"{name}.key", "--out", out, "-q")
    return out


def release(root: Path, charter: Path, name: str, *words: str) -> list[str]:
    """The words of the command by which a member answers the request."""
    request, out = root / "fed" / "masked" / "request.json", root / "inbox" / f"{name}.release.json"
    return [
        str(word) for word in ("client", "release", charter, request, "--key", root / f"{name}.key", "-o", out, *words)
    ]


@pytest.fixture(scope="module")
def enrolled(tmp_path_factory) -> Path:
    """Four members in a roster, each with its masked upload; west's has not been sent."""
    from hospitals import digits, rows_of, write_pngs
    from oneflare.upload.signing import generate

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
