"""What /server_info and /model_info of an SGLang server must say before anything is sampled. Pure; knows no HTTP.

A flag that changes the sampling distribution, the meaning of an expert id or who gets new weights corrupts training
without an error, so it is refused with the flag to set. Lines in comments are of SGLang 0.5.23, under sglang/srt.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from asyncrl.errors import EngineError
from asyncrl.types import ModelInfo

OLDEST = (0, 5, 23)
"""First version with weight_versions in replies and begin/end of a weight update."""

_RESERVED = 4
"""/generate cuts max_new_tokens without an error to what a sequence may have, which is max_req_input_len + 4 in all:
managers/tp_worker.py:572 (max_req_input_len = max_req_len - 5), managers/scheduler.py:2714 (max_req_len - P - 1)."""


class Fault(NamedTuple):
    """One thing that is wrong: the flag or field, what it is, why that matters and what to do."""

    name: str
    found: str
    why: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.name} is {self.found}: {self.why}; {self.remedy}"


@dataclass(frozen=True, slots=True)
class Facts:
    """What a checked server is. ranks: its processes that join an update group. max_length bounds P + max_new_tokens,
    max_prompt bounds P. shared_experts: whether it may have fused shared experts into the routed ones. overlap: whether
    a step may be on its way while the server pauses."""

    version: str
    label: str
    model_path: str
    device: str
    dtype: str
    ranks: int
    num_hidden_layers: int
    max_length: int
    max_prompt: int
    max_total_tokens: int
    max_running_requests: int
    shared_experts: bool
    overlap: bool


class _Rule(NamedTuple):
    """A key of /server_info, the values that are harmless, and for what others are not: all, routes or updates."""

    key: str
    good: Callable[[Any], bool]
    why: str
    remedy: str
    needed: str = "all"


def _off(value: Any) -> bool:
    return value in (None, False, 0, "", "null", "none", "off") or value in ([], {})


def _one(value: Any) -> bool:
    return value in (None, 1)


_SLOTS = "experts lie in slots: routes may name those, and updates cannot be verified"
_LOST = "a prefix that comes back from there has other tokens' routes"

_RULES = (
    _Rule("is_embedding", _off, "it does not generate", "start it without --is-embedding"),
    # data_parallel_controller.py: a replica of its own for each; tokenizer_control_mixin.py:451 asserts 1 for groups.
    _Rule(
        "dp_size", _one, "an update group reaches one replica only", "start one server for each replica, --dp-size 1"
    ),
    # The rank in a group is rank_offset + tp_rank, the same on every stage; a stage captures its own layers only.
    _Rule("pp_size", _one, "ranks of stages collide, and routes are one stage's", "use --tp-size instead of --pp-size"),
    # tokenizer_manager.py:2267 pauses the worker that was asked; the others go on and keep their version.
    _Rule("tokenizer_worker_num", _one, "a pause stops one of the workers", "start it with --tokenizer-worker-num 1"),
    _Rule("disaggregation_mode", _off, "prefill and decode are two servers", "start it without --disaggregation-mode"),
    # Draft tokens: log-probs are of the verifier, capture sizes leave num_verify_tokens out (routed_experts.py FIXME).
    _Rule(
        "speculative_algorithm",
        _off,
        "routes and versions of draft tokens are not those of the tokens",
        "start it without --speculative-algorithm",
    ),
    _Rule("dllm_algorithm", _off, "it does not sample token by token", "start it without --dllm-algorithm"),
    # tokenizer_manager.py:1549 merges them under every request. sampling_defaults is read by the OpenAI routes only.
    _Rule(
        "preferred_sampling_params",
        _off,
        "they change every request's distribution",
        "start it without --preferred-sampling-params",
    ),
    # sampling/watermarking/core.py:218; without default or enforcement only requests that ask for it are marked.
    _Rule("watermark_default_enabled", _off, "tokens are not sampled from the policy", "start it without watermarks"),
    _Rule("watermark_enforce_all", _off, "tokens are not sampled from the policy", "start it without watermarks"),
    # tokenizer_manager.py:1339, 1360: longer requests are cut, not refused.
    _Rule("allow_auto_truncate", _off, "prompts are cut to fit", "start it without --allow-auto-truncate"),
    _Rule("enable_lora", _off, "tensors have other names and an adapter on top", "start it without --enable-lora"),
    _Rule("lora_paths", _off, "tensors have other names and an adapter on top", "start it without --lora-paths"),
    # model_runner_components/weight_updater.py:159 refuses every update.
    _Rule(
        "weight_cache_mode",
        _off,
        "weights are shared with other servers, and updates are refused",
        "start it with --weight-cache-mode off",
        "updates",
    ),
    # Slots of w13/w2 are then copies of experts in an order of their own, which also changes between updates. 0.5.23
    # captures ids before it maps them to slots (layers/moe/topk.py:2574), other builds after it, and no reply says
    # which. "fake" draws random logits (eplb/expert_location_dispatch.py:80).
    _Rule("enable_eplb", _off, _SLOTS, "start it without --enable-eplb"),
    _Rule(
        "ep_num_redundant_experts",
        _off,
        _SLOTS,
        "start it with --ep-num-redundant-experts 0",
    ),
    _Rule(
        "init_expert_location",
        lambda value: value in (None, "trivial"),
        _SLOTS,
        "start it with --init-expert-location trivial",
    ),
    _Rule("ep_dispatch_algorithm", _off, _SLOTS, "start it without --ep-dispatch-algorithm"),
    _Rule("elastic_ep_backend", _off, "experts move between ranks", "start it without --elastic-ep-backend"),
    # state_capturer/base.py:49 writes every half batch to rows from 0 on.
    _Rule(
        "enable_two_batch_overlap",
        _off,
        "the second half of a batch overwrites the routes of the first",
        "start it without --enable-two-batch-overlap",
        "routes",
    ),
    # Captured rows are the rank's own part of the prompt; nothing gathers them.
    _Rule("attn_cp_size", _one, "a rank captures its part of a prompt", "start it with --attn-cp-size 1", "routes"),
    # Routes lie in a buffer by KV slot (state_capturer/base.py:194), which none of these stores along with the KV.
    _Rule("enable_hierarchical_cache", _off, _LOST, "start it without --enable-hierarchical-cache", "routes"),
    _Rule("enable_lmcache", _off, _LOST, "start it without --enable-lmcache", "routes"),
    _Rule("enable_flexkv", _off, _LOST, "start it without --enable-flexkv", "routes"),
    _Rule(
        "enable_unified_cache_external_linker",
        _off,
        _LOST,
        "start it without --enable-unified-cache-external-linker",
        "routes",
    ),
)


def check(
    server_info: Mapping[str, Any],
    model_info: Mapping[str, Any],
    info: ModelInfo,
    *,
    routes: bool,
    carrier: str | None,
    num_hidden_layers: int,
    architectures: Sequence[str] = (),
    shared_experts: int = 0,
    quantize: str = "none",
) -> Facts:
    """Facts of a server that a run can use, by its /server_info and /model_info; one EngineError with every fault.

    routes: whether the run needs routes. carrier: collective, disk, or None when its weights stay as they are.
    num_hidden_layers, architectures and shared_experts are of the model's config.json, quantize is weights.quantize.
    """
    found = list(
        faults(
            server_info,
            model_info,
            info,
            routes=routes,
            carrier=carrier,
            architectures=architectures,
            shared_experts=shared_experts,
            quantize=quantize,
        )
    )
    if found:
        # In one line, which is what a supervisor shows of a role's log.
        numbered = " ".join(f"({i}) {fault}" for i, fault in enumerate(found, 1))
        raise EngineError(f"the SGLang server cannot be used as it was started: {numbered}")
    longest = int(server_info["max_req_input_len"])
    return Facts(
        version=str(server_info["version"]),
        label=str(model_info["weight_version"]),
        model_path=str(model_info.get("model_path", "")),
        device=str(server_info.get("device", "")),
        dtype=str(server_info.get("dtype", "")),
        ranks=int(server_info["tp_size"]),
        num_hidden_layers=num_hidden_layers,
        max_length=longest + _RESERVED,
        max_prompt=longest - 1,
        max_total_tokens=int(server_info.get("max_total_num_tokens") or 0),
        max_running_requests=int(server_info.get("max_running_requests") or 0),
        shared_experts=_may_fuse(server_info, shared_experts),
        overlap=server_info.get("disable_overlap_schedule") is not True,
    )


def faults(
    server_info: Mapping[str, Any],
    model_info: Mapping[str, Any],
    info: ModelInfo,
    *,
    routes: bool,
    carrier: str | None,
    architectures: Sequence[str] = (),
    shared_experts: int = 0,
    quantize: str = "none",
) -> Iterator[Fault]:
    """Everything that is wrong with a server, by `check`'s arguments."""
    yield from _answers(server_info, model_info)
    yield from _version(server_info.get("version"))
    yield from _model(model_info, architectures)
    # Before any rule about routes, since it is what a user forgets.
    if routes and info.is_moe and server_info.get("enable_return_routed_experts") is not True:
        yield Fault(
            "enable_return_routed_experts",
            _words(server_info.get("enable_return_routed_experts")),
            f"the model has {len(info.layers)} MoE layers, whose routes the run needs",
            "start it with --enable-return-routed-experts",
        )
    asked = {"all", *(["routes"] if routes and info.is_moe else []), *(["updates"] if carrier else [])}
    for rule in _RULES:
        value = server_info.get(rule.key)
        if rule.needed in asked and not rule.good(value):
            yield Fault(rule.key, _words(value), rule.why, rule.remedy)
    yield from _updates(server_info, carrier, shared_experts, quantize)


