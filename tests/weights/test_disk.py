"""The disk carrier: what readers can see, keep and refuse, and what is removed when (B35)."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from asyncrl.errors import VersionGone, WeightSyncError
from asyncrl.models.names import stream
from asyncrl.types import Version
from asyncrl.weights import folders
from asyncrl.weights.disk import Publisher
from asyncrl.weights.engine_checksums import expected
from asyncrl.weights.folders import LOCK, READY, Folder
from tests.helpers import tiny_models

V4, V5, V6, V7 = (Version(0, update) for update in (4, 5, 6, 7))
ROOT = Path(__file__).parents[2]


@pytest.fixture
def start(tmp_path: Path) -> Path:
    """A model folder as far as the publisher looks into it, with weights that are not to be copied."""
    folder = tmp_path / "start"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "qwen3_moe", "dtype": "float64", "torch_dtype": "float64"}')
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "model.safetensors").write_bytes(b"old weights")
    return folder


@pytest.fixture
def publisher(tmp_path: Path, start: Path) -> Iterator[Publisher]:
    made = Publisher(tmp_path / "weights", start)
    yield made
    made.close()


def weights(value: float = 1.0) -> dict[str, Tensor]:
    return {
        "a.weight": torch.arange(6, dtype=torch.float32).view(2, 3) + value,
        "b.weight": torch.full((5,), value, dtype=torch.bfloat16),
        "c.count": torch.tensor(7),
        "d.empty": torch.zeros(0, 4),
        "e.half": torch.tensor([value / 3], dtype=torch.float16),
        "f.eighth": torch.tensor([[value, -448.0]]).to(torch.float8_e4m3fn),
    }


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    def bits(tensor: Tensor) -> list[int]:
        return tensor.reshape(-1).view(torch.uint8).tolist() if tensor.numel() else []

    return list(a) == list(b) and all(
        a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and bits(a[k]) == bits(b[k]) for k in a
    )


def three(value: float) -> dict[str, Tensor]:
    """40 bytes each: a file each with shards of 64 bytes."""
    return {name: torch.full((10,), value) for name in "abc"}


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def visible(publisher: Publisher) -> list[str]:
    return [name for name in names(publisher.directory) if not name.startswith(".")]


def path_of(source: str) -> Path:
    return Path(source.removeprefix("disk://"))


# --- what a version is ------------------------------------------------------------------------------


def test_round_trip_keeps_names_dtypes_shapes_and_bits(publisher: Publisher) -> None:
    source = publisher.publish(V5, iter(weights().items()))
    assert source == f"disk://{publisher.directory}/v0.5"
    assert same(Folder(source, V5).tensors(), weights())
    with Folder(source, V5).folder() as path:
        assert path == publisher.directory / "v0.5"
        assert names(path) == [LOCK, "config.json", "model.safetensors", READY, "tokenizer.json"]
        # bfloat16 has 10 bytes, float32 24.
        assert json.loads((path / "config.json").read_text()) == {"model_type": "qwen3_moe", "dtype": "float32"}
        assert (path / "tokenizer.json").read_text() == '{"version": "1.0"}'


def test_what_lies_there_is_a_model_folder_in_several_files(tmp_path: Path) -> None:
    start = tiny_models.save(tiny_models.qwen3_moe(), tmp_path / "start")
    trained = tiny_models.qwen3_moe(seed=1)
    publisher = Publisher(tmp_path / "weights", start, shard_bytes=40_000)
    path = path_of(publisher.publish(V5, stream(trained)))
    assert len(list(path.glob("*.safetensors"))) > 2
    loaded = AutoModelForCausalLM.from_pretrained(path)
    assert all(torch.equal(loaded.state_dict()[name], value) for name, value in trained.state_dict().items())
    publisher.close()


def test_a_transform_makes_what_engines_get(tmp_path: Path, start: Path) -> None:
    def doubled(stream):
        for name, tensor in stream:
            yield name, tensor
            yield f"{name}.twice", 2 * tensor

    publisher = Publisher(tmp_path / "weights", start, transform=doubled)
    got = Folder(publisher.publish(V5, three(1.0).items()), V5).tensors()
    assert list(got) == ["a", "a.twice", "b", "b.twice", "c", "c.twice"] and float(got["c.twice"][0]) == 2.0
    publisher.close()


def test_a_version_may_be_the_start_folder_of_another_publisher(publisher: Publisher, tmp_path: Path) -> None:
    first = path_of(publisher.publish(V5, three(1.0).items()))
    other = Publisher(tmp_path / "other", first)
    assert same(Folder(other.publish(V6, three(2.0).items()), V6).tensors(), three(2.0))
    other.close()


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ([("a", torch.ones(2)), ("b", torch.tensor([1.0, torch.nan]))], "b is not finite"),
        ([("a", torch.ones(2)), ("b", torch.tensor([torch.nan]).to(torch.float8_e4m3fn))], "b is not finite"),
        ([("a", torch.ones(2)), ("a", torch.ones(2))], r"version 0\.6: a comes twice"),
        ([("a", torch.ones(2, dtype=torch.complex64))], r"a: dtype torch\.complex64 cannot be published"),
    ],
)
def test_what_cannot_be_published_leaves_the_older_version_alone(publisher, bad, why) -> None:
    source = publisher.publish(V5, weights().items())
    with pytest.raises(WeightSyncError, match=why):
        publisher.publish(V6, iter(bad))
    assert names(publisher.directory) == ["v0.5"]
    assert same(Folder(source, V5).tensors(), weights())


def test_a_full_disk_leaves_nothing_behind(publisher: Publisher) -> None:
    source = publisher.publish(V5, weights().items())
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Root and every file system know this kind of fullness.
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, old[1]))
    try:
        with pytest.raises(WeightSyncError, match=r"version 0\.6 not written to .*File too large"):
            publisher.publish(V6, [("a", torch.ones(100)), ("b", torch.ones(10_000))])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)
    assert names(publisher.directory) == ["v0.5"]
    assert same(Folder(source, V5).tensors(), weights())
    assert path_of(publisher.publish(V6, [("b", torch.ones(10_000))])).name == "v0.6"


# --- who removes what when --------------------------------------------------------------------------


def test_only_the_newest_versions_stay_but_for_those_in_use(publisher: Publisher) -> None:
    five = publisher.publish(V5, three(5.0).items())
    with Folder(five, V5).folder() as path:
        publisher.publish(V6, three(6.0).items())
        publisher.publish(V7, three(7.0).items())
        publisher.publish(Version(1, 4), three(4.0).items())
        assert visible(publisher) == ["v0.5", "v0.7", "v1.4"]
        assert publisher.counters["held"] == 2
        # An engine that comes to it later still finds all of it.
        assert (path / "config.json").exists()
        assert same(Folder(five, V5).tensors(), three(5.0))
    publisher.publish(Version(1, 8), three(8.0).items())
    assert visible(publisher) == ["v1.4", "v1.8"]
    with pytest.raises(VersionGone, match=r"v0\.5 is gone"), Folder(five, V5).folder():
        pass


def test_a_version_published_again_replaces_the_folder_whole(tmp_path: Path, start: Path) -> None:
    first = Publisher(tmp_path / "weights", start, shard_bytes=64)
    path = path_of(first.publish(V5, three(1.0).items()))
    assert len(list(path.glob("model-0000?-of-00003.safetensors"))) == 3
    os.close(first._lock)  # killed
    second = Publisher(tmp_path / "weights", start, shard_bytes=100)
    source = second.publish(V5, three(2.0).items())
    assert path_of(source) == path and visible(second) == ["v0.5"]
    assert sorted(p.name for p in path.glob("*.safetensors")) == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    assert same(Folder(source, V5).tensors(), three(2.0))
    second.close()


def test_a_version_published_again_while_somebody_reads_it_gets_a_name_of_its_own(tmp_path: Path, start: Path) -> None:
    first = Publisher(tmp_path / "weights", start, shard_bytes=64)
    old = first.publish(V5, three(1.0).items())
    os.close(first._lock)  # killed
    second = Publisher(tmp_path / "weights", start, keep=1, shard_bytes=100)
    with Folder(old, V5).folder() as path:
        new = second.publish(V5, three(2.0).items())
        assert path_of(new).name == "v0.5-2"
        assert len(list(path.glob("*.safetensors"))) == 3
        assert same(Folder(old, V5).tensors(), three(1.0)) and same(Folder(new, V5).tensors(), three(2.0))
    second.publish(V6, three(3.0).items())
    assert visible(second) == ["v0.6"]
    second.close()


WATCH = """
import json, os, sys
from pathlib import Path
import torch
from asyncrl.types import Version
from asyncrl.weights.disk import Publisher

