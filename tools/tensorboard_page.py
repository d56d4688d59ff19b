"""TensorBoard as a browser shows it: pages and charts of CUSTOM SCALARS with their points, histograms and texts.

Reads what was drawn, out of the page's own elements. Written for the TensorBoard of constraints.txt.
"""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Collection
from pathlib import Path
from types import TracebackType
from typing import Any

from browser import Browser, BrowserError

PREPARE = """
window.deep = (selector) => {
  const found = [];
  const walk = (node) => {
    if (node.nodeType === 1 && node.matches(selector)) found.push(node);
    if (node.shadowRoot) [...node.shadowRoot.childNodes].forEach(walk);
    [...node.childNodes].forEach(walk);
  };
  walk(document.body);
  return found;
};
window.views = () => deep('tf-category-paginated-view').map((view) => ({
  view, name: view.shadowRoot.querySelector('.category-name')?.title,
  button: view.shadowRoot.querySelector('button.heading'),
})).filter((v) => v.name);
window.cards = (page) => views().filter((v) => v.name === page).flatMap((v) => [...v.view.querySelectorAll(
  'tf-custom-scalar-multi-line-chart-card, tf-custom-scalar-margin-chart-card')]);
window.chart = (card) => card.shadowRoot.querySelector('tf-line-chart-data-loader')
  ?.shadowRoot.querySelector('vz-line-chart2')?._chart;
window.points = (card) => Object.fromEntries(Object.entries(chart(card)?.name2datasets || {})
  .map(([name, set]) => [name, set.data().map((d) => [d.step, String(d.scalar)])]));
true
"""
"""Everything stands in shadow roots, and a chart's points are in its own data sets."""


class TensorBoard:
    """A server of one run folder on a free loopback port; `with` ends it. It reads new events every second."""

    def __init__(self, run: Path, log: Path, timeout_s: float = 120.0) -> None:
        """Waits for the server's address at most timeout_s; BrowserError when it does not start."""
        # One loader that is ours to end: the fast one is a second process.
        command = [sys.executable, "-m", "tensorboard.main", "--load_fast=false", "--host", "127.0.0.1", "--port", "0"]
        command += ["--reload_interval", "1"]
        folder = run.resolve()
        with log.open("wb") as out:
            # The page prints the folder as it was given: a short name, not a path of this machine.
            self._server = subprocess.Popen(
                [*command, "--logdir", folder.name], cwd=folder.parent, stdout=out, stderr=out
            )
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self._server.poll() is None:
            if found := re.search(r"at (http://127\.0\.0\.1:\d+/)", log.read_text(errors="replace")):
                self.url = found[1]
                return
            time.sleep(0.2)
        self.close()
        raise BrowserError(f"TensorBoard did not start:\n{log.read_text(errors='replace')[-2000:]}")

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: object, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """End the server. Waits for it at most 10 s."""
        self._server.terminate()
        try:
            self._server.wait(10)
        except subprocess.TimeoutExpired:
            self._server.kill()
            self._server.wait(10)


