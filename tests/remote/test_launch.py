"""The launcher with stand-ins for the way to a host: order, restarts, exit status, nothing left behind."""

import fcntl
import json
import os
import signal
import subprocess
import sys
import threading
import time

import psutil
import pytest

from asyncrl.config import validate
from asyncrl.remote.__main__ import fleet_of, parser
from asyncrl.remote.launch import Follower, Launcher, Lifeline, say, watch
from asyncrl.remote.plan import Fleet
from asyncrl.remote.reach import Srun, Ssh

# Keeps the job, then does as the role's script says; like an agent it ends when its input does.
STAND_IN = """
cd {folder}
read -r job; echo "$job" >> {folder}/{name}.jobs
n=$(wc -l < {folder}/{name}.jobs)
{script}
cat > {folder}/{name}.beats
exit 75
"""
READY = 'echo "12:00 replay INFO x: serving at tcp://127.0.0.1:4711"; echo "12:01 replay INFO x: g0 joined"'

# In a role's script: wait until the launcher has said it.
ASIDE = "until grep -qs 'set aside' said; do sleep 0.1; done"

# In the learner's script: wait until the last role has its job, or replay its second one.
ALL = "until [ -s g1.jobs ]; do sleep 0.1; done"
AGAIN = 'until [ "$(wc -l < replay.jobs)" = 2 ]; do sleep 0.1; done'


class Stubs:
    """A Reach to shells on this machine."""

    def __init__(self, folder, **scripts):
        self.folder, self.scripts = folder, {"replay": READY} | scripts

    def command(self, name, host):
        text = STAND_IN.format(folder=self.folder, name=name, script=self.scripts.get(name, ""))
        return ["bash", "-c", text]

    def jobs(self, name):
        file = self.folder / f"{name}.jobs"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.fixture
def run(tmp_path, monkeypatch):
    def say_and_keep(text, error=False):
        say(text, error)
        with open(tmp_path / "said", "a") as out:
            out.write(f"{text}\n")

    monkeypatch.setattr("asyncrl.remote.launch.say", say_and_keep)

    def go(changes=None, env=None, **scripts):
        reach = Stubs(tmp_path, **scripts)
        tree = {"model": {"path": "m"}, "run": {"dir": "runs", "shutdown_s": 2} | (changes or {})}
        env = {"A": "1"} | (env or {})
        launcher = Launcher(validate(tree), Fleet("a", "b", ("c", "d")), reach, tmp_path, env, False)
        status = watch(launcher)
        left = [c.name for c in launcher.children.values() if c.returncode is None]
        assert not left
        return status, reach

    return go


def test_replay_comes_first_and_the_rest_hears_its_address(run, capfd):
    status, reach = run(learner=f"{ALL}; exit 0")
    assert status == 0
    (replay,), (learner,), (g1,) = (reach.jobs(n) for n in ("replay", "learner", "g1"))
    assert "connect: null" in replay["config"] and replay["fresh"] == "runs/run/replay.snapshot"
    assert "connect: tcp://127.0.0.1:4711" in learner["config"] and learner["fresh"] == "runs/run/metrics.jsonl"
    assert (g1["role"], g1["words"], g1["env"], g1["fresh"]) == (
        "generate",
        ["--id", "g1"],
        {"ASYNCRL_LOCAL_INDEX": "0", "A": "1"},
        "",
    )
    said = capfd.readouterr().out.splitlines()
    assert said[0].startswith("started replay on a") and "replay serves at tcp://127.0.0.1:4711" in said[1]


def test_the_status_is_the_learners_with_its_cause(run, capfd):
    status, _ = run(learner="echo '2 learner-0 ERROR asyncrl: TrainingError: lost' ; exit 3")
    assert status == 3
    assert "TrainingError: lost" in capfd.readouterr().err


@pytest.mark.parametrize(("script", "status"), [("exit 2", 2), ("exit 1", 1), ("exit 0", 1)])
def test_a_replay_that_ends_before_it_serves_ends_the_run(run, script, status):
    got, reach = run(replay=script)
    assert got == status and not reach.jobs("learner")


def test_a_lost_replay_is_started_again_at_its_port_and_joined_again(run, capfd):
    again = f'{READY}; [ "$n" = 1 ] && sleep 0.5 && kill -9 $$'
    status, reach = run(replay=again, learner=f"{AGAIN}; exit 0")
    assert status == 0
    first, second = reach.jobs("replay")
    assert "127.0.0.1:*" in first["config"] and "bind: tcp://127.0.0.1:4711" in second["config"]
    assert second["fresh"] == ""  # its own snapshot is no other run


def test_a_killed_learner_is_started_again_and_one_that_failed_is_not(run):
    status, reach = run(learner='[ "$n" = 1 ] && exit 137; exit 0')
    assert status == 0 and len(reach.jobs("learner")) == 2
    status, reach = run({"max_learner_restarts": 0}, learner="exit 137")
    assert status == 137


