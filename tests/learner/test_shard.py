"""The sharded policy under its settings: checkpointing, compilation, bfloat16 and float32 routers, devices."""

import asyncio
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from asyncrl.config import validate
from asyncrl.engines.torch_engine import TorchEngine
from asyncrl.errors import ConfigError
from asyncrl.generator.collect import to_trajectory
from asyncrl.learner.batch import collate, rows_of
from asyncrl.learner.layers import checkpoint_layers
from asyncrl.learner.shard import build_policy, init_world, reshard
from asyncrl.learner.step import Updater
from asyncrl.learner.update import run_update, score_take
from asyncrl.models.describe import describe
from asyncrl.models.head import decoder_layers
from asyncrl.models.load import load_model
from asyncrl.models.names import stream
from asyncrl.models.precision import float32_names, keep_float32, routers_in_float32
from asyncrl.models.routes import RouteHook
from asyncrl.types import Group, ModelInfo, Prompt, SamplingParams, Version
from tests.helpers.sources import Given
from tests.helpers.tiny_models import FAMILIES, qwen3_dense, qwen3_moe
from tests.learner.groups import make_groups
from tests.learner.test_ranks import train_on_ranks


def make(model_dir, world, replay=False, **sections):
    tree = {"model": {"path": str(model_dir)}, "staleness": {"sync_every": 1, "max_lag": 8}}
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values
    config = validate(tree)
    return config, build_policy(config.model, config.learner, replay, world)


def whole(policy):
    return {n: p.full_tensor().detach().clone() for n, p in policy.named_parameters()}


# --- activation checkpointing -------------------------------------------------------------------------------------


def train(model_dir, world, checkpointing, routes, scoring, updates_per_take):
    """Gradients, weights, drift and shares of two updates; one take when updates_per_take is 2."""
    config, policy = make(
        model_dir, world, routes == "r3",
        learner={"activation_checkpointing": checkpointing, "scoring": scoring},
        algorithm={"routes": routes, "rdc": {"q": 0.2}}, staleness={"updates_per_take": updates_per_take},
    )  # fmt: skip
    updater = Updater(policy, config.learner, config.algorithm, world)
    gradients, tables, shares = [], [], []
    step = updater._optimizer.step

    def spy():
        gradients.append([p.grad.full_tensor().clone() for p in policy.parameters()])
        step()

    updater._optimizer.step = spy
    info = describe(model_dir)
    batches = [rows_of(make_groups(info, 3, 4, seed=u, version=0), u, 0, info) for u in range(2)]
    batches[1] = [renamed(row) for row in batches[1]]
    state = score_take(policy, batches[0] + batches[1], config, info, world) if updates_per_take == 2 else None
    for u, rows in enumerate(batches):
        outcome = run_update(policy, updater, rows, u, 0.0, state, config, info, world)
        assert outcome.step.outcome == "stepped"
        assert outcome.fused == (scoring == "auto")
        tables.append(outcome.table.columns | {"keep": outcome.keep.numpy()})
        shares.append(outcome.forced_fraction)
    return gradients, whole(policy), tables, shares


def renamed(row):
    """The same response under another id: a take holds each id once."""
    return replace(row, trajectory=replace(row.trajectory, trajectory_id=f"b/{row.trajectory.trajectory_id}"))


CASES = [("native", "separate", 1), ("r3", "auto", 1), ("native", "auto", 2), ("r3", "separate", 2)]


