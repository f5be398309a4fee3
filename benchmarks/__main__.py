"""`python -m benchmarks`: everything `oneflare bench` measures; fails where a promise does not hold."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

if __name__ == "__main__":
    command = [str(Path(sys.executable).parent / "oneflare"), "bench", "--strict", *sys.argv[1:]]
    sys.exit(subprocess.run(command, check=False).returncode)