class Dashboard:
    """The CUSTOM SCALARS tab in a browser. Every wait ends with BrowserError after timeout_s."""

    def __init__(self, browser: Browser, url: str, timeout_s: float = 120.0) -> None:
        """Opens the address that a run prints, and waits until the pages are there."""
        self._browser, self._timeout_s = browser, timeout_s
        browser.open(f"{url}#custom_scalars")
        # Together: what is prepared in a page that is about to be left is gone with it.
        browser.wait(f"{PREPARE}\nviews().length > 0", timeout_s)

    def pages(self) -> list[str]:
        """Titles of the pages in their order."""
        return [str(name) for name in self._browser.run("views().map((v) => v.name)")]

    def opened(self) -> list[str]:
        """Titles of the pages that are open."""
        return [
            str(name)
            for name in self._browser.run(
                "views().filter((v) => v.button.hasAttribute('open-button')).map((v) => v.name)"
            )
        ]

    def show(self, page: str) -> None:
        """Open one page, close the others, and wait until its charts have read their data."""
        self._browser.run(
            "views().forEach((v) => { if (v.button.hasAttribute('open-button') !== "
            f"(v.name === {page!r})) v.button.click() }})"
        )
        self.wait(page)

    def wait(self, page: str) -> None:
        """Wait until the charts of an open page have read their data."""
        loaded = f"cards({page!r}).length > 0 && cards({page!r}).every((c) => chart(c) && !c.shadowRoot.querySelector("
        self._browser.wait(loaded + "'tf-line-chart-data-loader').dataLoading)", self._timeout_s)

    def charts(self, page: str) -> dict[str, dict[str, list[tuple[int, float]]]]:
        """Chart title -> name of the line -> (update, value) of every point, of an open page."""
        read: list[list[Any]] = self._browser.run(f"cards({page!r}).map((c) => [c.title, points(c)])")
        return {title: {n: [(int(x), float(y)) for x, y in p] for n, p in lines.items()} for title, lines in read}

    def whole(self) -> None:
        """Untick "Ignore outliers in chart scaling", which cuts what is far from the rest off a chart."""
        self._browser.run(
            "deep('tf-custom-scalar-dashboard').flatMap((d) => [...d.shadowRoot.querySelectorAll('paper-checkbox')])"
            ".filter((box) => box.checked && box.textContent.includes('outliers')).forEach((box) => box.click())"
        )

    def legends(self) -> None:
        """Unfold the names of the lines under every chart."""
        self._browser.run(
            "deep('tf-custom-scalar-multi-line-chart-card, tf-custom-scalar-margin-chart-card').forEach((c) => {"
            " const list = c.shadowRoot.querySelector('#matches-container iron-collapse');"
            " if (list && !list.opened) c.shadowRoot.querySelector('.toggle-matches-button').click() })"
        )

    def bounds(self, page: str) -> tuple[int, int, int, int]:
        """Left, top, width and height of a page in pixels."""
        box: list[float] = self._browser.run(
            f"(() => {{ const r = views().filter((v) => v.name === {page!r})[0].view.getBoundingClientRect();"
            " return [r.left, r.top, r.width, r.height] })()"
        )
        left, top, width, height = map(int, box)
        return left, top, width, height


def histograms(browser: Browser, url: str, timeout_s: float = 120.0) -> dict[str, dict[int, list[list[float]]]]:
    """The HISTOGRAMS tab: tag -> update -> (left edge, width, count) of every bin that is drawn."""
    browser.open("about:blank")
    browser.open(f"{url}#histograms")
    browser.wait(PREPARE, timeout_s)
    browser.wait("deep('tf-histogram-loader').length > 0", timeout_s)
    browser.run("views().forEach((v) => { if (!v.button.hasAttribute('open-button')) v.button.click() })")
    drawn = "n.shadowRoot.querySelector('vz-histogram-timeseries')?._data"
    browser.wait(f"deep('tf-histogram-loader').every((n) => {drawn}?.length)", timeout_s)
    bins = f"{drawn}.map((d) => [d.step, d.bins.map((b) => [b.x, b.dx, b.y])])"
    read = browser.run(f"deep('tf-histogram-loader').map((n) => [n.tag, {bins}])")
    return {tag: {int(step): bins for step, bins in steps} for tag, steps in read}


def texts(
    browser: Browser, url: str, tags: Collection[str], timeout_s: float = 120.0
) -> dict[str, list[tuple[int, str]]]:
    """The TEXT tab: tag -> (update, HTML) of every text, newest first. Waits until each of `tags` has one."""
    browser.open("about:blank")
    browser.open(f"{url}#text")
    browser.wait(PREPARE, timeout_s)
    for tag in tags:
        browser.wait(f"deep('tf-text-loader').some((n) => n.tag === {tag!r} && n._texts?.length)", timeout_s)
    read = browser.run("deep('tf-text-loader').map((n) => [n.tag, (n._texts || []).map((t) => [t.step, t.text])])")
    return {tag: [(int(step), str(text)) for step, text in found] for tag, found in read if found}