@pytest.mark.parametrize(("routes", "scoring", "updates_per_take"), CASES)
def test_checkpointing_changes_no_bit_of_an_update(model_dir, world, routes, scoring, updates_per_take):
    """fp32. Drift and the share of forced rows would double if a recomputation were recorded."""
    plain = train(model_dir, world, False, routes, scoring, updates_per_take)
    again = train(model_dir, world, True, routes, scoring, updates_per_take)
    for ours, theirs in zip(plain[0], again[0], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert all(torch.equal(plain[1][n], again[1][n]) for n in plain[1])
    for ours, theirs in zip(plain[2], again[2], strict=True):
        for name in ours:
            np.testing.assert_array_equal(ours[name], theirs[name], err_msg=name)
    assert str(plain[3]) == str(again[3]) == str([1.0, 1.0] if routes == "r3" else [float("nan")] * 2)


def kept_bytes(model, hook, ids):
    """Bytes that a forward keeps for its backward, weights left out."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), hook.record():
        hidden = model.base_model(input_ids=ids, use_cache=False).last_hidden_state
    hidden.sum().backward()
    return sum(n for at, n in kept.items() if at not in weights)


def test_checkpointing_keeps_a_fraction_of_the_bytes():
    ids = torch.arange(6 * 60).view(6, 60) % 64
    kept = []
    for on in (False, True):
        model = qwen3_moe(layers=4)
        hook = RouteHook(model)
        if on:
            checkpoint_layers(decoder_layers(model), hook)
        kept.append(kept_bytes(model, hook, ids))
    # Of each layer its input; beside that the rope and the last norm.
    assert kept[1] < kept[0] / 8, kept


def test_a_dense_model_is_checkpointed_too(tmp_path, world):
    qwen3_dense().save_pretrained(tmp_path)
    info = describe(tmp_path)
    rows = rows_of([bare(g) for g in make_groups(ModelInfo((0, 1), 8, 2, 64), 2, 4, seed=0)], 0, 0, info)
    batch, found = collate(rows, range(len(rows)), info, True, False), []
    for on in (False, True):
        _, policy = make(tmp_path, world, learner={"activation_checkpointing": on}, algorithm={"rdc": {"mode": "off"}})
        policy(batch)[0].sum().backward()
        found.append([p.grad.full_tensor() for p in policy.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def bare(group):
    made = tuple(replace(t, route_counts=None, routes=None) for t in group.trajectories)
    return replace(group, trajectories=made)


# --- compilation --------------------------------------------------------------------------------------------------


def test_the_settings_compile_each_layer_inside_its_checkpoint(model_dir, world):
    """Nothing is compiled before the first forward; tests/long/test_compile.py makes some."""
    for compiled, on in itertools.product((False, True), repeat=2):
        _, policy = make(model_dir, world, learner={"compile": compiled, "activation_checkpointing": on})
        for layer in decoder_layers(policy.model):
            inner = layer.forward.inner if on else layer.forward
            assert hasattr(inner, "_torchdynamo_orig_callable") == compiled


# --- bfloat16 -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("families")
    for name in ("qwen3_moe", "deepseek_v3"):
        FAMILIES[name]().save_pretrained(root / name)
    return root


def rounded_model(folder, router_dtype):
    """The model as an engine has it after it loaded what a bfloat16 learner publishes."""
    exact = load_model(folder, "float32").state_dict()
    model = load_model(folder, "bfloat16")
    keep_float32(model, router_dtype)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            tensor.copy_(exact[name])
    if router_dtype == "float32":
        routers_in_float32(model)
    return model


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("router_dtype", ["checkpoint", "float32"])
def test_bfloat16_routes_are_those_of_the_module_that_an_engine_runs(folders, world, name, router_dtype):
    """Deepseek keeps router weights in float32 in an engine: a learner that rounds them takes other experts."""
    info = describe(folders / name)
    _, policy = make(folders / name, world, model={"dtype": "bfloat16", "router_dtype": router_dtype})
    groups = [replace(g, temperature=0.7) for g in make_groups(info, 6, 4, seed=0, max_tokens=40)]
    rows = rows_of(groups, 0, 0, info)
    batch = collate(rows, range(len(rows)), info, True, False)
    logp, _, native = policy(batch)
    model = rounded_model(folders / name, router_dtype)
    hook = RouteHook(model)
    with torch.no_grad(), hook.record():
        hidden = model.base_model(input_ids=batch.input_ids, use_cache=False).last_hidden_state
    assert torch.equal(native, hook.native)
    logits = hidden.double() @ model.lm_head.weight.double().t() / 0.7
    expected = torch.log_softmax(logits, -1).gather(-1, batch.targets[..., None])[..., 0]
    mask = batch.predict_mask
    # A temperature rounded to bfloat16 would be off by 1e-3, and so would log-probs of bfloat16 logits.
    torch.testing.assert_close(logp[mask].double(), expected[mask], atol=2e-5, rtol=0)
    logp.sum().backward()
    assert {(p.dtype, p.grad.dtype) for p in policy.parameters()} == {(torch.float32, torch.float32)}


def test_router_weights_are_rounded_or_not_as_the_setting_says(folders, world):
    """A change below the resolution of bfloat16 moves the router's outputs under float32 only."""
    info = describe(folders / "qwen3_moe")
    rows = rows_of(make_groups(info, 2, 2, seed=0), 0, 0, info)
    batch = collate(rows, range(len(rows)), info, False, False)
    moved = {}
    for router_dtype in ("checkpoint", "float32"):
        _, policy = make(folders / "qwen3_moe", world, model={"dtype": "bfloat16", "router_dtype": router_dtype})
        seen = []
        router = policy.hook.routers[0]
        router.register_forward_hook(lambda module, args, out, seen=seen: seen.append(out[0].double()))
        with torch.no_grad():
            policy(batch)
            reshard(policy)
            # bfloat16 has 8 bits: values already on its grid stay there after a change of 2^-12.
            for name, parameter in policy.named_parameters():
                if "gate.weight" in name:
                    local = parameter.to_local()
                    local.copy_(local.bfloat16().float())
            policy(batch)
            reshard(policy)
            for name, parameter in policy.named_parameters():
                if "gate.weight" in name:
                    parameter.to_local().mul_(1 + 2**-12)
            policy(batch)
        moved[router_dtype] = float((seen[2] - seen[1]).abs().max())
    assert moved["checkpoint"] == 0.0
    assert moved["float32"] > 0.0


@pytest.mark.parametrize("router_dtype", ["checkpoint", "float32"])
def test_the_embedded_engine_samples_with_nearly_the_routes_of_the_learner(folders, world, router_dtype):
    folder = folders / "qwen3_moe"
    info = describe(folder)
    engine = TorchEngine(folder, version=Version(0, 0), seed=1, dtype="bfloat16", router_dtype=router_dtype)
    published = dict(stream(load_model(folder, "float32")))
    ids = np.arange(1, 9, dtype=np.int32)

    async def sample():
        await engine.load(Version(0, 1), Given(lambda: published))
        return await engine.generate(ids, 16, SamplingParams(1.0, 24, ()))

    try:
        done = asyncio.run(sample())
    finally:
        engine.close()
    made = tuple(to_trajectory(c, f"0/p#0.{i}", 8, float(i % 2), info, True) for i, c in enumerate(done))
    rows = rows_of([Group("0/p", Prompt("p", ids, "", "", "t"), "g", 0, 1.0, made)], 0, 0, info)
    _, policy = make(folder, world, model={"dtype": "bfloat16", "router_dtype": router_dtype})
    batch = collate(rows, range(len(rows)), info, False, True)
    with torch.no_grad():
        logp, _, native = policy(batch)
    known = (batch.routes >= 0).all(-1)
    same = (batch.routes.sort(-1).values == native.sort(-1).values).all(-1)[known].double().mean()
    assert known.sum() == 2 * 16 * (8 + 24 - 1)
    # Kernels of other shapes round differently, which turns ties over now and then.
    assert float(same) > 0.97
    gap = (logp - batch.rollout_logp)[batch.predict_mask].double()
    assert float((gap.exp() - 1 - gap).mean()) < 1e-5


# --- ranks --------------------------------------------------------------------------------------------------------

_CHECKPOINTING = "learner.activation_checkpointing=true"
_BF16 = ["model.dtype=bfloat16", "model.router_dtype=float32"]
_REPLAY = ["algorithm.routes=r3", "algorithm.native_drift_every=0"]
SPECS = {
    "plain": ["learner.micro_batch_tokens=60"],
    "plain_checkpointed": ["learner.micro_batch_tokens=60", _CHECKPOINTING],
    "bf16": [*_BF16, *_REPLAY],
    "bf16_checkpointed": [*_BF16, *_REPLAY, _CHECKPOINTING],
}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Two updates of every spec on two ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    qwen3_moe(seed=3).save_pretrained(folder / "model")
    base = folder / "base.yaml"
    base.write_text("model: {path: x}\nalgorithm: {rdc: {q: 0.13}}\nstaleness: {sync_every: 1}\n")
    common = {"kind": "updates", "updates": 2, "groups": 5, "group_size": 4, "worlds": [2], "base": str(base)}
    return train_on_ranks(folder, (2,), {n: common | {"overrides": s} for n, s in SPECS.items()})[2]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["plain", "bf16"])
