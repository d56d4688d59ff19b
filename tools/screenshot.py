"""Picture of a run's dashboard: TensorBoard's CUSTOM SCALARS tab as a PNG, by headless Chromium.

    python tools/screenshot.py runs/quickstart docs/images/dashboard.png [--size 1500x2400]

Needs Chromium (Debian: apt-get install chromium fonts-dejavu-core). Starts TensorBoard on a free
loopback port and ends what it started.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="run folder (or a folder of run folders)")
    parser.add_argument("png", type=Path, help="picture to write")
    parser.add_argument("--size", default="1500x1900", help="window in pixels, WIDTHxHEIGHT")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds for TensorBoard to start and read")
    options = parser.parse_args()
    browser = next((found for name in BROWSERS if (found := shutil.which(name))), None)
    if browser is None:
        print("no Chromium found; install the package chromium (and fonts-dejavu-core)", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as scratch:
        server, url = start_tensorboard(options.run, Path(scratch) / "tensorboard.log", options.timeout)
        try:
            wait_for_layout(url, options.timeout)
            shoot(browser, f"{url}#custom_scalars", options.png, options.size, Path(scratch) / "profile")
        finally:
            server.terminate()
            try:
                server.wait(10)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait(10)
    print(f"{options.png}: {options.png.stat().st_size} bytes")
    return 0


def start_tensorboard(run: Path, log: Path, timeout_s: float) -> tuple[subprocess.Popen[bytes], str]:
    """Server process and its address. Waits for the address in the log, at most timeout_s."""
    # one loader that is ours to end: the fast one is a second process
    command = [sys.executable, "-m", "tensorboard.main", "--load_fast=false", "--host", "127.0.0.1", "--port", "0"]
    folder = run.resolve()
    with log.open("wb") as out:
        # the page prints the folder as it was given: a short name, not a path of this machine
        server = subprocess.Popen([*command, "--logdir", folder.name], cwd=folder.parent, stdout=out, stderr=out)
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        text = log.read_text(errors="replace")
        if found := re.search(r"at (http://127\.0\.0\.1:\d+/)", text):
            return server, found[1]
        if server.poll() is not None:
            break
        time.sleep(0.2)
    server.kill()
    server.wait(10)
    sys.exit(f"TensorBoard did not start:\n{log.read_text(errors='replace')[-2000:]}")


def wait_for_layout(url: str, timeout_s: float) -> None:
    """Wait until TensorBoard has read the run's layout, at most timeout_s."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}data/plugin/custom_scalars/layout", timeout=10) as reply:
                if json.load(reply):
                    return
        except (urllib.error.URLError, ValueError, TimeoutError):
            pass  # still starting
        time.sleep(0.5)
    sys.exit("TensorBoard shows no custom scalars: is this a run folder with tb/ in it?")


def shoot(browser: str, url: str, png: Path, size: str, profile: Path) -> None:
    """One picture of a page after 30 s of its own (virtual) time."""
    png.parent.mkdir(parents=True, exist_ok=True)
    window = [f"--user-data-dir={profile}", f"--window-size={size.replace('x', ',')}", "--virtual-time-budget=30000"]
    command = [browser, *FLAGS, *window, f"--screenshot={png.resolve()}", url]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    if done.returncode or not png.exists():
        sys.exit(f"Chromium made no picture:\n{done.stderr[-2000:]}")


if __name__ == "__main__":
    sys.exit(main())
