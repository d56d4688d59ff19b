"""The replay role as a process of its own: no torch, an address to find it by, a clean end."""

import json
import multiprocessing
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, models, pre_tokenizers

from asyncrl import wire
from asyncrl.config import Config, validate
from asyncrl.errors import ConfigError, TransportError
from asyncrl.models.describe import describe
from asyncrl.replay.server import run
from asyncrl.transport.address import parse
from asyncrl.transport.rendezvous import wait_for_address
from asyncrl.transport.sockets import Client, Server


def test_importing_the_data_plane_loads_no_torch():
    code = (
        "import sys, asyncrl.replay.server, asyncrl.transport.sockets, asyncrl.wire, asyncrl.config, asyncrl.types\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('torch', 'transformers', 'tensorboard')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_received_bytes_are_never_unpickled():
    # B47, on the source text.
    root = Path(__file__).parents[2] / "asyncrl"
    for folder in ("replay", "transport"):
        for file in (root / folder).glob("*.py"):
            text = file.read_text()
            assert not any(w in text for w in ("import pickle", "recv_pyobj", "send_pyobj", "eval(", "exec(")), file


def model_folder(path: Path) -> Path:
    """A model folder with one weight in place of all: a two-layer MoE and a character tokenizer."""
    path.mkdir()
    characters = ["<eos>", *"0123456789+-=*()., ?abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ:\n"]
    vocab = {c: i for i, c in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<eos>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.save(str(path / "tokenizer.json"))
    config = {
        "model_type": "qwen3_moe", "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2,
        "vocab_size": len(vocab), "eos_token_id": 0,
    }  # fmt: skip
    (path / "config.json").write_text(json.dumps(config))
    save_file({"model.norm.weight": np.zeros(2, np.float32)}, path / "model.safetensors")
    return path


def make_config(tmp_path: Path, updates: int = 120, **replay: object) -> Config:
    model = model_folder(tmp_path / "model")
    return validate(
        {
            "run": {"dir": str(tmp_path / "runs"), "name": "r"},
            "model": {"path": str(model)},
            "task": {"train_size": 64, "eval_size": 8, "max_terms": 4},
            "algorithm": {"groups_per_update": 4, "group_size": 2},
            "learner": {"updates": updates},
            "replay": replay,
        }
    )


@pytest.fixture
def role(tmp_path):
    config = make_config(tmp_path)
    process = multiprocessing.get_context("spawn").Process(target=run, args=(config, config.run_dir), daemon=True)
    process.start()
    yield config, process
    process.kill()
    process.join(10)
    process.close()


def test_serves_at_its_published_address_without_torch_and_ends_on_sigterm(role):
    config, process = role
    file = config.run_dir / "replay.address"
    address = wait_for_address(file, 60.0)
    assert parse(address).host == "127.0.0.1" and parse(address).port
    client = Client(address, b"g0")
    info = describe(config.model.path)
    hello = wire.Hello(
        wire.SCHEMA, "generator", "g0", "b", list(info.layers), info.num_experts, info.top_k, info.vocab_size,
        info.fingerprint,
    )  # fmt: skip
    client.send(wire.encode(hello))
    frames = client.recv(30.0)
    assert frames is not None
    welcome = wire.decode(frames)
    assert isinstance(welcome, wire.Welcome) and welcome.newest is None and welcome.boot
    client.send(wire.encode(wire.LeaseRequest((0, 0), 1)))
    frames = client.recv(30.0)
    assert frames is not None and wire.decode(frames) == wire.Leases([], "no_version", 1)
    client.close()
    assert "libtorch" not in Path(f"/proc/{process.pid}/maps").read_text()
    process.terminate()
    process.join(60)
    assert process.exitcode == 143 and not file.exists()
    # The port is free again at once.
    Server(address).close()


def test_bad_settings_are_refused_before_serving(tmp_path):
    config = make_config(tmp_path, bind="tcp://0.0.0.0:*")
    with pytest.raises(ConfigError, match=r"replay\.bind='tcp://0\.0\.0\.0:\*'"):
        run(config, config.run_dir)
    small = config.model_copy(update={"replay": config.replay.model_copy(update={"capacity_bytes": 2**16})})
    # 5 groups of 2 responses of 3200 tokens: ids, log-probs and masks alone are 5 * 2 * 3200 * 9 = 288,000 bytes.
    long = small.model_copy(update={"sampling": small.sampling.model_copy(update={"max_new_tokens": 3200})})
    with pytest.raises(ConfigError, match=r"replay\.capacity_bytes=65536 cannot hold one take and one group"):
        run(long, config.run_dir)
    with Blocked() as port:
        taken = config.model_copy(
            update={"replay": config.replay.model_copy(update={"bind": f"tcp://127.0.0.1:{port}"})}
        )
        with pytest.raises(TransportError, match=rf"port {port} of replay\.bind"):
            run(taken, config.run_dir)
    assert not (config.run_dir / "replay.address").exists()


class Blocked:
    """A port that somebody else listens on."""

    def __enter__(self) -> int:
        self.server = Server("127.0.0.1")
        port = parse(self.server.address).port
        assert port is not None
        return port

    def __exit__(self, *_: object) -> None:
        self.server.close()


def test_waiting_for_an_address_has_an_end(tmp_path):
    with pytest.raises(TransportError, match="is that role running"):
        wait_for_address(tmp_path / "replay.address", 0.2)
