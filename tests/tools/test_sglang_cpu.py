import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOLS = Path(__file__).parents[2] / "tools" / "sglang_cpu"
SCRIPTS = ("environment", "install", "serve")


def call(script, *arguments, cwd=None, **env):
    """Run a script with nothing in its environment but PATH and env."""
    return subprocess.run(
        [str(TOOLS / script), *arguments],
        env={"PATH": os.environ["PATH"], **env},
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


def made_from() -> str:
    return call("environment", "--hash", HOME="/").stdout.strip()


def fake_environment(folder: Path, mark: str | None) -> Path:
    """A folder that looks like an environment, whose python prints what it was called with."""
    python = folder / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\nenv\nprintf "arg %s\\n" "$@"\n')
    python.chmod(0o755)
    (folder / ".asyncrl-begun").touch()
    if mark is not None:
        (folder / ".asyncrl-complete").write_text(mark + "\n")
    return folder


@pytest.mark.parametrize("script", SCRIPTS)
def test_the_scripts_are_executable_and_parse(script):
    assert os.access(TOOLS / script, os.X_OK)
    done = subprocess.run(["bash", "-n", str(TOOLS / script)], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", ["environment", "serve"])
def test_a_missing_environment_names_the_command_that_makes_it(script, tmp_path):
    done = call(script, HOME=str(tmp_path))
    assert done.returncode == 1 and not done.stdout
    assert str(tmp_path / ".cache" / "asyncrl") in done.stderr and str(TOOLS / "install") in done.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("mark", [None, "", "of-other-requirements"])
def test_a_half_made_or_outdated_environment_is_not_used(mark, tmp_path):
    folder = fake_environment(tmp_path / "made", mark)
    done = call("serve", ASYNCRL_SGLANG_CPU=str(folder))
    assert done.returncode == 1 and str(folder) in done.stderr and not done.stdout


def test_an_environment_whose_interpreter_is_gone_is_not_used(tmp_path):
    folder = fake_environment(tmp_path / "made", made_from())
    (folder / "bin" / "python").unlink()
    assert call("serve", ASYNCRL_SGLANG_CPU=str(folder)).returncode == 1


def test_serve_starts_from_any_folder_with_the_callers_flags_last(tmp_path):
    folder = fake_environment(tmp_path / "made", made_from())
    done = call(
        "serve", "--dtype", "bfloat16", "--model-path", "a b", cwd=tmp_path,
        ASYNCRL_SGLANG_CPU=str(folder), PYTHONPATH="elsewhere", OMP_NUM_THREADS="3",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    arguments = [line.removeprefix("arg ") for line in lines if line.startswith("arg ")]
    assert arguments[0] == str(TOOLS / "launch.py")
    assert arguments[-4:] == ["--dtype", "bfloat16", "--model-path", "a b"]
    assert arguments.index("--dtype") < len(arguments) - 4  # the one of its own comes first
    assert "--enable-return-routed-experts" in arguments
    assert f"PYTHONPATH={TOOLS / 'shim'}" in lines
    assert "SGLANG_USE_CPU_ENGINE=1" in lines and "HF_HUB_OFFLINE=1" in lines
    assert "OMP_NUM_THREADS=3" in lines and "GOMP_SPINCOUNT=0" in lines


def test_install_leaves_a_complete_environment_alone(tmp_path):
    folder = fake_environment(tmp_path / "made", made_from())
    before = sorted((p, p.stat().st_mtime_ns) for p in folder.rglob("*"))
    done = call("install", ASYNCRL_SGLANG_CPU=str(folder), PYTHON="false")
    assert (done.returncode, done.stdout) == (0, f"{folder}\n")
    assert sorted((p, p.stat().st_mtime_ns) for p in folder.rglob("*")) == before


def test_install_clears_no_folder_of_somebody_elses(tmp_path):
    (tmp_path / "notes").write_text("mine")
    done = call("install", ASYNCRL_SGLANG_CPU=str(tmp_path), PYTHON="false")
    assert done.returncode == 1 and "ASYNCRL_SGLANG_CPU" in done.stderr
    assert (tmp_path / "notes").read_text() == "mine"


@pytest.mark.parametrize("mark", [None, "of-other-requirements"])
def test_install_makes_a_half_made_or_outdated_environment_anew_and_a_failure_leaves_it_unmarked(mark, tmp_path):
    folder = fake_environment(tmp_path / "made", mark)
    done = call("install", ASYNCRL_SGLANG_CPU=str(folder), PYTHON="false")
    assert done.returncode != 0 and not done.stdout
    assert [p.name for p in folder.iterdir()] == [".asyncrl-begun"]
    assert call("environment", ASYNCRL_SGLANG_CPU=str(folder)).returncode == 1


def fake_python(folder: Path) -> Path:
    """An interpreter that counts its calls and makes an environment of itself, without pip's downloads."""
    python = folder / "python"
    python.write_text(
        f"""#!{sys.executable}
import pathlib, shutil, sys, time
with open({str(folder / "calls")!r}, "a") as calls:
    calls.write(" ".join(sys.argv[1:]) + "\\n")
if sys.argv[1:3] == ["-m", "venv"]:
    time.sleep(0.2)
    target = pathlib.Path(sys.argv[3]) / "bin" / "python"
    target.parent.mkdir()
    shutil.copy(__file__, target)
"""
    )
    python.chmod(0o755)
    return python


def test_two_installs_at_once_make_it_once(tmp_path):
    python, folder = fake_python(tmp_path), tmp_path / "cache" / "made"
    env = {"PATH": os.environ["PATH"], "ASYNCRL_SGLANG_CPU": str(folder), "PYTHON": str(python)}
    both = [
        subprocess.Popen([str(TOOLS / "install")], env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for one in both:
        out, err = one.communicate(timeout=60)
        assert (one.returncode, out) == (0, f"{folder}\n"), err
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 3  # venv, pip with and without what the packages ask for
    assert [("--no-deps" in c) for c in calls] == [False, False, True]
    assert call("environment", ASYNCRL_SGLANG_CPU=str(folder)).returncode == 0


def test_every_requirement_is_pinned_and_torch_to_no_particular_build():
    lines = [
        line
        for name in ("requirements.txt", "no_deps.txt")
        for line in (TOOLS / name).read_text().splitlines()
        if not line.startswith("#")
    ]
    assert all(len(line.split("==")) == 2 and "+" not in line for line in lines), lines
    pins = dict(line.split("==") for line in lines)
    assert pins["torch"] == "2.13.0" and pins["sglang"] == "0.5.23"
