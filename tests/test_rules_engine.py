"""Rules between the engine, its SGLang servers and the carrier: each names the key, the value and the remedy."""

import pytest

from asyncrl.config import load_config, save_config, validate
from asyncrl.errors import ConfigError
from asyncrl.rules_engine import notes

URLS = ["http://h1:30000", "http://h2:30000"]


def config(generator=None, sglang=None, **sections):
    """A valid config with SGLang, with these changes."""
    generator = {"engine": "sglang", "sglang": sglang or {}} | (generator or {})
    sections["weights"] = {"carrier": "collective"} | sections.get("weights", {})
    sections["model"] = {"path": "x"} | sections.get("model", {})
    return validate({**sections, "generator": generator})


def refusal(*words, **changes):
    with pytest.raises(ConfigError) as caught:
        config(**changes)
    for word in words:
        assert word in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("carrier", ["collective", "disk"])
@pytest.mark.parametrize("on_load", ["keep", "abort", "drain"])
def test_sglang_takes_weights_by_a_group_or_a_folder_and_loads_in_every_way(carrier, on_load):
    found = config(weights={"carrier": carrier, "on_load": on_load}, algorithm={"routes": "r3"})
    assert (found.weights.carrier, found.weights.on_load) == (carrier, on_load)


@pytest.mark.parametrize("carrier", ["shm", "zmq"])
def test_sglang_takes_no_tensors(carrier):
    refusal(f"weights.carrier={carrier}", "set weights.carrier=collective, or disk", weights={"carrier": carrier})


def test_the_embedded_engine_is_in_no_group_but_reads_folders():
    torch = {"engine": "torch"}
    refusal("weights.carrier=collective", "generator.engine=torch", "set weights.carrier=shm", generator=torch)
    assert config(generator=torch, weights={"carrier": "disk", "timeout_s": 60}).weights.timeout_s == 60


@pytest.mark.parametrize(
    ("carrier", "key", "value", "remedy"),
    [
        ("shm", "dir", "/d", "set weights.carrier=disk, or weights.dir=null"),
        ("collective", "dir", "/d", "set weights.carrier=disk, or weights.dir=null"),
        ("disk", "backend", "gloo", "set weights.carrier=collective, or weights.backend=auto"),
        ("disk", "bucket_bytes", 4096, "set weights.carrier=collective, or weights.bucket_bytes=536870912"),
        ("zmq", "timeout_s", 5, "set weights.carrier=collective or disk, or weights.timeout_s=120"),
        ("shm", "verify", "off", "set weights.carrier=collective or disk, or weights.verify=checksum"),
        ("shm", "quantize", "fp8_block", "set weights.carrier=collective or disk, or weights.quantize=none"),
    ],
)
def test_what_a_carrier_does_not_read_is_refused(carrier, key, value, remedy):
    engine = "torch" if carrier in ("shm", "zmq") else "sglang"
    refusal(
        f"weights.{key}={value}", f"no effect with weights.carrier={carrier}", remedy,
        generator={"engine": engine}, weights={"carrier": carrier, key: value},
    )  # fmt: skip


def test_fp8_needs_bfloat16_and_a_checkpoint_of_its_kind():
    fp8, bfloat16 = {"quantize": "fp8_block"}, {"dtype": "bfloat16"}
    assert config({"model": "y"}, weights=fp8, model=bfloat16).weights.quantize == "fp8_block"
    refusal("model.dtype=float32", "set model.dtype=bfloat16", generator={"model": "y"}, weights=fp8)
    refusal("weights.quantize=fp8_block", "set generator.model", weights=fp8, model=bfloat16)
    torch = {"engine": "torch", "model": "y"}
    disk = fp8 | {"carrier": "disk"}
    refusal("set generator.engine=sglang, or weights.quantize=none", generator=torch, weights=disk, model=bfloat16)


@pytest.mark.parametrize(
    ("key", "value", "shown"),
    [
        ("urls", URLS, "[http://h1:30000,http://h2:30000]"),
        ("command", ["serve"], "[serve]"),
        ("args", {"tp-size": 2}, "{'tp-size': 2}"),
        ("port", 30000, "30000"),
        ("key_file", "k", "k"),
        ("answer_s", 5, "5.0"),
    ],
)
def test_settings_of_servers_without_servers_are_pointed_out(key, value, shown):
    """No error: another engine over a base config for SGLang must need no more than the engine and its carrier."""
    found = config({"engine": "torch"}, {key: value}, weights={"carrier": "shm"})
    (note,) = notes(found)
    assert note.startswith(f"generator.sglang.{key}={shown} has no effect with generator.engine=torch; set")


def test_what_only_the_embedded_engine_does_is_refused():
    refusal("generator.device=cpu", "set generator.device=auto", generator={"device": "cpu"})
    routers = {"router_dtype": "float32", "dtype": "bfloat16"}
    refusal("model.router_dtype=float32", "SGLang", "set model.router_dtype=checkpoint", model=routers)
    assert config(model={"router_dtype": "float32"})  # all is float32


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("h1:30000", "'h1:30000' does not begin with http://"),
        ("ftp://h1:30000", "does not begin with http://"),
        ("http://h1", "names no host and port"),
        ("http://:30000", "names no host and port"),
        ("http://h1:port", "is no address"),
        ("http://h1:70000", "is no address"),
        ("http://h1:0", "has port 0"),
        ("http://h1:30000/v1", "has more than host and port"),
        ("http://h1:30000?a=1", "has more than host and port"),
        ("http://me:secret@h1:30000", "one with user and password has more than host and port"),
    ],
)
def test_a_url_is_a_host_and_a_port(url, why):
    refusal("generator.sglang.urls", why, "http://HOST:PORT", sglang={"urls": [url]})


