"""Remembers what an interrupted command has kept, so that the command line can print it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

AGAIN = "run the same command again to go on"
NOTHING = "nothing was saved yet of what was running; the same command begins it again"
UNCHANGED = f"the uploads are as they were; {AGAIN}"

_kept = ""


@contextlib.contextmanager
def on_stop(describe: Callable[[], str]) -> Iterator[None]:
    """Ask `describe` what is kept when the work inside is interrupted.

    Where several are nested the outermost has the last word, unless it says "".
    """
    global _kept
    _kept = ""
    try:
        yield
    except Exception:
        raise
    except BaseException:
        _kept = describe() or _kept
        raise


def what_is_kept() -> str:
    return _kept
