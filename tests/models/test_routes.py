"""RouteHook on real transformers models: weights by hand, bad input, state. Families: test_families.py."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from asyncrl.errors import RouteError
from asyncrl.models.routes import RouteHook
from tests.helpers.family_checks import random_routes, tokens
from tests.helpers.tiny_models import FAMILIES, deepseek_v3, qwen3_dense, qwen3_moe


def test_gate_weights_and_router_gradient_of_forced_experts() -> None:
    """Logits [2, 1, 0, -1]: native top-2 is {0, 1}; forcing {2, 3} gives softmax([0, -1])."""
    model = qwen3_moe(hidden=8, layers=1, experts=4, top_k=2)
    hook = RouteHook(model)
    router: Any = hook.routers[0]
    with torch.no_grad():
        router.weight.zero_()
        router.weight[:, 0] = torch.tensor([2.0, 1.0, 0.0, -1.0])
    hidden = torch.eye(8)[:1]

    def gates() -> Tensor:
        with hook.replay(torch.tensor([[[[2, 3]]]])):
            weights: Tensor = router(hidden)[1]
        return weights

    torch.testing.assert_close(gates(), torch.tensor([[0.7311, 0.2689]]), atol=1e-4, rtol=0)
    assert hook.native.flatten().tolist() == [0, 1]
    assert hook.used.flatten().tolist() == [2, 3]
    gates()[0, 0].backward()
    # g0 (1 - g0) = 0.19661 for the first forced expert, its negative for the other, 0 elsewhere.
    expected = torch.tensor([0.0, 0.0, 0.19661, -0.19661])
    torch.testing.assert_close(router.weight.grad[:, 0], expected, atol=1e-5, rtol=0)
    differences = torch.zeros(4)
    for expert in range(4):
        for sign in (1, -1):
            with torch.no_grad():
                router.weight[expert, 0] += sign * 0.01
                differences[expert] += sign * gates()[0, 0] / 0.02
                router.weight[expert, 0] -= sign * 0.01
    torch.testing.assert_close(router.weight.grad[:, 0], differences, atol=1e-4, rtol=0)


def test_group_limited_values_of_experts_outside_the_native_group() -> None:
    """deepseek_v2 zeroes the other groups and uses the values: a forced expert there keeps its softmax score."""
    model = FAMILIES["deepseek_v2"]()
    hook = RouteHook(model)
    router: Any = hook.routers[1]
    with torch.no_grad():
        router.weight.zero_()
        router.weight[:, 0] = torch.tensor([3.0, 2.0, 1.0, 0.0, 1.0, 0.0, 0.0, 0.0])
    hidden = torch.eye(32)[:1]
    scores = torch.softmax(router.weight[:, 0].detach(), 0)
    with hook.replay(torch.tensor([[[[4, 0]]], [[[4, 0]]]])):
        _, weights, ids = router(hidden)
    assert ids.tolist() == [[4, 0]]
    torch.testing.assert_close(weights[0].detach(), scores[[4, 0]] * router.routed_scaling_factor)


def test_rows_of_minus_one_are_native() -> None:
    model, ids = qwen3_moe(layers=1), tokens()
    hook = RouteHook(model)
    with torch.no_grad():
        with hook.record():
            plain = model(ids).logits
        native = hook.native
        routes = random_routes(hook, 2, 7)
        routes[:, :, 4:] = -1
        with hook.replay(routes):
            mixed = model(ids).logits
    # 4 of 7 rows forced; in a one-layer model the native choice does not depend on them.
    assert hook.forced_fraction == 4 / 7
    assert torch.equal(hook.used[:, :, 4:], native[:, :, 4:])
    assert torch.equal(hook.used[:, :, :4], routes[:, :, :4])
    assert torch.equal(mixed[:, 4:], plain[:, 4:]) and not torch.equal(mixed[:, :4], plain[:, :4])
    with torch.no_grad(), hook.replay(torch.full_like(routes, -1)):
        assert torch.equal(model(ids).logits, plain)
    assert hook.forced_fraction == 0.0


def test_row_that_names_an_expert_twice_is_native_and_counted() -> None:
    model, ids = qwen3_moe(layers=1, experts=4), tokens(1, 3)
    hook = RouteHook(model)
    with torch.no_grad():
        with hook.record():
            model(ids)
        native = hook.native
        with hook.replay(torch.tensor([[[[2, 2], [3, 1], [-1, -1]]]])):
            model(ids)
    assert hook.duplicate_rows == 1 and hook.forced_fraction == 1 / 3
    assert torch.equal(hook.used[0, 0, 0], native[0, 0, 0])
    assert hook.used[0, 0, 1].tolist() == [3, 1]
    assert torch.equal(hook.used[0, 0, 2], native[0, 0, 2])


@pytest.mark.parametrize("dtype", [torch.uint16, torch.int16, torch.int64])
def test_512_experts_keep_their_ids(dtype: torch.dtype) -> None:
    model, ids = qwen3_moe(hidden=8, layers=1, experts=512, top_k=4), tokens(1, 2)
    hook = RouteHook(model)
    routes = torch.tensor([[[[0, 255, 256, 511], [511, 256, 255, 0]]]]).to(dtype)
    with torch.no_grad(), hook.replay(routes):
        model(ids)
    assert hook.used.tolist() == [[[[0, 255, 256, 511], [511, 256, 255, 0]]]]


@pytest.mark.parametrize(
    ("routes", "words"),
    [
        (torch.tensor([[[[0, 8]]]]), r"\[0, 8\], E is 8"),
        (torch.tensor([[[[-2, 3]]]]), r"\[-2, 3\], E is 8"),
        (torch.zeros(1, 1, 1, 3, dtype=torch.int64), "K=2"),
        (torch.zeros(1, 1, 2, dtype=torch.int64), "K=2"),
        (torch.zeros(1, 1, 1, 2), "float32"),
    ],
)
def test_bad_routes_are_refused(routes: Tensor, words: str) -> None:
    hook = RouteHook(qwen3_moe(layers=1))
    with pytest.raises(RouteError, match=words), hook.replay(routes):
        raise AssertionError("the body must not run")
    assert not hook.active


def test_routes_of_another_batch_are_refused() -> None:
    model = qwen3_moe(layers=1)
    hook = RouteHook(model)
    with pytest.raises(RouteError, match=r"\(2, 6\).*\(2, 7\)"), hook.replay(random_routes(hook, 2, 6)):
        model(tokens())


def test_dense_model_is_refused_by_name() -> None:
    with pytest.raises(RouteError, match="'qwen3'"):
        RouteHook(qwen3_dense())


def test_reading_before_a_forward_is_refused() -> None:
    hook = RouteHook(qwen3_moe(layers=2))
    with pytest.raises(RouteError, match=r"layers \[0, 1\]"):
        _ = hook.native
    with hook.record(), pytest.raises(RouteError, match="run a forward"):
        _ = hook.native


def test_planes_go_to_layers_by_number() -> None:
    """6 layers, 0-1 dense: 6 planes and 4 planes both give layer 2..5 its own; 5 are refused."""
    ids = tokens(1, 2)

    def planes(numbers: list[int]) -> Tensor:
        return torch.tensor(numbers)[:, None, None, None].expand(-1, 1, 2, 2).clone() + torch.tensor([0, 1])

    for seed in (0, 1):
        model = deepseek_v3(layers=6, first_k_dense=2, seed=seed)
        hook = RouteHook(model)
        assert hook.layers == (2, 3, 4, 5) and hook.num_layers == 6
        for given in ([0, 1, 2, 3, 4, 5], [2, 3, 4, 5]):
            with torch.no_grad(), hook.replay(planes(given)):
                model(ids)
            assert hook.used[:, 0, 0, 0].tolist() == [2, 3, 4, 5]
        with pytest.raises(RouteError, match=r"6 planes .* or 4 .*, got 5"), hook.replay(planes([1, 2, 3, 4, 5])):
            pass


def test_mlp_only_layers_are_left_out() -> None:
    hook = RouteHook(qwen3_moe(layers=4, mlp_only_layers=(1, 3)))
    assert hook.layers == (0, 2)
    assert (hook.num_experts, hook.top_k) == (8, 2)
    assert list(hook.routers) == [0, 2]


def test_contexts_restore_the_earlier_state() -> None:
    model, ids = qwen3_moe(), tokens()
    hook = RouteHook(model)
    routes = random_routes(hook, 2, 7)
    with torch.no_grad():
        plain = model(ids).logits
        with pytest.raises(ZeroDivisionError), hook.replay(routes):
            model(ids)
            raise ZeroDivisionError
        assert not hook.active
        assert torch.equal(model(ids).logits, plain)
        with hook.replay(routes):
            with hook.record():
                assert torch.equal(model(ids).logits, plain)
            assert hook.active
            model(ids)
            assert torch.equal(hook.used, routes)
    assert not hook.active


def test_a_router_that_runs_twice_in_one_forward_is_refused() -> None:
    """Layers run in a loop have several routes per token, of which only the last would be seen."""
    model, ids = qwen3_moe(layers=2), tokens()
    layers = model.model.layers
    layers[1] = layers[0]
    hook = RouteHook(model)
    with torch.no_grad(), hook.record(), pytest.raises(RouteError, match="ran twice in one forward"):
        model(ids)
    with hook.record():
        for _ in range(2):
            hook.routers[0](torch.randn(3, 32))


def test_two_models_share_nothing() -> None:
    first, second, ids = qwen3_moe(seed=0), qwen3_moe(seed=1), tokens()
    hook, other = RouteHook(first), RouteHook(second)
    with torch.no_grad():
        plain = second(ids).logits
        with hook.replay(random_routes(hook, 2, 7)):
            assert torch.equal(second(ids).logits, plain)
    with pytest.raises(RouteError):
        _ = other.native


def test_deep_copy_of_a_hooked_model_runs_its_own_weights() -> None:
    model, ids = qwen3_moe(), tokens()
    hook = RouteHook(model)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
        twin_hook = RouteHook(twin)
        with twin_hook.record():
            twin(ids)
        with pytest.raises(RouteError):
            _ = hook.native
        fresh = qwen3_moe()
        fresh.load_state_dict(twin.state_dict())
        assert torch.equal(fresh(ids).logits, twin(ids).logits)


def test_router_without_a_top_k_is_an_error_and_not_a_silent_no_op() -> None:
    model = qwen3_moe(layers=1)
    hook = RouteHook(model)
    # Another k than the one declared: the hook would never see its top-k.
    router: Any = hook.routers[0]
    router.top_k = 3
    with pytest.raises(RouteError, match="Qwen3MoeTopKRouter: its forward made no top-2"), hook.record():
        model(tokens())


def test_router_modules_called_without_the_model() -> None:
    model = qwen3_moe(layers=2)
    hook = RouteHook(model)
    hidden = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), hook.record():
        chosen = [hook.routers[layer](hidden)[2] for layer in hook.layers]
        assert torch.equal(hook.native, torch.stack(chosen)[:, :, None])
        again = [hook.routers[layer](hidden[:4])[2] for layer in hook.layers]
        assert torch.equal(hook.native, torch.stack(again)[:, :, None])
    with torch.no_grad(), hook.record((2, 3)):
        for layer in hook.layers:
            hook.routers[layer](hidden)
    assert torch.equal(hook.native, torch.stack(chosen).view(2, 2, 3, 2))


def test_cached_decoding_sees_the_routes_of_the_new_token() -> None:
    model, ids = qwen3_moe(), tokens(2, 6)
    hook = RouteHook(model)
    with torch.no_grad(), hook.record():
        model(ids)
        whole = hook.native
        cache = model(ids[:, :5], use_cache=True).past_key_values
        model(ids[:, 5:], past_key_values=cache, use_cache=True)
        assert torch.equal(hook.native, whole[:, :, 5:])
