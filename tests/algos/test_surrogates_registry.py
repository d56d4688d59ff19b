"""What every surrogate of the registry promises, also one that is added later: masks, NaN, shapes, equal policies.

They are called as a run calls them, through the seam with the settings of a config; `clip`, `gspo`, `cispo` and `gmpo`
have their own numbers in test_surrogates.py and test_surrogates_*.py.
"""

import ast
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from asyncrl.algos import seam
from asyncrl.algos.aggregate import aggregate
from asyncrl.algos.registry import SURROGATES
from asyncrl.algos.tokens import TokenLoss
from asyncrl.sections.algorithm import AlgorithmSection

NAN, INF = math.nan, math.inf
ADVANTAGES = torch.tensor([1.5, -0.75])
# Ratios within and beyond the bounds of every method, on both sides.
LOGP = torch.tensor([[-0.5, -1.0, -2.5, -0.2], [-1.5, -0.3, -0.9, -2.0]])
OLD = LOGP - torch.tensor([[0.1, -0.9, 1.9, 0.0], [0.05, 2.0, -1.2, -0.3]])

every = pytest.mark.parametrize("name", list(SURROGATES))


def run(
    name: str, logp: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor | None = None
) -> TokenLoss:
    mask = torch.ones_like(logp) if mask is None else mask
    inputs = {"logp": logp, "old_logp": old, "advantages": advantages, "mask": mask}
    result = seam.call(SURROGATES[name], inputs, AlgorithmSection())
    assert isinstance(result, TokenLoss)
    assert result.loss.shape == result.clipped.shape == logp.shape
    assert result.clipped.dtype == torch.bool
    return result


def loss_and_gradient(
    name: str, logp: torch.Tensor, old: torch.Tensor, advantages: torch.Tensor, mask: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    leaf = logp.clone().requires_grad_()
    loss = run(name, leaf, old, advantages, mask).loss
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    return loss.detach(), gradient


@every
def test_a_surrogate_is_a_file_that_names_what_the_seam_offers_and_no_other_method(name: str) -> None:
    method = SURROGATES[name]
    assert set(seam.named(method.place)) - set(method.knobs) <= {"logp", "old_logp", "advantages", "mask"}
    assert set(method.knobs) <= set(AlgorithmSection.model_fields)
    assert set(method.defaults) <= set(method.knobs)
    module = method.place.partition(":")[0]
    path = Path(seam.__file__).parent.joinpath(*module.split(".")).with_suffix(".py")
    imported = [n.module or "" for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
    assert not [m for m in imported if m.startswith(("asyncrl.algos.surrogates", "asyncrl.algos.corrections"))]
    assert f"asyncrl.algos.{module}" not in imported


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_policies_give_the_plain_policy_gradient(name: str, dtype: torch.dtype) -> None:
    # sequence_mean over n = 3 responses, one of them without a token: -A / T / n at every counted token.
    logp = torch.tensor([[-0.3, -2.0, -1.0], [-0.7, -0.1, -4.0], [-1.0, -1.0, -1.0]], dtype=dtype, requires_grad=True)
    mask = torch.tensor([[1, 1, 1], [1, 0, 1], [0, 0, 0]])
    result = run(name, logp, logp.detach().clone(), torch.tensor([1.5, -0.6, 2.0]), mask)
    aggregate(result.loss, mask, "sequence_mean", 5, 3, 1.0).backward()
    assert not result.clipped.any()
    assert logp.grad is not None
    # -1.5 / 3 / 3 = -1/6 and 0.6 / 2 / 3 = 0.1.
    assert logp.grad[0].tolist() == pytest.approx([-1 / 6] * 3, rel=1e-6)
    assert logp.grad[1].tolist() == pytest.approx([0.1, 0.0, 0.1], rel=1e-6)
    assert logp.grad[2].tolist() == [0.0] * 3


@every
@pytest.mark.parametrize("junk", [NAN, INF, -INF, 100.0, -100.0])
@pytest.mark.parametrize("side", ["logp", "old", "both"])
def test_what_lies_under_the_mask_is_never_read(name: str, junk: float, side: str) -> None:
    mask = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 0]])
    loss, gradient = loss_and_gradient(name, LOGP, OLD, ADVANTAGES, mask)
    logp = torch.where(mask != 0, LOGP, LOGP if side == "old" else torch.tensor(junk))
    old = torch.where(mask != 0, OLD, OLD if side == "logp" else torch.tensor(junk))
    for kind in (mask, mask.float(), mask.bool()):
        found, slope = loss_and_gradient(name, logp, old, ADVANTAGES, kind)
        assert torch.equal(found, loss)
        assert torch.equal(slope, gradient)
    assert loss[0, 1] == loss[1, 3] == gradient[0, 1] == gradient[1, 3] == 0
    result = run(name, logp, old, ADVANTAGES, mask)
    assert not result.clipped[0, 1]
    assert not result.clipped[1, 3]


