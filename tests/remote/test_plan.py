"""Who runs where, and what the config gets for it."""

import pytest

from asyncrl.config import validate
from asyncrl.errors import ConfigError
from asyncrl.remote.plan import Fleet, at_address, changed, from_file, from_slurm, reachable, repeated, tasks_per_node

MODEL = {"model": {"path": "m"}}
APART = Fleet("a", "b", ("c", "c", "d"))
TOGETHER = Fleet("a", "a", ("a", "a"))


def test_a_host_may_be_repeated_and_names_count_through():
    assert repeated(["h1", "h2*3"]) == ("h1", "h2", "h2", "h2")
    assert APART.hosts() == {"replay": "a", "learner": "b", "g0": "c", "g1": "c", "g2": "d"}


@pytest.mark.parametrize("word", ["*2", "h*", "h*0", "h*x", "h*99999"])
def test_a_word_that_is_no_host_is_refused(word):
    with pytest.raises(ConfigError, match="is not HOST or HOST"):
        repeated([word])


@pytest.mark.parametrize("host", ["", "-oProxyCommand=x", "a b"])
def test_a_host_that_ssh_would_take_for_an_option_is_refused(host):
    with pytest.raises(ConfigError, match="is not a host"):
        Fleet("a", host, ())


def test_a_hosts_file_says_the_same_as_options():
    text = "# cluster\nreplay a\nlearner b  # with the GPUs\n\ngenerators c*2\ngenerators d\n"
    assert from_file(text) == APART


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("replay a\n", "one host for learner, has 0"),
        ("replay a b\nlearner c\n", "one host for replay, has 2"),
        ("replay a\nlearner b\ngenerator c\n", "generators HOST"),
        ("replay\n", "a line is"),
    ],
)
def test_a_wrong_hosts_file_is_refused(text, word):
    with pytest.raises(ConfigError, match=word):
        from_file(text)


def test_slurm_counts_tasks_per_node():
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1]
    env = {"SLURM_TASKS_PER_NODE_HET_GROUP_0": "2,1"}
    assert from_slurm(env, ["c", "d"], ["a"]) == Fleet("a", "a", ("c", "c", "d"))
    with pytest.raises(ConfigError, match="1 generator nodes and task counts for 2"):
        from_slurm(env, ["c"], ["a"])
    with pytest.raises(ConfigError, match="component 1 has 2 nodes"):
        from_slurm(env, ["c", "d"], ["a", "b"])
    with pytest.raises(ConfigError, match="is not like"):
        tasks_per_node("2*3")


def test_other_hosts_get_curve_a_wildcard_and_the_network_carrier(tmp_path):
    config = reachable(validate(MODEL), APART, tmp_path / "keys")
    assert (config.replay.bind, config.replay.security) == ("tcp://*:*", "curve")
    assert config.replay.keys == str(tmp_path / "keys")
    assert (config.weights.carrier, config.weights.bind) == ("zmq", "tcp://*:*")


def test_one_host_stays_with_loopback_and_shared_memory():
    config = validate(MODEL)
    assert reachable(config, TOGETHER, None) == config


def test_what_the_config_says_already_stays(tmp_path):
    mine = {"bind": "tcp://192.0.2.1:5555", "security": "none"}
    weights = {"carrier": "zmq", "bind": "tcp://192.0.2.2:*"}
    config = reachable(validate(MODEL | {"replay": mine, "weights": weights}), APART, None)
    assert (config.replay.bind, config.replay.security, config.replay.keys) == (mine["bind"], "none", None)
    assert config.weights.bind == weights["bind"]
    with pytest.raises(ConfigError, match="reaches one host only"):
        reachable(validate(MODEL), APART, None)


def test_generators_beside_the_learner_keep_shared_memory(tmp_path):
    assert reachable(validate(MODEL), Fleet("a", "b", ("b",)), tmp_path).weights.carrier == "shm"


@pytest.mark.parametrize("carrier", ["collective", "disk"])
def test_servers_on_other_hosts_keep_their_carrier(tmp_path, carrier):
    tree = MODEL | {"generator": {"engine": "sglang"}, "weights": {"carrier": carrier}}
    config = reachable(validate(tree), APART, tmp_path)
    assert config.weights.carrier == carrier
    assert config.weights.bind == ("tcp://*:*" if carrier == "collective" else "tcp://127.0.0.1:*")


def test_generators_are_numbered_on_their_host():
    fleet = Fleet("a", "b", ("c", "c", "d", "c"))
    assert [fleet.number_on_host(f"g{i}") for i in range(4)] == [0, 1, 0, 2]


def test_a_restarted_replay_gets_its_port_again_and_everybody_the_address():
    config = validate(MODEL | {"replay": {"bind": "tcp://*:*", "security": "none"}})
    settled = at_address(config, "tcp://192.0.2.7:4711")
    assert (settled.replay.bind, settled.replay.connect) == ("tcp://*:4711", "tcp://192.0.2.7:4711")
    forwarded = changed(config, replay={"connect": "tcp://gate:9"})
    assert at_address(forwarded, "tcp://192.0.2.7:4711").replay.connect == "tcp://gate:9"
