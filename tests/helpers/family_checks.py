"""What must hold for every served MoE family: run for six families by tests/models, for all by tests/long.

Every check takes the name of a tiny model (tests/helpers/moe_families.py) and raises AssertionError.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from asyncrl.learner.batch import MicroBatch
from asyncrl.learner.shard import build_policy
from asyncrl.models.describe import describe
from asyncrl.models.families import SERVED
from asyncrl.models.head import decoder_layers, output_head
from asyncrl.models.load import load_model
from asyncrl.models.logprobs import token_logprobs
from asyncrl.models.names import Loader, stream
from asyncrl.models.routes import RouteHook
from asyncrl.models.summary import shared_experts
from asyncrl.sections.policy import ModelSection
from asyncrl.sections.training import LearnerSection
from asyncrl.types import SamplingParams
from tests.engines.support import Stepper
from tests.helpers.moe_families import build_tiny

VOCAB = 60  # two families pad their output matrix from 60 to 64 rows


def tokens(batch: int = 2, length: int = 7, seed: int = 3) -> Tensor:
    """Token ids [B, S]."""
    return torch.randint(0, VOCAB, (batch, length), generator=torch.Generator().manual_seed(seed))


def random_routes(hook: RouteHook, batch: int, length: int, seed: int = 5) -> Tensor:
    """Routes [L, B, S, K] with distinct experts in every row."""
    noise = torch.rand(len(hook.layers), batch, length, hook.num_experts, generator=torch.Generator().manual_seed(seed))
    return noise.topk(hook.top_k, dim=-1).indices


def gradients(model: PreTrainedModel, forward: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits and every gradient of a loss that depends on each of them."""
    model.zero_grad(set_to_none=True)
    logits = forward()
    logits.square().mul(torch.linspace(0.5, 2.0, logits.numel()).view(logits.shape)).sum().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), grads


def assert_bitwise(a: tuple[Tensor, dict[str, Tensor]], b: tuple[Tensor, dict[str, Tensor]]) -> None:
    """Equal logits, and equal gradients of the same parameters."""
    assert torch.equal(a[0], b[0])
    assert a[1].keys() == b[1].keys() and len(a[1]) > 5
    assert [name for name in a[1] if not torch.equal(a[1][name], b[1][name])] == []


def check_capture(name: str) -> None:
    """Recording and replaying the native routes change no bit of logits and gradients."""
    model, ids = build_tiny(name), tokens()
    plain = gradients(model, lambda: model(ids).logits)
    hook = RouteHook(model)
    assert_bitwise(gradients(model, lambda: model(ids).logits), plain)

    def captured() -> Tensor:
        with hook.record():
            return model(ids).logits

    # Twice: the first call learns where the router returns its ids, the second takes the fast path.
    assert_bitwise(gradients(model, captured), plain)
    native = hook.native
    assert_bitwise(gradients(model, captured), plain)
    assert torch.equal(hook.native, native)
    assert native.shape == (len(hook.layers), 2, 7, hook.top_k) and native.dtype == torch.int64
    assert int(native.min()) >= 0 and int(native.max()) < hook.num_experts
    assert len(native.flatten(0, 2).unique(dim=0)) > 1

    def replayed() -> Tensor:
        with hook.replay(native):
            return model(ids).logits

    assert_bitwise(gradients(model, replayed), plain)
    assert torch.equal(hook.native, native) and hook.forced_fraction == 1.0


def check_replay(name: str) -> None:
    """Forced routes reach the experts exactly and leave every router a gradient; rows of -1 stay native."""
    model, ids = build_tiny(name), tokens()
    hook = RouteHook(model)
    with torch.no_grad():
        plain = model(ids).logits
    routes = random_routes(hook, 2, 7)
    seen: list[Tensor] = []
    handles = [m.register_forward_pre_hook(_keep(seen), with_kwargs=True) for m in _experts(model, hook)]
    with hook.replay(routes):
        logits, grads = gradients(model, lambda: model(ids).logits)
    assert torch.equal(torch.stack(seen).view(routes.shape), routes)
    for handle in handles:
        handle.remove()
    assert torch.equal(hook.used, routes) and hook.forced_fraction == 1.0
    assert float((logits - plain).abs().max()) > 1e-3 * float(plain.abs().max())
    for router in hook.routers.values():
        own = [n for n, p in model.named_parameters() if any(p is q for q in router.parameters())]
        assert any(n in grads and float(grads[n].abs().max()) > 0 for n in own), own

    routes[:, :, 4:] = -1
    with torch.no_grad():
        with hook.replay(routes):
            model(ids)
        assert torch.equal(hook.used[:, :, :4], routes[:, :, :4])
        assert torch.equal(hook.used[:, :, 4:], hook.native[:, :, 4:])
        assert hook.forced_fraction == 4 / 7
        with hook.replay(torch.full_like(routes, -1)):
            assert torch.equal(model(ids).logits, plain)


