"""Clients as Flower nodes: one round with one message each, which is the upload.

`flwr` is an extra and is imported only by the modules of this room, never by importing this one.
"""

from __future__ import annotations

import importlib.util
import os

from oneflare.errors import ConfigError

QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
}
"""No reports to anybody, no installation at run time, Ray on loopback only."""


def require_flower(simulation: bool = False) -> None:
    """Complain in one line where Flower is missing; otherwise switch off what would look for the internet.

    Flower reads its switches when it is imported, so this comes before any `import flwr`.
    """
    if importlib.util.find_spec("flwr") is None:
        raise ConfigError("Flower is not installed; pip install 'oneflare[flower]', or use engine=local")
    if simulation and importlib.util.find_spec("ray") is None:
        raise ConfigError("Flower's simulation needs Ray; pip install 'oneflare[flower]', or use engine=local")
    os.environ.update(QUIET)
