"""Checks of config against model folders, before any process starts."""

import asyncio
import re

import numpy as np
import pytest

from asyncrl.config import load_config, validate
from asyncrl.engines.torch_engine import TorchEngine
from asyncrl.errors import ConfigError, EngineError
from asyncrl.models.describe import MAX_LENGTH, max_length
from asyncrl.preflight import preflight
from asyncrl.transport import keys
from asyncrl.types import SamplingParams, Version
from tests.helpers.tiny_models import qwen3_dense, qwen3_moe


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    qwen3_moe(layers=2, experts=8).save_pretrained(folder / "moe")
    qwen3_moe(layers=2, experts=4).save_pretrained(folder / "other")
    qwen3_dense().save_pretrained(folder / "dense")
    qwen3_moe(layers=1, max_position_embeddings=64).save_pretrained(folder / "short")
    qwen3_moe(layers=1, max_position_embeddings=8192).save_pretrained(folder / "long")
    return folder


def config(path, **sections):
    return validate({"model": {"path": str(path)}, **sections})


def test_moe_model_passes_and_is_described(models):
    info = preflight(config(models / "moe"))
    assert (info.layers, info.num_experts, info.top_k) == ((0, 1), 8, 2)


def test_missing_model_names_key_value_and_remedy(tmp_path):
    with pytest.raises(ConfigError, match=r"model\.path='.*nowhere'.*make quickstart"):
        preflight(config(tmp_path / "nowhere"))


def test_generator_with_another_model_is_refused(models):
    wrong = config(models / "moe", generator={"model": str(models / "other")})
    with pytest.raises(
        ConfigError, match=r"generator\.model=.*other.*num_experts \(4 against 8\).*leave generator\.model"
    ):
        preflight(wrong)


def test_generator_with_the_same_model_passes(models):
    assert preflight(config(models / "moe", generator={"model": str(models / "moe")})).is_moe


def test_a_best_policy_by_a_metric_that_cannot_come_is_refused(models):
    with pytest.raises(ConfigError, match=r"learner\.keep_best=eval/e9/avg_at_4: .*eval/chain_sum/avg_at_1"):
        preflight(config(models / "moe", learner={"keep_best": "eval/e9/avg_at_4"}))


def test_a_chat_task_for_a_model_without_a_chat_template_is_refused_once(models):
    with pytest.raises(ConfigError, match=r"^task\.chat=true: .*has no chat template.*set task\.chat=false$"):
        preflight(config(models / "moe", task={"chat": True}))


@pytest.mark.parametrize(
    ("algorithm", "words"),
    [
        ({"routes": "r3"}, r"algorithm\.routes=r3 .*dense; set algorithm\.routes=native$"),
        ({"routes": "r2"}, r"algorithm\.routes=r2 .*dense; set algorithm\.routes=native$"),
        (
            {"correction": {"kind": "rspo", "floor": 0.5}},
            r"algorithm\.correction\.kind=rspo .*dense; set algorithm\.correction\.kind=none and "
            r"algorithm\.correction\.floor=0\.8$",
        ),
    ],
)
def test_methods_that_need_a_router_are_refused_on_a_dense_model(models, algorithm, words):
    take = {"updates_per_take": 2}
    wrong = config(models / "dense", algorithm={"rdc": {"mode": "off"}} | algorithm, staleness=take)
    with pytest.raises(ConfigError, match=words):
        preflight(wrong)


@pytest.mark.parametrize("mode", ["filter", "observe", "random"])
def test_rdc_on_a_dense_model_is_refused(models, mode):
    with pytest.raises(ConfigError, match=rf"algorithm\.rdc\.mode={mode} .*set algorithm\.rdc\.mode=off"):
        preflight(config(models / "dense", algorithm={"rdc": {"mode": mode}}))


def test_dense_model_without_routing_methods_passes(models):
    assert not preflight(config(models / "dense", algorithm={"rdc": {"mode": "off"}})).is_moe