def _experts(model: PreTrainedModel, hook: RouteHook) -> list[nn.Module]:
    """The module called `experts` next to each router."""
    names = {module: name for name, module in model.named_modules()}
    return [model.get_submodule(f"{names[router].rpartition('.')[0]}.experts") for router in hook.routers.values()]


def _keep(seen: list[Tensor]) -> Callable[..., None]:
    def keep(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [*args, *kwargs.values()]
        ids = [value for value in given if isinstance(value, Tensor) and not value.is_floating_point()]
        assert len(ids) == 1
        seen.append(ids[0].clone())

    return keep


def check_scores(name: str) -> None:
    """Reading scores changes no bit, and they are the weights of the chosen experts but for a factor of each row."""
    model, ids = build_tiny(name), tokens()
    hook = RouteHook(model)
    routes, watch, given = random_routes(hook, 2, 7), random_routes(hook, 2, 7, seed=6), []
    for router in hook.routers.values():
        router.register_forward_hook(lambda _m, _args, out: given.append(out[1].detach().double()))

    def run(scores: bool, forced: Tensor | None, watched: Tensor | None = None) -> Tensor:
        with hook.record(scores=scores, watch=watched) if forced is None else hook.replay(forced, scores, watched):
            return model(ids).logits

    for forced in (None, routes):
        plain = gradients(model, lambda forced=forced: run(False, forced))
        native = hook.native
        assert_bitwise(gradients(model, lambda forced=forced: run(True, forced, watch)), plain)
        assert torch.equal(hook.native, native)
        given.clear()
        assert_bitwise(gradients(model, lambda forced=forced: run(True, forced)), plain)
        assert torch.equal(hook.native, native)
        # Weights of some families are rounded on their way out, and all of them scaled or normalised.
        ratio = torch.stack([w[:, : hook.top_k] for w in given]).log() - hook.scores.double().flatten(1, 2)
        assert float((ratio - ratio.mean(-1, keepdim=True)).abs().max()) < 1e-4
        assert float(hook.scores.std()) > 1e-2


def check_checkpointing(name: str) -> None:
    """Activation checkpointing changes no bit, under replay and under capture."""
    model, ids = build_tiny(name), tokens()
    hook = RouteHook(model)
    routes = random_routes(hook, 2, 7)

    def replayed() -> Tensor:
        with hook.replay(routes):
            return model(ids).logits

    def captured() -> Tensor:
        with hook.record():
            return model(ids).logits

    model.train()
    plain = gradients(model, replayed), gradients(model, captured)
    hook.enable_checkpointing()
    calls = _count_layer_calls(model)
    assert_bitwise(gradients(model, replayed), plain[0])
    # Forward and recomputation.
    assert calls == [2] * len(calls)
    assert_bitwise(gradients(model, captured), plain[1])


def _count_layer_calls(model: PreTrainedModel) -> list[int]:
    layers = decoder_layers(model)
    calls = [0] * len(layers)

    def counter(index: int) -> Callable[..., None]:
        def count(*_: Any) -> None:
            calls[index] += 1

        return count

    for index, layer in enumerate(layers):
        norm = next(m for m in layer.modules() if "Norm" in type(m).__name__ and next(m.parameters(), None) is not None)
        norm.register_forward_hook(counter(index))
    return calls


def check_description(name: str, folder: Path) -> None:
    """config.json alone says what the hook finds: layers, experts, top-k, and the formula of the weights."""
    model = build_tiny(name)
    model.config.save_pretrained(folder)
    info, hook = describe(folder), RouteHook(model)
    assert (info.layers, info.num_experts, info.top_k) == (hook.layers, hook.num_experts, hook.top_k)
    assert info.vocab_size == output_head(model).vocab_size
    config = json.loads((folder / "config.json").read_text())
    assert weight_formula(model, hook) == SERVED[config["model_type"]].formula(config)
    assert len(decoder_layers(model)) == hook.num_layers
    shared = any("shared" in part for part, _ in _block(model, hook).named_parameters())
    assert (shared_experts(config) > 0) == shared


def _block(model: PreTrainedModel, hook: RouteHook) -> nn.Module:
    """The decoder layer of the last router."""
    return decoder_layers(model)[hook.layers[-1]]


def weight_formula(model: PreTrainedModel, hook: RouteHook) -> str:
    """Kind of weights that the last router gives forced experts, from its numbers; up to a constant factor."""
    routes, got = random_routes(hook, 2, 7), []
    handle = hook.routers[hook.layers[-1]].register_forward_hook(lambda _m, _args, out: got.append(out))
    with torch.no_grad(), hook.replay(routes):
        model(tokens())
    handle.remove()
    chosen = routes[-1].flatten(0, 1)
    logits, weights = (part.double() for part in got[0][:2])
    if model.config.model_type == "gemma4_text":
        logits = logits.log()  # it returns probabilities
    sigmoid = logits.sigmoid().gather(1, chosen)
    soft = nn.functional.softplus(logits).sqrt().gather(1, chosen)
    kinds = {
        "softmax_selected": logits.gather(1, chosen).softmax(-1),
        "softmax_all": logits.softmax(-1).gather(1, chosen),
        "sigmoid_selected": sigmoid / sigmoid.sum(-1, keepdim=True),
        "sigmoid_all": sigmoid,
        "sqrtsoftplus_selected": soft / soft.sum(-1, keepdim=True),
    }
    if len(got[0]) > 3:
        # The weights of the shared experts, which the sum of all includes, are the fourth output.
        total = weights.sum(-1, keepdim=True) + got[0][3].double().sum(-1, keepdim=True)
        assert _constant(total) and _constant((weights / sigmoid).unsqueeze(-1), per_row=True)
        return "sigmoid_shared"
    fitting = [kind for kind, expected in kinds.items() if _constant(weights / expected)]
    assert len(fitting) == 1, fitting
    return fitting[0]


def _constant(ratio: Tensor, per_row: bool = False) -> bool:
    middle = ratio.mean(1, keepdim=True) if per_row else ratio.mean()
    return bool(((ratio - middle).abs() < 1e-3 * middle.abs()).all())


def check_names(name: str, folder: Path) -> None:
    """Weights go out under the names of save_pretrained and come back bitwise; a saved folder loads as it was."""
    source, target, ids = build_tiny(name, seed=1), build_tiny(name, seed=2), tokens()
    source.save_pretrained(folder)
    saved, streamed = load_file(folder / "model.safetensors"), dict(stream(source))
    assert streamed.keys() == saved.keys()
    assert [key for key in saved if not torch.equal(saved[key], streamed[key])] == []
    Loader(target).load(streamed)
    loaded = load_model(folder, "float32")
    with torch.no_grad():
        expected = source(ids).logits
        assert torch.equal(target(ids).logits, expected)
        assert torch.equal(loaded(ids).logits, expected)
    assert dict(stream(loaded)).keys() == saved.keys()


def check_logprobs(name: str) -> None:
    """The learner's log-probs are those of the model's logits, in a padded batch too, at any temperature."""
    model = build_tiny(name)
    head, rows = output_head(model), [tokens(1, 9, seed=4), tokens(1, 6, seed=6), tokens(1, 1, seed=7)]
    batch = torch.zeros(3, 9, dtype=torch.int64)
    for i, row in enumerate(rows):
        batch[i, : row.shape[1]] = row
    weight, bias = head.tensors(model)
    with torch.no_grad():
        hidden = model.base_model(input_ids=batch, use_cache=False).last_hidden_state
        for i, row in enumerate(rows):
            length = row.shape[1]
            expected = torch.log_softmax(model(row).logits[0].double() / 0.7, dim=-1)
            targets = torch.arange(length) % head.vocab_size
            logp, entropy = token_logprobs(
                hidden[i, :length], weight, targets, 0.7, bias_V=bias, scale=head.scale, soft_cap=head.soft_cap
            )
            torch.testing.assert_close(logp.double(), expected[torch.arange(length), targets], atol=1e-5, rtol=0)
            torch.testing.assert_close(entropy.double(), -(expected.exp() * expected).sum(-1), atol=1e-5, rtol=0)


def check_packing(name: str) -> None:
    """Two responses in one row give the numbers of two rows exactly where the table of families allows it."""
    model, first, second = build_tiny(name), tokens(1, 9), tokens(1, 7, seed=4)
    positions = torch.cat((torch.arange(9), torch.arange(7)))[None]
    with torch.no_grad():
        apart = torch.cat((model(first).logits, model(second).logits), dim=1)
        packed = model(torch.cat((first, second), dim=1), position_ids=positions, use_cache=False).logits
    equal = float((packed - apart).abs().max()) < 1e-4 * float(apart.abs().max())
    assert equal == SERVED[model.config.model_type].packing


def check_engine(name: str, atol: float = 1e-4) -> str:
    """The embedded engine gives log-probs and routes of a plain forward; returns the name of its decoder."""
    stepper = Stepper(build_tiny(name), rows=4)
    rng = np.random.default_rng(0)
    requests = []
    for i, (prompt, new) in enumerate([(1, 12), (14, 3), (5, 9)]):
        params = SamplingParams(0.8, new, (9,), greedy=i % 2 == 0)
        requests.append(stepper.submit(rng.integers(0, VOCAB, prompt), 2, params))
        stepper.batch.step()
    stepper.finish()
    for request in requests:
        stepper.check(request, atol)
    return type(stepper.decoder).__name__


def check_policy(name: str, folder: Path, world: Any) -> None:
    """The sharded learner on a saved folder: log-probs, replayed routes and gradients of the plain model.

    With activation checkpointing the same to the bit. world: of the fixture, one rank.
    """
    model = build_tiny(name)
    model.save_pretrained(folder)
    hook, head, batch = RouteHook(model), output_head(model), _batch(RouteHook(build_tiny(name)))
    with hook.replay(batch.routes):
        logits = model(batch.input_ids, use_cache=False).logits / batch.temperature[:, None, None]
    expected = torch.log_softmax(logits, -1).gather(2, batch.targets[..., None])[..., 0] * batch.predict_mask
    expected.sum().backward()
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert head.vocab_size >= VOCAB
    (logp, native, grads), (again, _, same) = (_learn(folder, batch, world, on) for on in (False, True))
    torch.testing.assert_close(logp, expected.detach(), atol=1e-5, rtol=0)
    assert torch.equal(native, hook.native)
    assert grads.keys() >= wanted.keys()
    size = max(float(grad.abs().max()) for grad in wanted.values())
    for key, grad in wanted.items():
        torch.testing.assert_close(grads[key], grad, atol=1e-5 * size, rtol=1e-4, msg=lambda text, key=key: key + text)
    assert torch.equal(again, logp)
    assert [key for key in grads if not torch.equal(grads[key], same[key])] == []


def _batch(hook: RouteHook) -> MicroBatch:
    """Two padded rows with routes of their own; the last position of each and the padding are native."""
    ids, mask, routes = torch.zeros(2, 9, dtype=torch.int64), torch.zeros(2, 9, dtype=torch.bool), None
    routes = random_routes(hook, 2, 9).to(torch.int16)
    for i, length in enumerate((9, 6)):
        ids[i, :length] = tokens(1, length, seed=i)
        mask[i, 1 : length - 1] = True
        routes[:, i, length - 1 :] = -1
    targets = torch.cat((ids[:, 1:], ids.new_zeros(2, 1)), dim=1)
    return MicroBatch((0, 1), ids, targets, mask, mask, torch.zeros(2, 9), torch.tensor([0.7, 1.3]), routes, grad=True)


def _learn(folder: Path, batch: MicroBatch, world: Any, on: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Log-probs, native routes and whole gradients by name; on: activation checkpointing."""
    learner = LearnerSection(activation_checkpointing=on)
    policy = build_policy(ModelSection(path=str(folder)), learner, replay=True, world=world)
    logp, _, native = policy(batch)
    assert native is not None
    logp.sum().backward()
    grads = {
        name.removeprefix("model."): parameter.grad.full_tensor()
        for name, parameter in policy.named_parameters()
        if parameter.grad is not None
    }
    return logp.detach(), native, grads


LIVE = (check_capture, check_replay, check_scores, check_checkpointing, check_logprobs, check_packing)
"""Checks of a live tiny model, by its family."""

FOLDER = (check_description, check_names)
"""Checks that also need a folder to write to."""
