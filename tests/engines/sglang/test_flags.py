"""What a server's flags must be: the good server passes, and every harmful flag is named with its remedy."""

from typing import Any

import pytest

from asyncrl.engines.sglang.flags import check, faults
from asyncrl.errors import EngineError
from asyncrl.types import ModelInfo

MOE = ModelInfo(layers=(0, 1, 2), num_experts=8, top_k=2, vocab_size=64)
DENSE = ModelInfo((), 0, 0, 64)

# Of a real server, cut to what is read: CPU, a model of 128 positions, all flags as they are when not given.
SERVER: dict[str, Any] = {
    "version": "0.5.23",
    "tp_size": 1,
    "dp_size": 1,
    "pp_size": 1,
    "attn_cp_size": 1,
    "tokenizer_worker_num": 1,
    "device": "cpu",
    "dtype": "float32",
    "max_req_input_len": 122,
    "max_running_requests": 256,
    "max_total_num_tokens": 30000,
    "enable_return_routed_experts": True,
    "disable_shared_experts_fusion": False,
    "is_embedding": False,
    "disaggregation_mode": "null",
    "speculative_algorithm": None,
    "dllm_algorithm": None,
    "preferred_sampling_params": None,
    "sampling_defaults": "model",
    "watermark_default_enabled": False,
    "watermark_enforce_all": False,
    "allow_auto_truncate": False,
    "enable_lora": None,
    "lora_paths": None,
    "weight_cache_mode": "off",
    "enable_eplb": False,
    "ep_num_redundant_experts": 0,
    "init_expert_location": "trivial",
    "ep_dispatch_algorithm": None,
    "elastic_ep_backend": None,
    "enable_two_batch_overlap": False,
    "enable_hierarchical_cache": False,
    "enable_lmcache": False,
    "enable_flexkv": False,
    "enable_unified_cache_external_linker": False,
    "quantization": None,
}
MODEL: dict[str, Any] = {
    "model_path": "/models/m",
    "weight_version": "default",
    "is_generation": True,
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
}


def checked(server=None, model=None, info=MOE, **rest):
    args = {"routes": True, "carrier": "collective", "num_hidden_layers": 4, **rest}
    return check({**SERVER, **(server or {})}, {**MODEL, **(model or {})}, info, **args)


def test_a_good_server_is_described():
    facts = checked(architectures=("Qwen3MoeForCausalLM",))
    assert (facts.version, facts.label, facts.model_path) == ("0.5.23", "default", "/models/m")
    assert (facts.device, facts.dtype, facts.ranks, facts.num_hidden_layers) == ("cpu", "float32", 1, 4)
    # 128 positions: 127 may hold tokens, and the last token sampled takes one of them that is never used.
    assert (facts.max_length, facts.max_prompt) == (126, 121)
    assert (facts.max_running_requests, facts.max_total_tokens, facts.shared_experts) == (256, 30000, False)


def test_the_ranks_of_a_server_are_its_tensor_parallel_ones():
    assert checked({"tp_size": 4}).ranks == 4


