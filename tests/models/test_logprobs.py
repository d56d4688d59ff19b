"""token_logprobs against the naive formula, by value and by gradient."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from asyncrl.errors import ConfigError
from asyncrl.models.head import OutputHead
from asyncrl.models.logprobs import token_logprobs


def naive(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: Tensor) -> tuple[Tensor, Tensor]:
    logp = torch.log_softmax((hidden @ weight.t()) / temperature[:, None], dim=-1)
    return logp.gather(1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


def problem(rows: int = 7, hidden: int = 5, vocab: int = 11, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    seeded = torch.Generator().manual_seed(0)
    return (
        torch.randn(rows, hidden, generator=seeded).to(dtype).requires_grad_(),
        torch.randn(vocab, hidden, generator=seeded).to(dtype).requires_grad_(),
        torch.randint(0, vocab, (rows,), generator=seeded),
        torch.linspace(0.5, 1.5, rows).to(dtype),
    )


def test_temperature_scales_logits_and_not_log_probs() -> None:
    """Logits [2, 1, 0]: at T = 0.6 the log-probs are -0.2026, -1.8692, -3.5359; at T = 1 -0.4076, ..."""
    hidden = torch.ones(6, 1)
    weight = torch.tensor([[2.0], [1.0], [0.0]])
    targets = torch.tensor([0, 1, 2, 0, 1, 2])
    temperature = torch.tensor([0.6, 0.6, 0.6, 1.0, 1.0, 1.0])
    logp, _ = token_logprobs(hidden, weight, targets, temperature)
    expected = torch.tensor([-0.2026, -1.8692, -3.5359, -0.4076, -1.4076, -2.4076])
    torch.testing.assert_close(logp, expected, atol=1e-4, rtol=0)
    same, _ = token_logprobs(hidden[:3], weight, targets[:3], 0.6)
    assert torch.equal(same, logp[:3])


def test_entropy_of_known_distributions_carries_no_gradient() -> None:
    """Uniform over 4: ln 4. Softmax of [ln 3, 0]: p = 3/4, 1/4, H = 0.5623."""
    hidden = torch.ones(1, 1, requires_grad=True)
    _, uniform = token_logprobs(hidden, torch.zeros(4, 1), torch.tensor([0]), 1.0)
    _, skewed = token_logprobs(hidden, torch.tensor([[math.log(3.0)], [0.0]]), torch.tensor([0]), 1.0)
    torch.testing.assert_close(torch.cat([uniform, skewed]), torch.tensor([1.3863, 0.5623]), atol=1e-4, rtol=0)
    assert not uniform.requires_grad


@pytest.mark.parametrize(("chunk", "block"), [(1, 5), (3, 12), (7, 1), (3, 33), (4096, 4096), (4096, 40)])
def test_values_and_gradients_equal_the_naive_formula(chunk: int, block: int) -> None:
    """block: logits at a time; of 11 columns (3, 12) gives blocks of 2, and (3, 33) blocks of 6 and 5."""
    hidden, weight, targets, temperature = problem()
    slope = torch.linspace(-1.0, 2.0, 7)
    results = []
    for function in (naive, lambda h, w, y, t: token_logprobs(h, w, y, t, chunk, block_numbers=block)):
        hidden.grad = weight.grad = None
        logp, entropy = function(hidden, weight, targets, temperature)
        (logp * slope).sum().backward()
        results.append((logp.detach(), entropy.detach(), hidden.grad, weight.grad))
    for ours, theirs in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


HEADS = [(1.0, None, False), (0.25, None, False), (1.0, 3.0, False), (-2.0, 1.5, True), (1.0, None, True)]


@pytest.mark.parametrize(("scale", "cap", "has_bias"), HEADS)
@pytest.mark.parametrize("block", [4096, 9])
def test_gradcheck_in_double(scale: float, cap: float | None, has_bias: bool, block: int) -> None:
    hidden, weight, targets, temperature = problem(dtype=torch.float64)
    bias = torch.linspace(-1, 2, 11, dtype=torch.float64, requires_grad=True) if has_bias else None

    def logp(h: Tensor, w: Tensor, *b: Tensor) -> Tensor:
        options: dict[str, Any] = {"bias_V": b[0] if b else None, "scale": scale, "soft_cap": cap}
        out = token_logprobs(h, w, targets, temperature, 3, block_numbers=block, **options)[0]
        assert out.dtype == torch.float64
        return out

    inputs = (hidden, weight) if bias is None else (hidden, weight, bias)
    assert torch.autograd.gradcheck(logp, inputs)


@pytest.mark.parametrize(("scale", "cap", "has_bias"), HEADS)
@pytest.mark.parametrize("block", [4096, 9])
def test_scale_cap_and_bias_equal_the_plain_formula(
    scale: float, cap: float | None, has_bias: bool, block: int
) -> None:
    hidden, weight, targets, temperature = problem(dtype=torch.float64)
    bias = torch.linspace(-1, 2, 11, dtype=torch.float64) if has_bias else None
    logits = OutputHead("lm_head", scale, cap, has_bias, 11).logits(hidden, weight, bias) / temperature[:, None]
    expected = torch.distributions.Categorical(logits=logits)
    options: dict[str, Any] = {"bias_V": bias, "scale": scale, "soft_cap": cap, "block_numbers": block}
    logp, entropy = token_logprobs(hidden, weight, targets, temperature, 3, **options)
    torch.testing.assert_close(logp, expected.log_prob(targets), atol=1e-12, rtol=0)
    torch.testing.assert_close(entropy, expected.entropy(), atol=1e-12, rtol=0)


class LargestWide(TorchDispatchMode):
    """The largest float32 tensor that any operation gave, in numbers."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(tensor, Tensor) and tensor.dtype == torch.float32:
                self.numbers = max(self.numbers, tensor.untyped_storage().nbytes() // 4)
        return out


def test_no_wide_tensor_is_as_large_as_the_logits_or_the_weight() -> None:
    block = 4096
    hidden, weight, targets, temperature = problem(60, 16, 4000, torch.bfloat16)
    with LargestWide() as seen:
        logp, _ = token_logprobs(hidden, weight, targets, temperature.float(), 32, block_numbers=block)
        logp.sum().backward()
    # Blocks of 4096 // 32 = 128 columns: logits of 32 x 128; the weight has 4000 x 16 numbers.
    assert seen.numbers == block
    assert weight.grad is not None and hidden.grad is not None


def test_bfloat16_is_accumulated_in_float32() -> None:
    hidden, weight, targets, temperature = problem(rows=32, hidden=64, vocab=512, dtype=torch.bfloat16)
    logp, _ = token_logprobs(hidden, weight, targets, temperature.float())
    logp.sum().backward()
    exact, _ = naive(hidden.detach().double(), weight.detach().double(), targets, temperature.double())
    assert logp.dtype == torch.float32
    assert [x.grad.dtype for x in (hidden, weight) if x.grad is not None] == [torch.bfloat16] * 2
    torch.testing.assert_close(logp.detach().double(), exact, atol=2e-5, rtol=1e-5)
    rounded, _ = naive(hidden.detach(), weight.detach(), targets, temperature)
    assert (rounded.double() - exact).abs().max() > 1e-2, "bfloat16 logits must show, else this test shows nothing"


def test_only_one_side_may_need_a_gradient() -> None:
    hidden, weight, targets, temperature = problem()
    token_logprobs(hidden, weight.detach(), targets, temperature)[0].sum().backward()
    assert hidden.grad is not None and weight.grad is None
    token_logprobs(hidden.detach(), weight, targets, temperature)[0].sum().backward()
    assert weight.grad is not None


def test_no_rows_give_zero_gradients() -> None:
    hidden, weight, _, _ = problem(rows=0)
    logp, entropy = token_logprobs(hidden, weight, torch.zeros(0, dtype=torch.int64), 1.0)
    assert logp.shape == entropy.shape == (0,)
    logp.sum().backward()
    assert hidden.grad is not None and hidden.grad.shape == (0, 5)
    assert weight.grad is not None and torch.equal(weight.grad, torch.zeros(11, 5))


def test_huge_logits_stay_finite() -> None:
    hidden = torch.full((1, 1), 1e4, requires_grad=True)
    logp, entropy = token_logprobs(hidden, torch.tensor([[1.0], [-1.0]]), torch.tensor([1]), 1.0)
    logp.sum().backward()
    assert logp.tolist() == [-2e4] and entropy.tolist() == [0.0]
    assert hidden.grad is not None and hidden.grad.tolist() == [[-2.0]]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight_VH": torch.zeros(3, 4)}, "do not multiply"),
        ({"targets_N": torch.zeros(2, dtype=torch.int64)}, "targets"),
        ({"temperature_N": torch.ones(2)}, "temperature"),
        ({"temperature_N": 0.0}, "above 0"),
        ({"chunk": 0}, "chunk"),
        ({"bias_V": torch.zeros(3)}, "bias"),
        ({"scale": 0.0}, "scale"),
        ({"soft_cap": 0.0}, "soft_cap"),
    ],
)
def test_bad_arguments_are_named(change: dict[str, object], words: str) -> None:
    hidden, weight, targets, temperature = problem()
    arguments = {"hidden_NH": hidden, "weight_VH": weight, "targets_N": targets, "temperature_N": temperature}
    with pytest.raises(ConfigError, match=words):
        token_logprobs(**{**arguments, **change})  # type: ignore[arg-type]