@every
@pytest.mark.parametrize("junk", [0.5, NAN, INF])
def test_a_response_without_a_counted_token_gives_nothing(name: str, junk: float) -> None:
    logp = LOGP.clone()
    logp[0] = junk
    mask = torch.tensor([[0] * 4, [1] * 4])
    loss, gradient = loss_and_gradient(name, logp, OLD, ADVANTAGES, mask)
    alone, slope = loss_and_gradient(name, LOGP[1:], OLD[1:], ADVANTAGES[1:])
    assert loss[0].tolist() == gradient[0].tolist() == [0.0] * 4
    assert torch.equal(loss[1:], alone)
    assert torch.equal(gradient[1:], slope)


@every
def test_neither_padding_nor_other_responses_change_a_response(name: str) -> None:
    # The rows of a batch come in any split and order, padded to the longest.
    loss, gradient = loss_and_gradient(name, LOGP, OLD, ADVANTAGES)
    turned, slope = loss_and_gradient(name, LOGP.flip(0), OLD.flip(0), ADVANTAGES.flip(0))
    assert torch.equal(turned.flip(0), loss)
    assert torch.equal(slope.flip(0), gradient)
    pad = torch.full((2, 3), NAN)
    mask = torch.cat([torch.ones(2, 4), torch.zeros(2, 3)], dim=1)
    padded, slope = loss_and_gradient(
        name, torch.cat([LOGP, pad], dim=1), torch.cat([OLD, pad], dim=1), ADVANTAGES, mask
    )
    torch.testing.assert_close(padded[:, :4], loss)
    torch.testing.assert_close(slope[:, :4], gradient)
    assert not padded[:, 4:].any()
    assert not slope[:, 4:].any()


@every
def test_the_loss_of_a_token_has_a_gradient_at_this_token_alone(name: str) -> None:
    # Else a correction that gives a token weight 0 would not keep it from training.
    logp = LOGP.clone().requires_grad_()
    old = LOGP - 1e-4 * torch.arange(8).view(2, 4)
    loss = run(name, logp, old, ADVANTAGES).loss
    for b in range(2):
        for t in range(4):
            (gradient,) = torch.autograd.grad(loss[b, t], logp, retain_graph=True)
            assert gradient[b, t] != 0
            assert gradient.count_nonzero() == 1


@every
@pytest.mark.parametrize("delta", [100.0, -100.0, 1e30, -1e30])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_huge_log_ratios_stay_finite(name: str, delta: float, advantage: float, dtype: torch.dtype) -> None:
    for number in (1, 3):
        logp = torch.full((1, 3), -1.0, dtype=dtype)
        old = logp.clone()
        old[0, :number] = -1.0 - delta
        loss, gradient = loss_and_gradient(name, logp, old, torch.tensor([advantage]))
        assert torch.isfinite(loss).all()
        assert torch.isfinite(gradient).all()


@every
@pytest.mark.parametrize(
    ("logp", "old"), [(NAN, -1.0), (-INF, -1.0), (INF, -1.0), (-1.0, INF), (-1.0, -INF), (INF, INF), (NAN, NAN)]
)
def test_a_counted_token_without_a_log_ratio_is_seen_and_has_no_gradient(name: str, logp: float, old: float) -> None:
    loss, gradient = loss_and_gradient(name, LOGP, OLD, ADVANTAGES)
    broken, old_logp = LOGP.clone(), OLD.clone()
    broken[0, 1], old_logp[0, 1] = logp, old
    found, slope = loss_and_gradient(name, broken, old_logp, ADVANTAGES)
    assert math.isnan(found[0, 1])
    assert slope[0, 1] == 0
    assert torch.isfinite(slope).all()
    assert not run(name, broken, old_logp, ADVANTAGES).clipped[0, 1]
    # The other response does not notice.
    assert torch.equal(found[1], loss[1])
    assert torch.equal(slope[1], gradient[1])


