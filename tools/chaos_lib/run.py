"""One run under chaos: plays the faults, ends the run, leaves the evidence. Judges nothing: chaos_lib.verify does."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from asyncrl.config import load_config, save_config
from chaos_lib import faults as f
from chaos_lib.proxy import Proxy
from chaos_lib.stage import Failure, Plan, Stage, num_own_descriptors

LEAVE_S = 90.0
"""Longest wait for replay once the learner has ended."""
LATE_S = 15.0
"""How long generators have to hear of the end; those that missed it are asked to stop."""
ORDER_S = 60.0
"""Longest wait for a role that was asked to stop."""
HAND = 4
"""Faults from which the next one is chosen."""


@dataclass
class Chaos(Stage):
    """A run to which faults happen. hand: drawn and not yet played. dealt: faults of the first deck."""

    hand: list[f.Fault] = field(default_factory=list)
    dealt: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._rng = random.Random(f"{self.plan.seed} victims")
        self._stream: Iterator[f.Fault] = f.plan(self.plan.seed, self.plan.cards, self.plan.pace)
        self._due = 0.0

    def chaos(self) -> None:
        """Play faults for the planned time, and one deck at least; ends early when the learner does."""
        deadline = time.monotonic() + self.plan.seconds
        self._due = time.monotonic()
        while not self.over and (time.monotonic() < deadline or self.dealt < len(self.plan.cards)):
            if time.monotonic() > deadline + self.plan.finish_s:
                raise Failure(f"only {self.dealt} of {len(self.plan.cards)} faults could be played")
            self.tick()
            if time.monotonic() >= self._due:
                self._play()

    def _play(self) -> None:
        """The first fault of the hand that is possible now; the others wait."""
        if len(self.hand) < HAND:
            self.hand.append(next(self._stream))
        for fault in self.hand:
            name = self._name(fault)
            if fault.target in self.plan.spare:
                self.hand.remove(fault)
                self.dealt += fault.number < len(self.plan.cards)
                return
            if self._possible(fault, name):
                self.hand.remove(fault)
                self._inflict(fault, name)
                self.dealt += fault.number < len(self.plan.cards)
                self._due = time.monotonic() + fault.gap
                return

    def _name(self, fault: f.Fault) -> str:
        if fault.target == "generator":
            return f"g{int(fault.pick * self.plan.generators)}"
        return "learner" if fault.target == "rank" else fault.target

    def _possible(self, fault: f.Fault, name: str) -> bool:
        """At most half of the roles at a time; a learner only after progress; a link only when it is in order."""
        role = self.roles[name]
        if not role.up or (fault.kind in f.LINK and name in self.calm_at):
            return False
        if fault.kind in f.LINK:
            return self.proxies[name].num_connections > 0
        if sum(not r.up for r in self.roles.values()) * 2 >= len(self.roles):
            return False
        progress = self.tap.commits - self.commits_at_start
        needed = self.config.learner.checkpoint_every + 1
        if fault.kind != f.STOP and name == "learner":
            return progress >= needed
        # A replay or a generator that has just begun proves little.
        return time.monotonic() - role.started > self.plan.pace.gap[1] and self.tap.commits > 0

    def _inflict(self, fault: f.Fault, name: str) -> None:
        role, until = self.roles[name], time.monotonic() + fault.seconds
        drawn = {k: round(v, 3) for k, v in (("seconds", fault.seconds), ("value", fault.value), ("back", fault.back))}
        what = {"kind": fault.kind, "name": name, "target": fault.target, "incarnation": role.incarnation}
        self.note("fault", number=fault.number, **what, **drawn)
        match fault.kind:
            case f.KILL:
                role.kill(self._rng, rank=fault.target == "rank")
                role.cause += f":{fault.seconds}"
            case f.TERMINATE:
                role.terminate()
                role.cause += f":{fault.seconds}"
            case f.STOP:
                role.freeze(until)
            case f.RESET:
                self.proxies[name].reset()
            case _:
                self._weather(fault, self.proxies[name], until)
                self.calm_at[name] = until

    def _weather(self, fault: f.Fault, proxy: Proxy, until: float) -> None:
        match fault.kind:
            case f.LATENCY:
                proxy.up.latency_s, proxy.down.latency_s = fault.value, fault.back
            case f.BANDWIDTH:
                proxy.up.rate, proxy.down.rate = fault.value, fault.back
            case f.PARTITION:
                proxy.up.held_until = proxy.down.held_until = until
            case f.PARTITION_UP:
                proxy.up.held_until = until
            case f.PARTITION_DOWN:
                proxy.down.held_until = until

    def settle(self) -> None:
        """No more faults: thaw, clear the weather, start again what is down."""
        self.note("chaos over", dealt=self.dealt, commits=self.tap.commits)
        for role in self.roles.values():
            role.thaw()
            if not self.over and role.restart_at not in (None, float("inf")):
                role.restart_at = 0.0
        for proxy in self.proxies.values():
            proxy.calm()
        self.calm_at.clear()
        self.tick()

    def stop_and_resume(self) -> None:
        """Stop every role in order, then start the whole run again with its last update in sight."""
        wait = time.monotonic() + ORDER_S
        while time.monotonic() < wait and not all(r.up for r in self.roles.values()):
            self.tick()
        for name in ["learner", *[n for n in self.roles if n.startswith("g")], "replay"]:
            role = self.roles[name]
            if not role.up:
                continue
            role.terminate()
            assert role.child is not None
            role.child.process.wait(ORDER_S)
            self.note("exit", role=name, incarnation=role.incarnation, status=role.child.returncode, cause="ordered")
        updates = self.tap.update + self.plan.tail
        self.note("resume", updates=updates)
        self.start(updates)

    def finish(self) -> None:
        """Wait for the learner's last update, then for the others to leave. Raises Failure after finish_s."""
        deadline = time.monotonic() + self.plan.finish_s
        while not self.over:
            if time.monotonic() > deadline:
                raise Failure(f"the run did not finish within {self.plan.finish_s:g} s after the chaos")
            self.tick()
        self._leave(["replay"], LEAVE_S)
        # A generator that was just being started again may have missed the end, and waits for replay.
        late = self._leave([n for n in self.roles if n.startswith("g")], LATE_S, must=False)
        for name in late:
            self.roles[name].terminate()
        self._leave(late, ORDER_S)

    def _leave(self, names: list[str], timeout_s: float, must: bool = True) -> list[str]:
        """Wait until these have ended; those that have not. Raises Failure when they must."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.tick(restart=False)
            left = [n for n in names if (c := self.roles[n].child) is not None and c.returncode is None]
            if left and must and time.monotonic() > deadline:
                raise Failure(f"{', '.join(left)} did not leave after the run")
            if not left or time.monotonic() > deadline:
                return left


def play(plan: Plan) -> Path:
    """A whole run under chaos; returns its folder. Raises Failure when it did not come to its end."""
    first = plan.updates or 1_000_000
    changes = [f"{k}={v}" for k, v in plan.settings.items()]
    config = load_config(plan.files, [*changes, f"learner.updates={first}"])
    config.run_dir.mkdir(parents=True)
    save_config(config, config.run_dir / "config.yaml")
    before = num_own_descriptors()
    chaos = Chaos(plan, config, config.run_dir / "chaos")
    try:
        chaos.start(first)
        chaos.chaos()
        chaos.settle()
        if not plan.updates and not chaos.over:
            chaos.stop_and_resume()
        chaos.finish()
    except Failure as exc:
        chaos.note("failure", why=str(exc))
    finally:
        facts = chaos.close()
        facts["own_descriptors"] = num_own_descriptors() - before
        (chaos.folder / "facts.json").write_text(json.dumps(facts))
    return config.run_dir
