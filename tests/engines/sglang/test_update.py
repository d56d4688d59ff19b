"""Order of the calls and what a failure of each leaves; weights that arrive are in tests/sglang/test_updates.py."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import struct
import threading
from dataclasses import dataclass, field

import pytest
from aiohttp import web

from asyncrl.engines.sglang.client import Client
from asyncrl.engines.sglang.expects import check, needs, stored_in
from asyncrl.engines.sglang.update import UNKNOWN, Updater
from asyncrl.errors import VersionGone, WeightSyncError

NEEDS = {"a": ("float32", (2, 3)), "b": ("float32", (4,))}
BUCKETS = ((("a", "float32", (2, 3)),), (("b", "float32", (4,)),))

JOIN = ["/init_weights_update_group"]
SEND = ["/pause_generation", "/begin_weight_update", "/update_weight_version"]
SEND += ["/update_weights_from_distributed"] * 2 + ["/end_weight_update"]
CHECK, GO_ON = ["/weights_checker"], ["/continue_generation"]
STAY = ["/pause_generation", "/update_weight_version"]


class Fake:
    """Answers every call with success, but for those in `refuse` and `hang`: path, and which call of it."""

    def __init__(self):
        self.calls, self.refuse, self.hang = [], {}, set()
        self.sums = [{"a": "aa", "b": "bb", "c": "cc"}]
        self.label = "0.-1"

    @property
    def paths(self):
        return [path for path, _ in self.calls]

    async def answer(self, request):
        path = request.path
        if path == "/model_info":
            return web.json_response({"weight_version": self.label})
        self.calls.append((path, await request.json()))
        number = self.paths.count(path)
        if (path, number) in self.hang:
            await asyncio.Event().wait()
        if (path, number) in self.refuse:
            return web.json_response({"success": False, "message": self.refuse[path, number]}, status=400)
        ranks = {"ranks": [{"checksums": sums} for sums in self.sums]} if path == "/weights_checker" else {}
        return web.json_response({"success": True, "message": "Success", **ranks})


@dataclass
class Sending:
    group: str = "grp-1"
    address: tuple = ("127.0.0.1", 4001)
    backend: str = "gloo"
    is_new: bool = True
    buckets: tuple = BUCKETS


@dataclass
class Source:
    """Gives what a test hands it, and notes who left."""

    kind: str = "broadcast"
    sendings: list = field(default_factory=lambda: [Sending()])
    path: object = None
    sums: dict = field(default_factory=lambda: {"a": frozenset({"aa", "xx"}), "b": frozenset({"bb"})})
    asked: list = field(default_factory=list)
    left: list = field(default_factory=list)
    open: int = 0

    def broadcast(self, engine, ranks):
        self.asked.append((engine, ranks))
        sending = self.sendings.pop(0)
        if isinstance(sending, Exception):
            raise sending
        return sending

    def leave(self, engine):
        self.left.append(engine)

    @contextlib.contextmanager
    def folder(self):
        self.open += 1
        yield self.path
        self.open -= 1

    def checksums(self, names, ranks):
        self.asked.append((tuple(names), ranks))
        return self.sums


@contextlib.asynccontextmanager
async def serving(timeout_s=5.0, verify=True, ranks=1, wanted=NEEDS):
    fake = Fake()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", fake.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    client = Client(f"http://127.0.0.1:{runner.addresses[0][1]}")
    try:
        yield fake, Updater(client, "g0", ranks, timeout_s, verify, wanted)
    finally:
        await client.close()
        await runner.cleanup()


def runs(test):
    """An async test with an event loop of its own."""

    @functools.wraps(test)
    def run(**arguments):
        asyncio.run(asyncio.wait_for(test(**arguments), 60))

    return run


async def fails(updater, source, *words, label="0.4"):
    with pytest.raises(WeightSyncError) as caught:
        await updater.update(label, source)
    for word in ("g0", f"version {label}", *words):
        assert word in str(caught.value), str(caught.value)


@runs
async def test_a_broadcast_is_sent_in_order_and_the_label_comes_last():
    async with serving() as (fake, updater):
        source = Source()
        await updater.update("0.4", source)
        assert fake.paths == JOIN + SEND + CHECK + GO_ON
        bodies = dict(fake.calls)
        assert bodies["/init_weights_update_group"]["group_name"] == "grp-1"
        assert bodies["/init_weights_update_group"]["world_size"] == 2
        assert bodies["/pause_generation"] == {"mode": "in_place"}
        buckets = [body for path, body in fake.calls if path == "/update_weights_from_distributed"]
        assert [(b["names"], b["weight_version"]) for b in buckets] == [(["a"], None), (["b"], "0.4")]
        assert source.asked == [("g0", 1), (("a", "b", "c"), 1)] and source.left == []
        assert not updater.torn


@runs
async def test_the_second_version_uses_the_group_and_a_new_group_replaces_it():
    async with serving() as (fake, updater):
        await updater.update("0.4", Source())
        fake.calls.clear()
        await updater.update("0.5", Source(sendings=[Sending(is_new=False)]))
        assert fake.paths == SEND + CHECK + GO_ON
        fake.calls.clear()
        fake.refuse["/destroy_weights_update_group", 1] = "The group to be destroyed does not exist."
        await updater.update("0.6", Source(sendings=[Sending(group="grp-2")]))
        assert fake.paths == ["/destroy_weights_update_group", *JOIN, *SEND, *CHECK, *GO_ON]
        assert fake.calls[0][1] == {"group_name": "grp-1"}


@runs
async def test_a_group_that_this_server_is_not_in_is_made_anew():
    async with serving() as (fake, updater):
        source = Source(sendings=[Sending(is_new=False), Sending(group="grp-2")])
        await updater.update("0.4", source)
        assert source.left == ["g0"] and fake.calls[0][1]["group_name"] == "grp-2"
        stubborn = Source(sendings=[Sending(group="grp-9", is_new=False)] * 2)
        await fails(updater, stubborn, "grp-9")
        assert not updater.torn


@runs
async def test_a_folder_is_loaded_while_it_is_held(tmp_path):
    write(tmp_path, a=("F32", (2, 3)), b=("F32", (4,)))
    async with serving() as (fake, updater):
        source = Source(kind="folder", path=tmp_path)
        await updater.update("0.4", source)
        assert fake.paths == [
            "/pause_generation", "/update_weight_version", "/update_weights_from_disk", *CHECK, *GO_ON
        ]  # fmt: skip
        assert fake.calls[2][1]["model_path"] == str(tmp_path)
        assert fake.calls[2][1]["weight_version"] == "0.4"
        assert source.open == 0 and not updater.torn


@runs
async def test_a_carrier_without_a_way_to_servers_is_refused():
    async with serving() as (fake, updater):
        await fails(updater, Source(kind="tensors"), "weights.carrier=collective or disk")
        assert fake.paths == [] and not updater.torn


@runs
async def test_a_version_that_is_gone_stays_that_error():
    async with serving() as (fake, updater):
        with pytest.raises(VersionGone, match=r"g0: version 0.4: asking the learner to send: no such version"):
            await updater.update("0.4", Source(sendings=[VersionGone("no such version")]))
        assert fake.paths == [] and not updater.torn


# --- before the first byte: the server goes on ------------------------------------------------------


@runs
async def test_a_join_that_is_refused_leaves_the_server_sampling():
    async with serving() as (fake, updater):
        source = Source()
        fake.refuse["/init_weights_update_group", 1] = "Failed to initialize custom process group: boom."
        await fails(updater, source, "joining the group", "boom")
        assert fake.paths == JOIN and source.left == ["g0"] and not updater.torn


@runs
async def test_a_join_that_hangs_ends_in_time():
    async with serving(timeout_s=0.2) as (fake, updater):
        source = Source()
        fake.hang.add(("/init_weights_update_group", 1))
        await fails(updater, source, "joining the group", "no answer within 0.2 s")
        assert source.left == ["g0"] and not updater.torn


@pytest.mark.parametrize("path", ["/pause_generation", "/begin_weight_update"])
@runs
async def test_a_refused_pause_or_beginning_lets_the_server_go_on(path):
    async with serving() as (fake, updater):
        source = Source()
        fake.refuse[path, 1] = "boom"
        await fails(updater, source, "boom")
        assert fake.paths == JOIN + SEND[: SEND.index(path) + 1] + GO_ON
        assert source.left == ["g0"] and not updater.torn


@runs
async def test_a_server_that_cannot_be_told_to_go_on_counts_as_torn():
    async with serving() as (fake, updater):
        fake.refuse["/pause_generation", 1] = fake.refuse["/continue_generation", 1] = "boom"
        await fails(updater, Source(), "pausing")
        assert updater.torn


@pytest.mark.parametrize(
    ("buckets", "words"),
    [
        ((BUCKETS[0],), "missing: b"),
        ((*BUCKETS, (("c", "float32", (1,)),)), "unknown to the server: c"),
        ((BUCKETS[0], (("b", "bfloat16", (4,)),)), "b is bfloat16 [4] and should be float32 [4]"),
        ((BUCKETS[0], (("b", "float32", (2, 2)),)), "b is float32 [2, 2] and should be float32 [4]"),
        ((*BUCKETS, BUCKETS[0]), "twice: a"),
    ],
)
@runs
async def test_other_tensors_are_named_before_anything_is_sent(buckets, words):
    async with serving() as (fake, updater):
        source = Source(sendings=[Sending(buckets=buckets)])
        await fails(updater, source, words, "generator.model")
        assert fake.paths == [] and source.left == ["g0"] and not updater.torn


@runs
async def test_a_folder_of_another_model_is_not_loaded(tmp_path):
    write(tmp_path, a=("BF16", (2, 3)))
    async with serving() as (fake, updater):
        source = Source(kind="folder", path=tmp_path)
        await fails(updater, source, "missing: b", "a is bfloat16 [2, 3]")
        assert fake.paths == [] and source.open == 0 and not updater.torn


# --- after the first byte: torn -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "number", "step"),
    [
        ("/update_weights_from_distributed", 1, "bucket 1 of 2"),
        ("/update_weights_from_distributed", 2, "bucket 2 of 2"),
        ("/end_weight_update", 1, "ending"),
        ("/weights_checker", 1, "asking for checksums"),
    ],
)
@runs
async def test_a_failure_after_the_first_byte_tears_and_the_next_update_mends(path, number, step):
    async with serving() as (fake, updater):
        source = Source()
        fake.refuse[path, number] = "Failed to receive weights: boom"
        await fails(updater, source, step, "boom")
        assert updater.torn and source.left == ["g0"]
        assert fake.paths[-2:] == STAY and not set(GO_ON) & set(fake.paths)
        assert fake.calls[-1][1]["new_version"] == UNKNOWN
        fake.calls.clear()
        fake.refuse.clear()
        await updater.update("0.5", Source(sendings=[Sending(group="grp-2")]))
        closing = ["/end_weight_update"] * (path != "/weights_checker")
        assert fake.paths == [
            "/destroy_weights_update_group", *JOIN, SEND[0], *closing, *SEND[1:], *CHECK, *GO_ON
        ]  # fmt: skip
        assert not updater.torn


@runs
async def test_a_bucket_that_hangs_frees_the_server_and_tears():
    async with serving(timeout_s=0.2) as (fake, updater):
        source = Source()
        fake.hang.add(("/update_weights_from_distributed", 1))
        await fails(updater, source, "bucket 1 of 2", "no answer within 0.2 s")
        assert updater.torn and source.left == ["g0"]


@runs
async def test_cancelling_in_the_middle_frees_the_server_and_tears():
    async with serving() as (fake, updater):
        source = Source()
        fake.hang.add(("/update_weights_from_distributed", 2))
        task = asyncio.create_task(updater.update("0.4", source))
        while fake.paths.count("/update_weights_from_distributed") < 2:
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert updater.torn and source.left == ["g0"] and fake.paths[-2:] == STAY


@runs
async def test_cancelling_before_the_first_byte_lets_the_server_go_on():
    async with serving() as (fake, updater):
        source, waits = Source(), threading.Event()
        source.broadcast = lambda engine, ranks: waits.wait(30)
        task = asyncio.create_task(updater.update("0.4", source))
        await asyncio.sleep(0.05)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        waits.set()
        assert not updater.torn and source.left == ["g0"] and fake.paths == []


@runs
async def test_a_torn_server_stays_paused_when_the_next_update_fails_early():
    async with serving() as (fake, updater):
        fake.refuse["/update_weights_from_distributed", 1] = "boom"
        await fails(updater, Source(), "boom")
        await fails(updater, Source(sendings=[WeightSyncError("no sender")]), "no sender", label="0.5")
        assert updater.torn and not set(GO_ON) & set(fake.paths)


@runs
async def test_a_folder_that_does_not_load_tears(tmp_path):
    write(tmp_path, a=("F32", (2, 3)), b=("F32", (4,)))
    async with serving() as (fake, updater):
        source = Source(kind="folder", path=tmp_path)
        fake.refuse["/update_weights_from_disk", 1] = "Failed to update weights: boom"
        await fails(updater, source, f"loading {tmp_path}", "boom")
        assert updater.torn and source.open == 0 and source.left == []


# --- checksums ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sums", "wanted", "words"),
    [
        ([{"a": "aa", "b": "xx"}], {"a": {"aa"}, "b": {"bb"}}, "1 of 2 compared tensors are not what was sent: b;"),
        ([{"a": "aa"}], {}, "weights.verify=off"),
        ([{"a": "aa"}] * 2, {"a": {"aa"}}, "checksums of 2 ranks came, the server should have 1"),
        ([{"a": "aa"}, None], {"a": {"aa"}}, "unknown form"),
    ],
)
@runs
async def test_checksums_that_do_not_agree_tear(sums, wanted, words):
    async with serving() as (fake, updater):
        fake.sums = sums
        await fails(updater, Source(sums={name: frozenset(some) for name, some in wanted.items()}), words)
        assert updater.torn and fake.paths[-2:] == STAY


@runs
async def test_every_rank_is_compared():
    async with serving(ranks=2) as (fake, updater):
        fake.sums = [{"a": "aa", "b": "bb"}, {"a": "aa", "b": "xx"}]
        await fails(updater, Source(), "not what was sent: b")


@runs
async def test_without_verification_none_are_asked_for():
    async with serving(verify=False) as (fake, updater):
        await updater.update("0.4", Source())
        assert fake.paths == JOIN + SEND + GO_ON


# --- a server in an unknown state -----------------------------------------------------------------------


@runs
async def test_a_whole_server_goes_on_after_a_reset():
    async with serving() as (fake, updater):
        fake.refuse["/end_weight_update", 1] = "no weight-update session is open"
        await updater.reset()
        assert fake.paths == ["/pause_generation", "/end_weight_update", *GO_ON] and not updater.torn


@pytest.mark.parametrize("is_open", [True, False])
@runs
async def test_one_left_in_the_middle_of_an_update_stays_paused(is_open):
    async with serving() as (fake, updater):
        if not is_open:
            fake.refuse["/end_weight_update", 1] = "no weight-update session is open"
            fake.label = UNKNOWN
        await updater.reset()
        assert fake.paths == ["/pause_generation", "/end_weight_update"] and updater.torn


@runs
async def test_a_server_that_is_not_there_is_an_error():
    client = Client("http://127.0.0.1:9")
    with pytest.raises(WeightSyncError, match="g0: pausing: "):
        await Updater(client, "g0", 1, 1.0, True, NEEDS).reset()
    await client.close()


# --- what a server needs --------------------------------------------------------------------------------


def write(folder, **tensors):
    file, end, header = folder / "model.safetensors", 0, {}
    for name, (word, shape) in tensors.items():
        header[name] = {"dtype": word, "shape": shape, "data_offsets": [end, end]}
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text)


def test_needs_are_of_the_dtype_that_the_server_has(tmp_path):
    write(
        tmp_path,
        w=("BF16", (2, 3)),
        e_score_correction_bias=("BF16", (2,)),
        q=("F8_E4M3", (2, 3)),
        q_scale_inv=("F32", (1, 1)),
        n=("I64", ()),
    )
    assert needs(tmp_path, "float16") == {
        "w": ("float16", (2, 3)),
        "e_score_correction_bias": ("float32", (2,)),
        "q": ("float8_e4m3fn", (2, 3)),
        "q_scale_inv": ("float32", (1, 1)),
        "n": ("int64", ()),
    }
    assert ("w", "bfloat16", (2, 3)) in stored_in(tmp_path)


def test_an_index_says_which_files_count(tmp_path):
    write(tmp_path, old=("F32", (1,)))
    (tmp_path / "model.safetensors").rename(tmp_path / "old.safetensors")
    write(tmp_path, new=("F32", (1,)))
    (tmp_path / "model.safetensors").rename(tmp_path / "model-1.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"new": "model-1.safetensors"}}))
    assert stored_in(tmp_path) == [("new", "float32", (1,))]
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(WeightSyncError, match="weight_map"):
        stored_in(tmp_path)


def test_an_output_matrix_may_come_beside_the_embeddings_of_a_tied_model():
    tied = {"model.embed_tokens.weight": ("float32", (4, 2))}
    both = [(name, "float32", (4, 2)) for name in ("model.embed_tokens.weight", "lm_head.weight")]
    check(both, tied)
    check(both[:1], tied)
    with pytest.raises(WeightSyncError, match=r"lm_head.weight is float32 \[5, 2\]"):
        check([both[0], ("lm_head.weight", "float32", (5, 2))], tied)
    with pytest.raises(WeightSyncError, match=r"missing: lm_head.weight"):
        check(both[:1], tied | {"lm_head.weight": ("float32", (4, 2))})


def test_an_error_names_three_tensors_of_each_kind():
    with pytest.raises(WeightSyncError, match=r"missing: w0, w1, w2 and 2 more; unknown to the server: x\."):
        check([("x", "float32", (1,))], {f"w{i}": ("float32", (1,)) for i in range(5)})
