"""Rules between the settings of the objective: each names the key, the value, the reason and a remedy that works."""

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl.algos.registry import CORRECTIONS, SURROGATES, Correction, Surrogate
from asyncrl.config import Config, load_config, read_overrides, save_config, validate
from asyncrl.errors import ConfigError
from asyncrl.rules_algorithm import notes

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "configs/quickstart.yaml"
TAKE4 = "staleness.updates_per_take=4"
GSPO, NONE = "algorithm.surrogate=gspo", "algorithm.correction.kind=none"


def config(*overrides: str) -> Config:
    """All defaults, TIS among them, and these words over them."""
    return made(read_overrides(list(overrides)))


def made(settings: dict) -> Config:
    tree: dict = {"model": {"path": "m"}}
    for key, value in settings.items():
        at = tree
        *sections, leaf = key.split(".")
        for name in sections:
            at = at.setdefault(name, {})
        at[leaf] = value
    return validate(tree)


def refusal(*overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        config(*overrides)
    said = str(caught.value)
    assert len(said.splitlines()) == 1
    return said


def remedies(said: str) -> list[list[str]]:
    """The settings of each remedy of a sentence: "...; set A=1 and B=2, or C=3 or D=4"."""
    advice = re.sub(r"\(.*\)", "", said.rpartition("; set ")[2])
    return [re.findall(r"[a-z_.]+=[^\s,]+", part) for part in re.split(r",? or ", advice) if "=" in part]


# --- the rules -----------------------------------------------------------------------------------

BEHAVIOUR = "algorithm.ratio=behaviour"
REFUSED = [
    # A ratio that is 1 everywhere.
    ([GSPO],
     "algorithm.surrogate=gspo changes nothing with algorithm.ratio=proximal and staleness.updates_per_take=1", [
        [TAKE4], [BEHAVIOUR, NONE], ["algorithm.surrogate=clip"]]),
    (["algorithm.surrogate=cispo", NONE], "the gradient is that of clip", [
        [TAKE4], [BEHAVIOUR], ["algorithm.surrogate=clip"]]),
    (["algorithm.surrogate=gmpo", "staleness.max_lag=0", "staleness.sync_every=1", "algorithm.correction.cap=3"],
     "pi_old is pi", [[TAKE4, "staleness.max_lag=3"], [BEHAVIOUR, NONE, "algorithm.correction.cap=2.0"],
                      ["algorithm.surrogate=clip"]]),
    # What compares with the start of a take, and there is only one update.
    (["algorithm.routes=r2"], "algorithm.routes=r2 has nothing to replay with staleness.updates_per_take=1", [
        [TAKE4], ["algorithm.routes=native"]]),
    (["algorithm.routes=r2", BEHAVIOUR, NONE], "algorithm.routes=r2 has nothing to replay", [
        [TAKE4], ["algorithm.routes=native"]]),
    (["algorithm.correction={kind: rspo, floor: 0.7}"],
     "algorithm.correction.kind=rspo has nothing to correct with staleness.updates_per_take=1", [
        [TAKE4], [NONE, "algorithm.correction.floor=0.8"]]),
    (["algorithm.correction.kind=rspo", BEHAVIOUR, "staleness.max_lag=1", "staleness.sync_every=2"], "kind=rspo", [
        [TAKE4, "staleness.max_lag=3"], [NONE]]),
    # pi / mu twice.
    *(([BEHAVIOUR, f"algorithm.correction.kind={kind}"], "algorithm.ratio=behaviour already carries pi/mu inside the "
       f"clip, so algorithm.correction.kind={kind} would apply it twice", [[NONE]]) for kind in ("tis", "sis", "ctpo")),
    ([BEHAVIOUR, "algorithm.correction={kind: ctpo, spread_low: 0.1}"], "a kind that does not weigh by it: mask, trm)",
     [[NONE, "algorithm.correction.spread_low=0.025"]]),
    ([BEHAVIOUR, TAKE4], "does not weigh by it: mask, trm, rspo)", [[NONE]]),
    # Knobs that nobody turns.
    (["algorithm.correction={kind: mask, cap: 3}"],
     "algorithm.correction.cap=3.0 is a knob of ", [
        ["algorithm.correction.cap=2.0"], ["algorithm.correction.kind=tis"]]),
    (["algorithm.correction={kind: mask, cap: 3}", BEHAVIOUR], "algorithm.correction.cap=3.0 is a knob of ", [
        ["algorithm.correction.cap=2.0"]]),  # tis would be another mistake
    (["algorithm.correction={kind: none, level: sequence}"], "algorithm.correction.level=sequence is a knob of ", [
        ["algorithm.correction.level=token"], ["algorithm.correction.kind=tis"]]),
    (["algorithm.correction.low=0.4"], "algorithm.correction.low=0.4 is a knob of mask", [
        ["algorithm.correction.low=0.5"], ["algorithm.correction.kind=mask"]]),
    (["algorithm.correction.high=2"], "algorithm.correction.high=2.0 is a knob of mask", [
        ["algorithm.correction.high=5.0"], ["algorithm.correction.kind=mask"]]),
    (["algorithm.correction.bound=1"], "algorithm.correction.bound=1.0 is a knob of trm", [
        ["algorithm.correction.bound=0.5"], ["algorithm.correction.kind=trm"]]),
    (["algorithm.correction.envelope=3"], "algorithm.correction.envelope=3.0 is a knob of sis", [
        ["algorithm.correction.envelope=2.0"], ["algorithm.correction.kind=sis"]]),
    (["algorithm.correction.spread_high=0.1"], "algorithm.correction.spread_high=0.1 is a knob of ctpo", [
        ["algorithm.correction.spread_high=0.05"], ["algorithm.correction.kind=ctpo"]]),
    (["algorithm.correction.floor=0.5"], "algorithm.correction.floor=0.5 is a knob of rspo", [
        ["algorithm.correction.floor=0.8"]]),  # rspo needs a longer take
    (["algorithm.correction.floor=0.5", TAKE4], "algorithm.correction.floor=0.5 is a knob of rspo", [
        ["algorithm.correction.floor=0.8"], ["algorithm.correction.kind=rspo"]]),
    ([GSPO, TAKE4, "algorithm.dual_clip=3"],
     "algorithm.dual_clip=3.0 is a knob of clip, and has no effect with algorithm.surrogate=gspo", [
        ["algorithm.dual_clip=null"], ["algorithm.surrogate=clip"]]),
    # A dual clip inside the clip range.
    (["algorithm.dual_clip=1.1"], "algorithm.dual_clip=1.1 must exceed 1 + eps_high = 1.27", [
        ["algorithm.dual_clip=null"]]),
    (["algorithm.dual_clip=3", "algorithm.eps_high=4"], "algorithm.dual_clip=3 must exceed 1 + eps_high = 5", [
        ["algorithm.dual_clip=null"]]),
    # The reference policy.
    (["algorithm.kl.where=reward"], "algorithm.kl.where=reward has no effect with algorithm.kl.coef=0", [
        ["algorithm.kl.coef=0.001"], ["algorithm.kl.where=loss"]]),
    (["algorithm.kl.estimator=k3"], "algorithm.kl.estimator=k3 has no effect with algorithm.kl.coef=0", [
        ["algorithm.kl.coef=0.001"], ["algorithm.kl.estimator=unbiased"]]),
    (["algorithm.kl.reference=other"], "algorithm.kl.reference=other has no effect with algorithm.kl.coef=0", [
        ["algorithm.kl.coef=0.001"], ["algorithm.kl.reference=null"]]),
    (["algorithm.kl={coef: 0.1, where: reward, estimator: k2}"],
     "algorithm.kl.estimator=k2 is of the loss term, and algorithm.kl.where=reward takes k1", [
        ["algorithm.kl.estimator=unbiased"], ["algorithm.kl.where=loss"]]),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "words", "wanted"), REFUSED)