def test_a_learner_with_its_own_error_is_not_started_again_also_when_a_rank_was_killed(run, capfd):
    status, reach = run(learner="echo '2 learner-0 ERROR asyncrl: TrainingError: lost'; exit 137")
    assert status == 137 and len(reach.jobs("learner")) == 1
    assert "TrainingError: lost" in capfd.readouterr().err


def test_a_generator_whose_config_is_refused_is_set_aside_at_once(run, capfd):
    status, reach = run(g1="echo why; exit 2", learner=f"{ASIDE}; exit 0")
    assert status == 0 and len(reach.jobs("g1")) == 1
    assert "g1 on d ended with status 2 and is set aside\nwhy\n" in capfd.readouterr().out


def test_a_job_that_no_pipe_holds_arrives_whole(run):
    status, reach = run(env={"LONG": "x" * 2**18}, learner="exit 0")
    assert status == 0 and reach.jobs("learner")[0]["env"] == {"A": "1", "LONG": "x" * 2**18}


def test_a_lifeline_takes_no_more_of_the_pipes_that_a_user_may_have_than_the_default():
    process = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    job = b"x" * 2**20
    lifeline = Lifeline(process, job)
    assert fcntl.fcntl(process.stdin.fileno(), fcntl.F_GETPIPE_SZ) <= 2**16
    got = b""
    while len(got) < len(job):
        lifeline.push(beat=True)
        got += os.read(process.stdout.fileno(), 2**16)
    lifeline.push(beat=True)
    lifeline.let_go()
    got += process.stdout.read()
    process.stdout.close()
    assert process.wait(30) == 0 and got.startswith(job) and set(got[len(job) :]) == {10}


def test_an_ssh_that_is_not_there_is_one_line(run, capfd, monkeypatch):
    monkeypatch.setattr(Stubs, "command", lambda *_: ["/nowhere/ssh"])
    assert run()[0] == 1
    err = capfd.readouterr().err
    assert "run failed: replay on a cannot be started from here" in err and "Traceback" not in err


def test_a_generator_that_cannot_be_kept_is_set_aside(run, capfd):
    status, reach = run({"max_generator_restarts": 1}, g1="exit 255", learner=f"{ASIDE}; exit 0")
    assert status == 0 and len(reach.jobs("g1")) == 2
    assert "g1 on d ended with status 255 and is set aside" in capfd.readouterr().out


def test_a_run_without_generators_left_ends(run, capfd):
    status, _ = run({"max_generator_restarts": 0}, g0="exit 255", g1="echo no route; exit 255")
    assert status == 1
    assert "every generator ended" in capfd.readouterr().err


def test_a_signal_stops_all(run, tmp_path):
    def stop():
        deadline = time.monotonic() + 120
        while not (tmp_path / "g1.jobs").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    status, reach = run()
    assert status == 143 and reach.jobs("g1")


def test_only_whole_lines_of_a_log_count(tmp_path):
    log = tmp_path / "log"
    log.write_bytes(b"old\nserving a")
    follower = Follower(log, 4)
    assert follower.lines() == []
    with open(log, "ab") as out:
        out.write(b"t x\nnext")
    assert follower.lines() == ["serving at x"] and follower.lines() == []


def test_the_commands_of_both_ways():
    ssh = Ssh(["ssh", "-F", "x"], "/a b", "/py").command("g0", "h1")
    assert ssh[:4] == ["ssh", "-F", "x", "-T"] and ssh[-2:] == [
        "h1", "cd '/a b' && exec /py -m asyncrl.remote.agent",
    ]  # fmt: skip
    srun = Srun("/a b", "/py", {"SLURM_CPUS_PER_TASK_HET_GROUP_1": "8"})
    assert {"--het-group=1", "--cpus-per-task=8", "--nodelist=n1"} <= set(srun.command("learner", "n1"))
    assert "--het-group=0" in srun.command("g0", "n2") and "--no-kill" in srun.command("g0", "n2")


def test_options_name_the_fleet():
    words = ["--replay", "a", "--learner", "b", "--generators", "c d*2", "x.yaml", "k=v"]
    options = parser().parse_intermixed_args(words)
    assert fleet_of(options) == Fleet("a", "b", ("c", "d", "d")) and options.words == ["x.yaml", "k=v"]


def test_a_refused_config_or_no_hosts_is_status_2(tmp_path):
    (tmp_path / "c.yaml").write_text("model: {path: m}\n")
    for words in (["c.yaml"], ["c.yaml", "--hosts", "nowhere"], ["c.yaml", "--slurm"], ["no.yaml"]):
        command = [sys.executable, "-m", "asyncrl.remote", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 2 and done.stderr.startswith("config error:"), words
    assert not (tmp_path / "runs").exists()


def test_an_agent_that_does_not_answer_is_given_up(run, monkeypatch, tmp_path):
    monkeypatch.setattr("asyncrl.remote.launch.MARGIN_S", 0.5)
    status, _ = run(learner="exit 0", g0="trap '' TERM; while :; do sleep 0.1; done")
    assert status == 0
    commands = [" ".join(p.info["cmdline"] or []) for p in psutil.process_iter(["cmdline"])]
    assert not [c for c in commands if f"{tmp_path}/g0.jobs" in c]
