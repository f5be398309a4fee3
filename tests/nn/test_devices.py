"""Training, fusion, evaluation and prediction on a device that is not the processor."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path


def test_on_a_device_of_its_own():
    """`on_device.py` in a fresh process: torch starts one thread per device at the first gradient, and never again."""
    tests = Path(__file__).with_name("on_device.py")
    words = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-p", "no:xdist", str(tests)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, cwd=tests.parents[2])
    assert done.returncode == 0, done.stdout + done.stderr
    assert "6 passed" in done.stdout