def test_a_refusal_names_key_value_and_remedies_that_work(overrides, words, wanted):
    said = refusal(*overrides)
    assert words in said
    assert remedies(said) == wanted
    for remedy in wanted:
        config(*overrides, *remedy)


@pytest.mark.parametrize("overrides", [
    [GSPO, TAKE4],
    [GSPO, BEHAVIOUR, NONE],
    ["algorithm.surrogate=clip"],
    ["algorithm.routes=r2", "staleness.updates_per_take=2"],
    ["algorithm.routes=r2", BEHAVIOUR, NONE, TAKE4],
    ["algorithm.correction.kind=rspo", TAKE4],
    *([BEHAVIOUR, f"algorithm.correction.kind={kind}"] for kind in ("none", "mask", "trm")),
    [BEHAVIOUR, "algorithm.correction.kind=rspo", TAKE4],
    ["algorithm.routes=r3"],
    ["algorithm.correction={kind: mask, low: 0.2, high: 3}"],
    ["algorithm.correction={kind: mask, cap: 2}"],  # the default, as a base config may spell it out
    ["algorithm.correction={kind: tis, cap: 0.5, level: sequence}"],
    ["algorithm.dual_clip=3", BEHAVIOUR, NONE],
    [GSPO, TAKE4, "algorithm.eps_low=0.01", "algorithm.eps_high=0.02"],
    ["algorithm.kl={coef: 0.1, estimator: k3, reference: other}"],
    ["algorithm.kl={coef: 0.1, where: reward}"],
    ["algorithm.kl={coef: 0, where: loss, estimator: unbiased, reference: null}"],
])  # fmt: skip
def test_what_makes_sense_is_accepted(overrides):
    config(*overrides)


