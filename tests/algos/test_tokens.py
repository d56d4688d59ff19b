"""What surrogates share: bounds, advantages by token, means over a response, the guarded loss."""

import math

import pytest
import torch

from asyncrl.algos.tokens import check_bounds, counted, mean_ratio, per_token, response_mean, token_loss

NAN, INF = math.nan, math.inf


def test_bounds() -> None:
    for low, high in ((0.0, 0.0), (1.0, INF), (0.2, 4.0)):
        check_bounds(low, high)
    check_bounds(3.0, 1.0, most_low=INF)
    for low, high in ((-0.1, 0.2), (1.1, 0.2), (0.2, -0.1), (NAN, 0.2), (0.2, NAN)):
        with pytest.raises(ValueError, match="eps_low"):
            check_bounds(low, high)
    with pytest.raises(ValueError, match=r"\[0, 2\]"):
        check_bounds(2.5, 1.0, most_low=2.0)


def test_advantages_by_response_and_by_token() -> None:
    like = torch.zeros(2, 3, dtype=torch.float64)
    by_response = per_token(torch.tensor([1.5, -2.0], requires_grad=True), like)
    assert by_response.tolist() == [[1.5] * 3, [-2.0] * 3]
    assert by_response.dtype == torch.float64
    assert not by_response.requires_grad
    by_token = torch.tensor([[1, 2, 3], [4, 5, 6]])
    assert per_token(by_token, like).tolist() == by_token.tolist()
    # B = T: a vector is one advantage for each response.
    assert per_token(torch.tensor([1.0, 2.0]), torch.zeros(2, 2)).tolist() == [[1.0, 1.0], [2.0, 2.0]]
    for shape in ((3,), (), (2, 1), (3, 2), (1, 2, 3)):
        with pytest.raises(ValueError, match=r"advantages must be \[B\] or \[B, T\] = \[2, 3\]"):
            per_token(torch.zeros(shape), like)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float32])
def test_a_token_counts_where_the_mask_is_not_zero(dtype: torch.dtype) -> None:
    like = torch.zeros(1, 3)
    assert counted(torch.tensor([[1, 0, 1]]).to(dtype), like).tolist() == [[True, False, True]]
    assert counted(None, like).tolist() == [[True] * 3]


def test_response_mean_by_hand() -> None:
    values = torch.tensor([[1.0, 2.0, 6.0], [1.0, NAN, 5.0], [NAN, INF, -INF]], requires_grad=True)
    mean = response_mean(values, torch.tensor([[True] * 3, [True, False, True], [False] * 3]))
    assert mean.tolist() == [[3.0], [3.0], [0.0]]
    mean.sum().backward()
    assert values.grad is not None
    assert values.grad[0].tolist() == pytest.approx([1 / 3] * 3)
    assert values.grad[1:].tolist() == [[0.5, 0.0, 0.5], [0.0] * 3]


def test_mean_ratio_has_its_value_everywhere_and_its_gradient_token_by_token() -> None:
    # (log 2 + log 4) / 2 over the counted: 2^1.5. A mean passes half of it to each token, from both losses: all of it.
    deltas = torch.tensor([[math.log(2), 0.0, math.log(4)]], dtype=torch.float64, requires_grad=True)
    ratio = mean_ratio(deltas, torch.tensor([[True, False, True]]))
    assert ratio[0].tolist() == pytest.approx([2**1.5] * 3)
    (gradient,) = torch.autograd.grad(ratio[0, 0], deltas, retain_graph=True)
    assert gradient[0].tolist() == pytest.approx([2**1.5, 0.0, 0.0])
    (shared,) = torch.autograd.grad(ratio[0, 0] + ratio[0, 2], deltas)
    plain = response_mean(deltas, torch.tensor([[True, False, True]])).exp()
    (whole,) = torch.autograd.grad(2 * plain.sum(), deltas)
    torch.testing.assert_close(shared, whole)


def test_mean_ratio_is_exact_beside_a_large_log_ratio() -> None:
    # In float32 1e9 + x - 1e9 loses x; the share of the gradient must not pass through such a sum.
    ratio = mean_ratio(torch.tensor([[1e9, -1e9 + 64, 0.0, 0.0]]), torch.ones(1, 4, dtype=torch.bool))
    assert ratio[0].tolist() == pytest.approx([math.exp(16)] * 4)
    far = torch.tensor([[100.0], [-100.0]], requires_grad=True)
    ratio = mean_ratio(far, torch.ones(2, 1, dtype=torch.bool))
    assert ratio.flatten().tolist() == pytest.approx([math.exp(20), math.exp(-20)])
    ratio.sum().backward()
    assert far.grad is not None
    assert not far.grad.any()


def test_token_loss_shows_what_is_broken_and_hides_what_is_masked() -> None:
    gain = torch.tensor([[1.0, 2.0, 3.0, 4.0]], requires_grad=True)
    broken = torch.tensor([[False, True, False, True]])
    clipped = torch.tensor([[True, True, True, False]])
    mask = torch.tensor([[True, True, False, False]])
    result = token_loss(gain, broken, clipped, mask)
    assert result.loss[0, 0] == -1
    assert math.isnan(result.loss[0, 1].item())
    assert result.loss[0, 2:].tolist() == [0.0, 0.0]
    assert result.clipped.tolist() == [[True, False, False, False]]
    result.loss.sum().backward()
    assert gain.grad is not None
    assert gain.grad.tolist() == [[-1.0, 0.0, 0.0, 0.0]]
