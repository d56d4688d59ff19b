"""The corrections one by one: weights by hand on two responses of three tokens, their limits, where a NaN spreads.

What they have in common is in test_corrections_registry.py, more of tis in test_corrections.py.
"""

import math

import pytest
import torch

from asyncrl.algos.corrections.ctpo import ctpo_weights
from asyncrl.algos.corrections.mask import mask_weights
from asyncrl.algos.corrections.none import none
from asyncrl.algos.corrections.rspo import rspo_weights
from asyncrl.algos.corrections.sis import sis_weights
from asyncrl.algos.corrections.tis import tis_weights
from asyncrl.algos.corrections.trm import trm_weights

NAN, INF = math.nan, math.inf
LOG2 = math.log(2)
# Ratios pi_old / mu: 1/2, 1, 4 and 2, (8, not counted), 1/8.
LOGP = torch.tensor([[-1.0, 0.0, 2.0], [1.0, 3.0, -3.0]], dtype=torch.float64) * LOG2
MU = torch.zeros(2, 3, dtype=torch.float64)
MASK = torch.tensor([[1, 1, 1], [1, 0, 1]])


def by_hand(found: torch.Tensor, first: list[float], second: list[float], rel: float = 1e-12) -> None:
    assert found.tolist() == [pytest.approx(first, rel=rel), pytest.approx(second, rel=rel)]


def test_none_by_hand() -> None:
    by_hand(none(LOGP, MASK), [1, 1, 1], [1, 0, 1])


def test_tis_by_hand() -> None:
    by_hand(tis_weights(LOGP, MU, MASK, cap=3.0), [0.5, 1, 3], [2, 0, 0.125])
    # Responses: 1/2 * 1 * 4 = 2, above the cap of 1.5; 2 * 1/8 = 1/4.
    by_hand(tis_weights(LOGP, MU, MASK, cap=1.5, level="sequence"), [1.5, 1.5, 1.5], [0.25, 0, 0.25])


def test_without_a_cap_tis_is_importance_sampling() -> None:
    by_hand(tis_weights(LOGP, MU, MASK, cap=INF), [0.5, 1, 4], [2, 0, 0.125])
    by_hand(tis_weights(LOGP, MU, MASK, cap=INF, level="sequence"), [2, 2, 2], [0.25, 0, 0.25])


def test_mask_by_hand() -> None:
    by_hand(mask_weights(LOGP, MU, MASK, low=0.2, high=3.0), [1, 1, 0], [1, 0, 0])
    # The bounds belong to the range.
    by_hand(mask_weights(LOGP, MU, MASK, low=0.5, high=2.0), [1, 1, 0], [1, 0, 0])
    by_hand(mask_weights(LOGP, MU, MASK, low=0.501, high=1.99), [0, 1, 0], [0, 0, 0])
    by_hand(mask_weights(LOGP, MU, MASK, low=1.0, high=1.0), [0, 1, 0], [0, 0, 0])


def test_without_bounds_mask_drops_nothing() -> None:
    far = torch.tensor([[100.0, -100.0, 1e30]])
    assert mask_weights(far, torch.zeros(1, 3), torch.ones(1, 3), low=0.0, high=INF).tolist() == [[1, 1, 1]]
    # exp(-100) is far below 1e-9 = exp(-20.7), and exp(100) far above 1e9: no exponent is clamped here.
    assert mask_weights(far, torch.zeros(1, 3), torch.ones(1, 3), low=1e-9, high=1e9).tolist() == [[0, 0, 0]]


def test_trm_by_hand() -> None:
    # k3 = r - 1 - log r: 1/2 0.1931, 1 0, 4 1.6137; 2 0.3069, (8 4.9206), 1/8 1.2044. The largest of a response counts.
    by_hand(trm_weights(LOGP, MU, MASK, bound=1.5), [0, 0, 0], [1, 0, 1])
    by_hand(trm_weights(LOGP, MU, MASK, bound=1.2), [0, 0, 0], [0, 0, 0])
    by_hand(trm_weights(LOGP, MU, MASK, bound=1.62), [1, 1, 1], [1, 0, 1])
    by_hand(trm_weights(LOGP, MU, torch.ones(2, 3), bound=1.62), [1, 1, 1], [0, 0, 0])