REFUSED = {
    "enable_return_routed_experts": (False, "--enable-return-routed-experts"),
    "is_embedding": (True, "--is-embedding"),
    "dp_size": (2, "--dp-size 1"),
    "pp_size": (2, "--tp-size"),
    "tokenizer_worker_num": (2, "--tokenizer-worker-num 1"),
    "disaggregation_mode": ("prefill", "--disaggregation-mode"),
    "speculative_algorithm": ("EAGLE3", "--speculative-algorithm"),
    "dllm_algorithm": ("LowConfidence", "--dllm-algorithm"),
    "preferred_sampling_params": ({"repetition_penalty": 1.1}, "--preferred-sampling-params"),
    "watermark_default_enabled": (True, "without watermarks"),
    "watermark_enforce_all": (True, "without watermarks"),
    "allow_auto_truncate": (True, "--allow-auto-truncate"),
    "enable_lora": (True, "--enable-lora"),
    "lora_paths": ([{"lora_name": "a"}], "--lora-paths"),
    "weight_cache_mode": ("client", "--weight-cache-mode off"),
    "enable_eplb": (True, "--enable-eplb"),
    "ep_num_redundant_experts": (8, "--ep-num-redundant-experts 0"),
    "init_expert_location": ("places.json", "--init-expert-location trivial"),
    "ep_dispatch_algorithm": ("fake", "--ep-dispatch-algorithm"),
    "elastic_ep_backend": ("mooncake", "--elastic-ep-backend"),
    "enable_two_batch_overlap": (True, "--enable-two-batch-overlap"),
    "attn_cp_size": (2, "--attn-cp-size 1"),
    "enable_hierarchical_cache": (True, "--enable-hierarchical-cache"),
    "enable_lmcache": (True, "--enable-lmcache"),
    "enable_flexkv": (True, "--enable-flexkv"),
    "enable_unified_cache_external_linker": (True, "--enable-unified-cache-external-linker"),
    "quantization": ("fp8", "weights.quantize"),
}


@pytest.mark.parametrize("key", REFUSED)
def test_a_harmful_flag_is_refused_with_its_remedy(key):
    value, remedy = REFUSED[key]
    with pytest.raises(EngineError) as caught:
        checked({key: value})
    message = str(caught.value)
    assert "\n" not in message and "(2) " not in message
    assert f"(1) {key} is " in message and remedy in message


def test_everything_that_is_wrong_stands_in_one_error():
    with pytest.raises(EngineError) as caught:
        checked({key: value for key, (value, _) in REFUSED.items()})
    message = str(caught.value)
    assert all(f") {key} is " in message for key in REFUSED)


@pytest.mark.parametrize("version", ["0.5.22", "0.5.22.post3", "0.4.99"])
def test_an_old_version_is_refused(version):
    with pytest.raises(EngineError, match=rf"version of /server_info is {version}.*update SGLang to 0\.5\.23"):
        checked({"version": version})


@pytest.mark.parametrize("version", ["0.5.23", "0.5.23.post1", "0.6.0rc1", "1.0.0", "0.5.24.dev3+gabc", "0.0.0.dev1"])
def test_a_new_one_passes_and_so_does_a_build_without_a_number(version):
    assert checked({"version": version}).version == version


def test_routes_and_updates_are_only_asked_of_a_server_that_must_give_them():
    flags = {"enable_return_routed_experts": False, "enable_hierarchical_cache": True, "enable_two_batch_overlap": True}
    checked(flags, routes=False)
    checked(flags, info=DENSE)
    checked({"weight_cache_mode": "client", "quantization": "fp8"}, carrier=None)


def test_another_model_is_refused():
    with pytest.raises(EngineError, match=r"architectures of /model_info is \['Qwen3MoeForCausalLM'\].*'LlamaForC"):
        checked(architectures=("LlamaForCausalLM",))


def test_fused_shared_experts_are_refused_where_weights_are_sent():
    with pytest.raises(EngineError, match="--disable-shared-experts-fusion"):
        checked(shared_experts=1)
    assert not checked({"disable_shared_experts_fusion": True}, shared_experts=1).shared_experts
    assert checked(shared_experts=1, carrier=None).shared_experts


def test_a_quantized_server_takes_quantized_weights():
    assert checked({"quantization": "fp8"}, quantize="fp8_block")


@pytest.mark.parametrize("label", [None, "", 3])
def test_a_server_without_a_label_is_refused(label):
    with pytest.raises(EngineError, match="weight_version of /model_info"):
        checked(model={"weight_version": label})


def test_something_else_that_answers_is_refused():
    names = {fault.name for fault in faults({}, {}, MOE, routes=True, carrier="disk")}
    assert names == {
        "version of /server_info",
        "tp_size of /server_info",
        "max_req_input_len of /server_info",
        "weight_version of /model_info",
        "enable_return_routed_experts",
    }


def test_a_model_that_only_embeds_is_refused():
    with pytest.raises(EngineError, match="is_generation"):
        checked(model={"is_generation": False})
