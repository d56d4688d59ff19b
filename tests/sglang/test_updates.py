"""Weight updates of a real server: what arrives, what is refused, and what running requests see."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import urllib.request

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, DynamicCache

from asyncrl.engines.sglang import bodies
from asyncrl.engines.sglang.client import Client
from asyncrl.engines.sglang.expects import needs
from asyncrl.engines.sglang.update import UNKNOWN, Updater
from asyncrl.errors import WeightSyncError
from asyncrl.types import Version
from asyncrl.weights import disk
from asyncrl.weights.collective import client as collective
from asyncrl.weights.collective.publisher import Groups, Publisher
from asyncrl.weights.engine_checksums import expected
from asyncrl.weights.folders import Folder
from asyncrl.weights.rollout import for_sglang
from tests.helpers import sglang_server

PROMPT = [2, 3, 4, 5, 6, 7]
TIMEOUT_S = 60.0
TIED = {"tie_word_embeddings": True}


def bumped(weights, seed):
    """Other weights of the same model, far enough away to be told apart."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name: w + 0.5 * w.std() * torch.randn(w.shape, generator=generator) if w.dim() > 1 else w * 1.1
        for name, w in weights.items()
    }


class Learner:
    """Publishes in memory and on disk; `load` brings a version into the server as `g0`."""

    def __init__(self, server, folder, bucket_bytes=2**29):
        self.server, self.client, self.groups = server, Client(server.url), collective.Groups()
        self.updater = Updater(self.client, "g0", 1, TIMEOUT_S, True, needs(server.model, "float32"))
        made = Groups(backend="gloo", bucket_bytes=bucket_bytes, timeout_s=TIMEOUT_S)
        self.memory = Publisher(folder / "memory", groups=made)
        self.disk = disk.Publisher(folder / "disk", server.model)
        self.update = 0

    def version(self):
        self.update += 1
        return Version(0, self.update)

    def publish(self, weights):
        version = self.version()
        return version, collective.Source(self.groups, self.memory.publish(version, weights.items()), version)

    def publish_folder(self, weights):
        version = self.version()
        return version, Folder(self.disk.publish(version, weights.items()), version)

    async def load(self, published):
        version, source = published
        begin = source.broadcast

        def noted(engine, ranks):
            self.told = begin(engine, ranks)
            return self.told

        source.broadcast = noted
        await self.updater.update(str(version), source)

    def close(self):
        self.memory.close()
        self.disk.close()


@pytest.fixture
def learner(server, tmp_path):
    made = []

    def begin(**rest):
        made.append(Learner(server, tmp_path / str(len(made)), **rest))
        return made[-1]

    yield begin
    for one in made:
        one.groups.left("g0")
        one.close()
    # Others use this server, too: it must sample, whatever a test did to it.
    for path, body in ((bodies.END_UPDATE, {}), (bodies.CONTINUE, bodies.resume())):
        server.call(path, body)


@pytest.fixture(scope="module")
def weights(can_serve):
    """Of the quickstart model, with the output matrix that tied models need."""
    return dict(for_sglang(load_file(sglang_server.QUICKSTART / "model.safetensors").items(), TIED))


def checksums(server):
    status, reply = server.call(bodies.CHECK, bodies.check_weights())
    assert status == 200, reply
    (rank,) = reply["ranks"]
    return rank["checksums"]


def logprobs(server, key):
    """Log-probs of the prompt under the weights of now; key keeps the KV of others out."""
    answer = server.generate(PROMPT, 4, logprob_start_len=0, extra_key=key)
    return [row[0] for row in answer["meta_info"]["input_token_logprobs"]][1:]


def label(server):
    return server.call(bodies.MODEL_INFO)[1]["weight_version"]


def play(job):
    return asyncio.run(asyncio.wait_for(job, 240))


