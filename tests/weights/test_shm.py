"""The shm carrier: what readers can see, keep and refuse."""

import fcntl
import os
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from asyncrl.errors import VersionGone, WeightSyncError
from asyncrl.types import Version
from asyncrl.weights.place import directory_of
from asyncrl.weights.shm import Publisher, read

V1, V2, V3 = Version(0, 1), Version(0, 2), Version(1, 2)


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    made = Publisher(tmp_path / "weights")
    yield made
    made.close()


def weights(value: float = 1.0) -> dict[str, Tensor]:
    return {
        "a.weight": torch.arange(6, dtype=torch.float32).view(2, 3) + value,
        "b.weight": torch.full((5,), value, dtype=torch.bfloat16),
        "c.count": torch.tensor(7),
        "d.mask": torch.tensor([True, False, True]),
        "e.empty": torch.zeros(0, 4),
        "f.double": torch.tensor([value / 3], dtype=torch.float64),
    }


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(torch.equal(a[k], b[k]) and a[k].dtype == b[k].dtype for k in a)


def files(publisher: Publisher) -> list[str]:
    return sorted(file.name for file in publisher.directory.iterdir())


def visible(publisher: Publisher) -> list[str]:
    """Without the memory that waits for the next version."""
    return [name for name in files(publisher) if name.endswith(".weights")]


def test_round_trip_keeps_names_dtypes_shapes_and_bits(publisher: Publisher) -> None:
    source = publisher.publish(V1, iter(weights().items()))
    assert same(read(source, V1), weights())
    assert stat.S_IMODE(os.stat(source).st_mode) == 0o600


PAUSED = """
import sys
from pathlib import Path
import torch
from asyncrl.errors import WeightSyncError
from asyncrl.types import Version
from asyncrl.weights.shm import Publisher, read

publisher = Publisher(Path(sys.argv[1]) / "weights", keep=1)
source = publisher.publish(Version(0, 1), [("a", torch.ones(4))])
todo = [Version(0, 3), Version(0, 2)]

def meanwhile(event, args):
    # The reader has opened the file and is about to lock it.
    if event == "fcntl.flock" and len(todo) == 2:
        while todo:
            version = todo.pop()
            publisher.publish(version, [("a", torch.full((4,), float(version.update)))])

sys.addaudithook(meanwhile)
try:
    read(source, Version(0, 1))
except WeightSyncError as exc:
    print(type(exc).__name__, publisher.counters["reused"])
publisher.close()
"""


def test_a_reader_that_paused_before_its_lock_finds_the_version_gone(tmp_path: Path) -> None:
    """By then the memory that it opened holds a newer version: that is no damage."""
    done = subprocess.run([sys.executable, "-c", PAUSED, tmp_path], capture_output=True, text=True, timeout=120)
    assert done.stdout == "VersionGone 1\n", done.stderr


def test_a_file_that_holds_another_version_under_its_name_is_refused(publisher: Publisher) -> None:
    source = publisher.publish(V1, iter(weights().items()))
    with pytest.raises(WeightSyncError, match=r"holds version 0\.1, not 0\.2") as refused:
        read(source, V2)
    assert not isinstance(refused.value, VersionGone)


def test_an_old_version_that_cannot_be_dropped_does_not_undo_the_new_one(tmp_path: Path, caplog) -> None:
    publisher = Publisher(tmp_path / "weights", keep=1)
    old = Path(publisher.publish(V1, iter(weights(1.0).items())))
    in_the_way = old.with_name(f"{old.name}.part") / "x"
    in_the_way.mkdir(parents=True)
    assert same(read(publisher.publish(V2, iter(weights(2.0).items())), V2), weights(2.0))
    assert "an old version stays" in caplog.text and old.exists()
    in_the_way.rmdir()
    in_the_way.parent.rmdir()
    publisher.publish(V3, iter(weights(3.0).items()))
    assert visible(publisher) == ["1.2.weights"]
    publisher.close()


def test_files_lie_in_shared_memory_where_there_is_one(publisher: Publisher, tmp_path: Path) -> None:
    if Path("/dev/shm").is_dir():
        assert publisher.directory.parent == Path("/dev/shm")
        assert not (tmp_path / "weights").exists()
    assert directory_of(tmp_path / "weights") == publisher.directory
    other = Publisher(tmp_path / "other")
    assert other.directory != publisher.directory
    other.close()