@every
def test_a_missing_old_log_prob_is_that_of_the_policy(name: str) -> None:
    # Ratio 1, gradient as on policy.
    missing = torch.tensor([[0, 1, 0, 0], [1, 0, 0, 1]]) != 0
    loss, gradient = loss_and_gradient(name, LOGP, torch.where(missing, LOGP, OLD), ADVANTAGES)
    found, slope = loss_and_gradient(name, LOGP, torch.where(missing, NAN, OLD), ADVANTAGES)
    assert torch.equal(found, loss)
    assert torch.equal(slope, gradient)
    _, slope = loss_and_gradient(name, LOGP, torch.full_like(OLD, NAN), ADVANTAGES)
    assert slope[0].tolist() == pytest.approx([-1.5] * 4)
    assert slope[1].tolist() == pytest.approx([0.75] * 4)


@every
def test_without_an_advantage_there_is_nothing_to_learn_and_nothing_to_clip(name: str) -> None:
    loss, gradient = loss_and_gradient(name, LOGP, OLD, torch.zeros(2))
    assert not loss.any()
    assert not gradient.any()
    assert not run(name, LOGP, OLD, torch.zeros(2)).clipped.any()


@every
def test_old_policy_and_advantages_get_no_gradient(name: str) -> None:
    logp, old, advantages = (x.clone().requires_grad_() for x in (LOGP, OLD, ADVANTAGES))
    run(name, logp, old, advantages).loss.sum().backward()
    assert logp.grad is not None
    assert old.grad is None
    assert advantages.grad is None


@every
def test_narrow_types_are_computed_in_float32(name: str) -> None:
    narrow, old = LOGP.bfloat16(), OLD.bfloat16()
    loss, gradient = loss_and_gradient(name, narrow, old, ADVANTAGES.bfloat16())
    wide, slope = loss_and_gradient(name, narrow.float(), old.float(), ADVANTAGES)
    assert loss.dtype == torch.float32
    assert gradient.dtype == torch.bfloat16
    assert torch.equal(loss, wide)
    assert torch.equal(gradient, slope.bfloat16())
    assert run(name, LOGP.double(), OLD.double(), ADVANTAGES).loss.dtype == torch.float64
    # Log-probs of one type and those of the old policy in another.
    assert run(name, LOGP, OLD.double(), ADVANTAGES).loss.dtype == torch.float64


@every
def test_advantages_may_be_given_by_token(name: str) -> None:
    loss, gradient = loss_and_gradient(name, LOGP, OLD, ADVANTAGES)
    found, slope = loss_and_gradient(name, LOGP, OLD, ADVANTAGES[:, None].expand(2, 4))
    assert torch.equal(found, loss)
    assert torch.equal(slope, gradient)
    # On policy each token has its own: the gradient is -A_t.
    by_token = torch.tensor([[1.0, -2.0, 0.5, 3.0], [0.0, 1.0, -1.0, 2.0]])
    _, slope = loss_and_gradient(name, LOGP, LOGP, by_token)
    torch.testing.assert_close(slope, -by_token)


@every
def test_wrong_shapes_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"\[B, T\]"):
        run(name, torch.zeros(2, 3), torch.zeros(2, 2), torch.zeros(2))
    with pytest.raises(ValueError, match=r"\[B, T\]"):
        run(name, torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(2), torch.ones(2, 1))
    with pytest.raises(ValueError, match=r"\[B, T\]"):
        run(name, torch.zeros(3), torch.zeros(3), torch.zeros(3))
    for shape in ((3,), (2, 2), ()):
        with pytest.raises(ValueError, match="advantages"):
            run(name, torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(shape))


@pytest.mark.parametrize("bound", ["eps_low", "eps_high"])
@pytest.mark.parametrize("value", [-0.1, NAN])
@pytest.mark.parametrize("name", [n for n, s in SURROGATES.items() if {"eps_low", "eps_high"} <= {*s.knobs}])
def test_wrong_bounds_are_refused(name: str, bound: str, value: float) -> None:
    settings = SimpleNamespace(**{**AlgorithmSection().model_dump(), bound: value})
    inputs = {"logp": LOGP, "old_logp": OLD, "advantages": ADVANTAGES, "mask": torch.ones(2, 4)}
    with pytest.raises(ValueError, match=f"{bound}={value}"):
        seam.call(SURROGATES[name], inputs, settings)
