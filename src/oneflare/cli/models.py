"""Commands for a finished model: predict, evaluate, export, serve."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from oneflare.cli.client import ImageColumn, LabelColumn, PatientColumn
from oneflare.cli.commands import Json
from oneflare.cli.loading import Device, FusionName, Key, Model, load

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
    """Classify images: print the most likely class of each and its probability.

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
                show.line(f"{plain(row['image']):<{width}}  {row['class']}  {100 * row['probability']:.1f} %")
    damaged = [row for row in rows if "error" in row]
    if damaged:
        raise DataError(f"{len(damaged)} of {len(rows)} images could not be read; the first: {damaged[0]['error']}")


def _print_csv(rows: list[dict[str, Any]]) -> None:
    import csv
    import sys

    from oneflare.core.plain import csv_cell

    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["image", "class", "probability", "error"])
    for row in rows:
        probability = row.get("probability")
        shown = "" if probability is None else f"{probability:.6f}"
        cells = [csv_cell(row.get(key, "")) for key in ("image", "class", "error")]
        writer.writerow([*cells[:2], shown, cells[2]])


def evaluate(
    model: Model,
    data: Annotated[
        Path,
        typer.Option(
            "--data",
            "-d",
            help="Labelled images: a folder with one folder per class, a table of files (labels.csv) or the folder "
            "that holds it, or parquet with images and labels. A table with a column split gives its rows for test.",
        ),
    ],
    image_column: ImageColumn = None,
    label_column: LabelColumn = None,
    patient_column: PatientColumn = None,
    fusion: FusionName = None,
    key: Key = None,
    device: Device = "auto",
    json: Json = False,
) -> None:
    """Measure a model on labelled images: accuracy, balanced accuracy, accuracy of each class, calibration.

    [bold]Examples[/bold]

      oneflare evaluate federation --data held-out

      oneflare evaluate runs/demo --fusion average --data held-out

      oneflare evaluate north.safetensors --data held-out      # an upload: that member alone
    """
    from oneflare.cli import show
    from oneflare.cli.progress import progress
    from oneflare.data.local import class_table, read_local
    from oneflare.data.tables import Columns
    from oneflare.metrics import score
    from oneflare.simulation.features import reader_of

    loaded = load(model, fusion, key, device)
    task = loaded.task
    columns = Columns(image_column, label_column, patient_column)
    with progress(enabled=not json, table=False) as watching:
        reader = reader_of(task.image, loaded.device.type, watching)
        local = read_local(data, task.classes, task.image, columns=columns, part="test", reader=reader)
    scores = score(loaded.logits(local.split.images), local.split.labels)
    counts = class_table(local.split.labels, task.classes)
    if json:
        show.as_json({"model": str(model), "data": str(data), "images": counts, **scores.to_dict()})
        return
    for note in local.notes:
        show.note(f"note: {note}")
    for remark in loaded.remarks():
        show.note(f"warning: {remark}")
    show.line(
        f"{sum(counts.values())} images: accuracy {100 * scores.accuracy:.1f} %, balanced "
        f"{100 * scores.balanced_accuracy:.1f} %, worst class {100 * scores.worst_class:.1f} %, "
        f"calibration error {100 * scores.calibration_error:.1f} %"
    )
    width = max(len(name) for name in task.classes)
    for (name, count), recall in zip(counts.items(), scores.per_class, strict=True):
        show.line(f"  {name:<{width}}  " + (f"{100 * recall:5.1f} % of {count}" if recall is not None else "no image"))


def export(
    model: Model,
    onnx: Annotated[Path, typer.Option("--onnx", help="The ONNX file to write.")],
    fusion: FusionName = None,
    key: Key = None,
    json: Json = False,
) -> None:
    """Write a model as one ONNX graph, if onnxruntime agrees with it to 1e-4.

    Input `images` (n, channels, size, size), floats in [0, 1]; outputs `logits` and `probabilities` (n, classes).
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
    """Answer over HTTP: a page to drop an image on, POST /predict, GET /health, GET /metrics.

    A request that is too large (413), too slow (408, 504), one too many (429, 503) or no image (422) gets one line.

    [bold]Examples[/bold]

      oneflare serve federation

      curl --data-binary @photo.png http://127.0.0.1:8000/predict

      curl -F image=@photo.png http://127.0.0.1:8000/predict
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
    server = make_server(loaded, limits, LOOPBACK if local else ("*",))
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
