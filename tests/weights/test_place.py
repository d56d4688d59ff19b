"""Where versions lie, and cleaning up after a publisher that was killed."""

import subprocess
import sys
from pathlib import Path

import torch

from asyncrl.types import Version
from asyncrl.weights.place import directory_of, remove, sweep
from asyncrl.weights.shm import Publisher, read


def test_a_supervisor_removes_what_a_killed_publisher_left(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path / "weights")
    held = read(publisher.publish(Version(0, 0), [("a", torch.ones(3))]), Version(0, 0))
    (publisher.directory / "0.1.77.part").write_bytes(b"half")
    # No close(): the publisher is gone, only the name of its directory is known.
    remove(tmp_path / "weights")
    remove(tmp_path / "weights")
    assert not directory_of(tmp_path / "weights").exists()
    assert held["a"].tolist() == [1.0, 1.0, 1.0]
    publisher.close()


def test_other_directories_and_foreign_files_stay(tmp_path: Path) -> None:
    first, second = Publisher(tmp_path / "a"), Publisher(tmp_path / "b")
    second.publish(Version(0, 0), [("a", torch.ones(1))])
    (first.directory / "notes.txt").write_text("keep")
    remove(tmp_path / "a")
    assert [file.name for file in first.directory.iterdir()] == ["notes.txt"]
    assert [file.name for file in second.directory.iterdir()] == ["0.0.weights"]
    (first.directory / "notes.txt").unlink()
    first.close()
    second.close()


def test_place_loads_no_torch() -> None:
    code = "import sys; import asyncrl.weights.place; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_a_later_publisher_sweeps_the_folder_of_a_killed_one_and_no_other(tmp_path: Path) -> None:
    code = (
        "import sys, torch; from asyncrl.weights.shm import Publisher; from asyncrl.types import Version; "
        "p = Publisher(sys.argv[1]); p.publish(Version(0, 0), [('a', torch.ones(1))]); print(p.directory, flush=True); "
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "killed")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        folder = Path(process.stdout.readline().strip())
        assert folder not in sweep()
        assert (folder / "0.0.weights").exists()
        process.kill()
        process.wait(60)
        # It is left there, until any publisher of this user comes: that may be one of another test.
        Publisher(tmp_path / "next").close()
    assert not folder.exists()