def test_one_bucket_three_and_tensor_by_tensor_give_the_same_weights(server, learner, weights):
    other = bumped(weights, 1)
    size = sum(w.nbytes for w in other.values())

    async def job():
        seen = []
        for bucket_bytes in (2**29, size // 3 + 4096, 1):
            at = learner(bucket_bytes=bucket_bytes)
            await at.load(at.publish(weights))
            before = checksums(server)
            published = at.publish(other)
            await at.load(published)
            assert before != checksums(server)
            assert label(server) == str(published[0])
            seen.append((len(at.told.buckets), checksums(server), logprobs(server, f"{bucket_bytes}")))
            await at.client.close()
        (one, *first), (three, *second), (many, *third) = seen
        assert (one, three, many) == (1, 3, len(weights))
        assert first == second == third

    play(job())


def test_twice_changes_nothing_and_there_and_back_restores(server, learner, weights):
    at = learner()

    async def job():
        await at.load(at.publish(weights))
        sums, values = checksums(server), logprobs(server, "a")
        await at.load(at.publish(weights))
        assert (checksums(server), logprobs(server, "b")) == (sums, values)
        await at.load(at.publish(bumped(weights, 1)))
        assert all(abs(x - y) > 1e-3 for x, y in zip(logprobs(server, "c"), values, strict=True))
        await at.load(at.publish(weights))
        assert (checksums(server), logprobs(server, "d")) == (sums, values)
        await at.client.close()

    play(job())


def test_a_folder_and_a_broadcast_give_the_same_weights(server, learner, weights):
    at, other = learner(), bumped(weights, 2)

    async def job():
        await at.load(at.publish(other))
        sent, values = checksums(server), logprobs(server, "a")
        await at.load(at.publish(weights))
        published = at.publish_folder(other)
        await at.load(published)
        assert (checksums(server), logprobs(server, "b")) == (sent, values)
        assert label(server) == str(published[0])
        await at.client.close()

    play(job())


def test_log_probs_are_those_of_the_learners_model(server, learner, weights, tmp_path):
    at, other = learner(), bumped(weights, 3)

    async def job():
        await at.load(at.publish(other))
        await at.client.close()

    play(job())
    own, ids = model_of(server.model, other, tmp_path / "own"), torch.tensor([PROMPT])
    with torch.no_grad():
        wanted = own(ids).logits.log_softmax(-1)[0, :-1].gather(1, ids[0, 1:, None])[:, 0]
    assert torch.allclose(wanted, torch.tensor(logprobs(server, "own")), atol=1e-4)


def test_every_checksum_of_the_server_is_known(server, learner, weights):
    at = learner()

    async def job():
        await at.load(at.publish(bumped(weights, 4)))
        await at.client.close()

    play(job())
    found = checksums(server)
    wanted = expected(bumped(weights, 4), sorted(found), 1)
    assert sorted(found) == sorted(wanted)
    assert [name for name in found if found[name] not in wanted[name]] == []


@pytest.mark.parametrize("way", ["publish", "publish_folder"])
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w: w.pop("model.norm.weight"), "missing: model.norm.weight"),
        (lambda w: w.update({"model.extra.weight": torch.ones(2)}), "unknown to the server: model.extra.weight"),
        (
            lambda w: w.update({"model.norm.weight": w["model.norm.weight"].to(torch.bfloat16)}),
            "model.norm.weight is bfloat16 [64] and should be float32 [64]",
        ),
        (
            lambda w: w.update({"model.norm.weight": torch.ones(32)}),
            "model.norm.weight is float32 [32] and should be float32 [64]",
        ),
    ],
)
def test_other_tensors_are_named_and_the_server_goes_on(server, learner, weights, way, change, words):
    at, wrong = learner(), bumped(weights, 5)
    change(wrong)

    async def job():
        first = at.publish(weights)
        await at.load(first)
        values = logprobs(server, f"{way} a")
        with pytest.raises(WeightSyncError, match=r"g0: version 0\.2") as caught:
            await at.load(getattr(at, way)(wrong))
        assert words in str(caught.value)
        assert not at.updater.torn
        assert label(server) == str(first[0])
        assert logprobs(server, f"{way} b") == values
        await at.load(at.publish(weights))
        await at.client.close()

    play(job())


def test_a_tensor_that_did_not_arrive_whole_keeps_the_version_from_counting(server, learner, weights):
    at = learner()

    async def job():
        await at.load(at.publish(weights))
        version, source = at.publish(bumped(weights, 6))
        true = source.checksums
        source.checksums = lambda names, ranks: {
            **true(names, ranks), "model.layers.1.self_attn.qkv_proj.weight": frozenset({"0" * 16})
        }  # fmt: skip
        with pytest.raises(WeightSyncError, match=r"not what was sent: model\.layers\.1\.self_attn\.qkv_proj\.weight"):
            await at.load((version, source))
        assert at.updater.torn and label(server) == UNKNOWN
        running = asyncio.create_task(at.client.post(bodies.GENERATE, request("torn"), TIMEOUT_S))
        await asyncio.sleep(1.0)
        assert not running.done()
        # Whoever finds the server like this knows what it is.
        found = Updater(at.client, "g0", 1, TIMEOUT_S, True, needs(server.model, "float32"))
        await found.reset()
        assert found.torn and not running.done()
        await at.load(at.publish(weights))
        assert not at.updater.torn
        assert len((await running)["output_ids"]) == 64
        await at.client.close()

    play(job())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_sender_that_dies_or_hangs_in_the_middle_tears_and_the_next_update_mends(server, learner, weights, how):
    at = learner(bucket_bytes=2**15)

    async def job():
        await at.load(at.publish(weights))
        values = logprobs(server, f"{how} a")
        version, source = at.publish(bumped(weights, 7))
        begin = source.broadcast

        def broken(engine, ranks):
            told = begin(engine, ranks)
            os.kill(at.memory._senders["g0"].pid, how)
            return told

        source.broadcast = broken
        at.updater._timeout_s = 5.0
        with pytest.raises(WeightSyncError, match=r"g0: version 0\.2: bucket "):
            await at.load((version, source))
        assert at.updater.torn
        at.updater._timeout_s = TIMEOUT_S
        await at.load(at.publish(weights))
        assert not at.updater.torn
        assert logprobs(server, f"{how} b") == values
        await at.client.close()

    play(job())


