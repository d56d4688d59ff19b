"""TensorBoard in a real Chromium. `make test-system` runs this folder; `make test` does not."""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import Browser, find
from tensorboard_page import TensorBoard

TIMEOUT_S = 600
"""Of one test: charts are drawn by the CPU, which others may load as well."""


def pytest_collection_modifyitems(items):
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="module")
def browser():
    """One page of a browser."""
    if find() is None:
        pytest.skip("Debian package chromium")
    with Browser(1500, 1200) as made:
        yield made


@pytest.fixture
def board(tmp_path):
    """Start servers of folders: board(folder) is an address."""
    started = []

    def start(folder: Path) -> str:
        started.append(TensorBoard(folder, tmp_path / f"tensorboard-{len(started)}.log"))
        return started[-1].url

    yield start
    for server in started:
        server.close()
