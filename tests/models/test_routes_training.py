"""RouteHook where forwards and backwards do not simply alternate: micro-batches, checkpointing, FSDP2."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from asyncrl.errors import RouteError
from asyncrl.models.names import stream
from asyncrl.models.routes import RouteHook
from tests.helpers.tiny_models import qwen3_moe

LENGTHS = ((3, 2), (4, 1), (2, 3))


def tracer_routes(sample: int, length: int) -> Tensor:
    """Routes [L=2, length, K=2] with expert 100 * sample + position, so that no two tokens share one."""
    rows = 100 * sample + torch.arange(length)
    return torch.stack([rows, torch.full_like(rows, 511)], dim=-1).expand(2, -1, -1)


def padded(lengths: tuple[int, ...], first: int, left: bool) -> dict[str, Tensor]:
    width = max(lengths) + 1
    out = {
        "input_ids": torch.zeros(len(lengths), width, dtype=torch.int64),
        "attention_mask": torch.zeros(len(lengths), width, dtype=torch.int64),
        "position_ids": torch.zeros(len(lengths), width, dtype=torch.int64),
        "routes": torch.full((2, len(lengths), width, 2), -1),
    }
    for row, length in enumerate(lengths):
        sample = first + row
        place = slice(width - length, width) if left else slice(0, length)
        out["input_ids"][row, place] = torch.arange(length) + 7 * sample + 1
        out["attention_mask"][row, place] = 1
        out["position_ids"][row, place] = torch.arange(length)
        out["routes"][:, row, place] = tracer_routes(sample % 5, length)
    return out


def real_logits(model: PreTrainedModel, hook: RouteHook, batch: dict[str, Tensor]) -> Tensor:
    inputs = {name: value for name, value in batch.items() if name != "routes"}
    with hook.replay(batch["routes"]):
        logits: Tensor = model(**inputs).logits
    return logits[batch["attention_mask"].bool()]


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("left", [False, True])
def test_every_token_gets_its_own_row_with_backwards_in_reverse(left: bool, checkpointed: bool) -> None:
    model = qwen3_moe(hidden=16, layers=2, experts=512, router_scale=1.0)
    hook = RouteHook(model)
    alone_logits, alone_loss = [], torch.zeros(())
    for index, lengths in enumerate(LENGTHS):
        for row, length in enumerate(lengths):
            single = padded((length,), 2 * index + row, left=False)
            logits = real_logits(model, hook, single)
            alone_logits.append(logits.detach())
            alone_loss = alone_loss + logits.square().sum()
    alone_loss.backward()
    alone = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()

    if checkpointed:
        hook.enable_checkpointing()
        model.train()
    losses = []
    for index, lengths in enumerate(LENGTHS):
        logits = real_logits(model, hook, padded(lengths, 2 * index, left))
        expected = torch.cat(alone_logits[2 * index : 2 * index + 2])
        torch.testing.assert_close(logits.detach(), expected, atol=1e-5, rtol=1e-4)
        losses.append(logits.square().sum())
    for loss in reversed(losses):
        loss.backward()
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, alone[name], atol=2e-5, rtol=1e-4, msg=name)


def test_swapped_rows_would_be_noticed() -> None:
    model = qwen3_moe(hidden=16, layers=2, experts=512, router_scale=1.0)
    hook = RouteHook(model)
    batch = padded((3, 2), 0, left=False)
    right = real_logits(model, hook, batch).detach()
    batch["routes"] = batch["routes"].flip(1)
    assert not torch.allclose(real_logits(model, hook, batch).detach(), right, atol=1e-4)


class _Wobble(nn.Module):
    """Nudges a router's weights from its second evaluation on: a near tie may flip in recomputation."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.calls = 0
        router.register_forward_pre_hook(self.nudge)

    def nudge(self, router: Any, _args: object) -> None:
        self.calls += 1
        if self.calls == 2:
            router.weight.data[4:] += 1e-6 * torch.sign(router.weight.data[4:])
            router.weight.data[:4] -= 1e-6 * torch.sign(router.weight.data[:4])


def tied_model() -> PreTrainedModel:
    """Experts 0-3 and 4-7 of layer 0 have equal router rows: every choice is an exact tie."""
    model = qwen3_moe(hidden=16, layers=2, experts=8)
    weight = model.model.layers[0].mlp.gate.weight
    with torch.no_grad():
        weight[4:] = weight[:4]
    return model


