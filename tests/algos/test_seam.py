"""How a method is called: by what it names, with the settings' knobs, and what is said of one that names too much."""

import inspect

import pytest
import torch

from asyncrl.algos.advantages import group_advantages
from asyncrl.algos.aggregate import aggregate
from asyncrl.algos.registry import ADVANTAGES, AGGREGATIONS, CORRECTIONS, SURROGATES, Correction, Method, Surrogate
from asyncrl.algos.seam import INPUTS, call, knobs_of
from asyncrl.algos.tokens import TokenLoss
from asyncrl.learner.objective import LossSums, Tokens, Totals, batch_loss
from asyncrl.sections.algorithm import AlgorithmSection
from asyncrl.sections.base import Section


class Knobs(Section):
    """Two knobs of a method that exists in this file only."""

    scale: float = 3.0
    shift: float | None = None


def test_a_method_gets_what_it_names_and_its_knobs(place):
    where = place(lambda logp, scale, shift: (logp, scale, shift))
    method = Method(where, ("scale", "shift"), {"shift": 0.5})
    inputs = {"logp": 1, "mask": 2}
    assert call(method, inputs, Knobs()) == (1, 3.0, 0.5)
    assert call(method, inputs, Knobs(scale=2.0, shift=0.0)) == (1, 2.0, 0.0)
    assert knobs_of(Method(where, ("shift",)), Knobs()) == {"shift": None}
    # Names that it does not have, and settings it has not asked for, do not reach it.
    assert call(Method(place(lambda: "nothing")), inputs, Knobs()) == "nothing"


def test_a_parameter_that_nobody_gives_is_named_with_what_there_is(place):
    where = place(lambda logp, routes: logp)
    with pytest.raises(ValueError, match=r"parameter 'routes'.*\(logp, mask\).*\(scale\).*registry.py") as refused:
        call(Method(where, ("scale",)), {"logp": 1, "mask": 2}, Knobs())
    assert where in str(refused.value)
    with pytest.raises(ValueError, match="it has none"):
        call(Method(where), {"logp": 1, "mask": 2})


def test_a_default_does_not_hide_an_input_that_is_missing(place):
    with pytest.raises(ValueError, match="parameter 'mask'"):
        call(Method(place(lambda logp, mask=None: logp)), {"logp": 1})


def test_a_knob_without_a_parameter_or_a_key_is_named(place):
    where = place(lambda logp: logp)
    with pytest.raises(ValueError, match=r"knob 'scale'.*no parameter.*logp"):
        call(Method(where, ("scale",)), {"logp": 1}, Knobs())
    with pytest.raises(ValueError, match="knob 'tau', which is no key of Knobs"):
        call(Method(where, ("tau",)), {"logp": 1}, Knobs())


def run_surrogate(name):
    one = torch.zeros(1, 1, requires_grad=True)
    x = Tokens(one, torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1), torch.ones(1, 1, dtype=torch.bool))
    batch_loss(x, AlgorithmSection.model_construct(surrogate=name), Totals(1, 1, 1), LossSums())


def run_correction(name):
    one = torch.zeros(1, 1)
    settings = AlgorithmSection()
    settings = settings.model_copy(update={"correction": settings.correction.model_copy(update={"kind": name})})
    batch_loss(Tokens(one, one, one, torch.ones(1), one == 0), settings, Totals(1, 1, 1), LossSums())


RUN = {
    "surrogates": (SURROGATES, Surrogate, run_surrogate),
    "corrections": (CORRECTIONS, Correction, run_correction),
    "advantages": (ADVANTAGES, Method, lambda name: group_advantages([1.0, 0.0], [0, 0], name)),
    "aggregate": (
        AGGREGATIONS,
        Method,
        lambda name: aggregate(torch.zeros(1, 1), torch.ones(1, 1), name, 1, 1, 1.0),
    ),
}


@pytest.mark.parametrize("kind", INPUTS)
def test_every_input_of_a_kind_is_really_given(kind, place, monkeypatch):
    table, line, run = RUN[kind]
    got = {}

    def everything(**inputs):
        got.update(inputs)
        raise KeyError("seen")

    names = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in INPUTS[kind]]
    everything.__signature__ = inspect.Signature(names)
    monkeypatch.setitem(table, "everything", line(place(everything)))
    with pytest.raises(KeyError, match="seen"):
        run("everything")
    assert set(got) == set(INPUTS[kind])


@pytest.mark.parametrize("kind", INPUTS)
def test_what_is_no_input_is_refused_in_the_place_that_runs_the_method(kind, place, monkeypatch):
    table, line, run = RUN[kind]
    monkeypatch.setitem(table, "other", line(place(lambda optimizer: optimizer)))
    with pytest.raises(ValueError, match="parameter 'optimizer'") as refused:
        run("other")
    assert f"({', '.join(INPUTS[kind])})" in str(refused.value)


def test_a_surrogate_of_the_registry_trains(place, monkeypatch):
    def method(logp, advantages, scale):
        return TokenLoss(-scale * advantages[:, None] * logp, torch.ones_like(logp, dtype=torch.bool))

    class Wider(AlgorithmSection):
        scale: float = 2.0

    monkeypatch.setitem(SURROGATES, "plain", Surrogate(place(method), ("scale",)))
    logp = torch.full((1, 2), -0.5, requires_grad=True)
    x = Tokens(logp, logp.detach(), logp.detach(), torch.tensor([1.5]), torch.ones(1, 2, dtype=torch.bool))
    settings, sums = Wider.model_construct(surrogate="plain"), LossSums()
    loss = batch_loss(x, settings, Totals(2, 1, 1), sums)
    loss.backward()
    # 2 tokens of -2 * 1.5 * -0.5 = 1.5 over 2 tokens; the gradient of each is -3 / 2.
    assert loss.item() == 1.5 and logp.grad.tolist() == [[-1.5, -1.5]]
    assert (sums.loss, sums.clipped) == (1.5, 2.0)
