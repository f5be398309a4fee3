"""Loads a saved model."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from oneflare.core.plain import plain
from oneflare.core.plugins import load_plugins
from oneflare.errors import ConfigError, RunError
from oneflare.models.base import KINDS, GlobalModel, Task
from oneflare.models.checking import FUSE_AGAIN, read_model_file, rehearse
from oneflare.models.decisions import decision_of
from oneflare.nn.backbones import frozen
from oneflare.nn.given import CUSTOM, give
from oneflare.nn.tuned import encoder_on


def load_model(
    path: Path | str, encoder: nn.Module | None = None, *, key: str | None = None, federation: str | None = None
) -> GlobalModel:
    """Read a saved model; a custom encoder must be given again, its code is not in the file.

    key: the coordinator's public key; a file that it has not signed is refused. federation: also one that was signed
    for another fingerprint. Thresholds in a file beside the model become its `decision`; where the model's signature
    names some that are not there, the model is refused.
    """
    load_plugins()
    path = Path(path)
    content = read_model_file(path, key, federation)
    try:
        task = Task.from_dict(content["task"])
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise RunError(f"{path} is not a OneFlare model ({plain(str(error), 160)}); {FUSE_AGAIN}") from None
    if task.image.backbone is not None and task.image.backbone.tune is not None:
        frozen(task.image.backbone, "cpu", None)  # whose weights a network that trained a part of it begins with
    try:
        if content["kind"] not in KINDS:
            raise RunError(f"{path}: kind '{content['kind']}' is not known to this version; update OneFlare")

        def empty() -> nn.Module:
            if encoder is None and task.encoder["name"] == CUSTOM:
                raise RunError(f"{path} uses your own encoder; pass it: load_model(path, encoder=module)")
            try:
                return encoder_on(task.encoder if encoder is None else give(encoder), task.image)
            except ConfigError as error:
                raise RunError(f"{path}: {error}; if it is your own, name its module: --plugin MODULE") from None

        model = KINDS[content["kind"]].from_state(task, content["state"], empty, path)
    except ConfigError as error:
        raise RunError(f"{path}: {error}; {FUSE_AGAIN}") from None
    except (KeyError, TypeError, AttributeError, RuntimeError, ValueError, IndexError) as error:
        reason = plain(" ".join(str(error).split()), 160)
        raise RunError(f"{path} is not a OneFlare model ({reason}); {FUSE_AGAIN}") from None
    rehearse(path, len(task.classes), model.rehearsal)
    model.decision = decision_of(path, model, content["sha256"], key, federation)
    return model