@pytest.mark.parametrize("how", ["record", "replay"])
def test_recompute_replays_what_the_forward_used(how: str) -> None:
    ids = torch.arange(24).view(2, 12)

    def run(checkpointed: bool) -> tuple[Tensor, dict[str, Tensor], Tensor, int]:
        model = tied_model()
        hook = RouteHook(model)
        with torch.no_grad(), hook.record():
            model(ids)
        native = hook.native
        model.train()
        wobble = _Wobble(hook.routers[0]) if checkpointed else None
        if checkpointed:
            hook.enable_checkpointing()
        with hook.record() if how == "record" else hook.replay(native):
            loss = model(ids).logits.square().sum()
        counted = hook.native.clone()
        loss.backward()
        assert torch.equal(hook.native, counted)
        calls = wobble.calls if wobble is not None else 0
        if checkpointed:
            with torch.no_grad(), hook.record():
                model(ids)
            assert not torch.equal(hook.native, native), "the wobble must flip a tie, else this test shows nothing"
        return loss.detach(), {n: p.grad for n, p in model.named_parameters()}, counted, calls

    plain, checked = run(False), run(True)
    assert checked[3] == 2
    assert torch.equal(plain[2], checked[2])
    torch.testing.assert_close(checked[0], plain[0], atol=1e-6, rtol=1e-6)
    for name, grad in plain[1].items():
        torch.testing.assert_close(checked[1][name], grad, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize("inside", [False, True])
def test_checkpointing_that_does_not_know_the_hook_is_refused(inside: bool) -> None:
    model, ids = qwen3_moe(), torch.arange(8)[None]
    hook = RouteHook(model)
    with torch.no_grad(), hook.record():
        model(ids)
    routes = hook.native.flip(2)
    model.activation_checkpointing_enable({"use_reentrant": False})
    model.train()
    with hook.replay(routes):
        loss = model(ids).logits.sum()
        if inside:
            with pytest.raises(RouteError, match="enable_checkpointing"):
                loss.backward()
    if not inside:
        with pytest.raises(RouteError, match="enable_checkpointing"):
            loss.backward()


def test_context_fn_serves_a_checkpoint_of_the_whole_model() -> None:
    model, ids = qwen3_moe(), torch.arange(8)[None]
    hook = RouteHook(model)
    with torch.no_grad(), hook.record():
        model(ids)
    routes = hook.native.flip(2)
    embedded = model.get_input_embeddings()(ids)

    def run(checkpointed: bool) -> Tensor:
        model.zero_grad()
        with hook.replay(routes):
            if checkpointed:
                logits = checkpoint(
                    lambda x: model(inputs_embeds=x).logits,
                    embedded.detach().requires_grad_(),
                    use_reentrant=False,
                    context_fn=hook.checkpoint_context_fn,
                )
            else:
                logits = model(inputs_embeds=embedded.detach()).logits
        logits.square().sum().backward()
        router: Any = hook.routers[0]
        grad: Tensor = router.weight.grad.clone()
        return grad

    torch.testing.assert_close(run(True), run(False), atol=0, rtol=0)


def test_sharded_replay_and_stream_equal_the_plain_model(world) -> None:
    ids = torch.arange(24).view(2, 12)

    def gradients(model: PreTrainedModel, hook: RouteHook, routes: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        with hook.replay(routes):
            logits = model(ids).logits
        logits.square().sum().backward()
        whole = {
            n: p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for n, p in model.named_parameters()
        }
        return logits.detach(), whole

    plain = qwen3_moe()
    plain_hook = RouteHook(plain)
    with torch.no_grad(), plain_hook.record():
        plain(ids)
    routes = plain_hook.native.flip(2)
    expected = gradients(plain, plain_hook, routes)
    assert plain_hook.forced_fraction == 1.0
    sharded = qwen3_moe()
    for layer in sharded.model.layers:
        fully_shard(layer)
    fully_shard(sharded)
    hook = RouteHook(sharded)
    hook.enable_checkpointing()
    sharded.train()
    logits, grads = gradients(sharded, hook, routes)
    torch.testing.assert_close(logits, expected[0], atol=1e-6, rtol=1e-6)
    for name, grad in expected[1].items():
        torch.testing.assert_close(grads[name], grad, atol=1e-6, rtol=1e-5, msg=name)
    assert torch.equal(hook.native, plain_hook.native)
    streamed, reference = dict(stream(sharded)), dict(stream(plain))
    assert list(streamed) == list(reference)
    assert all(torch.equal(streamed[name], reference[name]) for name in reference)
