"""The folder that `flwr run` takes: no code of its own, only the names of the two apps and the run's settings."""

from __future__ import annotations

from pathlib import Path

from oneflare.errors import ConfigError
from oneflare.files import write_text

APP = """\
# `flwr run FOLDER CONNECTION` sends this to the SuperLink. The code is the installed package, on every machine.
[project]
name = "{name}"
version = "1.0.0"
description = "One round of a OneFlare federation"
license = "Apache-2.0"
dependencies = ["flwr>=1.41,<1.43"]

[tool.flwr.app]
publisher = "oneflare"

[tool.flwr.app.components]
serverapp = "oneflare.flower_app.server_app:app"
clientapp = "oneflare.flower_app.client_app:app"

[tool.flwr.app.config]
federation = "{federation}"   # folder with federation.yaml, on the SuperLink's machine
min-members = {min_members}      # fewer usable uploads: nothing is fused
connect-seconds = 60   # for nodes to appear, where not all members are there
reply-seconds = 3600   # for uploads; who is later is left out
test = ""              # class folder or parquet on the SuperLink's machine, to measure the model
"""


def write_app(folder: Path, federation: Path, min_members: int = 1) -> Path:
    """Write the app's pyproject.toml; the folder's name is the app's, so Flower's rules for names hold."""
    name = folder.resolve().name
    if not (name.isascii() and name.replace("-", "").isalnum() and name[0].isalpha()):
        raise ConfigError(f"'{name}' cannot be an app's name; use letters, digits and '-', a letter first")
    path = folder / "pyproject.toml"
    if path.exists():
        raise ConfigError(f"{path} exists; choose another folder")
    text = str(federation.resolve())
    if '"' in text or "\\" in text:
        raise ConfigError(f"{text}: a path with quotes or backslashes cannot be written to {path}; rename it")
    write_text(path, APP.format(name=name, federation=text, min_members=min_members))
    return path
