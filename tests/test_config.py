"""Config: merging, refusals with key, value and remedy, save and reload, the files in configs/, docs/config.md."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from asyncrl.algos.registry import CORRECTIONS, SURROGATES
from asyncrl.config import Config, known_keys, load_config, read_overrides, save_config, validate
from asyncrl.errors import ConfigError
from asyncrl.rules_algorithm import notes
from asyncrl.sections.algorithm import AlgorithmSection
from asyncrl.suggest import SYNONYMS

ROOT = Path(__file__).parents[1]
QUICKSTART = ROOT / "configs/quickstart.yaml"
OVERLAYS = sorted((ROOT / "configs").glob("*/*.yaml"))


def load(*overrides: str) -> Config:
    return load_config(QUICKSTART, overrides)


# --- the files that ship -------------------------------------------------------------------------


def test_quickstart_is_the_recipe():
    config = load()
    a, s, lr = config.algorithm, config.staleness, config.learner
    assert config.model.path == "models/quickstart"
    assert (config.task.name, config.task.max_terms, config.task.eval_min_terms, config.task.eval_size) == (
        "chain_sum",
        5,
        3,
        400,
    )
    assert (a.groups_per_update, a.group_size, config.responses_per_update) == (32, 8, 256)
    assert (s.sync_every, s.max_lag, s.updates_per_take, s.stale) == (4, 8, 1, "mask")
    assert (a.correction.kind, a.correction.cap) == ("tis", 2.0)
    assert (a.rdc.mode, a.rdc.q, a.rdc.gate, a.rdc.signal, a.rdc.buckets) == ("filter", 0.08, "top_q", "drift", "auto")
    assert (lr.updates, lr.lr, lr.betas, lr.weight_decay, lr.warmup_updates, lr.max_grad_norm) == (
        120,
        3e-4,
        (0.9, 0.98),
        0.0,
        5,
        1.0,
    )
    assert (config.sampling.max_new_tokens, config.sampling.temperature, config.eval.every) == (32, 1.0, 20)


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_every_overlay_merges_over_the_quickstart(overlay):
    assert load_config([QUICKSTART, overlay]) != load() or overlay.stem in ("rdc", "async")


def read_yaml(text: str) -> dict[str, object]:
    """Values by dotted key."""

    def flat(tree, prefix):
        for key, value in tree.items():
            yield from flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]

    return dict(flat(yaml.safe_load(text), ""))


METHODS = {
    # surrogate, ratio, advantage, aggregation, routes, correction, rdc, kl, and whether it needs more updates of a take
    "grpo": "clip proximal grpo token_mean native none observe - 1",
    "tis": "clip proximal grpo token_mean native tis observe - 1",
    "tis_sequence": "clip proximal grpo token_mean native tis observe - 1",
    "rdc": "clip proximal grpo token_mean native tis filter - 1",
    "random": "clip proximal grpo token_mean native tis random - 1",
    "behaviour": "clip behaviour grpo token_mean native none observe - 1",
    "r3": "clip proximal grpo token_mean r3 none observe - 1",
    "r2": "clip proximal grpo token_mean r2 none observe - 4",
    "gspo": "gspo proximal grpo sequence_mean native none observe - 4",
    "gspo_tis": "gspo proximal grpo sequence_mean native tis observe - 4",
    "gspo_r3": "gspo proximal grpo sequence_mean r3 none observe - 4",
    "gspo_tis_rdc": "gspo proximal grpo sequence_mean native tis filter - 4",
    "cispo": "cispo proximal grpo token_mean native none observe - 4",
    "gmpo": "gmpo proximal grpo sequence_mean native none observe - 4",
    "rspo": "gmpo proximal grpo sequence_mean native rspo observe - 4",
    "mask": "clip proximal grpo token_mean native mask observe - 1",
    "trm": "clip proximal grpo token_mean native trm observe - 1",
    "sis": "clip proximal grpo token_mean native sis observe - 1",
    "ctpo": "clip proximal grpo token_mean native ctpo observe - 1",
    "kl_loss": "clip proximal grpo token_mean native tis observe loss 1",
    "kl_reward": "clip proximal dr_grpo token_mean native tis observe reward 1",
    "dr_grpo": "clip proximal dr_grpo constant native tis observe - 1",
    "rloo": "clip proximal rloo token_mean native tis observe - 1",
    "reinforce_pp": "clip proximal reinforce_pp token_mean native tis observe - 1",
}
QUICKSTART_KEYS = read_yaml(QUICKSTART.read_text())
METHOD_FILES = {p.stem: p for p in OVERLAYS if p.parent.name == "methods"}
REGIME_FILES = {p.stem: p for p in OVERLAYS if p.parent.name == "regimes"}


def needs_take(method: str) -> bool:
    return METHODS[method].endswith("4")


@pytest.mark.parametrize("name", METHOD_FILES)
def test_methods(name):
    config = load_config([QUICKSTART, METHOD_FILES[name]])
    a = config.algorithm
    kl = a.kl.where if a.kl.coef else "-"
    found = (a.surrogate, a.ratio, a.advantage, a.aggregation, a.routes, a.correction.kind, a.rdc.mode, kl)
    assert " ".join((*found, str(config.staleness.updates_per_take))) == METHODS[name]
    assert (a.correction.level == "sequence") == (name == "tis_sequence")
    assert a.clip_range == SURROGATES[a.surrogate].defaults
    assert not list(notes(config)), "a file that ships is what was published"


@pytest.mark.parametrize("name", METHOD_FILES)
def test_a_method_says_what_it_is_and_sets_all_that_makes_it_up(name):
    text = METHOD_FILES[name].read_text()
    assert text.startswith("# ")
    keys = set(read_yaml(text))
    a = load_config([QUICKSTART, METHOD_FILES[name]]).algorithm
    of_algorithm = {"surrogate", "ratio", "eps_low", "eps_high", "dual_clip", "advantage", "aggregation", "routes"}
    wanted = {f"algorithm.{key}" for key in of_algorithm}
    wanted |= {f"algorithm.correction.{knob}" for knob in CORRECTIONS[a.correction.kind].knobs}
    wanted |= {"algorithm.correction.kind", "algorithm.rdc.mode", "algorithm.kl.coef", "algorithm.kl.where"}
    assert wanted <= keys
    # Only where nothing else would do: another value of a regime, or of a run config, is not a method's business.
    assert ("staleness.updates_per_take" in keys) == needs_take(name)
    if needs_take(name):
        with pytest.raises(ConfigError, match=r"set staleness\.updates_per_take=4"):
            load_config([QUICKSTART, METHOD_FILES[name]], ["staleness.updates_per_take=1"])


def over_quickstart(*layers: dict[str, object]) -> AlgorithmSection:
    """The objective of flat layers over the quickstart, as load_config gives it, at less cost."""
    tree: dict = {}
    for key, value in {k: v for layer in (QUICKSTART_KEYS, *layers) for k, v in layer.items()}.items():
        at = tree
        *sections, leaf = key.split(".")
        for section in sections:
            at = at.setdefault(section, {})
        at[leaf] = value
    return validate(tree).algorithm


def test_a_method_file_leaves_nothing_of_an_earlier_one_standing():
    assert METHOD_FILES.keys() == METHODS.keys()
    layers = {name: read_yaml(file.read_text()) for name, file in METHOD_FILES.items()}
    alone = {name: load_config([QUICKSTART, file]).algorithm for name, file in METHOD_FILES.items()}
    assert alone == {name: over_quickstart(layer) for name, layer in layers.items()}
    for one, two in itertools.permutations(layers, 2):
        after = over_quickstart(layers[one], layers[two])
        # What the filter would do if it were on, and when the drift is measured, are no part of a method.
        same = {"rdc": alone[two].rdc, "native_drift_every": alone[two].native_drift_every}
        assert after.rdc.mode == alone[two].rdc.mode
        assert after.model_copy(update=same) == alone[two], (one, two)


@pytest.mark.parametrize("name", METHOD_FILES)
def test_every_method_merges_with_every_regime_that_allows_it(name):
    method = METHOD_FILES[name]
    assert REGIME_FILES.keys() == {"on_policy", "batch_over_4", "batch_over_16", "async"}
    for regime, file in REGIME_FILES.items():
        if not needs_take(name):
            assert load_config([QUICKSTART, method, file]) == load_config([QUICKSTART, file, method])
            continue
        # Of a regime of one update per take the method takes the rest, and goes after it.
        if regime == "on_policy":
            with pytest.raises(ConfigError, match=r"set staleness\.max_lag >= 3"):
                load_config([QUICKSTART, file, method])
        else:
            assert load_config([QUICKSTART, file, method]).staleness.updates_per_take == 4
        if regime in ("on_policy", "async"):
            with pytest.raises(ConfigError, match=r"set staleness\.updates_per_take=4"):
                load_config([QUICKSTART, method, file])
        else:
            own = load_config([QUICKSTART, file]).staleness
            assert load_config([QUICKSTART, method, file]).staleness == own


@pytest.mark.parametrize(
    ("name", "sync_every", "updates_per_take", "max_lag", "responses"),
    [
        ("on_policy", 1, 1, 0, 256),
        ("batch_over_4", 4, 4, 3, 64),
        ("batch_over_16", 16, 16, 15, 16),
        ("async", 4, 1, 8, 256),
    ],
)
def test_regimes_are_those_of_the_table(name, sync_every, updates_per_take, max_lag, responses):
    config = load_config([QUICKSTART, ROOT / f"configs/regimes/{name}.yaml"])
    s = config.staleness
    assert (s.sync_every, s.updates_per_take, s.max_lag) == (sync_every, updates_per_take, max_lag)
    assert config.responses_per_update == responses
    if name != "async":  # the synchronous regimes share one rollout batch
        assert responses * updates_per_take == 256


@pytest.mark.parametrize("data", ["dapo", "gsm8k", "zebra"])
def test_data_files_go_over_a_run_config(data):
    config = load_config([ROOT / "configs/qwen3_30b_a3b.yaml", ROOT / f"configs/data/{data}.yaml"])
    assert config.task.name == "sources" and config.task.train and config.task.eval


def test_keys_in_lists_of_sources_are_known_by_their_place(tmp_path):
    (tmp_path / "d.yaml").write_text(
        "task:\n  name: sources\n  train: [{path: a.csv}, {path: b.csv, promptkey: q, size: many, options: {a: []}}]\n"
        "  eval: [{path: c.csv, greedyy: true}]\n"
    )
    with pytest.raises(ConfigError) as caught:
        load_config([QUICKSTART, tmp_path / "d.yaml"])
    said = str(caught.value)
    assert "unknown key 'task.train[1].promptkey' (value 'q'); did you mean 'task.train[1].prompt_key'?" in said
    assert "unknown key 'task.eval[0].greedyy' (value True); did you mean 'task.eval[0].greedy'?" in said
    assert "task.train[1].size='many': Input should be a valid integer" in said
    assert said.count("task.train[1].options=[]: an option must be a text, a number, true or false") == 1
    assert {"task.train[].prompt_key", "task.eval[].samples"} <= set(known_keys())


def test_an_override_reaches_into_a_list(tmp_path):
    (tmp_path / "d.yaml").write_text("task: {name: sources, train: [{path: a.csv}, {path: b.csv}]}\neval: {every: 0}\n")
    files = [QUICKSTART, tmp_path / "d.yaml"]
    config = load_config(files, ["task.train[1].path=c.csv", "task.train[0].size=7"])
    assert [(s.path, s.size) for s in config.task.train] == [("a.csv", 7), ("c.csv", None)]
    assert read_overrides(["task.train[1].path=c", "eval.every=3"]) == {"task.train[1].path": "c", "eval.every": 3}
    with pytest.raises(ConfigError, match=r"there is no task\.train\[2\] in the config files"):
        load_config(files, ["task.train[2].path=c.csv"])
    with pytest.raises(ConfigError, match=r"'task\.train\[0\]\.pth'.*did you mean 'task\.train\[0\]\.path'"):
        load_config(files, ["task.train[0].pth=c.csv"])
    with pytest.raises(ConfigError, match=r"there is no task\.eval\[0\]"):
        load_config(files, ["task.eval[0].path=c.csv"])


# --- merging -------------------------------------------------------------------------------------


def test_files_and_overrides_merge_from_left_to_right(tmp_path):
    (tmp_path / "b.yaml").write_text("staleness: {max_lag: 12}\nlearner: {lr: 1e-5}\n")
    config = load_config([QUICKSTART, tmp_path / "b.yaml"], ["staleness.max_lag=16", "run.name=x"])
    assert config.staleness.max_lag == 16 and config.run.name == "x"
    assert config.learner.lr == 1e-5  # YAML 1.1 reads 1e-5 as text
    assert config.staleness.sync_every == 4
    assert str(config.run_dir) == "runs/x"


def test_the_saved_config_reloads_equal(tmp_path):
    config = load(
        "algorithm.rdc.bucket_edges=[8,16]", "algorithm.dual_clip=3", "generator.model=other", "learner.lr=1e-5"
    )
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config
    assert config != load()


def test_the_config_is_frozen():
    with pytest.raises(ValueError, match="frozen"):
        load().staleness.max_lag = 3


# --- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("override", "words"),
    [
        # B60
        ("rdc.quantle=0.1", ["'rdc.quantle'", "0.1", "'algorithm.rdc.q'"]),
        ("quantile=0.1", ["'quantile'", "0.1", "'algorithm.rdc.q'"]),
        ("algorithm.rdc.quantile=0.1", ["'algorithm.rdc.quantile'", "'algorithm.rdc.q'"]),
        ("rdc.q=0.1", ["'rdc.q'", "'algorithm.rdc.q'"]),
        ("max_lag=9", ["'max_lag'", "9", "'staleness.max_lag'"]),
        ("staleness.max_staleness=9", ["'staleness.max_staleness'", "'staleness.max_lag'"]),
        ("staleness.sync_evry=2", ["'staleness.sync_evry'", "'staleness.sync_every'"]),
        ("learner.learning_rate=1", ["'learner.learning_rate'", "'learner.lr'"]),
        ("lerner.lr=1", ["'lerner.lr'", "'learner.lr'"]),
        ("colour=blue", ["'colour'", "asyncrl config"]),
        ("staleness.max_lag=two", ["staleness.max_lag='two'", "integer"]),
        ("staleness.max_lag=true", ["staleness.max_lag=True"]),
        ("staleness.max_lag=8.5", ["staleness.max_lag=8.5", "integer"]),
        ("learner.lr=nan", ["learner.lr='nan'", "finite"]),
        ("staleness=8", ["staleness=8: this is a section", "staleness.sync_every=VALUE"]),
        ("algorithm.rdc=off", ["algorithm.rdc=False", "set algorithm.rdc.mode=off"]),
        ("algorithm.rdc=on", ["algorithm.rdc=True", "set algorithm.rdc.mode=filter"]),
        ("algorithm.rdc=observe", ["set algorithm.rdc.mode=observe"]),
        ("algorithm.correction=none", ["algorithm.correction='none'", "set algorithm.correction.kind=none"]),
        ("model=models/quickstart", ["set model.path=models/quickstart"]),
        (
            "algorithm.method=r3",
            ["'algorithm.method'", "a method is a file of configs/methods/", "after the run config"],
        ),
        ("regime=async", ["'regime'", "a regime is a file of configs/regimes/", "after the run config"]),
        ("algorithm.rdc.q=1", ["algorithm.rdc.q=1", "less than 1"]),
        ("algorithm.rdc.q=-0.1", ["algorithm.rdc.q=-0.1", "greater than or equal to 0"]),
        ("staleness.max_lag=-1", ["staleness.max_lag=-1", "greater than or equal to 0"]),
        ("staleness.sync_every=0", ["staleness.sync_every=0", "greater than or equal to 1"]),
        ("algorithm.rdc.buckets=few", ["algorithm.rdc.buckets='few'", "auto"]),
        ("generator.engine=other", ["generator.engine='other'", "torch"]),
        ("run.name=a/b", ["run.name='a/b'", "letters, digits, '.', '_' and '-'", "begin with"]),
        ("learner.betas=[0.9]", ["learner.betas=[0.9]"]),
        ("model.path=null", ["model.path=None"]),
        ("learner.betas=[0.9,1]", ["learner.betas=[0.9, 1.0]", "[0, 1)", "set learner.betas=[0.9,0.98]"]),
        ("learner.betas=[-0.1,0.9]", ["learner.betas=[-0.1, 0.9]", "set learner.betas=[0.9,0.98]"]),
        ("learner.betas=[true,0.9]", ["learner.betas=[True, 0.9]", "no numbers"]),
        ("learner.betas=[.nan,0.9]", ["learner.betas=nan", "finite"]),
        ("algorithm.rdc.bucket_edges=[]", ["algorithm.rdc.bucket_edges=[]", "bucket_edges=null"]),
        ("algorithm.rdc.bucket_edges=[0,8]", ["algorithm.rdc.bucket_edges=0", "greater than or equal to 1"]),
        ("algorithm.rdc.buckets=257", ["algorithm.rdc.buckets=257", "256 responses", "set algorithm.rdc.buckets=auto"]),
        ("algorithm.correction.kind=true", ["algorithm.correction.kind=True", "on, off, yes or no"]),
        ("algorithm.rdc.mode=on", ["algorithm.rdc.mode=True", "on, off, yes or no"]),
        ("run.seed=2147483648", ["run.seed=2147483648", "2147483647"]),
        ("task.seed=2147483648", ["task.seed=2147483648", "2147483647"]),
        ("run.name=..", ["run.name='..'"]),
        ("run.name=-x", ["run.name='-x'"]),
        (f"run.name={'x' * 101}", ["run.name='xxx", "at most 100"]),
        ("run.dir=''", ["run.dir=''", "at least 1"]),
        ("run.start_timeout_s=0.5", ["run.start_timeout_s=0.5", "greater than or equal to 10"]),
        ("run.shutdown_s=0", ["run.shutdown_s=0", "greater than or equal to 1"]),
        ("run.shutdown_s=1e300", ["run.shutdown_s=1e+300", "less than or equal to 1000000"]),
        ("generator.model=''", ["generator.model=''", "at least 1"]),
        ("generator.count=1025", ["generator.count=1025", "less than or equal to 1024"]),
        ("generator.threads=1025", ["generator.threads=1025", "1024"]),
        ("generator.groups_in_flight=4097", ["generator.groups_in_flight=4097", "4096"]),
        ("generator.reward_workers=257", ["generator.reward_workers=257", "256"]),
        ("generator.reward_timeout_s=0.001", ["generator.reward_timeout_s=0.001", "greater than or equal to 1"]),
        ("sampling.temperature=1e-30", ["sampling.temperature=1e-30", "0.01"]),
        ("replay.bind=''", ["replay.bind=''", "at least 1"]),
        ("replay.heartbeat_timeout_s=2.9", ["replay.heartbeat_timeout_s=2.9", "greater than or equal to 3"]),
        ("replay.lease_timeout_s=1", ["replay.lease_timeout_s=1", "greater than or equal to 2"]),
        ("replay.heartbeat_timeout_s=900", ["learner.take_timeout_s=900", "heartbeat_timeout_s=900", "> 900"]),
        ("replay.heartbeat_timeout_s=300", ["run.watchdog_s=300", "heartbeat_timeout_s=300", "watchdog_s > 300"]),
        ("learner.take_timeout_s=9", ["learner.take_timeout_s=9", "greater than or equal to 10"]),
        ("learner.collective_timeout_s=1", ["learner.collective_timeout_s=1", "greater than or equal to 10"]),
        ("eval.timeout_s=1", ["eval.timeout_s=1", "greater than or equal to 5"]),
        ("eval.samples=1025", ["eval.samples=1025", "1024"]),
        ("weights.keep_versions=65", ["weights.keep_versions=65", "64"]),
        ("learner.lr=2", ["learner.lr=2", "less than or equal to 1"]),
        ("learner.weight_decay=2", ["learner.weight_decay=2", "less than or equal to 1"]),
        ("learner.ranks=1025", ["learner.ranks=1025", "1024"]),
        ("learner.updates=9007199254740993", ["learner.updates=9007199254740993", "at most 9007199254740992"]),
        ("algorithm.eps_high=1e300", ["algorithm.eps_high=1e+300", "1000000"]),
        ("algorithm.dual_clip=1e300", ["algorithm.dual_clip=1e+300", "1000000"]),
        ("algorithm.correction.cap=1e300", ["algorithm.correction.cap=1e+300", "1000000"]),
        ("algorithm.rdc.outlier_k=1e300", ["algorithm.rdc.outlier_k=1e+300", "1000000"]),
        ("algorithm.group_size=1025", ["algorithm.group_size=1025", "1024"]),
        ("algorithm.groups_per_update=65537", ["algorithm.groups_per_update=65537", "65536"]),
        ("staleness.max_lag=2", ["staleness.max_lag=2", "sync_every - 1 = 3", "set staleness.max_lag >= 3"]),
        ("staleness.sync_every=10", ["staleness.max_lag=8", "sync_every <= 9"]),
        ("staleness.updates_per_take=10", ["staleness.max_lag=8", "updates_per_take", "set staleness.max_lag >= 9"]),
        ("sampling.top_p=0.9", ["sampling.top_p=0.9", "set sampling.top_p=1.0"]),
        ("sampling.top_k=5", ["sampling.top_k=5", "set sampling.top_k=0"]),
        ("sampling.min_p=0.1", ["sampling.min_p=0.1", "set sampling.min_p=0"]),
        ("task.max_terms=2", ["task.max_terms=2", "raise task.max_terms"]),
        ("task.reward=my_rewards.py", ["task.reward='my_rewards.py'", "must be package.module:name"]),
        ("task.template=Hello", ["task.template='Hello'", "no {question}"]),
        ("algorithm.rdc.bucket_edges=[8,4]", ["algorithm.rdc.bucket_edges=[8, 4]", "ascend"]),
        ("algorithm.ratio=behaviour", ["algorithm.ratio=behaviour", "set algorithm.correction.kind=none"]),
        ("algorithm.dual_clip=1.1", ["algorithm.dual_clip=1.1", "1.27"]),
        ("nonsense", ["'nonsense' is not key=value"]),
        ("=3", ["is not key=value"]),
        ("run.name=${nowhere}", ["nowhere"]),
    ],
)
def test_refusals_name_the_key_the_value_and_the_remedy(override, words):
    with pytest.raises(ConfigError) as caught:
        load(override)
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["model.attention=flash_attention_2"], ["flash_attention_2 has no float32 kernel", "model.dtype=bfloat16"]),
        (
            ["model.attention=flash_attention_2", "model.dtype=bfloat16", "learner.device=cpu"],
            ["flash_attention_2 runs on GPUs only", "learner.device=cuda or model.attention=sdpa"],
        ),
        (
            ["model.router_dtype=float32", "model.dtype=float64", "model.experts=eager"],
            ["model.router_dtype=float32", "set model.router_dtype=checkpoint"],
        ),
        (["learner.compile=true", "model.experts=eager"], ["learner.compile=true", "set model.experts=grouped_mm"]),
    ],
)
def test_settings_of_the_computation_that_contradict_each_other(overrides, words):
    with pytest.raises(ConfigError) as caught:
        load(*overrides)
    for word in words:
        assert word in str(caught.value)


# YAML 1.1 reads these bare words as booleans.
OFF = ["off", "Off", "OFF", "false", "no"]


@pytest.mark.parametrize("word", OFF)
def test_off_and_none_can_be_written_as_bare_words(tmp_path, word):
    assert load(f"algorithm.rdc.mode={word}").algorithm.rdc.mode == "off"
    assert load(f"algorithm.correction.kind={word}").algorithm.correction.kind == "none"
    (tmp_path / "off.yaml").write_text(f"algorithm: {{rdc: {{mode: {word}}}, correction: {{kind: {word}}}}}\n")
    algorithm = load_config([QUICKSTART, tmp_path / "off.yaml"]).algorithm
    assert (algorithm.rdc.mode, algorithm.correction.kind) == ("off", "none")


def test_off_survives_saving_and_loading(tmp_path):
    config = load("algorithm.rdc.mode=off")
    save_config(config, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == config


def test_booleans_stay_booleans():
    config = load("eval.greedy=off", "logging.progress=no", "logging.tensorboard=on")
    assert (config.eval.greedy, config.logging.progress, config.logging.tensorboard) == (False, False, True)


def test_no_generator_and_many_ranks_are_allowed():
    config = load("generator.count=0", "learner.ranks=512")
    assert (config.generator.count, config.learner.ranks) == (0, 512)


@pytest.mark.parametrize(("sync_every", "max_lag"), [(1, 0), (4, 3), (16, 15)])
def test_the_smallest_lag_that_sync_every_allows(sync_every, max_lag):
    assert load(f"staleness.sync_every={sync_every}", f"staleness.max_lag={max_lag}").staleness.max_lag == max_lag
    if max_lag:
        with pytest.raises(ConfigError, match="never be published"):
            load(f"staleness.sync_every={sync_every}", f"staleness.max_lag={max_lag - 1}")


def test_several_problems_are_all_reported():
    with pytest.raises(ConfigError) as caught:
        load("quantile=0.1", "staleness.max_lag=two", "learner.lr=-1")
    assert len(str(caught.value).splitlines()) == 3


@pytest.mark.parametrize("value", ["0", "1.5", "few"])
def test_a_key_with_alternatives_is_explained_in_one_line(value):
    with pytest.raises(ConfigError, match="must be auto or a whole number, at least 1") as caught:
        load(f"algorithm.rdc.buckets={value}")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("tree", [{}, {"model": {}}], ids=["no section", "an empty section"])
def test_a_missing_model_is_named(tree):
    with pytest.raises(ConfigError, match=r"^key 'model\.path' is missing; set model\.path=FOLDER"):
        validate(tree)


@pytest.mark.parametrize("overlay", OVERLAYS, ids=lambda p: f"{p.parent.name}/{p.stem}")
def test_a_method_or_regime_alone_is_told_where_it_belongs(overlay):
    with pytest.raises(ConfigError, match=r"goes after a run config such as configs/quickstart\.yaml") as caught:
        load_config(overlay)
    assert len(str(caught.value).splitlines()) == 1


NO_MAPPINGS = {
    "a list": b"- a\n- b\n",
    "words": b"just words",
    "cut": b"a: [1\n",
    "bytes": b"\xff\xfe\x00",
    "a key twice": b"a: 1\na: 2\n",
}


@pytest.mark.parametrize("content", NO_MAPPINGS.values(), ids=NO_MAPPINGS)
def test_a_file_that_is_no_mapping_is_refused(tmp_path, content):
    (tmp_path / "c.yaml").write_bytes(content)
    with pytest.raises(ConfigError):
        load_config([QUICKSTART, tmp_path / "c.yaml"])


def test_a_missing_file_and_no_file_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "none.yaml")
    with pytest.raises(ConfigError, match=r"configs/quickstart\.yaml"):
        load_config([])


def test_every_synonym_leads_to_a_real_key_and_hides_none():
    keys = known_keys()
    assert set(SYNONYMS.values()) <= set(keys)
    assert not set(SYNONYMS) & {key.rsplit(".", 1)[-1] for key in keys}


# --- the printed reference -----------------------------------------------------------------------


def test_the_reference_page_is_up_to_date(tmp_path):
    done = subprocess.run(
        [sys.executable, "tools/config_reference.py", "--check", "docs/config.md"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_reference_page_names_every_key():
    page = (ROOT / "docs/config.md").read_text()
    missing = [key for key in known_keys() if f"`{key}`" not in page]
    assert not missing


@pytest.mark.parametrize(("routes", "full"), [("native", False), ("r3", True)])
def test_replay_turns_full_routes_on(routes, full):
    config = validate({"model": {"path": "x"}, "algorithm": {"routes": routes}})
    assert config.full_routes is full
    assert validate({"model": {"path": "x"}, "generator": {"routes": "full"}}).full_routes


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"weights": {"carrier": "zmq", "security": "curve"}}, "set weights.keys=DIR"),
        ({"weights": {"keys": "K"}}, r"would not be used with weights.carrier=shm and weights.security=loopback"),
        ({"weights": {"carrier": "zmq", "keys": "K"}}, r"would not be used with weights.carrier=zmq"),
    ],
)
def test_keys_for_the_weights_come_with_curve(sections, says):
    with pytest.raises(ConfigError, match=says):
        validate({"model": {"path": "x"}, **sections})


def test_who_may_have_the_weights_is_decided_with_replay_unless_set():
    curve = {"security": "curve", "keys": "K"}
    plain = validate({"model": {"path": "x"}, "replay": curve, "weights": {"carrier": "zmq"}})
    assert (plain.weights_security, plain.weights_keys) == ("curve", "K")
    own = validate({"model": {"path": "x"}, "replay": curve, "weights": {"carrier": "zmq", "keys": "L"}})
    assert (own.weights_security, own.weights_keys) == ("curve", "L")
    none = validate({"model": {"path": "x"}, "replay": curve, "weights": {"carrier": "zmq", "security": "none"}})
    assert none.weights_security == "none"


def test_a_setting_written_with_blanks_is_named_as_one():
    with pytest.raises(ConfigError, match=r"'staleness.max_lag' does not exist; a setting is one word, key=value"):
        load_config([QUICKSTART, "staleness.max_lag", "16"], ["="])


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["task.train=[two.jsonl]"],
            "task.train='two.jsonl': must be a list of sources, .*'task.train=[{path: two.jsonl}]'",
        ),
        (
            ["task.eval=two.jsonl"],
            "task.eval='two.jsonl': must be a list of sources, .*'task.eval=[{path: two.jsonl}]'",
        ),
        (["task.train={path: a.csv, size: 9}"], "write 'task.train=[{path: a.csv, size: 9}]'"),
        (["task.train.0.weight=3"], "override 'task.train.0.weight=3': .* write 'task.train[0].weight=3'"),
        (["task.train=[{path: a.csv}]", "task.train.0.weight=3"], "write 'task.train[0].weight=3'"),
        (["taks.name=x"], "unknown key 'taks.name' (value 'x'); did you mean 'task.name'"),
        (["generater.count=2"], "did you mean 'generator.count'"),
        (["learner.keep_best=eval/a b"], "must be a metric of an evaluation, such as eval/greedy_accuracy"),
        (
            ["task.name=sources", "eval.every=0", "task.train=[{procedural: gcd, answer_key: a}]"],
            "task.train[0].answer_key='a' names a column of a file, and this source has procedural='gcd'; remove it",
        ),
    ],
)
def test_sources_and_keys_that_are_written_otherwise_are_told_how(overrides, says):
    with pytest.raises(ConfigError) as caught:
        load_config(QUICKSTART, overrides)
    for words in says.split(".*"):
        assert words in str(caught.value)


def test_a_list_in_the_place_of_a_section_names_its_override():
    with pytest.raises(ConfigError, match=r"override 'algorithm.rdc=\[1\]' puts a list where a section stands"):
        load_config(QUICKSTART, ["algorithm.rdc=[1]"])
