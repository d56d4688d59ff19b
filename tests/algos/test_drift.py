"""Counts and drift: numbers by hand, padding, zero tokens, wide expert ids, refusals."""

import math

import pytest
import torch

from asyncrl.algos.drift import expert_counts, layer_drift, route_drift
from asyncrl.errors import RouteError


def _one_layer(rows: list[list[int]], dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Routes [1, S, 1, K] of one response and one layer."""
    return torch.tensor(rows).to(dtype)[None, :, None, :]


def test_counts_by_hand() -> None:
    # [B=2, S=3, L=2, K=2], E=4
    routes = torch.tensor(
        [
            [[[0, 1], [2, 3]], [[0, 2], [2, 1]], [[3, 1], [0, 1]]],
            [[[1, 2], [0, 3]], [[1, 3], [0, 3]], [[1, 0], [2, 3]]],
        ]
    )
    mask = torch.tensor([[1, 1, 0], [0, 1, 1]])
    counts = expert_counts(routes, mask, 4)
    assert counts.dtype == torch.int64
    assert counts.tolist() == [
        [[2, 1, 1, 0], [0, 1, 2, 1]],
        [[1, 2, 0, 1], [1, 0, 1, 2]],
    ]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.uint16, torch.int16, torch.int32, torch.int64])
def test_counts_take_every_integer_type(dtype: torch.dtype) -> None:
    counts = expert_counts(_one_layer([[0, 7], [7, 1], [3, 7]], dtype), torch.ones(1, 3), 8)
    assert counts.tolist() == [[[1, 1, 0, 1, 0, 0, 0, 3]]]


def test_300_experts() -> None:
    rollout = expert_counts(_one_layer([[299, 0], [256, 255]], torch.uint16), torch.ones(1, 2), 300)
    native = expert_counts(_one_layer([[299, 0], [43, 255]], torch.int32), torch.ones(1, 2), 300)
    assert rollout.shape == (1, 1, 300)
    assert [i for i, c in enumerate(rollout[0, 0].tolist()) if c] == [0, 255, 256, 299]
    # One of 4 choices moved from 256 to 43: 2 / (2 * 4). In uint8 the two would be one expert (256 mod 256 = 0).
    assert route_drift(rollout, native).tolist() == [0.25]


def test_drift_by_hand() -> None:
    # T=3, K=2, L=2: layer 0 counts [3,2,1,0] vs [2,2,1,1] -> 2/12; layer 1 [2,2,2,0] vs [0,2,2,2] -> 4/12
    rollout = torch.tensor([[[3, 2, 1, 0], [2, 2, 2, 0]]])
    native = torch.tensor([[[2, 2, 1, 1], [0, 2, 2, 2]]])
    assert layer_drift(rollout, native).tolist() == [[2 / 12, 4 / 12]]
    drift = route_drift(rollout, native)
    assert drift.dtype == torch.float64
    assert drift.tolist() == [0.25]


def test_drift_bounds() -> None:
    same = torch.tensor([[[5, 1]]])
    assert route_drift(same, same).tolist() == [0.0]
    assert route_drift(torch.tensor([[[6, 0]]]), torch.tensor([[[0, 6]]])).tolist() == [1.0]


def test_permuted_tokens_do_not_drift() -> None:
    # Usage, not position: the same experts in another order of tokens.
    ones = torch.ones(1, 2)
    a = expert_counts(_one_layer([[0, 1], [2, 3]]), ones, 4)
    b = expert_counts(_one_layer([[3, 2], [1, 0]]), ones, 4)
    assert route_drift(a, b).tolist() == [0.0]


def test_drift_is_exact_for_small_unsigned_counts() -> None:
    # 1 - 2 must not wrap around in uint16.
    rollout = torch.tensor([[[1, 2]]]).to(torch.uint16)
    native = torch.tensor([[[2, 1]]]).to(torch.uint32)
    assert route_drift(rollout, native).tolist() == [1 / 3]


def test_zero_tokens_give_nan_and_only_they() -> None:
    rollout = torch.tensor([[[0, 0]], [[1, 1]], [[0, 0]]])
    native = torch.tensor([[[0, 0]], [[2, 0]], [[0, 0]]])
    assert [math.isnan(x) for x in route_drift(rollout, native).tolist()] == [True, False, True]
    assert route_drift(rollout, native)[1] == 0.5
    assert torch.isnan(layer_drift(rollout, native)).flatten().tolist() == [True, False, True]
    assert route_drift(rollout[:0], native[:0]).shape == (0,)


@pytest.mark.parametrize("pad_tokens", [0, 3, 100])
@pytest.mark.parametrize("pad_rows", [0, 7])
def test_padding_does_not_change_drift(pad_tokens: int, pad_rows: int) -> None:
    # B24: 4 real tokens, 1 of 4 rows differs, K=1: 2 / (2 * 4) = 0.25.
    def padded(experts: list[int], fill: int) -> torch.Tensor:
        routes = torch.full((1 + pad_rows, 4 + pad_tokens, 1, 1), fill)
        routes[0, :4, 0, 0] = torch.tensor(experts)
        return routes

    mask = torch.zeros(1 + pad_rows, 4 + pad_tokens, dtype=torch.bool)
    mask[0, :4] = True
    rollout = expert_counts(padded([0, 1, 2, 3], -1), mask, 5)
    native = expert_counts(padded([0, 1, 2, 4], 1), mask, 5)
    drift = route_drift(rollout, native)
    assert drift[0] == 0.25
    assert torch.isnan(drift[1:]).all()
    assert int(rollout.sum()) == 4


def test_left_out_positions_are_never_read() -> None:
    # Prompt row, tool row and the last row (which predicts nothing) hold nonsense.
    rows = [[77, -1], [0, 1], [-5, 9], [2, 1], [-1, -1]]
    counts = expert_counts(_one_layer(rows), torch.tensor([[0, 1, 0, 1, 0]]), 3)
    assert counts.tolist() == [[[1, 2, 1]]]


def test_refusals_name_the_response() -> None:
    routes = torch.zeros(2, 2, 1, 1, dtype=torch.int64)
    routes[1, 1] = 4
    with pytest.raises(RouteError, match="response 1: expert id 4"):
        expert_counts(routes, torch.ones(2, 2), 4)
    routes[1, 1] = -1
    with pytest.raises(RouteError, match="response 1: expert id -1"):
        expert_counts(routes, torch.ones(2, 2), 4)
    with pytest.raises(RouteError, match=r"mask must be \[B, S\]"):
        expert_counts(routes, torch.ones(2, 3), 4)
    with pytest.raises(RouteError, match="integers"):
        expert_counts(routes.float(), torch.ones(2, 2), 4)


def test_unequal_totals_name_response_and_layer() -> None:
    rollout = torch.tensor([[[2, 0], [1, 1]], [[2, 0], [1, 1]]])
    native = torch.tensor([[[2, 0], [1, 1]], [[2, 0], [1, 2]]])
    with pytest.raises(ValueError, match="response 1, layer 1: rollout counts sum to 2 but native counts to 3"):
        route_drift(rollout, native)
    uneven = torch.tensor([[[2, 0], [1, 2]]])
    with pytest.raises(ValueError, match="response 0: layers count different numbers"):
        route_drift(uneven, uneven)
    with pytest.raises(ValueError, match="no layer"):
        route_drift(torch.zeros(1, 0, 2, dtype=torch.int64), torch.zeros(1, 0, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="differ in shape"):
        route_drift(rollout, native[:1])
