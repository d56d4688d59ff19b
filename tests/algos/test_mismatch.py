"""k1, k3, F(tau) and ESS by hand; sums add up over splits; guards."""

import math

import pytest
import torch

from asyncrl.algos.mismatch import finalise, mismatch, mismatch_sums

NAN = math.nan
LOG2 = math.log(2)


def test_by_hand() -> None:
    # r = pi / mu = 2, 1/2, 1, 4 and a masked token. log r = log 2 * (1, -1, 0, 2).
    logp = torch.tensor([[LOG2, -LOG2], [0.0, 2 * LOG2]])
    got = mismatch(
        torch.cat([logp, torch.ones(2, 1)], 1), torch.zeros(2, 3), torch.tensor([[1, 1, 0]] * 2), taus=(1.5, 2.5)
    )
    assert set(got) == {"kl_k1", "kl_k3", "f_1.5", "f_2.5", "ess"}
    # k1 = -2 log 2 / 4
    assert got["kl_k1"] == pytest.approx(-0.346574, abs=1e-6)
    # k3 = (2 - 1 - .693147) + (.5 - 1 + .693147) + 0 + (4 - 1 - 1.386294) = 2.113706 over 4
    assert got["kl_k3"] == pytest.approx(0.528426, abs=1e-6)
    # Two-sided: 2, 1/2, 4 beyond 1.5; 4 beyond 2.5
    assert got["f_1.5"] == 0.75
    assert got["f_2.5"] == 0.25
    # (7.5)^2 / (4 * 21.25)
    assert got["ess"] == pytest.approx(0.661765, abs=1e-6)


def test_default_keys_are_those_others_script_against() -> None:
    z = torch.zeros(1, 2)
    assert mismatch(z, z, torch.ones(1, 2)) == {"kl_k1": 0.0, "kl_k3": 0.0, "f_2.0": 0.0, "ess": 1.0}
    assert "f_2.0" in mismatch(z, z, torch.ones(1, 2), taus=(2,))


def test_f_is_two_sided() -> None:
    logp = torch.tensor([[math.log(0.4), math.log(2.5), math.log(0.6), math.log(1.9)]])
    assert mismatch(logp, torch.zeros(1, 4), torch.ones(1, 4))["f_2.0"] == 0.5


def test_b29_both_estimates_have_the_kl_as_their_mean() -> None:
    # mu = [.7, .3], pi = [.4, .6]: 7 tokens of the first and 3 of the second are the exact expectation.
    mu = torch.log(torch.tensor([[0.7] * 7 + [0.3] * 3], dtype=torch.float64))
    pi = torch.log(torch.tensor([[0.4] * 7 + [0.6] * 3], dtype=torch.float64))
    got = mismatch(pi, mu, torch.ones(1, 10))
    assert got["kl_k1"] == pytest.approx(0.18379, abs=1e-5)
    assert got["kl_k3"] == pytest.approx(0.18379, abs=1e-5)
    # One sample of the second: k1 is negative, k3 never.
    one = mismatch(pi[:, 9:], mu[:, 9:], torch.ones(1, 1))
    assert one["kl_k1"] == pytest.approx(-LOG2)
    assert one["kl_k3"] == pytest.approx(1 - LOG2)


def test_k3_is_accurate_and_not_negative_where_policies_nearly_agree() -> None:
    # k3 = delta^2 / 2 = 5e-15 per token; exp(delta) - 1 - delta in float64 is off by 1e-17 / 5e-15.
    delta = torch.full((1, 100), 1e-7, dtype=torch.float64)
    delta[0, ::2] = -1e-7
    got = mismatch(delta, torch.zeros_like(delta), torch.ones(1, 100))
    assert got["kl_k3"] == pytest.approx(5e-15, rel=1e-6, abs=0)
    tiny = mismatch(torch.full((1, 4), 1e-20, dtype=torch.float64), torch.zeros(1, 4), torch.ones(1, 4))
    assert tiny["kl_k3"] >= 0


