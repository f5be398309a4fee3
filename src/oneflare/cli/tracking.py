"""`--track`: lets trackers watch a run beside the display of its progress."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from oneflare.cli import show
from oneflare.client.observer import Observer
from oneflare.simulation.results import RunResult


class _Counter(Observer):
    """How many runs there was something to log of."""

    def __init__(self) -> None:
        self.runs = 0

    def end(self, _content: RunResult) -> None:
        self.runs += 1


@contextlib.contextmanager
def tracked(display: Observer, names: Sequence[str] | None) -> Iterator[Observer]:
    """The display alone, or with trackers; says afterwards where to look."""
    if not names:
        yield display
        return
    from oneflare.client.observer import Observers
    from oneflare.simulation.tracking import tracker

    counter = _Counter()
    trackers = [tracker(name) for name in dict.fromkeys(names)]
    yield Observers(display, counter, *trackers)
    for one in trackers:
        if counter.runs:
            show.note(f"tracked; look with: {one.hint}")
        else:
            show.note("nothing was tracked: the run was complete before; choose another --out to run it again")
