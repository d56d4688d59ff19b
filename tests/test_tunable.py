"""Which settings can be tuned, and what is said of the others."""

import ast
from pathlib import Path

import pytest

from asyncrl import tunable
from asyncrl.algos.registry import CORRECTIONS, SURROGATES
from asyncrl.config import known_keys, read_overrides, validate
from asyncrl.errors import ConfigError
from asyncrl.replay.limits import LIVE, limits_of

ROOT = Path(__file__).parents[1]
CONFIG = validate({"model": {"path": "m"}})

LIMITS, OBJECTIVE, STEP, SCHEDULE = "replay/limits.py", "learner/objective.py", "learner/step.py", "learner/schedule.py"
UPDATE, ALARMS = "learner/update.py", "metrics/alarms.py"
CONSUMERS = {
    "staleness.max_lag": (LIMITS, "learner/loop.py"),
    "staleness.sync_every": (LIMITS, "learner/loop.py"),
    "staleness.stale": (LIMITS,),
    "staleness.patience": (LIMITS,),
    "staleness.on_evict": (LIMITS,),
    "algorithm.zero_variance": (LIMITS,),
    "algorithm.eps_low": (OBJECTIVE,),
    "algorithm.eps_high": (OBJECTIVE,),
    "algorithm.dual_clip": (OBJECTIVE,),
    "algorithm.native_drift_every": (UPDATE,),
    "algorithm.rdc": (UPDATE,),
    "algorithm.correction": (OBJECTIVE,),
    "learner.lr": (SCHEDULE,),
    "learner.min_lr": (SCHEDULE,),
    "learner.max_grad_norm": (STEP,),
    "learner.weight_decay": (STEP,),
    "learner.micro_batch_tokens": (STEP, UPDATE),
    "generator.groups_in_flight": ("generator/loop.py",),
    "eval.every": ("replay/tuning.py", "learner/loop.py"),
    "weights.paused": ("learner/loop.py",),
    "logging.histograms_every": ("learner/recorder.py",),
    "logging.dump_every": ("learner/dumping.py",),
    "logging.dump_policy": ("learner/dumping.py",),
    "alarms": (ALARMS, "metrics/alarm_rules.py", "metrics/alarm_fleet.py", "learner/alarming.py"),
    "sentinel": ("learner/sentinel.py", "replay/quarantine.py"),
}
"""Entry of TUNABLE to the files that read the live value: all of them, of a section any of them for each key."""


def test_every_key_of_the_config_is_either_tunable_or_has_a_reason_why_not():
    entries = {k: (tunable.entry(k, tunable.TUNABLE), tunable.entry(k, tunable.FIXED)) for k in tunable.leaves()}
    assert {k for k, (yes, no) in entries.items() if not yes and not no} == set(), (
        "put new keys into asyncrl/tunable.py"
    )
    assert {k for k, (yes, no) in entries.items() if yes == no} == set()
    assert set(tunable.TUNABLE) | set(tunable.FIXED) <= set(known_keys()), "entries without a key"
    used = {max(pair, key=len) for pair in entries.values()}
    assert {e for e in (*tunable.TUNABLE, *tunable.FIXED) if e not in used} == set(), "entries without effect"


@pytest.mark.parametrize("key", [k for k in tunable.leaves() if not tunable.is_tunable(k)])
def test_a_refused_key_says_why_and_what_to_do(key):
    with pytest.raises(ConfigError) as refused:
        tunable.check(key)
    words = str(refused.value)
    assert words.startswith(f"{key} cannot be changed in a running job: ") and ";" in words


def test_no_command_can_be_set_from_outside():
    # It would be run on the learner's host, for whoever can reach replay.
    assert not tunable.is_tunable("alarms.command")


