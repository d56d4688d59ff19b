"""Log-scores of experts: by hand for every kind of router, whatever else happens, and refused where not known."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from asyncrl.errors import RouteError
from asyncrl.models import router_scores
from asyncrl.models.router_scores import log_scores
from asyncrl.models.routes import RouteHook
from tests.helpers.family_checks import assert_bitwise, check_scores, gradients, random_routes, tokens
from tests.helpers.moe_families import build_tiny
from tests.helpers.tiny_models import qwen3_moe


def _softmax(logits: Tensor) -> Tensor:
    return logits - logits.exp().sum(-1, keepdim=True).log()


def _sigmoid(logits: Tensor) -> Tensor:
    return -(1 + (-logits).exp()).log()


def _sqrtsoftplus(logits: Tensor) -> Tensor:
    return (1 + logits.exp()).log().sqrt().log()


def _weight(router: Any, hidden: Tensor) -> Tensor:
    return hidden @ router.weight.double().t()


def _gemma(router: Any, hidden: Tensor) -> Tensor:
    normed = hidden * (hidden.square().mean(-1, keepdim=True) + router.eps).rsqrt()
    return normed * router.scale.double() * 32**-0.5 @ router.proj.weight.double().t()


BY_HAND = {
    "qwen3_moe": (_weight, _softmax),
    "mixtral": (_weight, _softmax),
    "olmoe": (_weight, _softmax),
    "gpt_oss": (lambda r, x: _weight(r, x) + r.bias.double(), _softmax),  # top-k on logits
    "cohere2_moe": (_weight, _softmax),  # top-k on logits
    "cohere2_moe sigmoid": (_weight, _sigmoid),  # top-k on logits, whose sigmoid is the score
    "deepseek_v2": (_weight, _softmax),  # in groups
    "deepseek_v3": (_weight, _sigmoid),  # with a bias, in groups
    "deepseek_v4": (_weight, _sqrtsoftplus),
    "ernie4_5_moe": (_weight, _softmax),  # with a bias
    "gemma4_text": (_gemma, _softmax),  # gives probabilities
    "hunyuan_v1_moe": (lambda r, x: x @ r.wg.weight.double().t(), _softmax),
    "inkling_text": (lambda r, x: _weight(r, x)[:, :-1], _sigmoid),  # the last column is the shared expert
    "kolibri1": (_weight, _sigmoid),  # top-k on logits with a bias
    "lfm2_moe": (_weight, _sigmoid),
}


@pytest.mark.parametrize("family", BY_HAND)
def test_log_scores_are_those_of_logits_computed_by_hand(family: str) -> None:
    model, ids = build_tiny(family), tokens()
    hook, (logits_of, log) = RouteHook(model), BY_HAND[family]
    seen: dict[int, Tensor] = {}
    for layer, router in hook.routers.items():
        router.register_forward_pre_hook(lambda _m, args, layer=layer: seen.update({layer: args[0]}))
    forced, watched = random_routes(hook, 2, 7), random_routes(hook, 2, 7, seed=6)
    with torch.no_grad():
        for context, wanted in (
            (lambda: hook.record(scores=True), None),
            (lambda: hook.record(scores=True), None),  # the fast way, after the first forward
            (lambda: hook.record(scores=True, watch=watched), watched),
            (lambda: hook.replay(forced, scores=True), forced),
            (lambda: hook.replay(forced, scores=True, watch=watched), watched),
        ):
            with context():
                model(ids)
            wanted = hook.native if wanted is None else wanted
            by_hand = [
                log(logits_of(hook.routers[n], seen[n].reshape(-1, 32).double())).gather(1, wanted[i].flatten(0, 1))
                for i, n in enumerate(hook.layers)
            ]
            assert hook.scores.dtype == torch.float32 and not hook.scores.requires_grad
            torch.testing.assert_close(
                hook.scores.double(), torch.stack(by_hand).view(wanted.shape), atol=2e-5, rtol=2e-5
            )
            assert float(hook.scores.std()) > 0.01


def test_formulas_are_finite_and_right_at_their_ends() -> None:
    logits = torch.tensor([[0.0, 100.0, -100.0]])
    # softmax: x - 100; sigmoid: -log 2, 0, x; root of softplus: log(log 2) / 2, log(100) / 2, the least number.
    expected = {
        "softmax": [-100.0, 0.0, -200.0],
        "sigmoid": [-0.693147, 0.0, -100.0],
        "sqrtsoftplus": [-0.183256, 2.302585, -43.668272],
    }
    for kind, values in expected.items():
        torch.testing.assert_close(log_scores(logits, kind), torch.tensor([values]), atol=1e-5, rtol=1e-6)
    # Of a probability that underflowed to 0 what counts is that it is small: the least normal number has log -87.3.
    got = log_scores(torch.tensor([[0.25, 0.75, 0.0]]), "probabilities")
    torch.testing.assert_close(got, torch.tensor([[-1.386294, -0.287682, -87.336544]]), atol=1e-5, rtol=1e-6)
    with pytest.raises(ValueError, match="no formula for router scores of kind None"):
        log_scores(logits, None)


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_scores_of_a_bfloat16_model_are_those_of_its_own_logits_in_float32(family: str) -> None:
    model, ids = build_tiny(family).to(torch.bfloat16), tokens()
    hook = RouteHook(model)
    given: list[Tensor] = []
    hook.routers[hook.layers[-1]].register_forward_hook(lambda _m, _args, out: given.append(out[0]))
    with torch.no_grad(), hook.record(scores=True):
        model(ids)
    log = _sigmoid if family == "deepseek_v3" else _softmax
    expected = log(given[0].double()).gather(1, hook.used[-1].flatten(0, 1)).view(2, 7, 2)
    assert hook.scores.dtype == torch.float32
    torch.testing.assert_close(hook.scores[-1].double(), expected, atol=1e-5, rtol=1e-5)


class _Wobble:
    """Moves a router's weights before its second evaluation."""

    def __init__(self, router: nn.Module) -> None:
        self.calls = 0
        router.register_forward_pre_hook(self.nudge)

    def nudge(self, router: Any, _args: object) -> None:
        self.calls += 1
        if self.calls == 2:
            router.weight.data.mul_(1.001)


