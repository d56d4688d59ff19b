"""One reply of /generate -> a Completion: what it holds, and every way in which a reply is refused."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from asyncrl.engines.sglang import bodies
from asyncrl.engines.sglang.answers import Aborted, Asked, completion_of, has_stale_prefix
from asyncrl.engines.sglang.routes import RouteDecoder
from asyncrl.errors import EngineError, RouteError, TrajectoryError
from asyncrl.types import SamplingParams, Segment, Version
from tests.helpers.fake_sglang import INFO, LAYERS, honest, routes_of

START, FOURTH, FIFTH = Version(0, -1), Version(0, 4), Version(0, 5)
VERSIONS = {"base": START, "0.4": FOURTH, "0.5": FIFTH}
SAMPLING = SamplingParams(1.0, 6, (7,))
PROMPT = [3, 4, 5]
"""P = 3, T = 6: rows of the response's routes begin at 2."""
ASKED = Asked("g0-1", len(PROMPT), SAMPLING, FOURTH)


def reply_of(sampling: SamplingParams = SAMPLING, routes: bool = True, **meta: Any) -> dict[str, Any]:
    """An honest reply under version 0.4, with some of its meta_info changed."""
    body = bodies.generate(PROMPT, "g0-1", sampling, routes=routes, cache_key="0.4")
    reply = honest(body, "0.4")
    reply["meta_info"] |= meta
    return reply


def decoded(reply: Any, asked: Asked = ASKED, routes: bool = True) -> Any:
    return completion_of(reply, asked, VERSIONS, RouteDecoder(INFO, LAYERS) if routes else None)


def spans(*parts: tuple[str, int, int]) -> list[dict[str, Any]]:
    return [{"version": label, "start": start, "end": end} for label, start, end in parts]


def test_what_a_completion_holds():
    done = decoded(reply_of(cached_tokens=2))
    assert done.token_ids.tolist() == [2, 3, 4, 5, 6, 7] and done.token_ids.dtype == np.int32
    assert done.logprobs.tolist() == [-0.5, -1.5, -2.5, -3.5, -4.5, -5.5] and done.logprobs.dtype == np.float32
    assert done.segments == (Segment(FOURTH, 0, 6),) and done.finish_reason == "length"
    assert done.routes.shape == (8, 2, 2) and done.routes_from == 0
    assert done.extra == {"cached_tokens": 2.0, "num_retractions": 0.0} and done.sampled is None


def test_a_dense_model_has_no_routes():
    done = decoded(reply_of(routes=False), routes=False)
    assert done.routes is None and done.routes_from == 0


def test_the_stop_token_stays():
    reply = reply_of(finish_reason={"type": "stop", "matched": 7})
    assert decoded(reply).token_ids[-1] == 7
    assert decoded(reply).finish_reason == "stop"


def test_a_missing_log_prob_stays_missing():
    reply = reply_of()
    reply["meta_info"]["output_token_logprobs"][2][0] = None
    assert np.isnan(decoded(reply).logprobs).tolist() == [False, False, True, False, False, False]


def test_an_abort_is_given_back_as_one():
    body = bodies.generate(PROMPT, "g0-1", SAMPLING, routes=True, cache_key="0.4")
    assert decoded(honest(body, "0.4", "abort")) == Aborted("Aborted", 3)
    # In the queue: nothing was sampled, and no version is known.
    empty = {"output_ids": [], "meta_info": {"id": "g0-1", "finish_reason": {"type": "abort", "message": None}}}
    assert decoded(empty) == Aborted("no reason given", 0)


def test_versions_are_segments():
    done = decoded(reply_of(weight_versions=spans(("0.4", 0, 2), ("0.5", 2, 6))))
    assert done.segments == (Segment(FOURTH, 0, 2), Segment(FIFTH, 2, 6)) and done.routes_from == 0


@pytest.mark.parametrize(
    ("changed", "unsure"),
    [
        ([("0.4", 0, 6)], []),
        ([("0.4", 0, 2), ("0.5", 2, 6)], [2]),
        ([("0.4", 0, 0), ("0.5", 0, 6)], [0]),
        ([("0.5", 0, 6)], [0]),
    ],
)
def test_the_first_token_after_an_update_may_be_of_the_weights_before(changed, unsure):
    reply = reply_of(weight_versions=spans(*changed))
    done = decoded(reply)
    assert ([] if done.sampled is None else np.flatnonzero(~done.sampled).tolist()) == unsure
    assert completion_of(reply, ASKED, VERSIONS, RouteDecoder(INFO, LAYERS), overlap=False).sampled is None


def test_a_version_without_a_token_is_no_segment():
    done = decoded(reply_of(weight_versions=spans(("0.4", 0, 0), ("0.5", 0, 6))))
    assert done.segments == (Segment(FIFTH, 0, 6),)


@pytest.mark.parametrize(
    ("changed", "retractions", "first_known"),
    [
        ([("0.4", 0, 6)], 0, 0),
        ([("0.4", 0, 6)], 2, 0),
        ([("0.4", 0, 2), ("0.5", 2, 6)], 0, 0),
        ([("0.4", 0, 2), ("0.5", 2, 6)], 1, 2 + 2),
        # Submitted before an update and begun after it, perhaps with a part of its prompt run before.
        ([("0.5", 0, 6)], 0, 2),
    ],
)
def test_routes_of_tokens_that_were_computed_again_are_unknown(changed, retractions, first_known):
    done = decoded(reply_of(weight_versions=spans(*changed), num_retractions=retractions))
    assert done.routes_from == first_known and len(done.routes) == 8