def makes_sense(surrogate: str, kind: str, ratio: str, routes: str, updates: int) -> bool:
    """The rules once more, from what the registry says of a method."""
    if ratio == "behaviour" and CORRECTIONS[kind].weighs_mu:
        return False
    proximal_one = ratio == "proximal" and SURROGATES[surrogate].needs_ratio
    return updates > 1 or not (proximal_one or routes == "r2" or CORRECTIONS[kind].needs_take)


def test_every_combination_is_accepted_or_leads_by_its_remedies_to_one_that_is():
    keys = ("algorithm.surrogate", "algorithm.correction.kind", "algorithm.ratio", "algorithm.routes",
            "staleness.updates_per_take")  # fmt: skip
    values = (SURROGATES, CORRECTIONS, ("proximal", "behaviour"), ("native", "r3", "r2"), (1, 2))
    for combination in itertools.product(*values):
        settings = {"staleness.max_lag": "3", **dict(zip(keys, combination, strict=True))}
        steps, said = 0, "?"
        while said:
            try:
                made({k: None if v == "null" else v for k, v in settings.items()})
                said = ""
            except ConfigError as exc:
                said, steps = str(exc), steps + 1
                settings |= dict(word.split("=") for word in remedies(said)[0])
        assert (steps == 0) == makes_sense(*combination), combination
        assert steps <= 2, combination


def test_a_method_of_tomorrow_is_covered(monkeypatch):
    monkeypatch.setitem(CORRECTIONS, "mine", Correction("corrections.mine:mine", ("bound",)))
    assert remedies(refusal("algorithm.correction.bound=1"))[1:] == [
        ["algorithm.correction.kind=trm"], ["algorithm.correction.kind=mine"],
    ]  # fmt: skip
    monkeypatch.setitem(SURROGATES, "other", Surrogate("surrogates.other:other", ("dual_clip",)))
    said = refusal(GSPO, TAKE4, "algorithm.dual_clip=3")
    assert "algorithm.dual_clip=3.0 is a knob of clip and other" in said
    # A surrogate without a clip range: one that was set is not for it.
    monkeypatch.setitem(SURROGATES, "gspo", Surrogate("surrogates.gspo:gspo"))
    said = refusal(GSPO, TAKE4, "algorithm.eps_low=0.1")
    assert (
        "algorithm.eps_low=0.1 is a knob of clip, cispo and gmpo, and has no effect with algorithm.surrogate=gspo"
        in said
    )


# --- what is merged ------------------------------------------------------------------------------


def test_another_surrogate_over_the_quickstart_has_its_own_clip_range():
    a = load_config(QUICKSTART, [GSPO, TAKE4]).algorithm
    assert a.clip_range == {"eps_low": 3e-4, "eps_high": 4e-4}
    assert load_config(QUICKSTART).algorithm.clip_range == {"eps_low": 0.2, "eps_high": 0.27}
    assert load_config(QUICKSTART, ["algorithm.eps_high=0.3"]).algorithm.clip_range == {"eps_low": 0.2, "eps_high": 0.3}
    assert load_config(QUICKSTART, [GSPO, TAKE4, "algorithm.eps_high=0.01"]).algorithm.clip_range["eps_high"] == 0.01