@pytest.mark.parametrize("forced", [False, True])
def test_a_recomputation_does_not_overwrite_scores(forced: bool) -> None:
    model, ids = qwen3_moe(layers=2), tokens()
    hook = RouteHook(model)
    hook.enable_checkpointing()
    model.train()
    wobble = _Wobble(hook.routers[0])
    with hook.replay(random_routes(hook, 2, 7), scores=True) if forced else hook.record(scores=True):
        loss = model(ids).logits.square().sum()
    before = hook.scores.clone()
    loss.backward()
    assert wobble.calls == 2
    assert torch.equal(hook.scores, before)
    with torch.no_grad(), hook.record(scores=True, watch=hook.used):
        model(ids)
    assert not torch.equal(hook.scores[0], before[0]), "the wobble must move scores, else this test shows nothing"


@pytest.mark.parametrize("backend", ["eager"])
def test_compiled_layers_give_the_scores_of_plain_ones(backend: str) -> None:
    from asyncrl.learner.layers import compile_layers
    from asyncrl.models.head import decoder_layers

    found = []
    for compiled in (False, True):
        model = qwen3_moe(layers=2)
        hook = RouteHook(model)
        if compiled:
            compile_layers(decoder_layers(model), hook, backend=backend)
        with torch.no_grad(), hook.replay(random_routes(hook, 2, 7), scores=True, watch=random_routes(hook, 2, 7, 8)):
            model(tokens())
        found.append(hook.scores)
    torch.testing.assert_close(found[0], found[1], atol=1e-6, rtol=1e-6)


