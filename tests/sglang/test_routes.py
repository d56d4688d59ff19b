"""Routes of a real server, decoded: prefix-cache hits, dense layers, turns and retractions (B01, B02, B07, B08)."""

import json
import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from asyncrl.engines.sglang.routes import RouteDecoder
from asyncrl.models.describe import describe

SYMBOLS = range(2, 16)
"""Tokens of the tests' models that are neither padding nor the end."""


def decoder_of(server):
    layers = json.loads((server.model / "config.json").read_text())["num_hidden_layers"]
    return RouteDecoder(describe(server.model), layers)


def fresh_prompt(length, seed=None):
    """Tokens that no other test has sent to a server that they share."""
    rng = np.random.default_rng(int.from_bytes(os.urandom(8), "big") if seed is None else seed)
    return rng.choice(SYMBOLS, length).tolist()


def routes_of(decoder, prompt, answer, start=0):
    """Routes [S - 1 - start, L, K] with the experts of each row ascending."""
    meta = answer["meta_info"]
    tokens = len(prompt) + len(answer["output_ids"])
    return np.sort(decoder.decode(meta["routed_experts"], tokens, start, request=meta["id"]), -1)


def routes_by_transformers(server, ids):
    """What the model chooses for these tokens without an engine, [S - 1, L, K] ascending."""
    model = AutoModelForCausalLM.from_pretrained(server.model, dtype=torch.float32).eval()
    with torch.no_grad():
        out = model(torch.tensor([ids]), output_router_logits=True)
    chosen = torch.stack([logits[:-1].topk(2, -1).indices for logits in out.router_logits], 1)
    return chosen.sort(-1).values.numpy()


def test_b07_prompt_rows_of_a_prefix_cache_hit_are_those_of_the_first_request(server):
    decoder, prompt = decoder_of(server), fresh_prompt(40)
    first, second = server.generate(prompt, 6), server.generate(prompt, 6)
    # The same beginning, another end: what is cached belongs to this request all the same.
    branch = [*prompt[:25], *fresh_prompt(15)]
    third = server.generate(branch, 6)
    # By chance it may begin as a prompt does that another test left in the cache.
    assert first["meta_info"]["cached_tokens"] < 16
    assert second["meta_info"]["cached_tokens"] >= 32
    assert third["meta_info"]["cached_tokens"] >= 16
    rows = [routes_of(decoder, p, a) for p, a in ((prompt, first), (prompt, second), (branch, third))]
    assert [len(r) for r in rows] == [45, 45, 45]
    np.testing.assert_array_equal(rows[0][:40], rows[1][:40])
    np.testing.assert_array_equal(rows[0][:25], rows[2][:25])
    assert (rows[0][25:40] != rows[2][25:40]).any()


def test_b01_turns_merge_to_the_rows_of_one_request_in_both_reply_forms(server):
    decoder = decoder_of(server)
    cropped, full = [], []
    tokens, counts = fresh_prompt(9), []
    for turn, new in enumerate((5, 4, 7)):
        start = len(tokens) - 1 if turn else 0
        if turn:
            tokens = tokens + fresh_prompt(3)  # what a tool said
        answer = server.generate(tokens, new, routed_experts_start_len=start)
        tokens = tokens + answer["output_ids"]
        blob, name = answer["meta_info"]["routed_experts"], f"turn {turn}"
        cropped.append(decoder.decode(blob, len(tokens), start, request=name))
        counts.append(len(cropped[-1]))
        # The same inputs from row 0 on, as a server answers that knows no start: the last token is never one.
        again = server.generate(tokens[:-1], 1)
        assert again["meta_info"]["prompt_tokens"] == len(tokens) - 1
        full.append(decoder.decode(again["meta_info"]["routed_experts"], len(tokens), start, request=f"{name} in full"))
    assert (len(tokens), counts) == (31, [13, 7, 10])
    merged = np.concatenate(cropped)
    assert merged.shape[0] == 30
    assert merged.tobytes() == np.concatenate(full).tobytes()
    # B02: so the row at each border is the true one.
    whole = server.generate(tokens, 1)
    np.testing.assert_array_equal(np.sort(merged, -1), routes_of(decoder, tokens, whole)[:30])


def test_b02_a_request_of_one_new_token_has_its_last_prompt_row(server):
    prompt = fresh_prompt(6)
    answer = server.generate(prompt, 1)
    assert routes_of(decoder_of(server), prompt, answer).shape[0] == 6
    # All but one row were asked for already.
    late = server.generate(prompt, 1, routed_experts_start_len=5)
    rows = routes_of(decoder_of(server), prompt, late, 5)
    np.testing.assert_array_equal(rows, routes_of(decoder_of(server), prompt, answer)[5:])


def test_b07_b08_retracted_requests_of_a_model_with_a_dense_layer_have_full_and_true_rows(
    start_server, dense_first_moe
):
    flags = ("--max-total-tokens", "512", "--schedule-conservativeness", "0.05")
    server = start_server(*flags, model=dense_first_moe)
    decoder = decoder_of(server)
    assert (decoder.info.layers, decoder.num_hidden_layers) == ((1, 2), 3)
    prompts = [fresh_prompt(12, seed) for seed in range(8)]
    # With ignore_eos SGLang keeps room for the whole response, and nobody is ever retracted.
    sampling = {"max_new_tokens": 100, "min_new_tokens": 100, "temperature": 1.0}
    with ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda p: server.generate(p, 100, sampling_params=sampling), prompts))
    retracted = [a["meta_info"]["num_retractions"] for a in answers]
    assert max(retracted) > 0, "8 x 112 tokens do not fit 512: somebody must have been retracted"
    for prompt, answer in zip(prompts, answers, strict=True):
        rows = routes_of(decoder, prompt, answer)
        assert rows.shape == (111, 2, 2)
        np.testing.assert_array_equal(rows, routes_by_transformers(server, prompt + answer["output_ids"]))