seen = []

def watch(event, args):
    where = str(args[0]) if args else ""
    if "v0.5" in where or "v0.5" in str(args[1:2]):
        if event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            seen.append(["write", Path(where).name])
        if event in ("os.rename", "os.remove", "os.rmdir"):
            seen.append([event[3:], Path(where).name])

sys.addaudithook(watch)
publisher = Publisher(sys.argv[1], sys.argv[2], keep=1)
publisher.publish(Version(0, 5), [("a", torch.ones(4))])
seen.append(["published", ""])
publisher.publish(Version(0, 6), [("a", torch.ones(4))])
print(json.dumps(seen))
publisher.close()
"""


def test_the_ready_mark_is_written_last_and_removed_first(tmp_path: Path, start: Path) -> None:
    done = script(WATCH, tmp_path / "weights", start)
    out, error = done.communicate(timeout=120)
    seen = [tuple(event) for event in json.loads(out or error)]
    published = seen.index(("published", ""))
    before, after = seen[:published], seen[published + 1 :]
    assert ("write", "model.safetensors") in before and ("write", "config.json") in before
    # All is written, then the mark, then the folder gets its name; nothing follows.
    assert before[-2:] == [("write", READY), ("rename", ".v0.5")]
    changes = [event for event in after if event[0] != "write"]
    assert changes[:2] == [("remove", READY), ("rename", "v0.5")]
    assert [event[0] for event in changes[2:]] == ["rmdir"]


def test_close_leaves_only_what_is_in_use(tmp_path: Path, start: Path, caplog) -> None:
    publisher = Publisher(tmp_path / "weights", start)
    five = publisher.publish(V5, three(5.0).items())
    publisher.publish(V6, three(6.0).items())
    with Folder(five, V5).folder():
        publisher.close()
        publisher.close()
        assert visible(publisher) == ["v0.5"] and "v0.5 stays: somebody is reading it" in caplog.text
        assert same(Folder(five, V5).tensors(), three(5.0))
    with pytest.raises(WeightSyncError, match="the publisher is closed"):
        publisher.publish(V7, three(7.0).items())
    assert names(publisher.directory) == ["v0.5"]
    # The next one counts it as its own.
    after = Publisher(tmp_path / "weights", start, keep=1)
    after.publish(V7, three(7.0).items())
    assert visible(after) == ["v0.7"]
    after.close()
    assert names(tmp_path) == ["start"]


def test_one_publisher_per_folder(publisher: Publisher, start: Path) -> None:
    with pytest.raises(WeightSyncError, match="has a publisher already"):
        Publisher(publisher.directory, start)
    with pytest.raises(WeightSyncError, match="keep 0"):
        Publisher(publisher.directory, start, keep=0)
    publisher.close()
    Publisher(publisher.directory, start).close()


def test_a_folder_of_somebody_else_is_left_alone(tmp_path: Path, start: Path) -> None:
    theirs = [tmp_path / "weights" / name for name in ("v0.5", "v0.1", "best", "v0.2.bak")]
    for folder in theirs:
        folder.mkdir(parents=True)
        (folder / "model.safetensors").write_bytes(b"mine")
    publisher = Publisher(tmp_path / "weights", start, keep=1)
    assert path_of(publisher.publish(V5, three(5.0).items())).name == "v0.5-2"
    publisher.publish(V6, three(6.0).items())
    publisher.close()
    assert [(folder / "model.safetensors").read_bytes() for folder in theirs] == [b"mine"] * 4
    assert names(tmp_path / "weights") == ["best", "v0.1", "v0.2.bak", "v0.5"]


def test_a_file_system_without_locks_is_refused(tmp_path: Path, start: Path, monkeypatch) -> None:
    monkeypatch.setattr(folders.fcntl, "flock", lambda file, how: None)
    with pytest.raises(WeightSyncError, match=r"has no working flock \(a shared lock did not keep"):
        Publisher(tmp_path / "weights", start)
    assert names(tmp_path / "weights") == []


# --- processes that pause and die -------------------------------------------------------------------

PAUSED_WRITER = """
import os, signal, sys
import torch
from asyncrl.types import Version
from asyncrl.weights.disk import Publisher

