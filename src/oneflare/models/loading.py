"""Loads a saved model."""

from __future__ import annotations

import copy
from pathlib import Path

from torch import nn

from oneflare.core.plain import plain
from oneflare.core.plugins import load_plugins
from oneflare.errors import ConfigError, RunError
from oneflare.models.base import KINDS, GlobalModel, Task
from oneflare.models.checking import FUSE_AGAIN, read_model_file, rehearse
from oneflare.models.decisions import decision_path, read_decision
from oneflare.nn import build_encoder
from oneflare.nn.given import CUSTOM


def load_model(
    path: Path, encoder: nn.Module | None = None, *, key: str | None = None, federation: str | None = None
) -> GlobalModel:
    """Read a saved model; a custom encoder must be given again, its code is not in the file.

    key: the coordinator's public key; a file that it has not signed is refused. federation: also one that was signed
    for another fingerprint. Thresholds in a file beside the model become its `decision`.
    """
    load_plugins()
    content = read_model_file(path, key, federation)
    try:
        task = Task.from_dict(content["task"])
        if content["kind"] not in KINDS:
            raise RunError(f"{path}: kind '{content['kind']}' is not known to this version; update OneFlare")

        def empty() -> nn.Module:
            if encoder is not None:
                return copy.deepcopy(encoder)
            if task.encoder["name"] == CUSTOM:
                raise RunError(f"{path} uses your own encoder; pass it: load_model(path, encoder=module)")
            try:
                return build_encoder(task.encoder, task.image.channels)
            except ConfigError as error:
                raise RunError(f"{path}: {error}; if it is your own, name its module: --plugin MODULE") from None

        model = KINDS[content["kind"]].from_state(task, content["state"], empty, path)
    except ConfigError as error:
        raise RunError(f"{path}: {error}; {FUSE_AGAIN}") from None
    except (KeyError, TypeError, AttributeError, RuntimeError, ValueError, IndexError) as error:
        reason = plain(" ".join(str(error).split()), 160)
        raise RunError(f"{path} is not a OneFlare model ({reason}); {FUSE_AGAIN}") from None
    rehearse(path, len(task.classes), model.rehearsal)
    chosen = decision_path(path)
    if chosen.exists():
        model.decision = read_decision(chosen, model, content["sha256"], key, federation)
    return model
