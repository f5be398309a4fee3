"""Chromium for the browser tests: the one that is there, or Debian's package where we may install it.

`python tests/browser.py` does it ahead of the tests and never fails: where there is none, tests are skipped.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PHONE = {"width": 390, "height": 800}
DESK = {"width": 1100, "height": 800}
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUICK = ["-o", "Acquire::http::Timeout=20", "-o", "Acquire::Retries=1", "-o", "DPkg::Lock::Timeout=300"]


@dataclass
class Opened:
    """A page and what it complained about."""

    page: Any
    errors: list[str]
    requests: list[str]


def find() -> str | None:
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def find_or_install() -> tuple[str | None, str]:
    """The path, or None and the reason."""
    path = find()
    if path is not None:
        return path, ""
    if shutil.which("apt-get") is None:
        return None, "it is not installed and this is not Debian; install Chromium or Chrome"
    if os.geteuid() != 0:
        return None, "it is not installed; as root: apt-get install -y --no-install-recommends chromium"
    with (Path(tempfile.gettempdir()) / "oneflare-browser.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # test workers ask at the same time
        return find_or_failure()


def find_or_failure() -> tuple[str | None, str]:
    path = find()
    if path is not None:
        return path, ""
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", *QUICK, "install", "-y", "--no-install-recommends", "chromium"]
    last = ""
    for command in (install, ["apt-get", *QUICK, "update"], install):
        try:
            outcome = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        except subprocess.TimeoutExpired:
            return None, "apt-get took more than ten minutes"
        path = find()
        if path is not None:
            return path, ""
        last = (outcome.stderr.strip().splitlines() or ["apt-get failed"])[-1]
    return None, f"apt-get could not install it ({last})"


if __name__ == "__main__":
    found, why = find_or_install()
    print(f"browser: {found}" if found else f"browser tests will be skipped: {why}")