def test_trm_keeps_tokens_that_nearly_agree_and_all_without_a_bound() -> None:
    # k3 = 5e-9 at a log-ratio of 1e-4: of exp - 1 - log r nothing would be left in float32.
    near = torch.tensor([[1e-4, -1e-4]])
    assert trm_weights(near, torch.zeros(1, 2), torch.ones(1, 2), bound=1e-8).tolist() == [[1, 1]]
    assert trm_weights(near, torch.zeros(1, 2), torch.ones(1, 2), bound=1e-9).tolist() == [[0, 0]]
    far = torch.tensor([[100.0, -100.0]])
    assert trm_weights(far, torch.zeros(1, 2), torch.ones(1, 2), bound=INF).tolist() == [[1, 1]]
    # A token that all but vanished: k3 = 100 - 1.
    assert trm_weights(far[:, 1:], torch.zeros(1, 1), torch.ones(1, 1), bound=99.1).tolist() == [[1]]
    assert trm_weights(far[:, 1:], torch.zeros(1, 1), torch.ones(1, 1), bound=98.9).tolist() == [[0]]


def test_sis_by_hand() -> None:
    # Accepted with a = r / 2: 1/4 + 3/4 * 1/2, 1, 1 (above the envelope); 1 (on it), 1/16 + 15/16 * 1/8.
    by_hand(sis_weights(LOGP, MU, MASK, envelope=2.0), [0.625, 1, 1], [1, 0, 0.1796875])
    # a = r / 8: 1/16 + 15/16 * 1/2, 1, 1/2 + 1/2 * 4; 1/4 + 3/4 * 2, 1/64 + 63/64 * 1/8.
    by_hand(sis_weights(LOGP, MU, MASK, envelope=8.0), [0.53125, 1, 2.5], [1.75, 0, 0.138671875])
    # Nothing above 1 is corrected with the smallest envelope: r (2 - r) below.
    by_hand(sis_weights(LOGP, MU, MASK, envelope=1.0), [0.75, 1, 1], [1, 0, 0.234375])


def test_sis_is_the_mean_over_its_test_and_bounded() -> None:
    # The test itself for 10000 even draws u: accepted (weight 1) where u < r / envelope, else r.
    draws = (torch.arange(10000, dtype=torch.float64) + 0.5) / 10000
    for ratio in (0.1, 0.7, 1.0, 1.9, 2.9, 3.5):
        tested = torch.where(draws < ratio / 3, 1.0, ratio).mean().item()
        logp = torch.tensor([[math.log(ratio)]], dtype=torch.float64)
        found = sis_weights(logp, torch.zeros(1, 1), torch.ones(1, 1), envelope=3.0).item()
        assert found == pytest.approx(tested, abs=3e-4)
    # The largest weight is at r = (3 + 1) / 2: 2/3 + 1/3 * 2 = (3 + 1)^2 / 12.
    ratios = torch.linspace(0.01, 6, 600, dtype=torch.float64)[None].log()
    found = sis_weights(ratios, torch.zeros(1, 600), torch.ones(1, 600), envelope=3.0)
    assert found.max().item() == pytest.approx(4 / 3, rel=1e-4)


def test_with_a_wide_envelope_sis_is_importance_sampling() -> None:
    by_hand(sis_weights(LOGP, MU, MASK, envelope=INF), [0.5, 1, 4], [2, 0, 0.125])
    by_hand(sis_weights(LOGP, MU, MASK, envelope=1e9), [0.5, 1, 4], [2, 0, 0.125], rel=1e-8)


def test_ctpo_by_hand() -> None:
    # Sums of logs in units of log 2 = 0.693: -1, -1, 1; bounds at t = 1, 2, 3: -0.5, 0.6; -0.707, 0.849; -0.866, 1.039.
    # Second: 1, (skipped), -2 = -1.386 with the bounds of t = 2.
    found = ctpo_weights(LOGP, MU, MASK, spread_low=0.5, spread_high=0.6)
    by_hand(found, [math.exp(-0.5), 0.5, 2], [math.exp(0.6), 0, math.exp(-0.5 * math.sqrt(2))])


def test_ctpo_counts_counted_tokens_only() -> None:
    # Four observations between two tokens: the second is t = 2, not 6.
    logp = torch.tensor([[-9.0, 5.0, 5.0, 5.0, 5.0, -9.0]])
    mask = torch.tensor([[1, 0, 0, 0, 0, 1]])
    found = ctpo_weights(logp, torch.zeros(1, 6), mask, spread_low=0.1, spread_high=0.1)[0]
    assert found[[0, 5]].tolist() == pytest.approx([math.exp(-0.1), math.exp(-0.1 * math.sqrt(2))], rel=1e-6)


