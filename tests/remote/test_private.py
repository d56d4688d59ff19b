"""Private folders: for one user, as long as the process, and swept when that was killed."""

import os
import stat
import subprocess
import sys

import pytest

from asyncrl.remote import private as module
from asyncrl.remote.private import private_folder, sweep

HOLD = """
import sys
from pathlib import Path
from asyncrl.remote import private
private._SHARED_MEMORY = Path(sys.argv[1])
with private.private_folder() as folder:
    (folder / "key").write_text("secret")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def memory(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_SHARED_MEMORY", tmp_path)
    return tmp_path


def test_it_is_for_this_user_only_and_goes_away(memory):
    with private_folder() as folder:
        assert folder.parent == memory and stat.S_IMODE(folder.stat().st_mode) == 0o700
        (folder / "keys").mkdir()
    assert list(memory.iterdir()) == []


def test_what_a_killed_process_left_is_swept_and_what_one_holds_is_not(memory):
    with subprocess.Popen(
        [sys.executable, "-c", HOLD, str(memory)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as other:
        folder = other.stdout.readline().strip()
        assert sweep() == []
        with private_folder():
            assert os.path.exists(f"{folder}/key")
        other.kill()
        other.wait(30)
        assert os.path.exists(f"{folder}/key")
        with private_folder():
            assert not os.path.exists(folder)


def test_a_sweep_follows_no_link_and_leaves_other_names(memory, tmp_path):
    (memory / "mine").mkdir()
    (memory / f"asyncrl-private-{os.getuid()}-1-x").symlink_to(memory / "mine")
    assert sweep() == [] and (memory / "mine").exists()