def test_only_the_newest_versions_stay_but_readers_keep_theirs(publisher: Publisher) -> None:
    first = publisher.publish(V1, weights(1.0).items())
    held = read(first, V1)
    also_held = read(first, V1)
    publisher.publish(V2, weights(2.0).items())
    third = publisher.publish(V3, weights(3.0).items())
    assert visible(publisher) == ["0.2.weights", "1.2.weights"]
    assert same(held, weights(1.0)) and same(also_held, weights(1.0))
    assert same(read(third, V3), weights(3.0))
    with pytest.raises(WeightSyncError, match=r"version 0\.1 cannot be read"):
        read(first, V1)
    held["a.weight"].zero_()
    assert same(also_held, weights(1.0))


def test_the_version_being_announced_always_stays(tmp_path: Path) -> None:
    with pytest.raises(WeightSyncError, match="keep 0"):
        Publisher(tmp_path, keep=0)
    publisher = Publisher(tmp_path / "one", keep=1)
    # An older label published later (a resumed run) is still the newest file.
    publisher.publish(V3, weights(3.0).items())
    source = publisher.publish(V1, weights(1.0).items())
    assert visible(publisher) == ["0.1.weights"]
    assert same(read(source, V1), weights(1.0))
    publisher.close()


def test_publishing_a_version_again_replaces_it_for_new_readers_only(publisher: Publisher) -> None:
    source = publisher.publish(V1, weights(1.0).items())
    held = read(source, V1)
    assert publisher.publish(V1, [("only", torch.ones(2))]) == source
    assert list(read(source, V1)) == ["only"]
    assert same(held, weights(1.0))


def test_a_half_written_version_is_never_visible(publisher: Publisher) -> None:
    publisher.publish(V1, weights(1.0).items())
    seen: list[list[str]] = []

    def slowly() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in weights(2.0).items():
            seen.append([file for file in files(publisher) if file.endswith(".weights")])
            with pytest.raises(WeightSyncError):
                read(str(publisher.directory / "0.2.weights"), V2)
            yield name, tensor
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        publisher.publish(V2, slowly())
    assert seen == [["0.1.weights"]] * 6
    assert files(publisher) == ["0.1.weights"]


def test_memory_of_a_dropped_version_is_used_again_when_nobody_holds_it(publisher: Publisher) -> None:
    inodes = []
    for update in range(6):
        source = publisher.publish(Version(0, update), weights(update).items())
        inodes.append(os.stat(source).st_ino)
        assert same(read(source, Version(0, update)), weights(update))  # and let go
    # Two visible ones and the next: three files take turns.
    assert inodes[3:] == inodes[:3]
    assert publisher.counters["reused"] == 3
    assert len(files(publisher)) == 3


def test_memory_that_a_reader_holds_is_left_to_it(publisher: Publisher) -> None:
    held = {}
    for update in range(6):
        source = publisher.publish(Version(0, update), weights(update).items())
        held[update] = read(source, Version(0, update))
        # Of a dropped version one tensor is enough.
        held[update] = {"a.weight": held[update]["a.weight"]}
    assert publisher.counters["reused"] == 0
    assert all(float(tensors["a.weight"][0, 0]) == update for update, tensors in held.items())
    held.clear()
    for update in range(6, 8):
        publisher.publish(Version(0, update), weights(update).items())
    assert publisher.counters["reused"] == 2


def test_a_version_that_a_reader_chose_survives_the_cleaner(publisher: Publisher) -> None:
    """Paused between opening and reading: as long as it has the lock, nothing is written over."""
    first = publisher.publish(V1, weights(1.0).items())
    with open(first, "rb") as chosen:
        fcntl.flock(chosen, fcntl.LOCK_SH)
        for update in range(2, 6):
            publisher.publish(Version(0, update), weights(update).items())
        assert not os.path.exists(first)
        assert same(read(f"/proc/self/fd/{chosen.fileno()}", V1), weights(1.0))
    # Nobody else can come to it any more: a name that is gone is an error, never other bytes.
    with pytest.raises(WeightSyncError, match=r"version 0\.1 cannot be read"):
        read(first, V1)


def test_a_reader_that_opened_just_before_its_version_was_dropped_sees_no_other_bytes(publisher: Publisher) -> None:
    first = publisher.publish(V1, weights(1.0).items())
    with open(first, "rb") as late:
        source = f"/proc/self/fd/{late.fileno()}"
        for update in range(2, 4):
            publisher.publish(Version(0, update), weights(update).items())
        seen = []

        def slowly() -> Iterator[tuple[str, Tensor]]:
            for pair in weights(4.0).items():
                with pytest.raises(WeightSyncError) as caught:
                    read(source, V1)
                seen.append(str(caught.value))
                yield pair

        publisher.publish(Version(0, 4), slowly())
        assert seen == ["version 0.1 cannot be read: it is dropped, a newer one takes its place"] * 6
        with pytest.raises(WeightSyncError, match=r"holds version 0\.4, not 0\.1"):
            read(source, V1)


