"""Pictures of a run's dashboard, by headless Chromium: TensorBoard's CUSTOM SCALARS tab as it opens, and every page.

    python tools/screenshot.py runs/quickstart docs/images/dashboard.png            # what opens first
    python tools/screenshot.py runs/quickstart docs/images/dashboard.png --pages    # and dashboard-<page>.png beside it

Needs Chromium (Debian: apt-get install chromium fonts-dejavu-core). Starts TensorBoard on a free
loopback port and ends what it started.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path

from browser import Browser, BrowserError
from PIL import Image
from tensorboard_page import Dashboard, TensorBoard

COLOURS = 64
"""Of a picture: enough for curves and text, and a third of the bytes."""
SETTLE_S = 2.0
"""For charts to be drawn once they have their data."""


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="run folder (or a folder of run folders)")
    parser.add_argument("png", type=Path, help="picture to write")
    parser.add_argument("--pages", action="store_true", help="a picture of every page as well, beside it")
    parser.add_argument("--only", nargs="+", default=[], help="of these pages only, and not of the first view")
    parser.add_argument("--size", default="1500x1500", help="window of the first view in pixels, WIDTHxHEIGHT")
    parser.add_argument("--timeout", type=float, default=240.0, help="seconds for every step")
    options = parser.parse_args()
    width, height = (int(x) for x in options.size.split("x"))
    try:
        with (
            tempfile.TemporaryDirectory() as scratch,
            TensorBoard(options.run, Path(scratch) / "tensorboard.log", options.timeout) as board,
            Browser(width, height) as browser,
        ):
            browser.resize(width, height)
            dashboard = Dashboard(browser, board.url, options.timeout)
            dashboard.whole()
            if not options.only:
                for page in dashboard.opened():
                    dashboard.wait(page)
                take(browser, options.png)
            for page in (options.only or dashboard.pages()) if options.pages or options.only else []:
                take_page(browser, dashboard, page, options.png.with_name(f"{options.png.stem}-{slug(page)}.png"))
    except BrowserError as exc:
        print(exc, file=sys.stderr)
        return 2
    return 0


def take_page(browser: Browser, dashboard: Dashboard, page: str, png: Path) -> None:
    """One page alone, with the names of the lines under each chart."""
    dashboard.show(page)
    dashboard.legends()
    time.sleep(SETTLE_S)
    left, top, width, height = dashboard.bounds(page)
    browser.resize(left + width, top + height)
    take(browser, png, (left, top, width, height))
    browser.resize(left + width, 1000)


def take(browser: Browser, png: Path, area: tuple[int, int, int, int] | None = None) -> None:
    """One picture, in few colours."""
    time.sleep(SETTLE_S)
    browser.picture(png, area)
    Image.open(png).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(png, optimize=True)
    print(f"{png}: {png.stat().st_size} bytes", flush=True)


def slug(page: str) -> str:
    """Part of a file name."""
    return page.lower().replace(" ", "-")


if __name__ == "__main__":
    sys.exit(main())
