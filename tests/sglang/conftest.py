"""Fixtures of the tests that need a real SGLang server on this CPU (`make test-sglang`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import sglang_server
from tests.helpers.sglang_models import save_dense_first_moe, save_untied_moe
from tests.helpers.sglang_server import Server

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test here may have to wait for the start of a server, which a busy machine takes minutes for."""
    for item in items:
        if HERE in item.path.parents and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(sglang_server.START_S + 300))


@pytest.fixture(scope="session")
def can_serve() -> None:
    """Skips, with the command that installs it, where the CPU server's environment or the model is missing."""
    reason = sglang_server.missing()
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="session")
def server(can_serve: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One server for all tests, with models/quickstart: leave it unpaused, its groups destroyed.

    Its output matrix is zero until weights are sent (the checkpoint is tied), and stays what a test sends.
    """
    running = sglang_server.start(tmp_path_factory.mktemp("server") / "server.log")
    yield running
    running.stop()


@pytest.fixture
def start_server(can_serve: None, tmp_path: Path) -> Iterator[Callable[..., Server]]:
    """start_server(*flags, model=, key=, admin_key=, env=): a server of this test's own, ended with the test."""
    started: list[Server] = []

    def begin(*flags: str, model: Path = sglang_server.QUICKSTART, **rest: Any) -> Server:
        log = tmp_path / f"server{len(started)}.log"
        started.append(sglang_server.start(log, model, flags, **rest))
        return started[-1]

    yield begin
    for one in started:
        one.stop()


@pytest.fixture(scope="session")
def untied_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random qwen3_moe whose log-probs make sense from the start."""
    return save_untied_moe(tmp_path_factory.mktemp("models") / "untied_moe")


@pytest.fixture(scope="session")
def dense_first_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a random glm4_moe: 3 layers, of which the first is dense."""
    return save_dense_first_moe(tmp_path_factory.mktemp("models") / "dense_first_moe")