todo = [1]

def pause(event, args):
    # Shard 1 holds its values, shard 2 is about to get them.
    if event == "open" and todo and "-00002-of-00003" in str(args[0]) and "+" in str(args[1]):
        todo.clear()
        os.kill(os.getpid(), signal.SIGSTOP)

sys.addaudithook(pause)
publisher = Publisher(sys.argv[1], sys.argv[2], shard_bytes=64)
print(publisher.publish(Version(0, 5), [(name, torch.full((10,), 1.0)) for name in "abc"]), flush=True)
sys.stdin.read()
"""

PAUSED_READER = """
import os, signal, sys
from asyncrl.types import Version
from asyncrl.weights.folders import Folder

with Folder(sys.argv[1], Version(0, 5)).folder() as path:
    os.kill(os.getpid(), signal.SIGSTOP)
    # As a server would, that was told the path before it was slow.
    from safetensors.torch import load_file
    print(sorted({float(v[0]) for file in path.glob("*.safetensors") for v in load_file(file).values()}))
"""


def script(text: str, *arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", text, *map(str, arguments)],
        cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_until(condition: Callable[[], bool]) -> None:
    for _ in range(6000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it did not happen within a minute")


@contextmanager
def stopped(text: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """The process, once it has stopped itself; waits for that at most a minute."""
    process = script(text, *arguments)
    try:
        wait_until(lambda: psutil.Process(process.pid).status() == psutil.STATUS_STOPPED)
        yield process
    finally:
        process.kill()
        process.communicate(timeout=60)


def test_a_writer_paused_after_its_first_shard_shows_nothing(tmp_path: Path, start: Path) -> None:
    directory = tmp_path / "weights"
    with stopped(PAUSED_WRITER, directory, start) as writer:
        assert names(directory) == [".v0.5.part"]
        with pytest.raises(VersionGone):
            Folder(f"disk://{directory}/v0.5", V5).tensors()
        with pytest.raises(WeightSyncError, match="has a publisher already"):
            Publisher(directory, start)
        writer.send_signal(signal.SIGCONT)
        assert writer.stdout is not None
        source = writer.stdout.readline().strip()
        assert same(Folder(source, V5).tensors(), three(1.0))


def test_what_a_killed_writer_left_is_swept_and_never_read(tmp_path: Path, start: Path) -> None:
    directory = tmp_path / "weights"
    with stopped(PAUSED_WRITER, directory, start) as writer:
        writer.kill()
        writer.wait(60)
        assert names(directory) == [".v0.5.part"]
        publisher = Publisher(directory, start, shard_bytes=100)
        assert names(directory) == []
        source = publisher.publish(V5, three(2.0).items())
        assert len(list(path_of(source).glob("*.safetensors"))) == 2
        assert same(Folder(source, V5).tensors(), three(2.0))
        publisher.close()


def test_what_a_publisher_that_was_killed_was_removing_is_swept(tmp_path: Path, start: Path) -> None:
    publisher = Publisher(tmp_path / "weights", start, keep=3)
    unmarked = path_of(publisher.publish(V5, three(1.0).items()))
    (unmarked / READY).unlink()
    moved = path_of(publisher.publish(V6, three(1.0).items()))
    moved.rename(moved.with_name(".v0.6.0123abcd.gone"))
    publisher.publish(V7, three(1.0).items())
    os.close(publisher._lock)  # killed
    with pytest.raises(WeightSyncError, match=r"v0\.5 is not complete: ready\.json is missing"):
        Folder(f"disk://{unmarked}", V5).tensors()
    after = Publisher(publisher.directory, start)
    assert names(publisher.directory) == ["v0.7"]
    after.close()


def test_a_reader_paused_after_choosing_a_version_still_loads_it(tmp_path: Path, start: Path) -> None:
    publisher = Publisher(tmp_path / "weights", start, keep=1, shard_bytes=64)
    source = publisher.publish(V5, three(5.0).items())
    with stopped(PAUSED_READER, source) as reader:
        for version in (V6, V7):
            publisher.publish(version, three(0.0).items())
        assert visible(publisher) == ["v0.5", "v0.7"]
        reader.send_signal(signal.SIGCONT)
        out, error = reader.communicate(timeout=120)
        assert out == "[5.0]\n", error
    publisher.publish(Version(0, 8), three(0.0).items())
    assert visible(publisher) == ["v0.8"]
    publisher.close()


def test_a_dead_reader_holds_nothing(tmp_path: Path, start: Path) -> None:
    publisher = Publisher(tmp_path / "weights", start, keep=1)
    with stopped(PAUSED_READER, publisher.publish(V5, three(5.0).items())) as reader:
        publisher.publish(V6, three(6.0).items())
        assert visible(publisher) == ["v0.5", "v0.6"]
        reader.kill()
        reader.wait(60)
        publisher.publish(V7, three(7.0).items())
        assert visible(publisher) == ["v0.7"]
    publisher.close()


# --- what a reader refuses --------------------------------------------------------------------------


def damage(file: Path, offset: int) -> None:
    with file.open("r+b") as out:
        out.seek(offset, os.SEEK_END if offset < 0 else os.SEEK_SET)
        byte = out.read(1)
        out.seek(-1, os.SEEK_CUR)
        out.write(bytes([byte[0] ^ 1]))


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 1)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda f: cut(f / "model.safetensors"), r"model\.safetensors has \d+ bytes, \d+ were written"),
        (lambda f: damage(f / "model.safetensors", 10), "model.safetensors is damaged: its beginning"),
        (lambda f: damage(f / "tokenizer.json", 3), "tokenizer.json is damaged"),
        (lambda f: (f / "model.safetensors").unlink(), "not complete: model.safetensors is missing"),
        (lambda f: (f / READY).unlink(), "not complete: ready.json is missing"),
        (lambda f: (f / READY).write_text("{"), "cannot be read"),
    ],
)
def test_a_folder_that_is_not_as_it_was_written_is_refused(publisher: Publisher, change, why) -> None:
    source = publisher.publish(V5, three(1.0).items())
    change(path_of(source))
    with pytest.raises(WeightSyncError, match=why) as refused, Folder(source, V5).folder():
        pass
    assert not isinstance(refused.value, VersionGone)
    with pytest.raises(WeightSyncError, match=why):
        Folder(source, V5).tensors()


def test_damaged_values_are_found_where_they_are_read(publisher: Publisher) -> None:
    source = publisher.publish(V5, three(1.0).items())
    damage(path_of(source) / "model.safetensors", -1)
    # An engine that loads the folder is asked for its checksums afterwards.
    with Folder(source, V5).folder():
        pass
    for read in (Folder(source, V5).tensors, lambda: Folder(source, V5).checksums(["c"], 1)):
        with pytest.raises(WeightSyncError, match="the checksum of c does not match, bytes are damaged"):
            read()
    assert Folder(source, V5).checksums(["a", "b"], 1) == expected(three(1.0), ["a", "b"], 1)


def test_checksums_are_those_of_what_was_sent(publisher: Publisher) -> None:
    model = dict(stream(tiny_models.qwen3_moe()))
    source = publisher.publish(V5, model.items())
    wanted = ["model.norm.weight", "model.layers.0.self_attn.qkv_proj.weight", "model.layers.1.mlp.experts.w13_weight"]
    found = Folder(source, V5).checksums([*wanted, "unknown"], 1)
    assert found == expected(model, wanted, 1) and sorted(found) == sorted(wanted)


def test_a_folder_with_another_version_is_refused(publisher: Publisher) -> None:
    source = publisher.publish(V5, three(1.0).items())
    with pytest.raises(WeightSyncError, match=r"v0\.5 holds version 0\.5, not 0\.6"):
        Folder(source, V6).tensors()
    ready = msgspec.json.decode((path_of(source) / READY).read_bytes())
    assert ready["version"] == [0, 5]


@pytest.mark.parametrize("source", ["/a/v0.5", "disk://a/v0.5", "tcp://127.0.0.1:1", "disk://"])
def test_another_source_is_refused(source: str) -> None:
    with pytest.raises(WeightSyncError, match="not a source of the disk carrier"):
        Folder(source, V5)


def test_the_other_ways_of_a_source(tmp_path: Path) -> None:
    folder = Folder(f"disk://{tmp_path}/v0.5", V5)
    assert folder.kind == "folder" and folder.leave("g0") is None
    with pytest.raises(WeightSyncError, match="is a folder, no broadcast to g0"):
        folder.broadcast("g0", 1)
    with pytest.raises(VersionGone):
        folder.checksums([], 1)
