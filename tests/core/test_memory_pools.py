"""The matrix library behind torch keeps no memory pools of its own, which would not survive a fork after threads."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = "import oneflare, os; print(os.environ['MKL_DISABLE_FAST_MM'])"


@pytest.mark.parametrize(("given", "wanted"), [(None, "1"), ("0", "0")])
def test_importing_the_package_switches_the_pools_off_unless_the_user_has_decided(given, wanted):
    environment = {name: value for name, value in os.environ.items() if name != "MKL_DISABLE_FAST_MM"}
    if given is not None:
        environment["MKL_DISABLE_FAST_MM"] = given
    done = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == wanted
