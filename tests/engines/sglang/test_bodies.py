"""Every JSON body that is sent, word for word. A change here is a change of what servers must understand."""

from __future__ import annotations

import inspect
import json

import pytest

from asyncrl.engines.sglang import bodies
from asyncrl.types import SamplingParams

SAMPLED = {
    "max_new_tokens": 32,
    "min_new_tokens": 0,
    "temperature": 0.7,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "n": 1,
    "stop_token_ids": [1, 7],
    "ignore_eos": False,
    "stop": None,
    "stop_regex": None,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "custom_params": None,
}
DENSE = {
    "rid": "g0-1",
    "input_ids": [3, 4],
    "sampling_params": SAMPLED,
    "return_logprob": True,
    "logprob_start_len": -1,
    "top_logprobs_num": 0,
    "return_text_in_logprobs": False,
    "stream": False,
    "extra_key": "0.4",
}
PARAMS = SamplingParams(0.7, 32, (7, 1))

CASES = {
    "generate": (bodies.generate([3, 4], "g0-1", PARAMS, routes=False, cache_key="0.4"), DENSE),
    "generate moe": (
        bodies.generate([3, 4], "g0-1", PARAMS, routes=True, cache_key="0.4"),
        DENSE | {"return_routed_experts": True, "routed_experts_start_len": 0},
    ),
    "generate second turn": (
        bodies.generate([3, 4], "g0-1", PARAMS, routes=True, cache_key="0.4", routes_from=1),
        DENSE | {"return_routed_experts": True, "routed_experts_start_len": 1},
    ),
    "sampling_params": (bodies.sampling_params(PARAMS), SAMPLED),
    "sampling_params greedy": (
        bodies.sampling_params(SamplingParams(0.7, 32, (7, 1), greedy=True)),
        SAMPLED | {"temperature": 0.0},
    ),
    "sampling_params endless": (
        bodies.sampling_params(SamplingParams(0.7, 32, ())),
        SAMPLED | {"stop_token_ids": [], "ignore_eos": True},
    ),
    "abort": (bodies.abort("g0-1"), {"rid": "g0-1", "abort_all": False}),
    "abort_all": (bodies.abort_all(), {"rid": "", "abort_all": True}),
    "pause in_place": (bodies.pause("in_place"), {"mode": "in_place"}),
    "pause abort": (bodies.pause("abort"), {"mode": "abort"}),
    "resume": (bodies.resume(), {"torch_empty_cache": True}),
    "init_group": (
        bodies.init_group("10.0.0.1", 4001, "asyncrl-g0-1-x", 4, "nccl"),
        {
            "master_address": "10.0.0.1",
            "master_port": 4001,
            "rank_offset": 1,
            "world_size": 5,
            "group_name": "asyncrl-g0-1-x",
            "backend": "nccl",
        },
    ),
    "destroy_group": (bodies.destroy_group("asyncrl-g0-1-x"), {"group_name": "asyncrl-g0-1-x"}),
    "begin_update": (bodies.begin_update(), {"selector": "all"}),
    "end_update": (bodies.end_update(), {}),
    "update_distributed": (
        bodies.update_distributed([("a", "bfloat16", (2, 3)), ("b", "float8_e4m3fn", ())], "grp", "0.4"),
        {
            "names": ["a", "b"],
            "dtypes": ["bfloat16", "float8_e4m3fn"],
            "shapes": [[2, 3], []],
            "group_name": "grp",
            "load_format": "flattened_bucket",
            "selector": "all",
            "flush_cache": False,
            "abort_all_requests": False,
            "weight_version": "0.4",
            "torch_empty_cache": False,
        },
    ),
    "update_distributed first bucket": (
        bodies.update_distributed([("a", "float32", (1,))], "grp", None)["weight_version"],
        None,
    ),
    "update_disk": (
        bodies.update_disk("/weights/v0.4", "0.4"),
        {
            "model_path": "/weights/v0.4",
            "load_format": None,
            "weight_version": "0.4",
            "flush_cache": False,
            "abort_all_requests": False,
            "keep_pause": True,
            "torch_empty_cache": False,
            "is_async": False,
        },
    ),
    "mark_version": (bodies.mark_version("unknown"), {"new_version": "unknown", "abort_all_requests": False}),
    "check_weights": (bodies.check_weights(), {"action": "checksum", "selector": "all"}),
    "flush": (bodies.flush(), {}),
}


@pytest.mark.parametrize("name", CASES)
def test_body(name):
    made, pinned = CASES[name]
    assert made == pinned
    assert json.loads(json.dumps(made)) == pinned


def test_every_body_is_pinned():
    made = {
        name for name, function in inspect.getmembers(bodies, inspect.isfunction)
        if function.__module__ == bodies.__name__ and not name.startswith("_")
    }  # fmt: skip
    assert made == {name.split()[0] for name in CASES}


def test_the_mode_that_computes_old_routes_again_is_never_sent():
    assert "retract" not in str(inspect.signature(bodies.pause))


def test_paths():
    paths = {name: value for name, value in vars(bodies).items() if isinstance(value, str) and value.startswith("/")}
    paths = {name: value for name, value in paths.items() if name.isupper()}
    assert paths == {
        "GENERATE": "/generate",
        "ABORT": "/abort_request",
        "PAUSE": "/pause_generation",
        "CONTINUE": "/continue_generation",
        "FLUSH": "/flush_cache",
        "INIT_GROUP": "/init_weights_update_group",
        "DESTROY_GROUP": "/destroy_weights_update_group",
        "BEGIN_UPDATE": "/begin_weight_update",
        "END_UPDATE": "/end_weight_update",
        "UPDATE_DISTRIBUTED": "/update_weights_from_distributed",
        "UPDATE_DISK": "/update_weights_from_disk",
        "MARK_VERSION": "/update_weight_version",
        "CHECK": "/weights_checker",
        "HEALTH": "/health_generate",
        "MODEL_INFO": "/model_info",
        "SERVER_INFO": "/server_info",
    }
