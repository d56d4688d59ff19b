import math

import numpy as np
import torch

from asyncrl.engines.sampler import draw, log_probs


def test_log_probs_are_of_the_logits_divided_by_each_row_s_temperature():
    logits = torch.tensor([[2.0, 1.0, 0.0], [2.0, 1.0, 0.0]])
    logp = log_probs(logits, torch.tensor([0.6, 1.0]))
    np.testing.assert_allclose(logp[0], [-0.2026, -1.8692, -3.5359], atol=1e-4)
    np.testing.assert_allclose(logp[1], [-0.4076, -1.4076, -2.4076], atol=1e-4)


def test_bfloat16_logits_are_widened_before_anything_else():
    logp = log_probs(torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.bfloat16), torch.ones(1))
    assert logp.dtype == torch.float32
    assert abs(float(logp[0, 0]) + 0.407606) < 1e-6


def test_float64_stays_float64():
    assert log_probs(torch.zeros(1, 3, dtype=torch.float64), torch.ones(1)).dtype == torch.float64


def test_draw_inverts_the_cumulative_distribution():
    # p = 0.5, 0.25, 0.25: the borders are 0.5 and 0.75.
    logp = torch.tensor([[0.5, 0.25, 0.25]]).log().expand(6, 3)
    uniform = torch.tensor([0.0, 0.49, 0.51, 0.74, 0.76, 1 - 2**-53], dtype=torch.float64)
    assert draw(logp, uniform).tolist() == [0, 0, 1, 1, 2, 2]


def test_draw_leaves_the_log_probs_alone():
    logp = torch.tensor([[0.5, 0.5]], dtype=torch.float64).log()
    draw(logp, torch.zeros(1, dtype=torch.float64))
    assert logp.tolist() == [[-0.6931471805599453, -0.6931471805599453]]


def test_draw_never_takes_a_token_of_probability_0():
    logp = torch.tensor([[-math.inf, 0.0, -math.inf]]).expand(3, 3)
    assert draw(logp, torch.tensor([0.0, 0.5, 1 - 2**-53], dtype=torch.float64)).tolist() == [1, 1, 1]


def test_draws_have_the_right_frequencies():
    logp = torch.log_softmax(torch.tensor([[2.0, 1.0, 0.0, -1.0]]), dim=-1).expand(40_000, 4)
    uniform = torch.rand(40_000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = torch.bincount(draw(logp, uniform), minlength=4) / 40_000
    # Four standard errors of a frequency near 1/2 are 0.01.
    np.testing.assert_allclose(found, logp[0].exp(), atol=0.01)