def test_sums_add_up_over_any_split() -> None:
    generator = torch.Generator().manual_seed(3)
    logp = -torch.rand(6, 5, generator=generator)
    rollout = -torch.rand(6, 5, generator=generator)
    mask = torch.rand(6, 5, generator=generator) > 0.3
    whole = mismatch(logp, rollout, mask, taus=(1.2, 2.0))
    parts = [
        mismatch_sums(logp[s], rollout[s], mask[s], taus=(1.2, 2.0)) for s in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    added = {name: sum((part[name] for part in parts), torch.tensor(0.0, dtype=torch.float64)) for name in parts[0]}
    assert set(added) == {"count", "missing", "k1", "k3", "abs", "w", "w2", "f_1.2", "f_2.0"}
    assert all(value.dtype == torch.float64 for value in added.values())
    assert finalise(added) == pytest.approx(whole)
    assert added["count"].item() == int(mask.sum())


def test_sums_per_response() -> None:
    # Row 0: |log r| = log 2 + log 2, one of 3 masked. Row 1: nothing counts.
    logp = torch.tensor([[LOG2, -LOG2, 9.0], [NAN, 9.0, 9.0]])
    sums = mismatch_sums(logp, torch.zeros(2, 3), torch.tensor([[1, 1, 0], [0, 0, 0]]), (1.5,), per_response=True)
    assert sums["abs"].tolist() == pytest.approx([2 * LOG2, 0.0])
    assert sums["w"].tolist() == pytest.approx([2.5, 0.0])
    assert sums["w2"].tolist() == pytest.approx([4.25, 0.0])
    assert sums["f_1.5"].tolist() == sums["count"].tolist() == [2.0, 0.0]
    whole = mismatch_sums(logp, torch.zeros(2, 3), torch.tensor([[1, 1, 0], [0, 0, 0]]), (1.5,))
    assert {name: value.sum().item() for name, value in sums.items()} == pytest.approx(
        {name: value.item() for name, value in whole.items()}
    )


def test_b15_missing_tokens_are_left_out_and_counted() -> None:
    logp = torch.tensor([[-0.1, -5.0, -5.0, -2.0]])
    sums = mismatch_sums(logp, torch.tensor([[-0.1, NAN, NAN, -2.0]]), torch.tensor([[1, 1, 1, 1]]))
    assert sums["missing"].item() == 2
    assert sums["count"].item() == 2
    assert finalise(sums) == {"kl_k1": 0.0, "kl_k3": 0.0, "f_2.0": 0.0, "ess": 1.0}


@pytest.mark.parametrize("junk", [NAN, math.inf, -math.inf])
def test_padding_is_never_read(junk: float) -> None:
    # B24: the same with 0 or 3 pad tokens
    logp, rollout = torch.tensor([[-1.0, -2.0]]), torch.tensor([[-1.5, -1.0]])
    pad = torch.full((1, 3), junk)
    padded = mismatch(torch.cat([logp, pad], 1), torch.cat([rollout, pad], 1), torch.tensor([[1, 1, 0, 0, 0]]))
    assert padded == mismatch(logp, rollout, torch.ones(1, 2))


def test_huge_log_ratios_stay_finite() -> None:
    got = mismatch(torch.tensor([[99.0, -99.0]]), torch.zeros(1, 2), torch.ones(1, 2))
    assert all(math.isfinite(value) for value in got.values())
    assert got["f_2.0"] == 1.0
    # exp(20) - 1 - 99 and exp(-99) - 1 + 99
    assert got["kl_k3"] == pytest.approx((math.exp(20) - 100 + 98) / 2)
    assert got["ess"] == pytest.approx(0.5)


def test_nothing_to_measure_is_nan_not_a_crash() -> None:
    # B22, B26
    got = mismatch(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2, 3))
    assert set(got) == {"kl_k1", "kl_k3", "f_2.0", "ess"}
    assert all(math.isnan(value) for value in got.values())


def test_gradients_are_not_built() -> None:
    logp = torch.zeros(1, 2, requires_grad=True)
    assert not any(v.requires_grad for v in mismatch_sums(logp, torch.zeros(1, 2), torch.ones(1, 2)).values())


def test_refusals() -> None:
    z = torch.zeros(1, 2)
    with pytest.raises(ValueError, match="taus"):
        mismatch(z, z, z, taus=(1.0,))
    with pytest.raises(ValueError, match=r"\[B, T\]"):
        mismatch(z, torch.zeros(1, 3), z)
