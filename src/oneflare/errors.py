"""Errors that a user can act on: one line that says what is wrong, where, and what to do about it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class OneFlareError(Exception):
    """Anything the user can put right; the command line prints it as one line and exits with its code."""

    exit_code = 2


class ConfigError(OneFlareError):
    """An unknown key, an impossible value, or parts that do not fit together."""


class DataError(OneFlareError):
    """Images or labels that are missing, unreadable or do not fit."""


class UploadError(OneFlareError):
    """An upload that is damaged, does not fit the federation, or lacks what a fusion needs."""


class MemberFault(UploadError):
    """One member's upload that was verified and is of no use all the same; a fusion goes on without that member."""

    def __init__(self, client: int, reason: str) -> None:
        super().__init__(client, reason)
        self.client = client
        self.reason = reason

    def __str__(self) -> str:
        return self.reason


class TrainingError(OneFlareError):
    """A client whose training cannot go on (a loss that is no longer finite)."""


class RunError(OneFlareError):
    """A run folder that is in use, incomplete, or belongs to another experiment."""


class BudgetError(OneFlareError):
    """An answer that would reveal more about a member's images than the member has agreed to."""


class WorkError(RunError):
    """Input was right, and part of the work failed all the same."""

    exit_code = 1


class InUseError(RunError):
    """A folder that another process is working on."""


def did_you_mean(name: str, options: Iterable[str]) -> str:
    """`"; did you mean 'lr'?"`, or the choices when nothing is close, or nothing when there are many."""
    options = sorted(options)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.6)
    if close:
        return f"; did you mean '{close[0]}'?"
    return f"; choose from {', '.join(options)}" if 0 < len(options) <= 40 else ""
