"""A random Llama becomes a Mixture of Experts: the same without noise, another one with it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from asyncrl.models.describe import describe
from asyncrl.models.load import load_model

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tools"))

import smollm2  # noqa: E402
import upcycle as tool  # noqa: E402
from upcycling import add_noise, load_llama, log_probs, upcycle  # noqa: E402

RECIPE = tool.Recipe(sparse_layers=2, experts=4, top_k=2, shared_size=8, noise=0.3)
OPTIONS = ["--sparse-layers", "2", "--experts", "4", "--shared-size", "8", "--noise", "0.3", "--dtype", "float32"]


def save_llama(folder: Path, **fields: object) -> Path:
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "eos_token_id": [2, 3]}
    # A head size of its own, rope scaling and tied embeddings must all come through.
    rope = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
    config = LlamaConfig(**{**sizes, **heads, "tie_word_embeddings": True, "rope_parameters": rope, **fields})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages[0].content }}"}))
    return folder


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_llama(tmp_path_factory.mktemp("llama") / "model")


ROW = torch.randint(64, (1, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("top_k", [1, 2, 4])
def test_without_noise_every_log_prob_is_that_of_the_dense_model(llama: Path, top_k: int) -> None:
    dense = load_llama(llama)
    model = upcycle(dense, tool.Recipe(sparse_layers=2, experts=4, top_k=top_k, shared_size=8), 0.02)
    torch.testing.assert_close(log_probs(model, ROW), log_probs(dense, ROW), atol=1e-5, rtol=0)


def test_with_noise_experts_differ_and_everything_can_learn(llama: Path) -> None:
    dense = load_llama(llama)
    model = upcycle(dense, RECIPE, 0.02)
    add_noise(model, RECIPE)
    assert float((log_probs(model, ROW) - log_probs(dense, ROW)).abs().max()) > 1e-3
    stack = model.model.layers[2].mlp.experts.down_proj
    original = dense.model.layers[2].mlp.down_proj.weight
    assert [round(float(((e - original).std() / original.std()).detach()), 1) for e in stack] == [0.3] * 4
    assert not torch.equal(stack[0], stack[1])
    torch.testing.assert_close(model.model.layers[0].mlp.down_proj.weight, dense.model.layers[0].mlp.down_proj.weight)
    model(input_ids=ROW, labels=ROW).loss.backward()
    for name in ("gate.weight", "experts.gate_up_proj", "experts.down_proj", "shared_expert.down_proj.weight"):
        assert float(model.get_parameter(f"model.layers.2.mlp.{name}").grad.abs().sum()) > 0, name


def test_a_written_folder_is_a_model_of_asyncrl_and_is_written_once(
    llama: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "moe"
    assert tool.main([str(out), "--model", str(llama), *OPTIONS]) == 0
    info = describe(out)
    assert (info.layers, info.num_experts, info.top_k, info.vocab_size) == ((1, 2), 4, 2, 64)
    dense = load_llama(llama)
    model = upcycle(dense, RECIPE, 0.02)
    add_noise(model, RECIPE)
    torch.testing.assert_close(log_probs(load_model(out, "float32"), ROW), log_probs(model, ROW), atol=1e-5, rtol=0)
    assert AutoModelForCausalLM.from_pretrained(out).get_output_embeddings().weight.shape == (64, 32)
    assert json.loads((out / "generation_config.json").read_text())["eos_token_id"] == [2, 3]
    assert (out / "tokenizer_config.json").read_bytes() == (llama / "tokenizer_config.json").read_bytes()
    report = json.loads((out / "recipe.json").read_text())["report"]
    assert report["exact_difference"] < 1e-5 and report["difference"] > 1e-3
    assert "without noise: largest change of a log-prob" in capsys.readouterr().out
    before = (out / "config.json").stat().st_mtime_ns
    assert tool.main([str(out), "--model", str(llama), *OPTIONS]) == 0
    assert "up to date" in capsys.readouterr().out and (out / "config.json").stat().st_mtime_ns == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["moe"]


@pytest.mark.parametrize(
    ("fields", "options", "reason"),
    [
        ({"attention_bias": True}, [], "attention_bias=true"),
        ({"mlp_bias": True}, [], "mlp_bias=true"),
        ({}, ["--sparse-layers", "4"], "does not fit 3 layers"),
        ({}, ["--top-k", "5"], "does not fit 3 layers"),
    ],
)
def test_what_cannot_be_exact_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fields: dict, options: list[str], reason: str
) -> None:
    llama = save_llama(tmp_path / "llama", **fields)
    assert tool.main([str(tmp_path / "moe"), "--model", str(llama), *OPTIONS, *options]) == 1
    assert reason in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == ["llama"]


def test_a_folder_of_somebody_else_is_not_overwritten(llama: Path, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert tool.main([str(tmp_path), "--model", str(llama), *OPTIONS]) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def test_another_wheel_than_the_tested_one_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / smollm2.WHEEL).write_bytes(b"not this")
    assert tool.main([str(tmp_path / "moe"), "--cache", str(tmp_path)]) == 1
    assert "expected bcc81830" in capsys.readouterr().err
