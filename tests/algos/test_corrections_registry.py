"""What every correction of the registry promises, also one that is added later: masks, NaN, shapes, equal policies.

They are called as a run calls them, through the seam with the settings of a config. Their numbers are in
test_corrections.py (tis) and test_corrections_methods.py.
"""

import ast
import math
from pathlib import Path

import pytest
import torch

from asyncrl.algos import seam
from asyncrl.algos.registry import CORRECTIONS
from asyncrl.sections.algorithm import CorrectionSection

NAN, INF = math.nan, math.inf
# Ratios within and beyond the bounds of every method, on both sides, and a hole in each response.
LOGP = torch.tensor([[-0.5, -1.0, -2.5, -0.2, -1.1], [-1.5, -0.3, -0.9, -2.0, -0.7]])
MU = LOGP - torch.tensor([[0.1, -0.9, 1.9, 1.8, 0.02], [0.05, 3.0, -2.2, -0.3, 0.04]])
SHIFT = torch.tensor([[0.0, 0.1, 0.5, 0.05, 0.2], [0.01, 0.3, 0.0, 2.0, 0.15]])
MASK = torch.tensor([[1, 1, 0, 1, 1], [1, 0, 1, 1, 1]])

every = pytest.mark.parametrize("name", list(CORRECTIONS))
weighing = pytest.mark.parametrize(
    "name", [n for n, method in CORRECTIONS.items() if "rollout_logp" in seam.named(method.place)]
)
knobs = pytest.mark.parametrize(("name", "knob"), [(n, k) for n, m in CORRECTIONS.items() for k in m.knobs])


def weights(
    name: str, logp: torch.Tensor, mu: torch.Tensor, mask: torch.Tensor, shift: torch.Tensor | None = None, **set_to
) -> torch.Tensor:
    """Weights with the settings of a new config, some of them set, unchecked."""
    inputs = {
        "logp": logp,
        "rollout_logp": mu,
        "mask": mask,
        "router_shift": torch.zeros_like(logp) if shift is None else shift,
    }
    return seam.call(CORRECTIONS[name], inputs, CorrectionSection().model_copy(update=set_to))


def example(name: str) -> torch.Tensor:
    found = weights(name, LOGP, MU, MASK, SHIFT)
    assert found.shape == MASK.shape
    return found


@every
def test_a_correction_is_a_file_that_names_what_the_seam_offers_and_no_other_method(name: str) -> None:
    method = CORRECTIONS[name]
    offered = {"logp", "rollout_logp", "mask", "router_shift"}
    assert set(seam.named(method.place)) - set(method.knobs) <= offered
    assert set(method.knobs) <= set(CorrectionSection.model_fields)
    assert set(method.defaults) <= set(method.knobs)
    path = Path(seam.__file__).parent.joinpath(*method.place.partition(":")[0].split(".")).with_suffix(".py")
    imported = [n.module or "" for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)]
    assert not [m for m in imported if m.startswith(("asyncrl.algos.surrogates", "asyncrl.algos.corrections"))]


@every
def test_the_defaults_of_the_function_are_those_of_the_config(name: str) -> None:
    method = CORRECTIONS[name]
    inputs = {"logp": LOGP, "rollout_logp": MU, "mask": MASK, "router_shift": SHIFT}
    plain = seam.function(method.place)(**{k: v for k, v in inputs.items() if k in seam.named(method.place)})
    assert torch.equal(plain, example(name))


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_equal_policies_weigh_exactly_one(name: str, dtype: torch.dtype) -> None:
    logp = LOGP.to(dtype)
    found = weights(name, logp, logp.clone(), MASK)
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert torch.equal(found, MASK.to(found.dtype))


@every
def test_other_types_give_the_same_weights_as_float32(name: str) -> None:
    wide = weights(name, LOGP.double(), MU.double(), MASK, SHIFT.double())
    assert wide.tolist() == [pytest.approx(row, rel=1e-5) for row in example(name).tolist()]
    narrow = [t.to(torch.bfloat16) for t in (LOGP, MU, SHIFT)]
    found = weights(name, narrow[0], narrow[1], MASK, narrow[2])
    assert torch.equal(found, weights(name, narrow[0].float(), narrow[1].float(), MASK, narrow[2].float()))


@every
def test_a_weight_never_carries_a_gradient(name: str) -> None:
    leaves = [t.clone().requires_grad_() for t in (LOGP, MU, SHIFT)]
    found = weights(name, leaves[0], leaves[1], MASK, leaves[2])
    assert not found.requires_grad
    # d/dlogp of w * logp must be w: weights that depend on logp are constants of it.
    torch.where(MASK != 0, found * leaves[0], 0.0).sum().backward()
    assert leaves[0].grad is not None
    assert torch.equal(leaves[0].grad, found)
    assert leaves[1].grad is None and leaves[2].grad is None


@every
@pytest.mark.parametrize("delta", [100.0, -100.0, 1e30, -1e30])
def test_weights_are_finite_at_huge_log_ratios(name: str, delta: float) -> None:
    logp = torch.tensor([[delta, -1.0, delta, delta], [-1.0, delta, -delta, -1.0]])
    shift = torch.full_like(logp, abs(delta))
    found = weights(name, logp, torch.zeros_like(logp), torch.ones_like(logp), shift)
    assert torch.isfinite(found).all() and (found >= 0).all()


