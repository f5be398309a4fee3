"""Finds and checks the model that a user names by a model file, an upload, a run or a federation."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from oneflare.fusion import GlobalModel
    from oneflare.models.cards import CardText

Model = Annotated[
    Path,
    typer.Argument(metavar="MODEL", help="A model file, an upload, or the folder of a federation or run."),
]
FusionName = Annotated[
    str | None,
    typer.Option("--fusion", help="Use the model of this fusion of the run or federation instead of its first one."),
]
Key = Annotated[
    str | None,
    typer.Option(
        "--key",
        help="The coordinator's public key, or its file: a model it has not signed is refused. "
        "Default: the key in federation.yaml beside the model.",
    ),
]
Device = Annotated[
    str,
    typer.Option("--device", help="Where networks compute: auto (a GPU if there is one), cpu, cuda or mps."),
]


def load(path: Path, fusion: str | None, key: str | None, device: str = "cpu") -> GlobalModel:
    """The model, verified if the coordinator's key is known; one line on stderr says which."""
    from oneflare.nn.hardware import choose_device

    where = choose_device(device, "--device")
    return _verified(path, fusion, key).to(where)


def _verified(path: Path, fusion: str | None, key: str | None) -> GlobalModel:
    from oneflare.cli import show
    from oneflare.errors import ConfigError
    from oneflare.federation.model_signing import known_key
    from oneflare.fusion import load_model
    from oneflare.fusion.single_upload import is_upload, model_of_upload

    file = found_file(path, fusion)
    if file.exists() and is_upload(file):
        if key is not None:
            raise ConfigError(f"--key: {file} is an upload, which its member signs; `oneflare upload show` checks that")
        show.note(f"note: {file} is an upload; this is that member alone, before any fusion")
        return model_of_upload(file)
    known = known_key(file, key)
    if known is None:
        loaded = load_model(file)
        show.note(f"note: {file} is not verified, because the coordinator's key is not known; --key KEY checks it")
    else:
        loaded = load_model(file, key=known.key, federation=known.federation)
        show.note(f"{file} is signed by the coordinator ({known.key}, known from {known.source})")
    return loaded


def card_of(path: Path, fusion: str | None, key: str | None) -> CardText | None:
    """Use and limits from the card beside a model, which must be signed as the model must; None without a card."""
    from oneflare.federation.model_signing import known_key
    from oneflare.models.cards import card_beside, read_card

    file = found_file(path, fusion)
    known, card = known_key(file, key), card_beside(file)
    return read_card(card) if known is None else read_card(card, known.key, known.federation)


def found_file(path: Path, fusion: str | None) -> Path:
    """The file of the model that a user names by itself or by a folder."""
    from oneflare.errors import ConfigError

    if path.is_dir():
        return model_file(path, fusion)
    if fusion is not None:
        raise ConfigError(f"--fusion {fusion}: {path} is one file; name the folder of the run or federation")
    return path


def model_file(folder: Path, fusion: str | None) -> Path:
    """The model of a fusion in the folder of a run or federation; by default the folder's own fusion."""
    from oneflare.errors import RunError, did_you_mean
    from oneflare.federation.charter import FILE
    from oneflare.federation.coordinator import read_fused
    from oneflare.simulation.files import RunFiles
    from oneflare.simulation.stages import read_result

    if (folder / FILE).exists():
        fused = read_fused(folder)
        places: dict[str, Path] = {name: folder / made.model for name, made in fused.fusions.items()}
        own = fused.headline
    elif RunFiles(folder).experiment.exists():
        content = read_result(folder).content
        places = {name: RunFiles(folder).model(name) for name in content.fusions}
        own = content.headline
    elif (folder / "model.safetensors").exists() and fusion is None:
        return folder / "model.safetensors"
    else:
        raise RunError(f"{folder} is neither a federation nor a run; name one of them, or a model file")
    name = fusion or own
    if name not in places:
        raise RunError(f"{folder} has no fusion '{name}'{did_you_mean(name, places)}")
    return places[name]
