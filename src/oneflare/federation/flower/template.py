"""The app folder for `flwr run`: the names of the two apps and the run's settings, without code."""

from __future__ import annotations

import hashlib
from pathlib import Path

from oneflare.core.files import write_text
from oneflare.errors import ConfigError
from oneflare.simulation.engines.flower import require_flower

COMPONENTS = {
    "serverapp": "oneflare.federation.flower.server_app:app",
    "clientapp": "oneflare.federation.flower.client_app:app",
}
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
serverapp = "{serverapp}"
clientapp = "{clientapp}"

[tool.flwr.app.config]
federation = "{federation}"   # folder with federation.yaml, on the SuperLink's machine
min-members = {min_members}        # fewer members in the fusion: nothing is fused; 0: all members that are not removed
nodes = "bound"        # ask the nodes that are registered for a member; "any": whoever connects, for rehearsals
connect-seconds = 60   # for nodes to appear, where not all members are there
reply-seconds = 3600   # for uploads; who is later is left out
test = ""              # class folder or parquet on the SuperLink's machine, to measure the model
"""


def write_app(folder: Path, federation: Path, min_members: int = 0) -> Path:
    """Write the app's pyproject.toml; the folder's name is the app's, so Flower's rules for names hold.

    min_members: with fewer members in the fusion nothing is fused; 0: all members that are not removed.
    """
    name = folder.resolve().name
    if not (name.isascii() and name.replace("-", "").isalnum() and name[0].isalpha()):
        raise ConfigError(f"'{name}' cannot be an app's name; use letters, digits and '-', a letter first")
    path = folder / "pyproject.toml"
    if path.exists():
        raise ConfigError(f"{path} exists; choose another folder")
    text = str(federation.resolve())
    if '"' in text or "\\" in text:
        raise ConfigError(f"{text}: a path with quotes or backslashes cannot be written to {path}; rename it")
    write_text(path, APP.format(name=name, federation=text, min_members=min_members, **COMPONENTS))
    return path


def app_digest(folder: Path) -> str:
    """SHA-256 of the bundle that `flwr run` makes of an app folder, by which members pin it.

    The bundle is compressed, so another machine's zlib may give another digest: the coordinator's machine decides.
    """
    require_flower()
    from flwr.cli.build import build_fab_from_disk

    if not (folder / "pyproject.toml").is_file():
        raise ConfigError(f"{folder} is no app; `oneflare flower init` writes one")
    try:
        return hashlib.sha256(build_fab_from_disk(folder)).hexdigest()
    except ValueError as error:
        raise ConfigError(f"{folder} cannot be bundled: {' '.join(str(error).split())}") from None