@every
@pytest.mark.parametrize("junk", [NAN, INF, -INF, 99.0, -99.0])
def test_what_lies_under_the_mask_is_never_read(name: str, junk: float) -> None:
    inputs = [torch.where(MASK != 0, t, junk) for t in (LOGP, MU, SHIFT)]
    for i in range(3):
        mixed = [inputs[j] if j == i else t for j, t in enumerate((LOGP, MU, SHIFT))]
        assert torch.equal(weights(name, mixed[0], mixed[1], MASK, mixed[2]), example(name))
    assert torch.equal(weights(name, inputs[0], inputs[1], MASK, inputs[2]), example(name))
    assert (example(name)[MASK == 0] == 0).all()


@weighing
@pytest.mark.parametrize("broken", ["logp nan", "logp inf", "logp -inf", "mu inf", "mu -inf"])
def test_a_counted_log_prob_that_is_none_is_seen(name: str, broken: str) -> None:
    which, value = broken.split()
    inputs = {"logp": LOGP.clone(), "mu": MU.clone()}
    inputs[which][0, 1] = float(value)
    found = weights(name, inputs["logp"], inputs["mu"], MASK, SHIFT)
    assert math.isnan(found[0, 1])
    assert torch.equal(found[1], example(name)[1])
    assert (found[MASK == 0] == 0).all()


@weighing
def test_a_missing_rollout_log_prob_acts_as_the_learners_own(name: str) -> None:
    mu, own = MU.clone(), MU.clone()
    mu[0, 1], own[0, 1] = NAN, LOGP[0, 1]
    found = weights(name, LOGP, mu, MASK, SHIFT)
    assert torch.isfinite(found).all()
    assert torch.equal(found, weights(name, LOGP, own, MASK, SHIFT))
    assert torch.equal(weights(name, LOGP, torch.full_like(MU, NAN), MASK), MASK.float())
    # Missing and the learner's own is none: still seen.
    broken = LOGP.clone()
    broken[0, 1] = NAN
    assert math.isnan(weights(name, broken, mu, MASK, SHIFT)[0, 1])


@every
def test_a_response_without_a_counted_token(name: str) -> None:
    mask = MASK.clone()
    mask[0] = 0
    empty = torch.tensor([NAN, INF, -INF, 1e30, NAN])
    found = weights(name, *(torch.stack([empty, t[1]]) for t in (LOGP, MU)), mask, torch.stack([empty, SHIFT[1]]))
    assert found[0].tolist() == [0.0] * 5
    assert torch.equal(found[1], example(name)[1])
    for shape in ((0, 3), (2, 0)):
        assert weights(name, torch.zeros(shape), torch.zeros(shape), torch.zeros(shape)).shape == shape


@every
def test_the_type_of_the_mask_does_not_matter(name: str) -> None:
    for mask in (MASK.bool(), MASK.float(), MASK.to(torch.uint8), MASK * 7):
        assert torch.equal(weights(name, LOGP, MU, mask, SHIFT), example(name))


@every
def test_a_response_is_weighed_by_itself_alone(name: str) -> None:
    swapped = weights(name, LOGP.flip(0), MU.flip(0), MASK.flip(0), SHIFT.flip(0))
    assert torch.equal(swapped, example(name).flip(0))
    for row in ([0], [1]):
        assert torch.equal(weights(name, LOGP[row], MU[row], MASK[row], SHIFT[row]), example(name)[row])


@every
@pytest.mark.parametrize("place", [0, 1, 3, 5])
def test_pads_and_observations_do_not_change_a_weight(name: str, place: int) -> None:
    def spread(values: torch.Tensor, filler: float) -> torch.Tensor:
        hole = torch.full((2, 3), filler, dtype=values.dtype)
        return torch.cat([values[:, :place], hole, values[:, place:]], dim=1)

    found = weights(name, spread(LOGP, -7.0), spread(MU, -0.1), spread(MASK, 0), spread(SHIFT, 3.0))
    assert torch.equal(found, spread(example(name), 0.0))


@every
def test_wrong_shapes_are_refused(name: str) -> None:
    row = torch.zeros(5)
    with pytest.raises(ValueError, match=r"\[B, T\]"):
        weights(name, LOGP, MU, MASK[:, :4], SHIFT)
    with pytest.raises(ValueError, match=r"\[B, T\]"):
        weights(name, LOGP, MU, MASK[:1], SHIFT)
    with pytest.raises(ValueError, match=r"\[B, T\]"):
        weights(name, row, row, row, row)


@weighing
def test_rollout_log_probs_of_another_shape_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"\[B, T\]"):
        weights(name, LOGP, MU[:, :1], MASK, SHIFT)


@knobs
@pytest.mark.parametrize("value", [NAN, -1.0])
def test_a_knob_that_makes_no_sense_is_refused_by_name(name: str, knob: str, value: float) -> None:
    number = isinstance(getattr(CorrectionSection(), knob), float)
    with pytest.raises(ValueError, match=knob):
        weights(name, LOGP, MU, MASK, SHIFT, **{knob: value if number else "nonsense"})


@knobs
def test_a_knob_changes_a_weight(name: str, knob: str) -> None:
    """Guards against a knob that is taken and not used: some other value in its range gives other weights."""
    others = ("sequence",) if knob == "level" else (0.05, 0.2, 0.9, 1.5, 3.0, 20.0)
    found = []
    for value in others:
        try:
            found.append(weights(name, LOGP, MU, MASK, SHIFT, **{knob: value}))
        except ValueError:
            continue
    assert found and any(not torch.equal(w, example(name)) for w in found)


def test_the_examples_tell_the_methods_apart() -> None:
    """Guards the tests above: no two corrections agree on the example."""
    found = {name: tuple(example(name).flatten().tolist()) for name in CORRECTIONS}
    assert len(set(found.values())) == len(CORRECTIONS)
