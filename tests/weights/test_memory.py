"""The memory of version files: written again in place, and never beyond what the file has."""

import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from asyncrl.weights.memory import Memory
from asyncrl.weights.place import in_shared_memory

SHARED = Path("/dev/shm")


@pytest.fixture(params=["shared", "disk"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    if request.param == "disk":
        yield tmp_path
        return
    if not SHARED.is_dir():
        pytest.skip("no /dev/shm")
    with tempfile.TemporaryDirectory(dir=SHARED, prefix="asyncrl-test-") as made:
        yield Path(made)


def written(memory: Memory, content: bytes, block: int = 1000) -> bytes:
    """What the file holds after content was written in blocks."""
    for start in range(0, len(content), block):
        memory.write(content[start : start + block])
    memory.seal()
    return memory.path.read_bytes()


def test_every_size_over_every_other(folder: Path) -> None:
    memory = Memory(folder / "first")
    sizes = (50_000, 50_001, 7, 100_000, 49_999, 100_000, 99_000, 100_001)
    for number, size in enumerate(sizes):
        content = bytes([number + 1]) * size
        assert written(memory, content) == content
        inode = memory.path.stat().st_ino
        assert memory.reuse(folder / str(number)) and memory.path.stat().st_ino == inode
    memory.discard()
    assert list(folder.iterdir()) == []


def test_only_shared_memory_is_mapped(folder: Path) -> None:
    """Elsewhere a full disk would be a SIGBUS, not an error."""
    memory = Memory(folder / "first")
    written(memory, b"x" * 5000)
    memory.reuse(folder / "second")
    assert (memory._mapped is not None) == in_shared_memory(folder / "second")
    memory.discard()


@pytest.mark.parametrize("left", [0, 1, 4096, 10_000])
def test_a_file_that_was_cut_is_written_to_its_end_and_then_extended(folder: Path, left: int) -> None:
    memory = Memory(folder / "first")
    written(memory, b"x" * 100_000)
    assert memory.reuse(folder / "second")  # mapped whole
    written(memory, b"y" * 100_000)
    os.truncate(memory.path, left)
    assert memory.reuse(folder / "third")
    assert written(memory, b"z" * 100_000) == b"z" * 100_000
    memory.discard()


def test_what_a_reader_holds_or_nobody_has_is_not_used_again(folder: Path) -> None:
    memory = Memory(folder / "first")
    written(memory, b"x" * 5000)
    with open(memory.path, "rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        assert not memory.reuse(folder / "second")
        assert memory.path == folder / "first" and reader.read() == b"x" * 5000
    assert memory.reuse(folder / "second")
    with open(memory.path, "rb") as reader:
        with pytest.raises(BlockingIOError):
            fcntl.flock(reader, fcntl.LOCK_SH | fcntl.LOCK_NB)
        written(memory, b"y" * 5000)
        fcntl.flock(reader, fcntl.LOCK_SH | fcntl.LOCK_NB)
    memory.path.unlink()
    assert not memory.reuse(folder / "third")
    memory.discard()
