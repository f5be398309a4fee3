"""Imports the user's own modules, so that the parts they define are registered.

Named in three ways: the entry points `oneflare.plugins` of an installed package, the variable ONEFLARE_PLUGINS (names
separated by commas), or `oneflare --plugin NAME` (or a file, `--plugin rule.py`), which adds to that variable so that
every process sees it.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from oneflare.core.sourcecode import module_digest, text_digest
from oneflare.errors import ConfigError

GROUP = "oneflare.plugins"
VARIABLE = "ONEFLARE_PLUGINS"
SCRIPT = "__main__"
SUFFIX = ".py"

_loaded: set[str] = set()


def name_plugins(names: list[str]) -> None:
    """Let this process and its children load these modules when parts are first asked for."""
    if names:
        known = [name for name in os.environ.get(VARIABLE, "").split(",") if name]
        os.environ[VARIABLE] = ",".join(dict.fromkeys([*known, *map(_importable, names)]))


def _importable(name: str) -> str:
    """The name itself; a file (`rule.py`) with its folder, so that every process finds it wherever it works."""
    if not name.endswith(SUFFIX):
        return name
    path = Path(name).expanduser().resolve()
    if not path.is_file():
        raise ConfigError(f"--plugin {name}: there is no such file")
    if "," in str(path):
        raise ConfigError(f"--plugin {name}: names of plugins are kept with commas between; move the file")
    if not path.stem.isidentifier():
        raise ConfigError(f"--plugin {name}: a module's name is one word of letters, digits and '_'; rename the file")
    return str(path)


def _import(name: str) -> None:
    """A module by name, or by its file, which then is the module of that name."""
    if not name.endswith(SUFFIX):
        import_module(name)
        return
    path = Path(_importable(name))
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    found = getattr(import_module(path.stem), "__file__", None)
    if found is None or Path(found).resolve() != path:
        raise ImportError(f"another module is called {path.stem}; rename the file")


def loaded_plugins() -> list[str]:
    """The modules that were imported as plugins."""
    return sorted(name for name in _loaded if name)


def source_of(part: Any) -> tuple[str, str] | None:
    """The plugin (or other module) that defines a class or function of the user's, and the digest of its source.

    None for parts of OneFlare, and for those whose source cannot be read.
    """
    module = str(getattr(part, "__module__", "") or "")
    if module.split(".")[0] in ("", "oneflare"):
        return None
    if module == SCRIPT:  # the rest of a script may be edited freely
        name, digest = module, text_digest(part)
    else:
        name = next((plugin for plugin in loaded_plugins() if f"{module}.".startswith(f"{plugin}.")), module)
        digest = module_digest(name)
    return None if digest is None else (name, digest)


def load_plugins() -> None:
    """Import every named module once; files of the working folder count."""
    wanted = [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
    if "" not in _loaded:
        _loaded.add("")
        wanted += [point.value for point in entry_points(group=GROUP)]
    for name in wanted:
        if (Path(name).stem if name.endswith(SUFFIX) else name) in _loaded:
            continue
        here = str(Path.cwd())
        if here not in sys.path:
            sys.path.append(here)
        try:
            _import(name)
        except ImportError as error:
            raise ConfigError(f"plugin {name}: {error}; is it installed, or in this folder?") from None
        except Exception as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ConfigError(f"plugin {name} cannot be imported: {reason}") from error
        _loaded.add(Path(name).stem if name.endswith(SUFFIX) else name)