@pytest.mark.parametrize("form", ["full", "crop"])
@pytest.mark.parametrize("retractions", [0, 1])
def test_a_turn_has_the_rows_that_its_caller_lacks_in_both_reply_forms(form, retractions):
    asked = replace(ASKED, rows=2)
    reply = reply_of(weight_versions=spans(("0.4", 0, 2), ("0.5", 2, 6)), num_retractions=retractions)
    if form == "crop":
        rows = np.frombuffer(base64.b64decode(reply["meta_info"]["routed_experts"]), "<i4").reshape(8, LAYERS, 2)
        reply["meta_info"]["routed_experts"] = base64.b64encode(rows[2:].tobytes()).decode()
    done = decoded(reply, asked)
    np.testing.assert_array_equal(done.routes, decoded(reply_of()).routes[2:])
    # Counted from row 0, whatever the caller has.
    assert done.routes_from == (2 + 2 if retractions else 0)


def test_a_stale_prefix():
    assert not has_stale_prefix(decoded(reply_of(cached_tokens=2)), ASKED)
    assert not has_stale_prefix(decoded(reply_of(weight_versions=spans(("0.5", 0, 6)))), ASKED)
    assert has_stale_prefix(decoded(reply_of(weight_versions=spans(("0.5", 0, 6)), cached_tokens=2)), ASKED)


@pytest.mark.parametrize(
    ("meta", "error", "text"),
    [
        ({"weight_versions": spans(("9.9", 0, 6))}, EngineError, "'9.9', which this run never loaded"),
        ({"weight_versions": spans(("base", 0, 6))}, EngineError, "version 0.-1 though 0.4 was loaded before"),
        ({"weight_versions": spans(("0.5", 0, 2), ("0.4", 2, 6))}, EngineError, "0.4 though 0.5 was loaded before"),
        ({"weight_versions": None}, EngineError, "weight_versions is missing; SGLang 0.5.23"),
        ({"weight_versions": []}, EngineError, "do not cover the 6 tokens"),
        ({"weight_versions": spans(("0.4", 0, 5))}, EngineError, "do not cover the 6 tokens"),
        ({"weight_versions": spans(("0.4", 1, 6))}, EngineError, "do not cover the 6 tokens"),
        ({"weight_versions": spans(("0.4", 0, 3), ("0.5", 4, 6))}, EngineError, "do not cover the 6 tokens"),
        ({"weight_versions": spans(("0.4", 0, 7))}, EngineError, "do not cover the 6 tokens"),
        ({"weight_versions": ["0.4"]}, EngineError, "weight_versions is"),
        ({"output_token_logprobs": None}, EngineError, "output_token_logprobs is missing"),
        ({"output_token_logprobs": [[-1.0, 2, None]] * 5}, TrajectoryError, "6 token ids but 5 log-probs"),
        ({"output_token_logprobs": [[-1.0, 2, None]] * 6}, TrajectoryError, "token 1 is 3, its log-prob is of token 2"),
        ({"output_token_logprobs": [-1.0] * 6}, EngineError, r"output_token_logprobs\[0\] is -1.0"),
        ({"finish_reason": None}, EngineError, "finish_reason is None"),
        ({"finish_reason": {"type": "other"}}, EngineError, "finish_reason is"),
        ({"finish_reason": {"type": "stop", "matched": "NaN happened"}}, TrajectoryError, "NaN happened.* are broken"),
        ({"finish_reason": {"type": "stop", "matched": 1}}, EngineError, "token 1, but the last of output_ids is 7"),
        ({"id": "g0-2"}, EngineError, "the reply is of request 'g0-2'"),
        ({"cached_tokens": None}, EngineError, "cached_tokens of the reply is None"),
        ({"num_retractions": None}, EngineError, "num_retractions of the reply is None"),
        ({"routed_experts": None}, RouteError, "routes lost"),
        ({"routed_experts": routes_of(10)}, RouteError, "expected 8 rows"),
    ],
)
def test_replies_that_are_refused_by_request(meta, error, text):
    with pytest.raises(error, match=f"^g0-1: .*{text}"):
        decoded(reply_of(**meta))


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        (None, "output_ids is missing"),
        (["a"], "output_ids is"),
        ([2**31], "no token id"),
        ([], "0 tokens, asked for 1 to 6"),
        ([2] * 7, "7 tokens, asked for 1 to 6"),
    ],
)
def test_token_ids_that_are_refused(ids, text):
    with pytest.raises(EngineError, match=f"^g0-1: .*{text}"):
        decoded(reply_of() | {"output_ids": ids})


@pytest.mark.parametrize("reply", [None, [], "text", {}, {"meta_info": None}])
def test_answers_that_are_no_reply(reply):
    with pytest.raises(EngineError, match=r"^g0-1: the reply has no meta_info"):
        decoded(reply)


def test_a_response_that_the_server_cut_short():
    short = SamplingParams(1.0, 4, (7,))
    with pytest.raises(EngineError, match=r"cut at 4 tokens, asked for 6; .*--context-length"):
        decoded(reply_of(short))


def test_an_end_token_of_the_server_that_the_run_does_not_have():
    reply = reply_of(finish_reason={"type": "stop", "matched": 7})
    asked = Asked("g0-1", len(PROMPT), SamplingParams(1.0, 6, (1,)), FOURTH)
    with pytest.raises(
        EngineError, match=r"ended with token 7, an end token of the server's own; the run stops at \[1\]"
    ):
        decoded(reply, asked)