def test_a_smaller_version_over_the_memory_of_a_larger_one(publisher: Publisher) -> None:
    large = {"big": torch.arange(100_000), "small": torch.ones(3)}
    for update in range(3):
        publisher.publish(Version(0, update), large.items())
    source = publisher.publish(Version(0, 3), [("small", torch.zeros(3))])
    assert publisher.counters["reused"] == 1
    assert same(read(source, Version(0, 3)), {"small": torch.zeros(3)})
    assert os.stat(source).st_size < 1000


@pytest.mark.parametrize("fault", ["gone", "failed"])
def test_memory_that_cannot_be_used_again_costs_nothing(publisher: Publisher, fault: str) -> None:
    for update in range(3):
        publisher.publish(Version(0, update), weights(update).items())
    if fault == "gone":
        next(publisher.directory.glob("*.part")).unlink()
    else:
        with pytest.raises(WeightSyncError, match="non-finite"):
            publisher.publish(Version(0, 3), [("a", torch.tensor([float("nan")]))])
    source = publisher.publish(Version(0, 4), weights(4).items())
    assert same(read(source, Version(0, 4)), weights(4))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_non_finite_weights_are_not_published(publisher: Publisher, bad: float) -> None:
    publisher.publish(V1, weights().items())
    broken = weights()
    broken["b.weight"][3] = bad
    with pytest.raises(WeightSyncError, match=r"b\.weight has non-finite"):
        publisher.publish(V2, broken.items())
    assert files(publisher) == ["0.1.weights"]


def test_a_name_twice_and_a_strange_dtype_are_refused(publisher: Publisher) -> None:
    with pytest.raises(WeightSyncError, match="a comes twice"):
        publisher.publish(V1, [("a", torch.zeros(1)), ("a", torch.zeros(1))])
    with pytest.raises(WeightSyncError, match="complex64"):
        publisher.publish(V1, [("a", torch.zeros(1, dtype=torch.complex64))])
    assert files(publisher) == []


def test_every_corrupt_byte_is_found(publisher: Publisher) -> None:
    source = publisher.publish(V1, weights().items())
    original = Path(source).read_bytes()
    for position in range(len(original)):
        damaged = bytearray(original)
        damaged[position] ^= 0x10
        Path(source).write_bytes(damaged)
        with pytest.raises(WeightSyncError, match=r"0\.1\.weights"):
            read(source, V1)
    Path(source).write_bytes(original)
    assert same(read(source, V1), weights())


@pytest.mark.parametrize("size", [0, 10, 23, 24, 200, -1])
def test_cut_files_are_refused(publisher: Publisher, size: int) -> None:
    source = publisher.publish(V1, weights().items())
    Path(source).write_bytes(Path(source).read_bytes()[:size])
    with pytest.raises(WeightSyncError, match=r"0\.1\.weights"):
        read(source, V1)


def test_appended_bytes_are_refused(publisher: Publisher) -> None:
    source = publisher.publish(V1, weights().items())
    whole = Path(source).read_bytes()
    Path(source).write_bytes(whole[:8] + whole)
    with pytest.raises(WeightSyncError, match="do not match"):
        read(source, V1)


def test_another_version_under_the_name_is_refused(publisher: Publisher) -> None:
    source = publisher.publish(V1, weights().items())
    with pytest.raises(WeightSyncError, match=r"holds version 0\.1, not 1\.1"):
        read(source, Version(1, 1))


def test_close_removes_the_directory_and_may_be_repeated(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path / "weights")
    held = read(publisher.publish(V1, weights().items()), V1)
    publisher.close()
    publisher.close()
    assert not publisher.directory.exists()
    assert same(held, weights())


def test_left_over_parts_of_a_killed_publisher_are_cleaned(publisher: Publisher, tmp_path: Path) -> None:
    kept = publisher.publish(V1, weights().items())
    (publisher.directory / "0.2.123.part").write_bytes(b"half")
    with pytest.raises(WeightSyncError, match="has a publisher already"):
        Publisher(tmp_path / "weights")
    # What the kernel does with the lock of a process that dies.
    os.close(publisher._lock)
    publisher._lock = -1
    successor = Publisher(tmp_path / "weights")
    assert files(successor) == ["0.1.weights"]
    assert same(read(kept, V1), weights())


def test_another_process_reads_the_version(publisher: Publisher) -> None:
    source = publisher.publish(V1, weights().items())
    code = (
        "import sys; from asyncrl.types import Version; from asyncrl.weights.shm import read;"
        "print(float(read(sys.argv[1], Version(0, 1))['a.weight'].sum()))"
    )
    done = subprocess.run([sys.executable, "-c", code, source], check=True, timeout=60, capture_output=True, text=True)
    # 0 + 1 + ... + 5, each plus 1.
    assert float(done.stdout) == 21.0