def test_micro_batches_keep_their_own_watched_experts() -> None:
    model = qwen3_moe()
    hook = RouteHook(model)
    with torch.no_grad():
        with hook.record(scores=True):
            model(tokens(2, 7))
            whole, used = hook.scores, hook.used
        for row in (1, 0):
            with hook.record(scores=True, watch=used[:, row : row + 1]):
                model(tokens(2, 7)[row : row + 1])
            torch.testing.assert_close(hook.scores, whole[:, row : row + 1], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("watch", "words"),
    [
        (torch.tensor([[[[0, 8]]]]), r"span \[0, 8\], E is 8"),
        (torch.tensor([[[[-1, 3]]]]), r"span \[-1, 3\], E is 8"),
        (torch.zeros(1, 1, 1, 3, dtype=torch.int64), r"\[L=1, B, S, K=2\], got \(1, 1, 1, 3\)"),
        (torch.zeros(2, 1, 1, 2, dtype=torch.int64), r"\[L=1, B, S, K=2\], got \(2, 1, 1, 2\)"),
        (torch.zeros(1, 1, 2, dtype=torch.int64), r"got \(1, 1, 2\)"),
        (torch.zeros(1, 1, 1, 2), "watched experts must be integers, got torch.float32"),
    ],
)
def test_bad_watched_experts_are_refused(watch: Tensor, words: str) -> None:
    hook = RouteHook(qwen3_moe(layers=1))
    routes = torch.tensor([[[[0, 1]]]])
    for context in (hook.record(scores=True, watch=watch), hook.replay(routes, scores=True, watch=watch)):
        with pytest.raises(RouteError, match=words), context:
            raise AssertionError("the body must not run")
    assert not hook.active


def test_watched_experts_of_another_batch_and_without_scores_are_refused() -> None:
    model = qwen3_moe(layers=1)
    hook = RouteHook(model)
    watch = random_routes(hook, 2, 6)
    with pytest.raises(RouteError, match=r"\(2, 6\).*\(2, 7\)"), hook.record(scores=True, watch=watch):
        model(tokens())
    with pytest.raises(RouteError, match="ask for scores too"), hook.record(watch=watch):
        raise AssertionError("the body must not run")
    with hook.record():
        model(tokens())
    with pytest.raises(RouteError, match=r"no scores of layers \[0\]"):
        _ = hook.scores


def test_a_family_whose_scores_are_not_known_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(router_scores, "SERVED", {})
    model = qwen3_moe(layers=1)
    hook = RouteHook(model)
    words = r"'qwen3_moe': how its router scores experts is not known"
    with pytest.raises(RouteError, match=words), hook.record(scores=True):
        raise AssertionError("the body must not run")
    with hook.record():
        model(tokens())


def test_a_scoring_function_that_is_not_known_is_refused() -> None:
    model = build_tiny("cohere2_moe")
    model.config.expert_selection_fn = "entmax"
    with pytest.raises(RouteError, match="'cohere2_moe': how"), RouteHook(model).record(scores=True):
        raise AssertionError("the body must not run")


def test_a_router_that_gives_no_logits_is_refused() -> None:
    model = qwen3_moe(layers=1)
    router: Any = model.model.layers[0].mlp.gate
    whole = router.forward
    # Scores and ids only: the first output is [rows, K].
    router.forward = lambda hidden: (whole(hidden)[1], *whole(hidden)[1:])
    hook = RouteHook(model)
    words = r"Qwen3MoeTopKRouter: its first output is not \[rows, E=8\]"
    with pytest.raises(RouteError, match=words), torch.no_grad(), hook.record(scores=True):
        model(tokens())


def test_a_router_called_without_the_model_with_other_rows_than_are_watched_is_refused() -> None:
    hook = RouteHook(qwen3_moe(layers=1))
    hidden, watch = torch.randn(6, 32, generator=torch.Generator().manual_seed(0)), torch.tensor([[[[0, 1]] * 5]])
    with torch.no_grad(), hook.record(scores=True, watch=watch), pytest.raises(RouteError, match="that are asked for"):
        hook.routers[0](hidden)


def test_the_check_of_every_family_notices_a_wrong_score(monkeypatch: pytest.MonkeyPatch) -> None:
    check_scores("kolibri1")
    monkeypatch.setattr("asyncrl.models.override.log_scores", lambda first, _kind: log_scores(first, "softmax"))
    with pytest.raises(AssertionError):
        check_scores("kolibri1")


def test_scores_cost_no_bit_of_a_gradient_under_checkpointing() -> None:
    model, ids = qwen3_moe(), tokens()
    hook = RouteHook(model)
    routes = random_routes(hook, 2, 7)
    hook.enable_checkpointing()
    model.train()

    def run(scores: bool) -> Tensor:
        with hook.replay(routes, scores=scores, watch=routes if scores else None):
            return model(ids).logits

    assert_bitwise(gradients(model, lambda: run(True)), gradients(model, lambda: run(False)))
