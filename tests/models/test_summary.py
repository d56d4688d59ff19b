"""What `asyncrl config --model` prints, and that it needs no torch."""

import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.errors import ConfigError
from asyncrl.models.summary import ranges, summary
from tests.helpers.moe_families import build_tiny
from tests.helpers.tiny_models import deepseek_v3, qwen3_dense


def test_summary_of_a_model_with_dense_layers_and_a_shared_expert(tmp_path: Path) -> None:
    deepseek_v3(layers=6, first_k_dense=2).config.save_pretrained(tmp_path)
    assert summary(tmp_path) == {
        "model type": "deepseek_v3",
        "MoE layers": "4 of 6: 2-5",
        "experts": "8, top-2, 1 shared",
        "weight formula": "sigmoid_selected: sigmoid of the logit / its sum over the chosen experts",
        "packing": "allowed",
        "attention": "sdpa, eager",
        "vocabulary": "64 tokens, at most 512 of prompt and response",
    }


def test_summary_of_a_linear_attention_family(tmp_path: Path) -> None:
    build_tiny("qwen3_next").config.save_pretrained(tmp_path)
    lines = summary(tmp_path)
    assert lines["MoE layers"] == "2 of 3: 1-2" and lines["packing"].startswith("not allowed")


def test_summary_of_a_dense_model(tmp_path: Path) -> None:
    qwen3_dense().config.save_pretrained(tmp_path)
    lines = summary(tmp_path)
    assert lines["routes"].startswith("none") and "experts" not in lines


def test_refused_family_is_named_with_the_reason(tmp_path: Path) -> None:
    build_tiny("jetmoe").config.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="'jetmoe' has two routers per layer"):
        summary(tmp_path)


def test_ranges() -> None:
    assert ranges((0, 1, 2, 5, 7, 8)) == "0-2, 5, 7-8"
    assert ranges(()) == ""


def test_the_command_prints_it_without_torch(tmp_path: Path) -> None:
    deepseek_v3().config.save_pretrained(tmp_path)
    code = (
        "import sys; from asyncrl.cli import app\n"
        "try: app(['config', '--model', sys.argv[1]])\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], check=True, timeout=120, capture_output=True, text=True
    )
    assert done.stdout.splitlines()[:2] == ["model type: deepseek_v3", "MoE layers: 2 of 3: 1-2"]
