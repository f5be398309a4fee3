"""Eight hospitals by the real commands: one upload is damaged, one is late, one member leaves; the rest measure."""

from __future__ import annotations

import contextlib
import csv
import io
import os
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

from PIL import Image

from hospitals import digits
from oneflare.federation import member as member_side

NAMES = ("aachen", "bergen", "cork", "delft", "evora", "fulda", "ghent", "hull")
REFUSED, LATE, REMOVED = "ghent", "fulda", "hull"
STAYING = NAMES[:5]
CLASSES = ("effusion", "nodule", "normal", "pneumonia")
EACH = 80
"""images of a member, half of them for its test, two of each patient"""


def said(*words: str, code: int = 0) -> str:
    """What `oneflare WORDS` prints, in this process; code: the exit code that it must end with."""
    from oneflare.cli.main import main

    out, before = io.StringIO(), sys.argv
    sys.argv = ["oneflare", *words]
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            main()
        ended = 0
    except SystemExit as stop:
        ended = int(stop.code or 0)
    finally:
        sys.argv = before
    assert ended == code, out.getvalue()
    return out.getvalue()


def write_images(root: Path) -> None:
    """Every member has half of two classes' images less, a table with patients, and test images of all classes."""
    train, test = digits()
    rows = [(split, row) for split in (train, test) for row in range(len(split.labels)) if int(split.labels[row]) < 4]
    for index, name in enumerate(NAMES):
        place = root / name / "images"
        place.mkdir(parents=True)
        lines = []
        for number, (split, row) in enumerate(rows[EACH * index : EACH * (index + 1)]):
            label = int(split.labels[row])
            part = "test" if number % 2 else "train"
            if part == "train" and label in (index % 4, (index + 1) % 4) and number % 8:
                continue
            Image.fromarray(split.images[row, 0].numpy()).save(place / f"{number:03d}.png")
            lines.append((f"{number:03d}.png", CLASSES[label], f"{name}-{number // 4}-{part}", part))
        with (place / "labels.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("file", "label", "patient", "split"), *lines])


def eight_hospitals(root: Path) -> Path:
    """The folder of the federation after its members have measured the model of the five who stay."""
    write_images(root)
    federation, inbox, today = root / "lungs", root / "inbox", datetime.now(UTC)
    inbox.mkdir()
    before = Path.cwd()
    os.chdir(root)  # keys are written where one is
    try:
        for name in NAMES:
            said("client", "keygen", "--name", name, "--out", str(root / name))
        said(
            "server", "init", str(federation), "--classes", ",".join(CLASSES), "--image-size", "8", "--channels", "1",
            "--deadline", f"{today - timedelta(days=1):%Y-%m-%d}", "--use", "A second look at radiographs of adults.",
            "--limits", "Not for children.", "method=analytic",
            *(word for name in NAMES for word in ("--member", f"{name}={root / name / name}.pub")),
        )  # fmt: skip
        _train(root, federation, inbox, today)
        said("server", "fuse", str(federation), "--uploads", str(inbox), "--min-members", "6")
        said("server", "fuse", str(federation), "--remove", REMOVED)
        for name in STAYING:
            said(
                "evaluate", str(federation / "model.safetensors"), "--data", str(root / name / "images"),
                "--alone", str(inbox / f"{name}.safetensors"), "--sign", str(root / name / f"{name}.key"),
                "--out", str(root / name / "scores.json"),
            )  # fmt: skip
        said("server", "scores", str(federation), *(str(root / name / "scores.json") for name in STAYING))
        said("report", str(federation))
    finally:
        os.chdir(before)
    return federation


def _train(root: Path, federation: Path, inbox: Path, today: datetime) -> None:
    """Everybody trains; the clocks of all but one show a day before the deadline; one file is damaged on its way."""
    clock = member_side.now
    for name in NAMES:
        moment = (today - timedelta(days=0 if name == LATE else 3)).isoformat(timespec="seconds")
        member_side.now = lambda moment=moment: moment
        try:
            said(
                "client", "train", str(federation / "federation.yaml"), "--data", str(root / name / "images"),
                "--key", str(root / name / f"{name}.key"), "--out", str(inbox / f"{name}.safetensors"),
            )  # fmt: skip
        finally:
            member_side.now = clock
    damaged = inbox / f"{REFUSED}.safetensors"
    content = bytearray(damaged.read_bytes())
    content[-100] ^= 1
    damaged.write_bytes(content)