@pytest.mark.parametrize(("values", "words"), [
    # B60: a mistyped or mis-nested setting is never ignored.
    ({"algorithm.rdc.quantle": 0.1}, "did you mean 'algorithm.rdc.q'"),
    ({"quantile": 0.1}, "unknown key 'quantile'; did you mean 'algorithm.rdc.q'?"),
    ({"staleness.max_lag": "two"}, "staleness.max_lag='two'"),
    ({"algorithm.rdc.q": 1.0}, "algorithm.rdc.q=1.0"),
    ({"algorithm.rdc.q": True}, "algorithm.rdc.q=True"),
    ({"staleness.max_lag": -1}, "staleness.max_lag=-1"),
    ({"staleness.sync_every": 0}, "staleness.sync_every=0"),
    ({"learner.lr": float("nan")}, "learner.lr=nan"),
    ({"staleness": 3}, "staleness is a section; name a key in it, such as staleness.sync_every"),
    ({"task": 3}, "task is a section: prompts and their ids follow from it"),
    ({"": 3}, "unknown key ''"),
    # Rules between settings hold as in the config, whatever was tuned before.
    ({"staleness.max_lag": 2}, "staleness.max_lag=2 is smaller than sync_every - 1 = 3"),
    ({"algorithm.dual_clip": 1.1}, "must exceed 1 + eps_high"),
    ({"learner.min_lr": 1e-5}, "has no effect with learner.lr_schedule=constant"),
    ({"algorithm.correction.kind": "rspo"}, "has nothing to correct with staleness.updates_per_take=1"),
    ({"algorithm.correction.low": 0.3}, "is a knob of mask, and has no effect with algorithm.correction.kind=tis"),
    ({"algorithm.correction.kind": "mask", "algorithm.correction.cap": 3}, "cap=3.0 is a knob of "),
    ({"algorithm.surrogate": "gspo"}, "algorithm.surrogate cannot be changed in a running job"),
    ({"algorithm.kl.coef": 0.1}, "algorithm.kl.coef cannot be changed in a running job: the reference policy"),
    # The embedded engine has memory for what it was started with.
    ({"generator.groups_in_flight": 33}, "KV cache"),
])  # fmt: skip
def test_what_the_config_would_refuse_is_refused(values, words):
    with pytest.raises(ConfigError) as refused:
        tunable.merged(CONFIG, values)
    assert words in str(refused.value)


def test_values_are_read_as_the_config_reads_them():
    words = [
        "algorithm.rdc.mode=off",
        "algorithm.rdc.bucket_edges=[4, 8]",
        "algorithm.correction={cap: 3}",
        "learner.lr=1e-3",
    ]
    values = read_overrides(words)
    new = tunable.merged(CONFIG, values)
    assert (new.algorithm.rdc.mode, new.algorithm.rdc.bucket_edges, new.algorithm.correction.cap) == ("off", (4, 8), 3)
    assert new.learner.lr == 1e-3 and new.staleness == CONFIG.staleness
    with pytest.raises(ConfigError, match="is not key=value"):
        read_overrides(["staleness.max_lag"])


def test_values_that_must_change_together_can():
    new = tunable.merged(CONFIG, {"staleness.max_lag": 0, "staleness.sync_every": 1})
    assert (new.staleness.max_lag, new.staleness.sync_every) == (0, 1)


def test_another_correction_comes_with_its_knobs_and_goes_without_them():
    values = {"algorithm.correction.kind": "mask", "algorithm.correction.low": 0.3, "algorithm.correction.high": 2.0}
    correction = tunable.merged(CONFIG, values).algorithm.correction
    assert (correction.kind, correction.low, correction.high, correction.cap) == ("mask", 0.3, 2.0, 2.0)
    capped = tunable.merged(CONFIG, {"algorithm.correction.cap": 3})
    with pytest.raises(ConfigError, match=r"set algorithm\.correction\.cap=2\.0 or algorithm\.correction\.kind=tis"):
        tunable.merged(capped, {"algorithm.correction.kind": "none"})
    assert tunable.merged(capped, {"algorithm.correction.kind": "none", "algorithm.correction.cap": 2.0})
    several = tunable.merged(validate({"model": {"path": "m"}, "staleness": {"updates_per_take": 2}}), {
        "algorithm.correction.kind": "rspo", "algorithm.correction.floor": 0.5,
    })  # fmt: skip
    assert several.algorithm.correction.floor == 0.5


