"""A headless Chromium that a script drives: it opens pages, runs JavaScript and makes pictures (DevTools protocol).

Knows nothing of TensorBoard. Ends the browser that it started.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

NAMES = ("chromium", "chromium-browser", "google-chrome")
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--disable-quic", "--hide-scrollbars",
    "--no-first-run", "--disable-background-networking", "--disable-component-update", "--disable-sync",
    "--remote-debugging-port=0",
)  # fmt: skip
START_S = 60.0
ANSWER_S = 180.0
MAX_MESSAGE = 2**27


class BrowserError(Exception):
    """The browser did not start, a page threw, or something did not come in time."""


def find() -> str | None:
    """The browser's program, None without one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Browser:
    """One page in one browser with a profile of its own. Every wait ends with BrowserError after its timeout."""

    def __init__(self, width: int = 1500, height: int = 1000) -> None:
        program = find()
        if program is None:
            raise BrowserError("no Chromium found; install the package chromium (and fonts-dejavu-core)")
        self._folder = Path(tempfile.mkdtemp(prefix="asyncrl-browser-"))
        self._runner = asyncio.Runner()
        self._session: aiohttp.ClientSession | None = None
        self._number = 0
        profile = self._folder / "profile"
        command = [program, *FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank"]
        with (self._folder / "log").open("wb") as log:
            # In a session of its own: what it spawns is ended with it.
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | {"TZ": "UTC"}, start_new_session=True
            )
        try:
            self._page = self._runner.run(self._connect(profile / "DevToolsActivePort"))
            self.call("Page.enable")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def open(self, url: str) -> None:
        """Go to a page; `wait` says when it is there."""
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Value of a JavaScript expression in the page, JSON-like. A promise is waited for."""
        answer = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise BrowserError(f"{script[:200]}: {json.dumps(answer['exceptionDetails'])[:1000]}")
        return answer["result"].get("value")

    def wait(self, script: str, timeout_s: float = 60.0) -> Any:
        """The first true value of an expression, asked again and again for at most timeout_s.

        One that fails is not true yet: a page that is being built lacks half of what it will have.
        """
        deadline, why = time.monotonic() + timeout_s, ""
        while True:
            try:
                if value := self.run(script):
                    return value
            except BrowserError as exc:
                why = f" ({exc})"
            if time.monotonic() > deadline:
                raise BrowserError(f"not true within {timeout_s:g} s: {script[:300]}{why}")
            time.sleep(0.1)

    def resize(self, width: int, height: int) -> None:
        """Size of the page in pixels."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False
        )  # fmt: skip

    def picture(self, png: Path, area: tuple[int, int, int, int] | None = None) -> None:
        """Write what the page shows, or a part of it: left, top, width, height in pixels."""
        clip = {"clip": dict(zip(("x", "y", "width", "height"), area, strict=True)) | {"scale": 1}} if area else {}
        data = self.call("Page.captureScreenshot", format="png", **clip)["data"]
        png.parent.mkdir(parents=True, exist_ok=True)
        png.write_bytes(base64.b64decode(data))

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command of the DevTools protocol. Waits for its answer at most ANSWER_S."""
        return self._runner.run(self._call(method, params))

    def close(self) -> None:
        """End the browser. Waits for it at most 10 s."""
        if self._session is not None:
            self._runner.run(self._session.close())
        self._runner.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(10)
        shutil.rmtree(self._folder, ignore_errors=True)

    async def _connect(self, port_file: Path) -> aiohttp.ClientWebSocketResponse:
        deadline = time.monotonic() + START_S
        self._session = aiohttp.ClientSession()
        while not port_file.exists() or not port_file.read_text().strip():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise BrowserError(f"Chromium did not start:\n{(self._folder / 'log').read_text()[-2000:]}")
            await asyncio.sleep(0.1)
        address = f"http://127.0.0.1:{port_file.read_text().split()[0]}/json/list"
        while time.monotonic() < deadline:
            async with self._session.get(address) as reply:
                pages = [t for t in await reply.json() if t["type"] == "page"]
            if pages:
                return await self._session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=MAX_MESSAGE)
            await asyncio.sleep(0.1)
        raise BrowserError(f"Chromium shows no page within {START_S:g} s")

    async def _call(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        await self._page.send_json({"id": self._number, "method": method, "params": params})
        try:
            async with asyncio.timeout(ANSWER_S):
                while True:
                    answer = await self._page.receive_json()
                    if answer.get("id") == self._number:
                        break
        except (TimeoutError, TypeError) as exc:  # aiohttp's TypeError: the connection was closed
            raise BrowserError(f"no answer to {method} within {ANSWER_S:g} s, or the browser is gone") from exc
        if "error" in answer:
            raise BrowserError(f"{method}: {answer['error']}")
        result: dict[str, Any] = answer["result"]
        return result
