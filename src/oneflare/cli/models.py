"""Commands for a finished model: predict, export, serve."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oneflare.cli.loading import Device, FusionName, Key, Model, card_of, load
from oneflare.cli.options import Json

if TYPE_CHECKING:
    from socket import socket


def predict(
    model: Model,
    images: Annotated[
        list[Path],
        typer.Argument(metavar="IMAGES...", help="Image files of any size, folders, or tables (labels.csv)."),
    ],
    json: Json = False,
    csv: Annotated[
        bool,
        typer.Option(
            "--csv", help="Print comma-separated values. An apostrophe is put before text that looks like a formula."
        ),
    ] = False,
    fusion: FusionName = None,
    key: Key = None,
    device: Device = "auto",
) -> None:
    """Classify images: print the class of each and its probability.

    The class is the most likely one. Where the coordinator has chosen thresholds, a class is the answer as soon as its
    probability reaches its threshold, and an image that the members do not know shows none of the known classes.
    If an image cannot be read, the others are still classified, and the exit code is 2.

    [bold]Examples[/bold]

      oneflare predict federation photo.png

      oneflare predict federation/model.safetensors scans --csv > answers.csv
    """
    from oneflare.cli import show
    from oneflare.core.plain import plain
    from oneflare.errors import ConfigError, DataError
    from oneflare.models.predicting import classify, image_files

    if json and csv:
        raise ConfigError("--json and --csv exclude each other")
    loaded = load(model, fusion, key, device)
    rows = list(classify(loaded, image_files(images)))
    for remark in loaded.remarks():
        show.note(f"warning: {remark}")
    if json:
        show.as_json({"model": str(model), "predictions": rows})
    elif csv:
        _print_csv(rows)
    else:
        width = max(len(plain(row["image"])) for row in rows)
        for row in rows:
            if "error" not in row:
                show.line(f"{plain(row['image']):<{width}}  {_answer(row)}")
    damaged = [row for row in rows if "error" in row]
    if damaged:
        raise DataError(f"{len(damaged)} of {len(rows)} images could not be read; the first: {damaged[0]['error']}")


def _answer(row: dict[str, Any]) -> str:
    """The answer to one image in words."""
    if row.get("known") is False:
        return f"none of the known classes (nearest: {row['nearest']})"
    return f"{row['class']}  {100 * row['probability']:.1f} %"


def _print_csv(rows: list[dict[str, Any]]) -> None:
    import csv
    import sys

    from oneflare.core.plain import csv_cell

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["image", "class", "probability", "known", "nearest", "error"])
    for row in rows:
        probability = row.get("probability")
        shown = "" if probability is None else f"{probability:.6f}"
        known = ("yes" if row["known"] else "no") if "known" in row else ""  # empty where nobody can tell
        cells = {name: csv_cell(row.get(name) or "") for name in ("image", "class", "nearest", "error")}
        writer.writerow([cells["image"], cells["class"], shown, known, cells["nearest"], cells["error"]])


def export(
    model: Model,
    onnx: Annotated[Path, typer.Option("--onnx", help="The ONNX file to write.")],
    fusion: FusionName = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """Write a model as one ONNX graph, if onnxruntime agrees with it to 1e-4.

    Input `images` (n, channels, size, size), floats in [0, 1]; outputs `logits` and `probabilities` (n, classes).
    With thresholds also `labels` (n), -1 for none of the known classes; `familiarity` (n) where the model can tell.
    Models that ask every member hold all their networks in the one graph.

    [bold]Example[/bold]

      oneflare export federation --onnx model.onnx
    """
    from oneflare.cli import show
    from oneflare.models.onnx import INPUT, export_onnx

    loaded = load(model, fusion, key)
    made = export_onnx(loaded, onnx)
    if json:
        show.as_json({"file": str(made.path), "bytes": made.size_bytes, "difference": made.difference})
        return
    image = loaded.task.image.decoded
    show.done(
        f"{made.path}: {made.size_bytes:,} bytes, {INPUT} (n, {image.channels}, {image.size}, {image.size}) in [0, 1]; "
        f"probabilities agree with the model to {made.difference:.1g}"
    )


def serve(
    model: Model,
    fusion: FusionName = None,
    key: Key = None,
    device: Device = "auto",
    host: Annotated[str, typer.Option("--host", help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", "-p", min=0, max=65535, help="Port to listen on; 0 takes any free port.")
    ] = 8000,
    max_bytes: Annotated[
        int, typer.Option("--max-bytes", min=1, help="Largest size of a request in bytes.")
    ] = 10_000_000,
    max_pixels: Annotated[
        int,
        typer.Option(
            "--max-pixels", min=1, help="Most pixels in all images of one request; decoding takes about 8 bytes each."
        ),
    ] = 25_000_000,
    max_seconds: Annotated[
        float, typer.Option("--max-seconds", min=1, help="Longest time of a request in seconds.")
    ] = 60.0,
    max_connections: Annotated[
        int, typer.Option("--max-connections", min=1, help="Most connections that are open at the same time.")
    ] = 64,
) -> None:
    """Answer over HTTP: a page to drop images on, POST /predict, GET /about, GET /health, GET /metrics.

    The page shows the intended use and the limits from the card beside the model.

    A request that is too large (413), too slow (408, 504), one too many (429, 503) or no image (422) gets one line.

    [bold]Examples[/bold]

      oneflare serve federation

      curl --data-binary @photo.png http://127.0.0.1:8000/predict

      curl -F image=@photo.png -F image=@other.png http://127.0.0.1:8000/predict
    """
    import signal
    import sys

    from oneflare.cli import show
    from oneflare.errors import ConfigError

    try:
        from oneflare.models.serving.app import LOOPBACK, make_server
        from oneflare.models.serving.limits import Limits
    except ImportError:
        raise ConfigError("serve needs fastapi and uvicorn; pip install 'oneflare[serve]'") from None
    limits = Limits(
        body_bytes=max_bytes,
        pixels=max_pixels,
        request_seconds=max_seconds,
        connections=max_connections,
        held_bytes=max(max_bytes, Limits.held_bytes),
    )
    loaded = load(model, fusion, key, device)
    local = host in ("127.0.0.1", "localhost", "::1")
    server = make_server(loaded, limits, LOOPBACK if local else ("*",), card_of(model, fusion, key))
    listening = _listen(host, port)
    shown = f"[{host}]" if ":" in host else host
    if not local:
        show.note("warning: whoever reaches this address may ask the model; there are no accounts")
    show.done(f"serving {model} on http://{shown}:{listening.getsockname()[1]} (stop with Ctrl-C)")
    sys.stdout.flush()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # the server has its own handlers and hands the signal back at the end
    server.run(sockets=[listening])


def _listen(host: str, port: int) -> socket:
    """A bound socket, or one line that says why there is none."""
    from socket import SO_REUSEADDR, SOCK_STREAM, SOL_SOCKET, getaddrinfo, socket

    from oneflare.errors import ConfigError

    try:
        family = getaddrinfo(host, port, type=SOCK_STREAM)[0]
        listening = socket(family[0], SOCK_STREAM)
        listening.setsockopt(SOL_SOCKET, SO_REUSEADDR, 1)
        listening.bind(family[4])
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error.strerror}; choose another --port or --host"
        ) from None
    return listening