def test_a_clip_range_that_is_null_is_the_surrogates_own():
    gspo = {"model": {"path": "m"}, "staleness": {"updates_per_take": 2}, "algorithm": {"surrogate": "gspo"}}
    wide = tunable.merged(validate(gspo), {"algorithm.eps_high": 0.01})
    assert wide.algorithm.clip_range == {"eps_low": 3e-4, "eps_high": 0.01}
    assert tunable.merged_json(wide, {"algorithm.eps_high": "null"}).algorithm.clip_range["eps_high"] == 4e-4


def test_an_sglang_server_takes_more_groups_than_configured():
    sglang = validate({"model": {"path": "m"}, "generator": {"engine": "sglang"}, "weights": {"carrier": "disk"}})
    assert tunable.merged(sglang, {"generator.groups_in_flight": 64}).generator.groups_in_flight == 64


@pytest.mark.parametrize("text", ["{", "[" * 50_000, "01"])
def test_what_is_no_json_is_refused(text):
    with pytest.raises(ConfigError, match=r"learner\.lr: the value is no JSON"):
        tunable.merged_json(CONFIG, {"learner.lr": text})


def test_values_have_one_spelling():
    assert tunable.flat(tunable.merged(CONFIG, {"algorithm.rdc.q": 0}))["algorithm.rdc.q"] == "0.0"
    assert tuple(tunable.flat(CONFIG)) == tunable.tunable_keys()


def test_the_docs_have_the_table():
    text = (ROOT / "docs/tuning_live.md").read_text()
    rows = [line.split("|")[1:3] for line in text.splitlines() if line.startswith("| `")]
    assert {key.strip().strip("`").removesuffix(".*"): when.strip() for key, when in rows} == dict(tunable.TUNABLE)


TABLES = {"SURROGATES": SURROGATES, "CORRECTIONS": CORRECTIONS}


def attributes(file):
    """Names that a file reads of anything, and the knobs of methods that it runs with its settings: the seam reads
    those."""
    tree = ast.parse((ROOT / "asyncrl" / file).read_text())
    read = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "call" and len(node.args) == 3:
            methods = TABLES[ast.unparse(node.args[0]).partition("[")[0]]
            read |= {knob for method in methods.values() for knob in method.knobs}
    return read


def test_every_tunable_key_has_somebody_who_reads_its_live_value():
    assert CONSUMERS.keys() == tunable.TUNABLE.keys(), "say who reads the live value of a new key"
    read = {file: attributes(file) for files in CONSUMERS.values() for file in files}
    for key in tunable.tunable_keys():
        files, leaf = CONSUMERS[entry := tunable.entry(key, tunable.TUNABLE)], key.rpartition(".")[2]
        found = [leaf in read[file] for file in files]
        assert all(found) if key == entry else any(found), f"{key} is read by none of {files}"


def test_the_limits_of_a_running_queue_take_every_tunable_key_over():
    # What replay reads only at its start it would not hear of.
    assert set(LIVE) == {k.rpartition(".")[2] for k, files in CONSUMERS.items() if LIMITS in files}
    values = {
        "staleness.max_lag": 9, "staleness.sync_every": 2, "staleness.stale": "evict", "staleness.patience": 7.0,
        "staleness.on_evict": "drop", "algorithm.zero_variance": "refill",
    }  # fmt: skip
    limits, before = limits_of(CONFIG), limits_of(CONFIG)
    limits.follow(limits_of(tunable.merged(CONFIG, values)))
    assert {k: getattr(limits, k.rpartition(".")[2]) for k in values} == values
    assert all(getattr(before, k.rpartition(".")[2]) != v for k, v in values.items()), "each is another value"
