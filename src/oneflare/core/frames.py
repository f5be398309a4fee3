"""The lines of the user's own files in a traceback, without those of OneFlare and of libraries."""

from __future__ import annotations

import sysconfig
import traceback
from pathlib import Path

OURS = str(Path(__file__).parent.parent)
LIBRARIES = tuple(
    {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib") if sysconfig.get_path(name)}
)
ELSEWHERE = "__oneflare_frames__"
"""attribute of an error that was raised in another process, whose traceback stayed there"""


def own_lines(error: BaseException) -> list[str]:
    """`"/home/me/half.py", line 12, in loss` and the text of that line, outermost first; empty where none is theirs."""
    kept = getattr(error, ELSEWHERE, None)
    if kept is not None:
        return [str(line) for line in kept]
    frames = traceback.extract_tb(error.__traceback__)
    first = next((number for number, frame in enumerate(frames) if _is_ours(frame.filename)), len(frames))
    lines = []
    for frame in frames[first:]:  # what comes before ours has only started the program
        if not _is_ours(frame.filename) and not _is_library(frame.filename):
            lines.append(f'"{frame.filename}", line {frame.lineno}, in {frame.name}')
            lines += [f"  {frame.line}"] if frame.line else []
    return lines


def keep_lines(error: BaseException) -> None:
    """Before an error is sent to another process: what its traceback says goes with it."""
    setattr(error, ELSEWHERE, own_lines(error))
    error.add_note("In a worker process:\n" + "".join(traceback.format_exception(error)).rstrip())


def move_lines(error: BaseException, other: BaseException) -> None:
    """Give what was kept of one error to another that stands for it."""
    setattr(other, ELSEWHERE, own_lines(error))
    for note in error.__notes__:
        other.add_note(note)


def _is_ours(file: str) -> bool:
    return Path(file).is_relative_to(OURS)


def _is_library(file: str) -> bool:
    return file.startswith("<") or any(Path(file).is_relative_to(place) for place in LIBRARIES)