def test_the_remedy_for_a_dense_model_works_as_it_is_written(models, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(f"model: {{path: {models / 'dense'}}}\n")
    with pytest.raises(ConfigError) as caught:
        preflight(load_config(file))
    (remedy,) = re.findall(r"; set (\S+)$", str(caught.value))
    assert not preflight(load_config(file, [remedy])).is_moe


# --- length --------------------------------------------------------------------------------------


def test_a_response_that_does_not_fit_the_model_is_refused(models):
    # The longest prompt of 5 one-digit terms is 5 digits, 4 signs and `=`: 10 characters of the 64.
    assert preflight(config(models / "short", sampling={"max_new_tokens": 54}))
    with pytest.raises(ConfigError) as caught:
        preflight(config(models / "short", sampling={"max_new_tokens": 55}))
    for word in ("sampling.max_new_tokens=55", "10 tokens", "64 tokens", "set sampling.max_new_tokens <= 54"):
        assert word in str(caught.value)


def test_a_prompt_that_fills_the_model_is_refused(tmp_path):
    qwen3_moe(layers=1, max_position_embeddings=32).save_pretrained(tmp_path)
    task = {"max_terms": 8, "digits": 3}  # 8 * 4 = 32 characters
    with pytest.raises(ConfigError, match=r"prompt of up to 32 tokens leaves no room.*lower task\.max_terms"):
        preflight(config(tmp_path, task=task, sampling={"max_new_tokens": 1}))


@pytest.mark.parametrize(("name", "limit"), [("short", 64), ("long", MAX_LENGTH)])
def test_the_limit_is_the_one_of_the_engine(models, name, limit):
    assert max_length(models / name) == limit
    engine = TorchEngine(models / name, version=Version(0, 0), max_rows=1)
    try:
        with pytest.raises(EngineError, match=f"limit of {limit}"):
            prompt = np.zeros(2, np.int32)
            asyncio.run(engine.generate(prompt, 1, SamplingParams(1.0, limit - 1, ())))
    finally:
        engine.close()


# --- task, replay and run folder -----------------------------------------------------------------


def test_a_training_set_that_cannot_be_drawn_is_refused(models):
    with pytest.raises(ConfigError, match=r"task\.train_size=5000: only 3800 .*lower task\.train_size"):
        preflight(config(models / "moe", task={"max_terms": 3, "train_size": 5000}))  # 200 + 4000 - 400 held out


def test_files_of_the_task_are_looked_at_where_they_are_read(models, tmp_path):
    (tmp_path / "good.jsonl").write_text('{"problem": "p", "answer": "1"}\n')
    (tmp_path / "bad.jsonl").write_text('{"problem": null, "answer": "1"}\n')

    def of(name, **keys):
        task = {"name": "sources", "train": [{"path": str(tmp_path / name), **keys}], "max_prompt_tokens": 16}
        return config(models / "moe", task=task, eval={"every": 0})

    assert preflight(of("good.jsonl"))
    with pytest.raises(ConfigError, match=r"task\.train\[0\]\.path=.*none\.jsonl' does not exist"):
        preflight(of("none.jsonl"))
    assert preflight(of("none.jsonl"), data=False)  # another host reads it
    with pytest.raises(ConfigError, match=r"bad\.jsonl' line 1: column 'problem' is missing"):
        preflight(of("bad.jsonl"))
    with pytest.raises(ConfigError, match=r"task\.train\[0\]\.verifier='maths' is no verifier"):
        preflight(of("good.jsonl", verifier="maths"))


def test_a_prompt_limit_that_fills_the_model_is_refused_by_its_key(models):
    task = {"name": "sources", "train": [{"procedural": "zebra_grid"}], "max_prompt_tokens": 64}
    with pytest.raises(ConfigError, match=r"leaves no room.*lower task\.max_prompt_tokens"):
        preflight(config(models / "short", task=task, eval={"every": 0}))


def test_a_capacity_below_one_take_is_refused_with_one_that_works(models):
    wrong = {"capacity_bytes": 65536}
    with pytest.raises(ConfigError, match=r"replay\.capacity_bytes=65536 .*set replay\.capacity_bytes >= ") as caught:
        preflight(config(models / "moe", replay=wrong))
    (enough,) = re.findall(r">= (\d+)", str(caught.value))
    assert preflight(config(models / "moe", replay={"capacity_bytes": int(enough)}))
    with pytest.raises(ConfigError):
        preflight(config(models / "moe", replay={"capacity_bytes": int(enough) - 1}))


@pytest.mark.parametrize(
    ("bind", "word"),
    [
        ("udp://127.0.0.1:*", "only tcp://"),
        ("tcp://127.0.0.1:70000", "70000"),
        ("tcp://:5555", "no host"),
        ("tcp://no-such-host.invalid:5555", "cannot be resolved"),
        ("tcp://*:5555", "replay.security=none"),
        ("tcp://192.0.2.1:5555", "replay.security=none"),
    ],
)
def test_an_address_that_cannot_serve_is_refused(models, bind, word):
    with pytest.raises(ConfigError) as caught:
        preflight(config(models / "moe", replay={"bind": bind}))
    assert f"replay.bind={bind!r}" in str(caught.value)
    assert word in str(caught.value)
    assert "set replay.bind=tcp://127.0.0.1:*" in str(caught.value)


@pytest.mark.parametrize(
    ("connect", "word"),
    [
        ("tcp://127.0.0.1", "names no host and port"),
        ("tcp://*:5555", "names no host and port"),
        ("ipc://socket", "only tcp:// is supported"),
        ("tcp://192.0.2.1:5555", "is another machine"),
    ],
)
def test_an_address_that_nobody_can_connect_to_is_refused(models, connect, word):
    with pytest.raises(ConfigError) as caught:
        preflight(config(models / "moe", replay={"connect": connect}))
    assert f"replay.connect={connect!r}" in str(caught.value) and word in str(caught.value)


@pytest.mark.parametrize(("connect", "security"), [("localhost:5555", "loopback"), ("tcp://192.0.2.1:5555", "none")])
def test_an_address_to_connect_to_passes(models, connect, security):
    assert preflight(config(models / "moe", replay={"connect": connect, "security": security}))


@pytest.mark.parametrize(
    ("bind", "security"), [("localhost:*", "loopback"), ("tcp://[::1]:5555", "loopback"), ("tcp://*:5555", "none")]
)
def test_an_address_that_can_serve_passes(models, bind, security):
    assert preflight(config(models / "moe", replay={"bind": bind, "security": security}))


def test_a_run_folder_that_cannot_be_one_is_refused(models, tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for wrong in ("file", "file/below", "link", "x" * 300, "nul\0"):
        with pytest.raises(ConfigError, match=r"run\.dir='.*; set run\.dir to "):
            preflight(config(models / "moe", run={"dir": f"{tmp_path}/{wrong}"}))
    assert preflight(config(models / "moe", run={"dir": f"{tmp_path}/new/below"}))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "link"]  # it makes nothing


def test_a_run_folder_that_is_there_passes_unless_a_file_has_its_name(models, tmp_path):
    (tmp_path / "r").mkdir()
    (tmp_path / "f").write_text("")
    assert preflight(config(models / "moe", run={"dir": str(tmp_path), "name": "r"}))
    with pytest.raises(ConfigError, match=r"run\.dir='.*/f' is not a folder"):
        preflight(config(models / "moe", run={"dir": str(tmp_path), "name": "f"}))


@pytest.mark.parametrize(
    ("bind", "word"),
    [
        ("udp://127.0.0.1:*", "only tcp://"),
        ("tcp://no-such-host.invalid:5555", "cannot be resolved"),
        ("tcp://*:5556", "weights.security=none"),
    ],
)
def test_an_address_that_cannot_serve_weights_is_refused(models, bind, word):
    weights = {"carrier": "zmq", "bind": bind}
    with pytest.raises(ConfigError) as caught:
        preflight(config(models / "moe", weights=weights))
    assert f"weights.bind={bind!r}" in str(caught.value) and word in str(caught.value)
    assert "set weights.bind=tcp://127.0.0.1:*" in str(caught.value)
    assert preflight(config(models / "moe", weights=weights | {"carrier": "shm"}))  # binds nothing


def test_weights_are_served_to_others_with_the_keys_of_replay_or_their_own(models, tmp_path):
    keys.new(tmp_path / "keys")
    replay = {"bind": "tcp://*:*", "security": "curve", "keys": str(tmp_path / "keys")}
    weights = {"carrier": "zmq", "bind": "tcp://*:*"}
    assert preflight(config(models / "moe", replay=replay, weights=weights))
    with pytest.raises(ConfigError, match=r"weights\.keys='.*other' is no folder"):
        preflight(config(models / "moe", replay=replay, weights=weights | {"keys": str(tmp_path / "other")}))
    keys.new(tmp_path / "other", ["elsewhere"])
    assert preflight(config(models / "moe", weights=weights | {"security": "none"}))


@pytest.mark.parametrize(
    ("weights", "says"),
    [
        ({}, r"only generators on the learner's host can load weights"),
        ({"carrier": "zmq"}, r"generators there cannot load weights; set weights\.bind"),
        (
            {"carrier": "zmq", "bind": "tcp://*:*"},
            r"anyone on the network who reaches weights\.bind=.* copy the weights",
        ),
    ],
)
def test_weights_that_other_hosts_cannot_or_can_have_are_said(models, caplog, weights, says):
    assert preflight(config(models / "moe", replay={"bind": "tcp://*:*", "security": "none"}, weights=weights))
    assert re.search(says, caplog.text)


def test_a_reward_of_the_users_is_imported_elsewhere_where_responses_are_sampled(models):
    task = {"reward": "tests.tasks.user_rewards:missing"}
    with pytest.raises(ConfigError, match=r"task\.reward=.*has no function 'missing'; name a function as package"):
        preflight(config(models / "moe", task=task), generates=True)
    assert preflight(config(models / "moe", task=task))
    assert preflight(config(models / "moe", task={"reward": "tests.tasks.user_rewards:plain"}), generates=True)


def test_all_problems_are_reported_at_once(models):
    with pytest.raises(ConfigError) as refused:
        preflight(config(models / "moe", sampling={"max_new_tokens": 10**6}, replay={"bind": "tcp://0.0.0.0:*"}))
    assert "sampling.max_new_tokens=1000000" in str(refused.value) and "replay.bind" in str(refused.value)


def test_a_procedure_that_takes_longer_than_the_start_may_is_refused(models):
    task = {"name": "sources", "train": [{"procedural": "futoshiki"}], "max_prompt_tokens": 64}
    sections = {"task": task, "eval": {"every": 0}, "sampling": {"max_new_tokens": 16}}
    with pytest.raises(ConfigError, match=r"task\.train\[0\]\.size=1000, the default, .*run\.start_timeout_s=180"):
        preflight(config(models / "moe", **sections), weights=False)
    preflight(config(models / "moe", run={"start_timeout_s": 600}, **sections), weights=False)