def test_a_resumed_run_with_another_surrogate_has_the_range_of_that_one(tmp_path):
    save_config(load_config(QUICKSTART, [TAKE4]), tmp_path / "config.yaml")
    assert "eps_low: null" in (tmp_path / "config.yaml").read_text()
    a = load_config(tmp_path / "config.yaml", ["algorithm.surrogate=cispo"]).algorithm
    assert a.clip_range == {"eps_low": 1.0, "eps_high": 4.0}
    # A range that somebody set stays.
    save_config(load_config(QUICKSTART, [TAKE4, "algorithm.eps_low=0.1"]), tmp_path / "config.yaml")
    a = load_config(tmp_path / "config.yaml", ["algorithm.surrogate=cispo"]).algorithm
    assert a.clip_range == {"eps_low": 0.1, "eps_high": 4.0}


# --- what is unusual -----------------------------------------------------------------------------

NOTED = [
    *((["algorithm.routes=r3", f"algorithm.correction.kind={kind}"],
       f"algorithm.correction.kind={kind} on top of algorithm.routes=r3: TIS on top of R3 scored 1.69 points below R3 "
       "alone in the R3 paper (arXiv 2510.11370, single mini-step SFT model)", [NONE])
      for kind in ("tis", "sis", "ctpo")),
    (["algorithm.routes=r3", "algorithm.correction.cap=3"], "TIS on top of R3", [NONE, "algorithm.correction.cap=2.0"]),
    ([GSPO, TAKE4], "algorithm.aggregation=token_mean is not what algorithm.surrogate=gspo was published with",
     ["algorithm.aggregation=sequence_mean"]),
    (["algorithm.surrogate=gmpo", TAKE4, "algorithm.aggregation=constant"],
     "algorithm.aggregation=constant is not what algorithm.surrogate=gmpo", ["algorithm.aggregation=sequence_mean"]),
    ([GSPO, TAKE4, "algorithm.aggregation=sequence_mean", "algorithm.eps_high=0.05"],
     "algorithm.eps_high=0.05 is a clip range of token ratios", ["algorithm.eps_high=null"]),
    ([GSPO, TAKE4, "algorithm.aggregation=sequence_mean", "algorithm.eps_low=0.2"],
     "algorithm.eps_low=0.2 is a clip range of token ratios", ["algorithm.eps_low=null"]),
]  # fmt: skip


@pytest.mark.parametrize(("overrides", "words", "remedy"), NOTED)
def test_what_is_unusual_is_noted_with_what_is_usual(overrides, words, remedy):
    (note,) = notes(config(*overrides))
    assert words in note
    (advice,) = remedies(re.sub(", (unless|its own).*", "", note))
    assert advice == remedy
    assert not list(notes(config(*overrides, *remedy)))


@pytest.mark.parametrize("overrides", [
    [], ["algorithm.routes=r2", TAKE4], ["algorithm.surrogate=cispo", TAKE4], ["algorithm.aggregation=constant"],
    *(["algorithm.routes=r3", f"algorithm.correction.kind={kind}"] for kind in ("none", "mask", "trm")),
    [GSPO, TAKE4, "algorithm.aggregation=sequence_mean", "algorithm.eps_high=0.049"],
])  # fmt: skip
def test_what_is_usual_is_not_noted(overrides):
    assert not list(notes(config(*overrides)))


@pytest.mark.parametrize("command", ["run", "learn", "config"])
def test_the_note_is_said_once_whatever_the_ranks_and_before_anything_starts(command, tmp_path):
    words = ["algorithm.routes=r3", "learner.ranks=2", f"model.path={tmp_path}/none", f"run.dir={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "asyncrl", command, QUICKSTART, *words],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("TIS on top of R3 scored 1.69 points below R3 alone") == 1
    assert done.stderr.index("TIS on top of R3") < done.stderr.index("has no config.json")
    assert not list(tmp_path.iterdir())