def test_without_bounds_ctpo_is_the_cumulative_product() -> None:
    # 1/2, 1/2 * 1, 1/2 * 1 * 4; 2, 2 * 1/8.
    by_hand(ctpo_weights(LOGP, MU, MASK, spread_low=INF, spread_high=INF), [0.5, 0.5, 2], [2, 0, 0.25])
    # A response that begins with an observation has no position there.
    late = ctpo_weights(LOGP, MU, torch.tensor([[0, 1, 1], [0, 0, 1]]), spread_low=INF, spread_high=INF)
    by_hand(late, [0, 1, 4], [0, 0, 0.125])


def test_rspo_by_hand() -> None:
    # exp(-0.1) = 0.9048, exp(-0.3) = 0.7408 is below the floor; exp(-0.2) = 0.8187, exp(-0.25) = 0.7788.
    shift = torch.tensor([[0.0, 0.1, 0.3], [0.2, 9.0, 0.25]], dtype=torch.float64)
    by_hand(rspo_weights(shift, MASK, floor=0.8), [1, 0.9048374180, 0.8], [0.8187307531, 0, 0.8], rel=1e-9)
    by_hand(rspo_weights(shift, MASK, floor=0.01)[:, 2:], [0.7408182207], [0.7788007831], rel=1e-9)
    by_hand(rspo_weights(shift, MASK, floor=1.0), [1, 1, 1], [1, 0, 1])
    by_hand(rspo_weights(shift * 0, MASK, floor=0.01), [1, 1, 1], [1, 0, 1])


@pytest.mark.parametrize("shift", [NAN, INF, -INF])
def test_rspo_shows_a_shift_that_is_none(shift: float) -> None:
    found = rspo_weights(torch.tensor([[0.1, shift, 0.1]]), torch.ones(1, 3))
    assert [math.isnan(w) for w in found[0].tolist()] == [False, True, False]
    assert rspo_weights(torch.tensor([[1e30, 100.0]]), torch.ones(1, 2), floor=0.5).tolist() == [[0.5, 0.5]]


def test_where_a_log_prob_that_is_none_spreads() -> None:
    logp = torch.zeros(1, 4)
    logp[0, 1] = NAN
    mu, mask = torch.zeros(1, 4), torch.tensor([[1, 1, 0, 1]])

    def nans(found: torch.Tensor) -> list[bool]:
        assert found[0, 2] == 0
        return torch.isnan(found[0]).tolist()

    for one in (tis_weights, mask_weights, sis_weights):
        assert nans(one(logp, mu, mask)) == [False, True, False, False]
    # Of a sum nothing is known from there on; of a maximum or a sum over the response nothing at all.
    assert nans(ctpo_weights(logp, mu, mask)) == [False, True, False, True]
    assert nans(trm_weights(logp, mu, mask)) == [True, True, False, True]
    assert nans(tis_weights(logp, mu, mask, level="sequence")) == [True, True, False, True]


def test_a_missing_log_prob_weighs_one_and_changes_no_other() -> None:
    mu = MU.clone()
    mu[0, 0] = NAN
    by_hand(tis_weights(LOGP, mu, MASK, cap=3.0), [1, 1, 3], [2, 0, 0.125])
    by_hand(mask_weights(LOGP, mu, MASK, low=0.9, high=1.1), [1, 1, 0], [0, 0, 0])
    by_hand(sis_weights(LOGP, mu, MASK, envelope=8.0), [1, 1, 2.5], [1.75, 0, 0.138671875])
    by_hand(ctpo_weights(LOGP, mu, MASK, spread_low=9.0, spread_high=9.0), [1, 1, 4], [2, 0, 0.25])
    # Only the third token of the first response has a KL now, of 1.6137; without it none has.
    by_hand(trm_weights(LOGP, mu, MASK, bound=1.62), [1, 1, 1], [1, 0, 1])
    mu[0, 2] = NAN
    by_hand(trm_weights(LOGP, mu, MASK, bound=1e-9), [1, 1, 1], [0, 0, 0])


@pytest.mark.parametrize(
    ("knob", "value", "call"),
    [
        ("low", 1.1, mask_weights),
        ("high", 0.9, mask_weights),
        ("bound", 0.0, trm_weights),
        ("envelope", 0.99, sis_weights),
        ("spread_low", 0.0, ctpo_weights),
        ("spread_high", 0.0, ctpo_weights),
    ],
)
def test_refused_knobs(knob, value, call) -> None:
    with pytest.raises(ValueError, match=knob):
        call(LOGP, MU, MASK, **{knob: value})


@pytest.mark.parametrize("floor", [0.0, 1.01])
def test_refused_floors(floor: float) -> None:
    with pytest.raises(ValueError, match="floor"):
        rspo_weights(MU, MASK, floor=floor)
