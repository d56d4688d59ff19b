"""Aggregation: by hand, over splits (B24, B56), with nothing to train on (B26)."""

import math

import pytest
import torch

from asyncrl.algos.aggregate import aggregate
from asyncrl.algos.registry import AGGREGATIONS, Method
from asyncrl.algos.surrogates import clip_surrogate

LOSS = torch.tensor([[1.0, 2.0, 3.0, 100.0], [4.0, 100.0, 100.0, 100.0]])
MASK = torch.tensor([[1, 1, 1, 0], [1, 0, 0, 0]])


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("token_mean", 2.5), ("sequence_mean", 3.0), ("constant", 1.25)],  # 10 / 4; (2 + 4) / 2; 10 / 8
)
def test_by_hand(kind: str, expected: float) -> None:
    assert aggregate(LOSS, MASK, kind, 4, 2, 8.0).item() == expected  # type: ignore[arg-type]


def test_token_mean_over_ranks() -> None:
    # 10 tokens of loss 1 and 2 tokens of loss 4: 18 / 12, not the mean of means 2.5.
    first = aggregate(torch.ones(2, 5), torch.ones(2, 5), "token_mean", 12, 3, 1.0)
    second = aggregate(torch.full((1, 2), 4.0), torch.ones(1, 2), "token_mean", 12, 3, 1.0)
    assert (first + second).item() == pytest.approx(1.5)


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("pads", [0, 3, 100])
@pytest.mark.parametrize("rows", [0, 7])
def test_padding_and_splits_change_nothing(kind: str, pads: int, rows: int) -> None:
    whole = aggregate(LOSS, MASK, kind, 4, 2, 8.0)  # type: ignore[arg-type]
    loss = torch.full((2 + rows, 4 + pads), math.nan)
    mask = torch.zeros(2 + rows, 4 + pads)
    loss[:2, :4], mask[:2, :4] = LOSS, MASK
    parts = [aggregate(loss[i : i + 1], mask[i : i + 1], kind, 4, 2, 8.0) for i in range(2 + rows)]  # type: ignore[arg-type]
    assert torch.stack(parts).sum().item() == pytest.approx(whole.item())


@pytest.mark.parametrize("kind", ["token_mean", "sequence_mean", "constant"])
def test_empty_responses_give_zero_loss_and_gradient(kind: str) -> None:
    # B26: a batch of empty responses; B22: everything filtered.
    logp = torch.tensor([[math.nan, -1.0]], requires_grad=True)
    token_loss = clip_surrogate(logp, torch.zeros(1, 2), torch.tensor([1.0]))
    loss = aggregate(token_loss, torch.zeros(1, 2), kind, 0, 0, 0.0)  # type: ignore[arg-type]
    assert loss.item() == 0.0
    loss.backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == [[0.0, 0.0]]


def test_one_empty_response_counts_as_a_sequence_only() -> None:
    mask = torch.tensor([[1, 1, 0, 0], [0, 0, 0, 0]])
    assert aggregate(LOSS, mask, "token_mean", 2, 2, 1.0).item() == 1.5
    assert aggregate(LOSS, mask, "sequence_mean", 2, 2, 1.0).item() == 0.75


def test_gradient_weights() -> None:
    loss = torch.zeros(2, 4, requires_grad=True)
    aggregate(loss, MASK, "sequence_mean", 4, 2, 1.0).backward()
    assert loss.grad is not None
    assert loss.grad[0].tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 6, 0])
    assert loss.grad[1].tolist() == [0.5, 0, 0, 0]


def test_refusals() -> None:
    with pytest.raises(ValueError, match="kind"):
        aggregate(LOSS, MASK, "mean", 4, 2, 1.0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"constant=-1\.0"):
        aggregate(LOSS, MASK, "constant", 4, 2, -1.0)
    with pytest.raises(ValueError, match="negative"):
        aggregate(LOSS, MASK, "token_mean", -1, 2, 1.0)
    with pytest.raises(ValueError, match=r"\[B, T\]"):
        aggregate(LOSS, MASK[:1], "token_mean", 4, 2, 1.0)


def test_an_unknown_kind_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ValueError, match="kind='mean' must be one of token_mean, sequence_mean, constant"):
        aggregate(LOSS, MASK, "mean", 4, 2, 1.0)


def test_a_method_gets_sums_and_counts_of_what_is_not_masked(place, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    def longest(sum_B: torch.Tensor, count_B: torch.Tensor, total_sequences: float) -> torch.Tensor:
        assert (sum_B.tolist(), count_B.tolist()) == ([6.0, 4.0], [3, 1])
        return sum_B[count_B.argmax()] / total_sequences

    monkeypatch.setitem(AGGREGATIONS, "longest", Method(place(longest)))
    assert aggregate(LOSS, MASK, "longest", 4, 2, 8.0).item() == 3.0
