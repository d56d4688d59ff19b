"""tools/gpu_check.py on a CPU, so that it works where a GPU is."""

import json

import gpu_check
import pytest


@pytest.fixture(scope="module")
def numbers(world, tmp_path_factory):
    file = tmp_path_factory.mktemp("check") / "numbers.json"
    found = gpu_check.main(
        ["--device", "cpu", "--size", "tiny", "--updates", "2", "--no-compile", "--json", str(file)], world
    )
    assert json.loads(file.read_text()) == found
    return found


def test_the_tiny_check_trains_and_finds_learner_and_engine_alike(numbers):
    assert (numbers["stepped"], numbers["forced"]) == (1, 1)
    assert numbers["grad_norm"] > 0
    assert numbers["engine_drift"] < 0.02
    assert numbers["engine_k3"] < 1e-4
    assert 0 < numbers["logp_error"] < 1e-4
    assert 0 < numbers["scoring_percent"] < 100
    assert numbers["tokens_per_s"] > 0 and numbers["engine_tokens_per_s"] > 0 and numbers["peak_gib"] > 0


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"loss": float("nan")}, "loss is nan"),
        ({"stepped": 0.5}, "50% of the updates"),
        ({"grad_norm": 0.0}, "gradient is 0"),
        ({"forced": 0.9}, "90.0% of the rows"),
        ({"logp_error": 0.05}, "off by 5.0e-02"),
        ({"engine_drift": 0.4}, "disagree"),
        ({"engine_k3": 0.2}, "disagree"),
    ],
)
def test_what_is_wrong_is_named(numbers, change, words):
    assert gpu_check._wrong(numbers) == []
    (text,) = gpu_check._wrong({**numbers, **change})
    assert words in text