# --- running requests ---------------------------------------------------------------------------------


def request(key, prompt=PROMPT, tokens=64):
    sampling = {"max_new_tokens": tokens, "temperature": 1.0, "ignore_eos": True}
    return {"input_ids": prompt, "sampling_params": sampling, "return_logprob": True, "extra_key": key}


def model_of(folder, weights, made):
    """The transformers model with these weights, its output matrix its own."""
    made.mkdir()
    apart = {name: tensor.clone() for name, tensor in weights.items()}
    save_file(apart, made / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (made / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    return AutoModelForCausalLM.from_pretrained(made, dtype=torch.float32).eval()


def across(old, new, ids, num_old):
    """Log-probs of ids[1:] when the first num_old tokens were read with the old weights, the rest with the new."""
    cache = DynamicCache(config=old.config)
    with torch.no_grad():
        first = old(torch.tensor([ids[:num_old]]), past_key_values=cache, use_cache=True).logits
        second = new(torch.tensor([ids[num_old:]]), past_key_values=cache, use_cache=True).logits
    logits = torch.cat([first, second], 1)[0, :-1]
    return logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


LONG = 1000
"""Tokens of a request: many more than are sampled while an update begins."""


@pytest.fixture(scope="module")
def exact_server(can_serve, tmp_path_factory):
    """A server that has noted every sampled token before it takes the next order, of a model for long responses."""
    folder = tmp_path_factory.mktemp("exact")
    model = shutil.copytree(sglang_server.QUICKSTART, folder / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    running = sglang_server.start(folder / "server.log", model, ("--disable-overlap-schedule",))
    yield running
    running.stop()


def wait_until_sampling(server):
    """Returns when a request that came after all others has a few tokens; it ends unread."""
    data = json.dumps(request("canary", tokens=LONG) | {"return_logprob": False, "stream": True}).encode()
    asked = urllib.request.Request(f"{server.url}/generate", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(asked, timeout=TIMEOUT_S) as answer:
        for line in answer:
            text = line.decode().removeprefix("data: ").strip()
            if text.startswith("{") and len(json.loads(text)["output_ids"]) >= 8:
                return
    raise AssertionError("the request ended before it had 8 tokens")


def test_running_requests_carry_both_versions_and_tokens_have_the_log_probs_of_theirs(exact_server, weights, tmp_path):
    at, other = Learner(exact_server, tmp_path / "learner"), bumped(weights, 8)
    prompts = [PROMPT[: 3 + i] for i in range(4)]

    async def job():
        await at.updater.reset()
        first = at.publish(weights)
        await at.load(first)
        second = at.publish(other)
        calls = [at.client.post(bodies.GENERATE, request(f"r{i}", p, LONG), 120) for i, p in enumerate(prompts)]
        running = [asyncio.create_task(call) for call in calls]
        await asyncio.to_thread(wait_until_sampling, exact_server)
        await at.load(second)
        replies = [await task for task in running]
        late = await at.client.post(bodies.GENERATE, request("late"), TIMEOUT_S)
        await at.client.close()
        return [str(version) for version, _ in (first, second)], replies, late

    try:
        (old_label, new_label), replies, late = play(job())
    finally:
        at.close()
    assert [span["version"] for span in late["meta_info"]["weight_versions"]] == [new_label]
    models = [model_of(exact_server.model, w, tmp_path / name) for name, w in (("old", weights), ("new", other))]
    for prompt, reply in zip(prompts, replies, strict=True):
        spans = [(span["version"], span["start"], span["end"]) for span in reply["meta_info"]["weight_versions"]]
        cut = spans[0][2]
        assert spans == [(old_label, 0, cut), (new_label, cut, LONG)] and 0 < cut < LONG
        ids = prompt + reply["output_ids"]
        got = torch.tensor([row[0] for row in reply["meta_info"]["output_token_logprobs"]])
        # Token `cut` is the first that came of the new weights: they read the token before it, and what came earlier
        # stays as the old ones read it.
        off = [
            (across(*models, ids, len(prompt) + cut - 1 + by)[len(prompt) - 1 :] - got).abs().max().item()
            for by in (-1, 0, 1)
        ]
        assert off[1] < 1e-4 and off[0] > 1e-3 and off[2] > 1e-3, off