def test_a_password_in_a_url_is_not_repeated():
    with pytest.raises(ConfigError) as caught:
        config(sglang={"urls": ["http://me:secret@h1:30000"]})
    assert "secret" not in str(caught.value)


def test_every_generator_has_a_url_of_its_own():
    assert config({"count": 2}, {"urls": [*URLS, "http://[::1]:1/"]}).generator.count == 2
    refusal("has 2 servers for generator.count=3", "generator.count=2", generator={"count": 3}, sglang={"urls": URLS})
    refusal("names http://h1:30000 twice", sglang={"urls": [URLS[0], "http://H1:30000/"]})


@pytest.mark.parametrize(
    ("key", "value"), [("command", ["serve"]), ("args", {"tp-size": 2}), ("env", {"A": "1"}), ("port", 9), ("gpus", 1)]
)
def test_running_servers_are_not_told_how_to_start(key, value):
    (note,) = notes(config(sglang={"urls": URLS, key: value}))
    assert note.startswith(f"generator.sglang.{key}=") and "no effect with generator.sglang.urls" in note
    assert not list(notes(config(sglang={"urls": URLS, "key_file": "k", "start_timeout_s": 20, "answer_s": 5})))


@pytest.mark.parametrize(
    ("flag", "remedy"),
    [
        ("model-path", "set generator.model"),
        ("model_path", "set generator.model"),
        ("mod", "set generator.model"),
        ("host", "generator.sglang.urls"),
        ("port", "set generator.sglang.port"),
        ("api-key", "set generator.sglang.key_file"),
        ("admin-api-k", "set generator.sglang.admin_key_file"),
        ("dtype", "set model.dtype"),
        ("random-seed", "set run.seed"),
        ("config", "name the flags in generator.sglang.args"),
        ("enable-return-routed-experts", "every Mixture-of-Experts model"),
        ("nnodes", "generator.sglang.urls"),
    ],
)
def test_what_the_run_depends_on_is_not_overridden(flag, remedy):
    refusal(f"generator.sglang.args.{flag}=x would override", remedy, sglang={"args": {flag: "x"}})


def test_routes_cannot_be_switched_off():
    refusal("enable-return-routed-experts=False", sglang={"args": {"enable-return-routed-experts": False}})


@pytest.mark.parametrize("flag", ["--tp-size", "-x", "tp size", "tp-size=4", ""])
def test_flags_are_written_as_names(flag):
    refusal(f"generator.sglang.args.{flag}: a flag is written without", sglang={"args": {flag: 4}})


def test_flags_are_given_once():
    refusal("generator.sglang.args has tp-size twice", sglang={"args": {"tp-size": 1, "tp_size": 2}})


def test_other_flags_pass():
    args = {"tp-size": 4, "mem-fraction-static": 0.8, "enable-metrics": True, "model-impl": "auto", "dist-timeout": 60}
    assert config(sglang={"args": args}).generator.sglang.args == args
    fp8 = {"generator": {"model": "y"}, "weights": {"quantize": "fp8_block"}, "model": {"dtype": "bfloat16"}}
    assert config(sglang={"args": {"dtype": "bfloat16"}}, **fp8)


@pytest.mark.parametrize(
    ("words", "sglang", "generator"),
    [
        (["generator.sglang.command=[] runs nothing"], {"command": []}, {}),
        (["generator.sglang.first_gpu=2 has no effect", "first_gpu=0"], {"first_gpu": 2}, {}),
        (["CUDA_VISIBLE_DEVICES", "set gpus=0"], {"gpus": 1, "env": {"CUDA_VISIBLE_DEVICES": "1"}}, {}),
        (["ORIGINAL_LOGPROB=1", "sampling.temperature"], {"env": {"SGLANG_RETURN_ORIGINAL_LOGPROB": "1"}}, {}),
        (["SGLANG_MAX_NEW_TOKENS_LIMIT=9"], {"env": {"SGLANG_MAX_NEW_TOKENS_LIMIT": "9"}}, {}),
        (["generator.sglang.port=65535", "generator.sglang.port <= 65534"], {"port": 65535}, {"count": 2}),
    ],
)  # fmt: skip
def test_how_servers_are_started(words, sglang, generator):
    refusal(*words, sglang=sglang, generator=generator)


def test_keys_of_the_collective_carrier_are_as_those_of_zmq():
    curve = {"security": "curve"}
    refusal("weights.security=curve needs weights.keys", weights=curve)
    assert config(weights=curve | {"keys": "K"}).weights_keys == "K"
    refusal("weights.keys='K' would not be used", weights={"carrier": "disk", "keys": "K"})


def test_flags_can_be_overridden_one_by_one_and_are_saved(tmp_path):
    found = load_config("configs/quickstart_sglang.yaml", ["generator.sglang.args.tp-size=2"])
    assert found.generator.sglang.args["tp-size"] == 2 and "max-running-requests" in found.generator.sglang.args
    save_config(found, tmp_path / "config.yaml")
    assert load_config(tmp_path / "config.yaml") == found


@pytest.mark.parametrize("key", ["run.watchdog_s", "learner.take_timeout_s"])
def test_a_run_does_not_end_while_its_servers_load(key):
    section, name = key.split(".")
    refusal(f"{key}=200", f"set {key} > 240", **{section: {name: 200.0}})
    assert config(sglang={"start_timeout_s": 100}, **{section: {name: 200.0}})
