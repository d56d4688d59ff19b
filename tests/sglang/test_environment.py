"""The CPU server itself: it starts, answers what it should, and leaves nothing."""

import base64
import json
import math
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.helpers.sglang_models import save_untied_moe

PROMPT = [2, 3, 4, 5, 6, 7]


def routes_of(answer, num_layers, top_k=2):
    """int32 [rows, num_layers, top_k]: one row a token but the last, which is never an input."""
    raw = np.frombuffer(base64.b64decode(answer["meta_info"]["routed_experts"]), "<i4")
    return torch.from_numpy(raw.reshape(len(PROMPT) + len(answer["output_ids"]) - 1, num_layers, top_k).copy())


def test_a_server_is_ready_and_says_what_it_serves(server):
    assert server.call("/ready")[0] == 200
    status, info = server.call("/model_info")
    assert status == 200
    assert info["model_path"] == str(server.model) and info["weight_version"]
    status, info = server.call("/server_info")
    assert status == 200
    assert info["enable_return_routed_experts"] and info["dtype"] == "float32" and info["device"] == "cpu"


def test_an_answer_has_log_probs_and_routes_of_the_right_size(server):
    answer = server.generate(PROMPT, 8)
    meta = answer["meta_info"]
    assert len(answer["output_ids"]) == meta["completion_tokens"] == 8
    assert [token for _, token, *_ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert all(math.isfinite(lp) and lp < 0 for lp, *_ in meta["output_token_logprobs"])
    config = json.loads((server.model / "config.json").read_text())
    routes = routes_of(answer, config["num_hidden_layers"], config["num_experts_per_tok"])
    assert routes.min() >= 0 and routes.max() < config["num_local_experts"]


def by_transformers(folder: Path, answer):
    """Of the same tokens: log-probs of the answer [T], experts of each MoE layer, sorted, [rows, layers, 2]."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([PROMPT + answer["output_ids"]])
    with torch.no_grad():
        out = model(ids, output_router_logits=True)
    rows = out.logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)
    experts = torch.stack([logits[:-1].topk(2, -1).indices for logits in out.router_logits], 1)
    return rows.gather(1, ids[0, len(PROMPT) :, None])[:, 0], experts.sort(-1).values.int()


def log_probs_of(answer):
    return torch.tensor([lp for lp, *_ in answer["meta_info"]["output_token_logprobs"]])


def test_an_untied_model_is_sampled_as_transformers_computes_it_and_nothing_is_left(start_server, untied_moe):
    server = start_server(model=untied_moe)
    answer = server.generate(PROMPT, 24)
    log_probs, experts = by_transformers(untied_moe, answer)
    torch.testing.assert_close(log_probs_of(answer), log_probs, atol=1e-4, rtol=0)
    assert torch.equal(routes_of(answer, 3).sort(-1).values, experts)
    family = server.processes()
    assert len(family) >= 3  # HTTP, scheduler, detokenizer
    server.stop()
    assert not server.processes()
    gone, alive = psutil.wait_procs(family, timeout=0)
    assert len(gone) == len(family) and not alive
    assert not server.scratch.exists()


@pytest.mark.long
def test_a_dense_layer_has_a_row_of_zeros(start_server, dense_first_moe):
    server = start_server(model=dense_first_moe)
    answer = server.generate(PROMPT, 24)
    log_probs, experts = by_transformers(dense_first_moe, answer)
    torch.testing.assert_close(log_probs_of(answer), log_probs, atol=1e-4, rtol=0)
    routes = routes_of(answer, 3)
    assert not routes[:, 0].any()
    assert torch.equal(routes[:, 1:].sort(-1).values, experts)


@pytest.mark.long
def test_sglang_makes_every_layer_of_a_qwen3_moe_a_mixture(start_server, tmp_path):
    """Why such a model must be refused: it starts without a word, and samples from another one."""
    folder = save_untied_moe(tmp_path / "model", mlp_only_layers=(0,))
    answer = start_server(model=folder).generate(PROMPT, 24)
    log_probs, _ = by_transformers(folder, answer)
    assert (log_probs_of(answer) - log_probs).abs().max() > 1e-3
    assert routes_of(answer, 3)[:, 0].any()


def test_keys_are_asked_for_the_callers_flags_win_and_sigterm_ends_it_all(start_server, untied_moe):
    server = start_server("--max-running-requests", "3", "--weight-version", "w", model=untied_moe, key="k")
    assert server.call("/model_info", key="wrong")[0] == 401
    status, info = server.call("/server_info")
    assert status == 200
    assert info["max_running_requests"] == 3
    assert server.call("/model_info")[1]["weight_version"] == "w"
    family = server.processes()
    server.process.terminate()
    server.process.wait(120)
    _, alive = psutil.wait_procs(family, timeout=20)
    assert not alive
