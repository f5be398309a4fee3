"""OneFlare: one-shot federated learning. The public functions are `run`, `compare` and `load_model`.

Organisations with private, badly skewed data each train alone, upload one file once, and get one shared classifier.

    import oneflare
    result = oneflare.run(data="digits", alpha=0.05, clients=5, method="flare")
    print(result.accuracy)

Names are imported when first used, so that `import oneflare` costs nothing.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from oneflare._version import __version__

# The memory pools of the library behind torch's matrices do not survive a fork after threads have used them: workers
# were seen to wait for ever in an allocation. It reads this when it first allocates.
os.environ.setdefault("MKL_DISABLE_FAST_MM", "1")

if TYPE_CHECKING:
    from oneflare.data import Dataset, from_arrays
    from oneflare.errors import OneFlareError
    from oneflare.fusion import GlobalModel, load_model
    from oneflare.simulation.stages import Result, run

_HOMES = {
    "run": "oneflare.simulation.stages",
    "Result": "oneflare.simulation.stages",
    "Dataset": "oneflare.data",
    "from_arrays": "oneflare.data",
    "GlobalModel": "oneflare.fusion",
    "load_model": "oneflare.fusion",
    "OneFlareError": "oneflare.errors",
}

__all__ = [
    "Dataset",
    "GlobalModel",
    "OneFlareError",
    "Result",
    "__version__",
    "from_arrays",
    "load_model",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'oneflare' has no attribute '{name}'")
    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
