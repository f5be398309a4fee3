"""The same four hospitals over Flower: a SuperLink, its proxy and four SuperNodes on this machine.

    python examples/hospitals_flower.py [FOLDER]

The network's version of `hospitals.py`: nobody carries a file, and everything else is the same code. Takes about a
minute on an idle machine with two cores, most of it Flower's polling. The proxy is nginx; where it is not installed,
the round runs without TLS.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path

from hospitals import HOSPITALS, make_folders, type_in


def main() -> None:
    root = Path(sys.argv[1] if len(sys.argv) > 1 else "hospitals-flower").resolve()
    if root.exists():
        sys.exit(f"{root} exists; give another folder")
    started = time.monotonic()
    make_folders(root)
    office = root / "coordinator"
    members = " ".join(f"--member {name}" for name in HOSPITALS)
    shape = "--classes 0,1,2,3,4,5,6,7,8,9 --image-size 8 --channels 1"
    type_in(office, f"oneflare server init digits {shape} {members} epochs=10")
    images = " ".join(f"--member {name}=../{name}/images" for name in HOSPITALS)
    tls = " --tls" if shutil.which("nginx") else ""
    type_in(office, f"oneflare flower try digits {images} --test test{tls}")
    print(f"\n{time.monotonic() - started:.0f} s. Next: cd {office} && oneflare serve digits")


if __name__ == "__main__":
    main()
