"""What was sampled is what trains: ids from the engine to the learner's batch (B20), and ends of responses (B19)."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from asyncrl import wire
from asyncrl.engines.torch_engine import TorchEngine
from asyncrl.errors import WireError
from asyncrl.generator.collect import to_trajectory
from asyncrl.learner.batch import collate, rows_of
from asyncrl.models.describe import describe
from asyncrl.tasks.text import Decoder
from asyncrl.types import Completion, Group, ModelInfo, Prompt, SamplingParams, Segment, Version

INFO = ModelInfo((0, 1), 8, 2, 64)


def completion(ids, prompt=2, logprobs=None, **changes):
    n = len(ids)
    routes = np.tile(np.array([0, 1], np.uint8), (prompt + n - 1, 2, 1))
    given = -np.ones(n, np.float32) if logprobs is None else logprobs
    segments = (Segment(Version(0, 0), 0, n),)
    return Completion(np.array(ids, np.int32), given, segments, "stop", routes, **changes)


def group_of(*completions, prompt=(5, 6), stops=None):
    ids = np.array(prompt, np.int32)
    made = tuple(
        to_trajectory(c, f"t{i}", len(ids), float(i), INFO, False, stops) for i, c in enumerate(completions)
    )  # fmt: skip
    return Group("g", Prompt("p", ids, "", "", "t"), "g0", 1, 1.0, made, 1.0)


def batch_of(group, info=INFO):
    """The learner's padded rows of a group that went over the wire."""
    received = wire.decode_group(wire.encode_group(group))
    rows = rows_of([received], 0, 0, info)
    return collate(rows, range(len(rows)), info, True, False)


def trained(batch, row):
    """(id, rollout log-prob) of every token of a row that has a gradient."""
    mask = batch.predict_mask[row]
    return list(zip(batch.targets[row][mask].tolist(), batch.rollout_logp[row][mask].tolist(), strict=True))


def test_b20_the_sampled_ids_arrive_at_the_learner_although_their_text_encodes_to_others(tmp_path):
    vocab = {"x": 0, "y": 1, "z": 2, "a": 3, "b": 4, "c": 5, "d": 6, "ab": 7}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[("a", "b")]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    sampled = completion([3, 4], logprobs=np.array([-0.5, -0.75], np.float32))
    text = Decoder(tmp_path).decode(sampled.token_ids)
    assert tokenizer.encode(text).ids == [7]
    group = group_of(sampled)
    assert group.trajectories[0].token_ids.tolist() == [3, 4]
    batch = batch_of(group)
    assert batch.input_ids[0].tolist() == [5, 6, 3, 4]
    assert trained(batch, 0) == [(3, -0.5), (4, -0.75)]


def test_b20_a_group_without_the_ids_of_its_tokens_is_refused():
    frames = wire.encode_group(group_of(completion([3, 4])))
    # A trajectory travels as ids, log-probs, mask and counts; there is no place for text.
    with pytest.raises(WireError, match="1 buffers are missing"):
        wire.decode_group([*frames[:2], *frames[3:]])
    with pytest.raises(WireError, match="has 2 bytes, by its header 8"):
        wire.decode_group([*frames[:2], b"ab", *frames[3:]])


def test_b19a_six_log_probs_for_five_ids_are_refused_on_the_wire_too():
    group = group_of(completion([3, 4, 5, 6, 7]))
    six = replace(group.trajectories[0], logprobs=-np.ones(6, np.float32))
    with pytest.raises(WireError, match="5 token ids, 6 log-probs"):
        wire.encode_group(replace(group, trajectories=(six,)))
    frames = wire.encode_group(group)
    with pytest.raises(WireError, match="has 24 bytes, by its header 20"):
        wire.decode_group([*frames[:3], six.logprobs.tobytes(), *frames[4:]])


def test_b19c_an_end_token_that_the_engine_put_there_has_no_gradient():
    appended = completion([3, 4, 0], logprobs=[-0.5, -0.75, 0.0], sampled=np.array([True, True, False]))
    batch = batch_of(group_of(appended, stops=(0,)))
    assert batch.input_ids[0].tolist() == [5, 6, 3, 4, 0]
    assert trained(batch, 0) == [(3, -0.5), (4, -0.75)]


def test_b19e_the_last_eos_is_trained_once_and_pads_are_not_when_both_are_id_0():
    # Id 0 ends responses, pads rows, and is also sampled in the middle of none of them.
    short, long = completion([3, 0], logprobs=[-1, -2]), completion([3, 4, 5, 6, 0], logprobs=[-1, -1, -1, -1, -3])
    batch = batch_of(group_of(short, long, stops=(0,)))
    assert batch.input_ids[0].tolist() == [5, 6, 3, 0, 0, 0, 0]
    assert trained(batch, 0) == [(3, -1), (0, -2)]
    assert trained(batch, 1) == [(3, -1), (4, -1), (5, -1), (6, -1), (0, -3)]
    assert batch.predict_mask.sum() == 7


def test_b19d_both_stop_tokens_of_a_real_engine_are_kept_with_their_log_probs_and_trained(model_dir):
    stops, info = (1, 2), describe(model_dir)
    engine = TorchEngine(model_dir, version=Version(0, 0), seed=0)
    try:
        params = SamplingParams(1.0, 200, stops)
        done = asyncio.run(engine.generate(np.array([5, 6], np.int32), 48, params))
    finally:
        engine.close()
    stopped = [c for c in done if c.finish_reason == "stop"]
    assert {int(c.token_ids[-1]) for c in stopped} == set(stops), "sample more: one stop token never came"
    made = group_of(*stopped, stops=stops)
    made = replace(made, trajectories=tuple(replace(t, reward=0.0) for t in made.trajectories))
    rows = rows_of([made], 0, 0, info)
    batch = collate(rows, range(len(rows)), info, True, False)
    for i, c in enumerate(stopped):
        assert len(c.token_ids) == len(c.logprobs)
        assert trained(batch, i)[-1] == (int(c.token_ids[-1]), pytest.approx(float(c.logprobs[-1])))
        assert c.logprobs[-1] < -0.1
