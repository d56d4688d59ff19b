"""Every JSON body that is sent to a server, of SGLang 0.5.23's API. Pure functions; knows no HTTP.

Whatever could change what is sampled, or when weights count as loaded, is sent explicitly: a server may have other
defaults (--preferred-sampling-params), and another build other ones still.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from asyncrl.types import SamplingParams

Json = dict[str, Any]
TensorSpec = tuple[str, str, tuple[int, ...]]
"""Name, dtype (without `torch.`) and shape of one tensor."""

GENERATE = "/generate"
ABORT = "/abort_request"
PAUSE = "/pause_generation"
CONTINUE = "/continue_generation"
FLUSH = "/flush_cache"
INIT_GROUP = "/init_weights_update_group"
DESTROY_GROUP = "/destroy_weights_update_group"
BEGIN_UPDATE = "/begin_weight_update"
END_UPDATE = "/end_weight_update"
UPDATE_DISTRIBUTED = "/update_weights_from_distributed"
UPDATE_DISK = "/update_weights_from_disk"
MARK_VERSION = "/update_weight_version"
CHECK = "/weights_checker"
HEALTH = "/health_generate"
MODEL_INFO = "/model_info"
SERVER_INFO = "/server_info"

EVERY_TOKEN = -1
"""top_k of the whole vocabulary."""


def generate(
    prompt_ids: Sequence[int],
    rid: str,
    sampling: SamplingParams,
    *,
    routes: bool,
    cache_key: str,
    routes_from: int = 0,
) -> Json:
    """One sample of one prompt of token ids, with log-probs of what it samples.

    routes: also return routed experts, of the rows from routes_from on. cache_key: only requests with the same one
    share the KV of a common prefix.
    """
    body = {
        "rid": rid,
        "input_ids": [int(token) for token in prompt_ids],
        "sampling_params": sampling_params(sampling),
        "return_logprob": True,
        "logprob_start_len": -1,
        "top_logprobs_num": 0,
        "return_text_in_logprobs": False,
        "stream": False,
        "extra_key": cache_key,
    }
    if routes:
        body |= {"return_routed_experts": True, "routed_experts_start_len": routes_from}
    return body


def sampling_params(sampling: SamplingParams) -> Json:
    """The whole distribution at its temperature: nothing cut off, penalised, biased or constrained.

    A server ends a response at stop_token_ids, and at the end tokens of its own that it reads from the model folder;
    without stop tokens neither counts (ignore_eos would switch off both). Greedy is temperature 0; the log-probs are
    then those at temperature 1.
    """
    return {
        "max_new_tokens": sampling.max_new_tokens,
        "min_new_tokens": 0,
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_p": 1.0,
        "top_k": EVERY_TOKEN,
        "min_p": 0.0,
        "frequency_penalty": 0.0,
        "presence_penalty": 0.0,
        "repetition_penalty": 1.0,
        "logit_bias": None,
        "n": 1,
        "stop_token_ids": sorted(sampling.stop_token_ids),
        "ignore_eos": not sampling.stop_token_ids,
        "stop": None,
        "stop_regex": None,
        "json_schema": None,
        "regex": None,
        "ebnf": None,
        "structural_tag": None,
        "custom_params": None,
    }


def abort(rid: str) -> Json:
    """End one request; its own call returns what it has. Unknown ids are ignored."""
    return {"rid": rid, "abort_all": False}


def abort_all() -> Json:
    """End every request of the server."""
    return {"rid": "", "abort_all": True}


def pause(mode: Literal["in_place", "abort"]) -> Json:
    """Sample nothing until `resume`: in_place keeps running requests and their KV, abort ends them.

    SGLang's third mode, retract, is left out: it computes the routes of old tokens again under the new weights.
    """
    return {"mode": mode}


def resume() -> Json:
    """Go on after `pause`. The server does not ask for the memory back that the update's transients left cached."""
    return {"torch_empty_cache": True}


def init_group(host: str, port: int, group: str, ranks: int, backend: str) -> Json:
    """Join the group whose rank 0 is the learner's; the server's processes are ranks 1 .. ranks."""
    return {
        "master_address": host,
        "master_port": port,
        "rank_offset": 1,
        "world_size": 1 + ranks,
        "group_name": group,
        "backend": backend,
    }


def destroy_group(group: str) -> Json:
    """Leave a group."""
    return {"group_name": group}


def begin_update() -> Json:
    """Open the session in which tensors arrive."""
    return {"selector": "all"}


def end_update() -> Json:
    """Close the session: weights are packed again for the kernels."""
    return {}


def update_distributed(
    tensors: Sequence[TensorSpec], group: str, version: str | None, *, flush_cache: bool = False
) -> Json:
    """Receive one bucket: one broadcast of the tensors' bytes, back to back. version: with the last bucket only."""
    return {
        "names": [name for name, _, _ in tensors],
        "dtypes": [dtype for _, dtype, _ in tensors],
        "shapes": [list(shape) for _, _, shape in tensors],
        "group_name": group,
        "load_format": "flattened_bucket",
        "selector": "all",
        "flush_cache": flush_cache,
        "abort_all_requests": False,
        "weight_version": version,
        "torch_empty_cache": False,
    }


def update_disk(folder: str, version: str, *, flush_cache: bool = False) -> Json:
    """Load a model folder; the server's pause stays as it was."""
    return {
        "model_path": folder,
        "load_format": None,
        "weight_version": version,
        "flush_cache": flush_cache,
        "abort_all_requests": False,
        "keep_pause": True,
        "torch_empty_cache": False,
        "is_async": False,
    }


def mark_version(label: str) -> Json:
    """Call the weights as they are by another label."""
    return {"new_version": label, "abort_all_requests": False}


def check_weights() -> Json:
    """Ask for checksums of all tensors."""
    return {"action": "checksum", "selector": "all"}


def flush() -> Json:
    """Forget all KV."""
    return {}
