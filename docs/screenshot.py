"""Make a picture of a page as its reader sees it: `python docs/screenshot.py PAGE.html OUT.png [--size 1020x530]`

`--paper` shows the first sheet as it is printed (A4), `--dark` the dark scheme. Needs playwright and Chromium, which
the browser tests use too.
"""

from __future__ import annotations

import argparse
import io
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SHEET = "794x1123"
"""A4 at 96 dots per inch"""


def picture(page: Path, size: str, *, dark: bool, paper: bool) -> bytes:
    """PNG of what is seen before anybody scrolls."""
    browser = next((path for name in NAMES if (path := shutil.which(name))), None)
    if browser is None:
        raise SystemExit("Chromium or Chrome is not installed; `python tests/browser.py` tries to install it")
    width, _, height = size.partition("x")
    with sync_playwright() as play:
        opened = play.chromium.launch(executable_path=browser, args=["--no-sandbox"])
        tab = opened.new_page(viewport={"width": int(width), "height": int(height)})
        tab.emulate_media(media="print" if paper else "screen", color_scheme="dark" if dark else "light")
        tab.goto(page.resolve().as_uri())
        tab.wait_for_timeout(500)  # milliseconds, until the figures are drawn
        taken = tab.screenshot()
        opened.close()
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--size", default=None, help="width and height of the window in pixels; default: 1020x530")
    parser.add_argument("--dark", action="store_true", help="in the dark scheme")
    parser.add_argument("--paper", action="store_true", help="as it is printed")
    given = parser.parse_args()
    size = given.size or (SHEET if given.paper else "1020x530")
    taken = Image.open(io.BytesIO(picture(given.page, size, dark=given.dark, paper=given.paper)))
    taken.convert("RGB").quantize(64).save(given.out, optimize=True)
    print(f"{given.out}: {taken.width} x {taken.height}, {given.out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
