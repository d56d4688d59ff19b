"""`python -m asyncrl.remote`: one run on several hosts, over ssh or in a heterogeneous SLURM job."""

from __future__ import annotations

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path

from asyncrl.config import load_config
from asyncrl.errors import ConfigError, TransportError
from asyncrl.remote.launch import Launcher, say, watch
from asyncrl.remote.plan import Fleet, from_file, from_slurm, reachable, repeated
from asyncrl.remote.private import private_folder
from asyncrl.remote.reach import Reach, Srun, Ssh
from asyncrl.transport import keys


def parser() -> argparse.ArgumentParser:
    """The options; what is left is CONFIG... key=value..."""
    p = argparse.ArgumentParser(
        prog=os.environ.get("ASYNCRL_PROG", "python -m asyncrl.remote"), description=__doc__, allow_abbrev=False
    )
    p.add_argument("words", nargs="+", metavar="CONFIG|KEY=VALUE", help="config files of this host, and overrides")
    p.add_argument("--replay", metavar="HOST", help="host of replay")
    p.add_argument("--learner", metavar="HOST", help="host of the learner's ranks (learner.ranks)")
    p.add_argument("--generators", metavar="'HOST HOST*N ...'", help="a generator for every word, N for HOST*N")
    p.add_argument("--hosts", metavar="FILE", help="the same as lines: replay HOST, learner HOST, generators HOST*N")
    p.add_argument("--slurm", action="store_true", help="take the hosts from this heterogeneous job, use srun")
    p.add_argument("--dir", default=os.getcwd(), help="working folder on every host; default: this one")
    p.add_argument("--python", help="Python there; default: DIR/.venv/bin/python over ssh, this Python under SLURM")
    p.add_argument("--ssh", default="ssh", help="the ssh command, for example 'ssh -F FILE'")
    p.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="for every role; repeatable")
    p.add_argument("--logs", metavar="DIR", help="log folder on this host; default: RUN/logs")
    p.add_argument("--resume", action="store_true", help="go on in a run folder that holds a run")
    return p


def fleet_of(options: argparse.Namespace) -> Fleet:
    """The hosts, from the one source that was given."""
    if options.slurm:
        lists = [os.environ.get(f"SLURM_JOB_NODELIST_HET_GROUP_{i}", "") for i in (0, 1)]
        if not all(lists):
            raise ConfigError("--slurm needs a heterogeneous job with two components; submit launch/slurm/job.sh")
        return from_slurm(os.environ, *(_hostnames(text) for text in lists))
    if options.hosts:
        try:
            return from_file(Path(options.hosts).read_text())
        except (OSError, UnicodeDecodeError) as exc:
            raise ConfigError(f"--hosts {options.hosts}: {exc}") from exc
    if not (options.replay and options.learner):
        raise ConfigError("name the hosts: --replay HOST --learner HOST --generators 'HOST HOST*N', or --hosts FILE")
    return Fleet(options.replay, options.learner, repeated((options.generators or "").split()))


def _hostnames(text: str) -> list[str]:
    """SLURM's `n[1-3]` to names, by its own tool. Waits at most 60 s."""
    try:
        done = subprocess.run(
            ["scontrol", "show", "hostnames", text], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError) as exc:
        raise ConfigError(f"scontrol show hostnames {text}: {exc}") from exc
    return done.stdout.split()


def launch(options: argparse.Namespace) -> int:
    """Settle the config for these hosts and run it.

    Keys that are made here are in a private folder until they are read, and then in memory, as long as the run.
    """
    config = load_config([w for w in options.words if "=" not in w], [w for w in options.words if "=" in w])
    fleet = fleet_of(options)
    directory = str(Path(options.dir).absolute())
    reach: Reach
    if options.slurm:
        reach = Srun(directory, options.python or sys.executable, os.environ)
    else:
        reach = Ssh(shlex.split(options.ssh), directory, options.python or f"{directory}/.venv/bin/python")
    env = dict(item.split("=", 1) for item in options.env if "=" in item)
    if len(env) != len(options.env):
        raise ConfigError("--env needs NAME=VALUE, each name once")
    logs = Path(options.logs or config.run_dir / "logs")
    try:
        logs.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"the log folder {str(logs)!r} cannot be made: {exc}; set --logs DIR") from exc
    with private_folder() as private:
        made = None
        if config.replay.security == "loopback" and not fleet.is_one_host:
            made = private / "keys"
            keys.new(made, [config.replay.client])
        config = reachable(config, fleet, made)
        launcher = Launcher(config, fleet, reach, logs, env, options.resume)
    status = watch(launcher)
    if status == 0:
        say(f"finished: {config.run_dir} on {fleet.learner} (metrics.jsonl, model/), on {fleet.replay} committed.jsonl")
    return status


def main() -> int:
    """Entry point: a refused config or command line is status 2."""
    try:
        return launch(parser().parse_intermixed_args())
    except (ConfigError, TransportError) as exc:
        print(f"config error: {exc}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
