"""`oneflare doctor`: what this machine has, and what it lacks for which purpose."""

from __future__ import annotations

from typing import Annotated

import typer

EXTRAS = {
    "hub": ("datasets", "data sets from the Hugging Face hub"),
    "flower": ("flwr", "engine=flower and deployments"),
    "sign": ("cryptography", "signed uploads"),
    "onnx": ("onnxruntime", "oneflare export"),
    "serve": ("fastapi", "oneflare serve"),
    "track": ("tensorboard", "--track"),
}
LOW_SPACE = 1 << 30


def doctor(json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False) -> None:
    """Look at this machine: versions, device, bfloat16, extras, data found, disk space.

    [bold]Example[/bold]

      oneflare doctor
    """
    from oneflare.cli import show

    content = examine()
    if json:
        show.as_json(content)
        return
    for name, (verdict, text) in _lines(content).items():
        show.line(f"{verdict:<8}{name:<15}{text}")


def examine() -> dict[str, object]:
    """Everything `doctor` prints, as data."""
    import os
    import platform
    import shutil
    from importlib.metadata import version
    from importlib.util import find_spec
    from pathlib import Path

    from oneflare._version import __version__
    from oneflare.data.sources import LAYOUTS
    from oneflare.engine import default_workers
    from oneflare.nn.hardware import bfloat16_speedup, choose_device

    device = choose_device("auto")
    root = os.environ.get("ONEFLARE_DATA")
    found = {}
    for name, layout in LAYOUTS.items():
        places = [Path(root) / layout.folder, Path(root) / layout.folder / "data"] if root else []
        found[name] = any(any(place.glob("train-*.parquet")) for place in places)
    return {
        "oneflare": __version__,
        "python": platform.python_version(),
        "torch": version("torch"),
        "device": device.type,
        "workers": default_workers(),
        "bfloat16_speedup": bfloat16_speedup(device),
        "extras": {name: find_spec(module) is not None for name, (module, _) in EXTRAS.items()},
        "data_folder": root,
        "data": found,
        "free_bytes": shutil.disk_usage(Path.cwd()).free,
        "writable": os.access(Path.cwd(), os.W_OK),
    }


def _lines(content: dict[str, object]) -> dict[str, tuple[str, str]]:
    """name -> (verdict, text)"""
    from oneflare.nn.hardware import WORTHWHILE

    speedup, free = float(str(content["bfloat16_speedup"])), int(str(content["free_bytes"]))
    lines = {
        "versions": ("ok", f"oneflare {content['oneflare']}, Python {content['python']}, torch {content['torch']}"),
        "device": ("ok", f"{content['device']}, {content['workers']} worker processes"),
        "bfloat16": (
            ("ok", f"{speedup:.2g} times as fast as float32: used for images of 16 pixels and more")
            if speedup >= WORTHWHILE
            else ("note", "no faster than float32 here, or not working; training uses float32")
        ),
        "disk": (
            "ok" if free > LOW_SPACE and content["writable"] else "problem",
            f"{free / 2**30:.1f} GiB free in this folder" + ("" if content["writable"] else ", which is read-only"),
        ),
    }
    extras, data = content["extras"], content["data"]
    assert isinstance(extras, dict)
    assert isinstance(data, dict)
    for name, there in extras.items():
        purpose = EXTRAS[name][1]
        lines[name] = ("ok", purpose) if there else ("absent", f"{purpose}: pip install 'oneflare[{name}]'")
    folder = content["data_folder"]
    lines["digits"] = ("ok", "embedded, always there")
    for name, there in data.items():
        if there:
            lines[name] = ("ok", f"in {folder}")
        else:
            remedy = "set ONEFLARE_DATA to a folder with" if folder is None else f"not in {folder}: needs"
            lines[name] = ("absent", f"{remedy} {name}/train-*.parquet, or let the hub deliver it")
    return lines