def test_checkpointing_changes_no_bit_on_two_ranks(ranks, name):
    one, other = ranks[name], ranks[f"{name}_checkpointed"]
    assert all(torch.equal(one["weights"][n], other["weights"][n]) for n in one["weights"])
    for a, b in zip(one["results"], other["results"], strict=True):
        assert a["outcome"] == b["outcome"] == "stepped"
        assert repr(a["drift"]) == repr(b["drift"])
        assert a["keep"] == b["keep"]


@pytest.mark.timeout(600)
def test_bf16_on_two_ranks_keeps_float32_gradients_and_replays_every_row(ranks):
    run = ranks["bf16"]
    assert [r["forced"] for r in run["results"]] == [1.0, 1.0]
    assert {g.dtype for update in run["gradients"] for g in update.values()} == {torch.float32}
    routers = [n for n in run["gradients"][0] if n.endswith("gate.weight")]
    assert len(routers) == 2
    assert all(float(run["gradients"][0][n].abs().max()) > 0 for n in routers)


# --- devices ------------------------------------------------------------------------------------------------------


def test_a_gpu_that_is_not_there_is_refused_with_the_remedy(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"learner\.device=cuda needs a GPU.*set learner\.device=cpu"):
        init_world(10, "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with pytest.raises(ConfigError, match=r"GPU number 2 of this host, but torch .* sees 2"):
        init_world(10, "auto")


def test_names_that_stay_float32_are_those_of_the_family_and_of_the_routers(folders):
    model = load_model(folders / "deepseek_v3", "bfloat16")
    gates = {f"model.layers.{i}.mlp.gate.{what}" for i in (1, 2) for what in ("weight", "e_score_correction_bias")}
    assert float32_names(model, "checkpoint") == float32_names(model, "float32") == gates
    # transformers' own loader does the same.
    assert {n for n, t in model.state_dict().items() if t.dtype == torch.float32} == gates
    model = load_model(folders / "qwen3_moe", "bfloat16")
    assert float32_names(model, "checkpoint") == frozenset()
    assert float32_names(model, "float32") == {f"model.layers.{i}.mlp.gate.weight" for i in (0, 1)}