def _answers(server_info: Mapping[str, Any], model_info: Mapping[str, Any]) -> Iterator[Fault]:
    """Fields that are read as they are; an answer without them is not of an SGLang server."""
    for key in ("tp_size", "max_req_input_len"):
        value = server_info.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            yield Fault(f"{key} of /server_info", _words(value), "it must be a positive number", "is this SGLang?")
    label = model_info.get("weight_version")
    if not isinstance(label, str) or not label:
        yield Fault(
            "weight_version of /model_info",
            _words(label),
            "tokens would have no version",
            "update SGLang, or start it with --weight-version",
        )
    if model_info.get("is_generation") is False:
        yield Fault("is_generation of /model_info", "false", "it does not generate", "serve a causal language model")


def _version(version: Any) -> Iterator[Fault]:
    """Builds that name no number, as 0.0.0.dev1, are left to the other checks."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", str(version or ""))
    if found is None:
        if version is None:
            yield Fault("version of /server_info", "missing", "it is no SGLang of our time", "update SGLang")
        return
    numbers = tuple(map(int, found.groups()))
    if (0, 0, 0) < numbers < OLDEST:
        yield Fault(
            "version of /server_info",
            str(version),
            "replies have no weight_versions and weights no begin and end of an update",
            f"update SGLang to {'.'.join(map(str, OLDEST))} or newer",
        )


def _model(model_info: Mapping[str, Any], architectures: Sequence[str]) -> Iterator[Fault]:
    served = model_info.get("architectures")
    if architectures and isinstance(served, list) and not set(served) & set(architectures):
        yield Fault(
            "architectures of /model_info",
            _words(served),
            f"the run's model is {_words(list(architectures))}",
            f"serve model.path, not {model_info.get('model_path')}",
        )


def _updates(
    server_info: Mapping[str, Any], carrier: str | None, shared_experts: int, quantize: str
) -> Iterator[Fault]:
    if not carrier:
        return
    # Routes are right (routed_experts.py:132 drops those columns), but w13/w2 then hold one expert more than sent,
    # and where a shared expert lies depends on the model: its checksums cannot be compared.
    if _may_fuse(server_info, shared_experts):
        yield Fault(
            "disable_shared_experts_fusion",
            _words(server_info.get("disable_shared_experts_fusion")),
            f"the {shared_experts} shared experts may lie among the routed ones, where updates cannot be verified",
            "start it with --disable-shared-experts-fusion",
        )
    # Fp8 parameters take bf16 values without an error and without a scale.
    if server_info.get("quantization") and quantize == "none":
        yield Fault(
            "quantization",
            _words(server_info["quantization"]),
            "weights are sent as they are trained, without its scales",
            "start it without --quantization, or set weights.quantize",
        )


def _may_fuse(server_info: Mapping[str, Any], shared_experts: int) -> bool:
    """Whether shared experts may be fused. False is the default of the flag, also for models that have none."""
    return shared_experts > 0 and server_info.get("disable_shared_experts_fusion") is not True


def _words(value: Any) -> str:
    """A value as a user would type it, in short."""
    if value is None:
        return "missing"
    if isinstance(value, bool):
        return str(value).lower()
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
