"""The estimate of `asyncrl config` against the memory of whole learner processes (tools/bench/memory.py)."""

import importlib.util
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parents[2] / "tools" / "bench" / "memory.py"


@pytest.fixture(scope="module")
def bench():
    spec = importlib.util.spec_from_file_location("bench_memory", FILE)
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules["bench_memory"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["bench_memory"]


@pytest.fixture(scope="module")
def model(bench, tmp_path_factory):
    return bench.make_model(tmp_path_factory.mktemp("models") / "moe", 256, 4, 32000)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    "settings",
    [
        {"length": 2048},
        {"length": 8192, "checkpointing": True},
        {"length": 2048, "dtype": "bfloat16", "ranks": 2},
    ],
    ids=["float32", "float32-checkpointing", "bfloat16-2-ranks"],
)
def test_the_estimate_is_within_15_percent_of_the_process(bench, model, tmp_path, settings):
    found = bench.measure(model, bench.Point(**settings), tmp_path)
    assert found["estimated"] == pytest.approx(found["peak"] - found["before"], rel=0.15)
