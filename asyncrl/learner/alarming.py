"""What an alarm does: it is written down, told, runs a command, pauses publishing or ends the run. On rank 0.

Which alarms are on is asyncrl.metrics.alarms' business. RUN/alarms.jsonl has a line for every one that went on or off.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl.config import Config
from asyncrl.errors import TransportError
from asyncrl.learner.alarm_command import Commands
from asyncrl.learner.client import ReplayClient
from asyncrl.metrics.alarm_rules import Facts
from asyncrl.metrics.alarms import Alarm, Alarms
from asyncrl.metrics.sink import FILE as METRICS
from asyncrl.metrics.sink import read_jsonl, timeline
from asyncrl.wire import AlarmMsg

log = logging.getLogger(__name__)

FILE = "alarms.jsonl"
"""Name of the file in the run folder."""
MAX_READ = 1000
"""Records of an earlier learner that are judged again."""
PLAIN = ("log", "text")
"""Actions of alarms that have no section of their own."""


class News(NamedTuple):
    """What one record brought. active: all alarms that are on; on, off: those that changed."""

    active: list[Alarm]
    on: list[Alarm]
    off: list[Alarm]

    def messages(self) -> list[AlarmMsg]:
        """The active ones as replay is told of them."""
        return [AlarmMsg(a.name, a.since, a.text, a.remedy) for a in self.active]


class Alarming:
    """The alarms of a run and their actions."""

    def __init__(self, run_dir: Path, client: ReplayClient, config: Config, first: int, resumed: bool) -> None:
        """first: update that the learner goes on from. resumed: an earlier learner of this run left records."""
        self._file, self._client, self._run = run_dir / FILE, client, config.run.name
        self._alarms, self._others = Alarms(), dict[str, Alarm]()
        self._commands = Commands(run_dir / "logs" / "alarms.log")
        self._failures, self._config, self._next = 0, config, first
        self.ending: Alarm | None = None
        """The alarm that ends the run."""
        if resumed:
            self._alarms.replay(earlier(run_dir, first), config.alarms, facts(config))
        self._agree(first, resumed)

    def check(self, update: int, record: Mapping[str, float], config: Config, others: Sequence[AlarmMsg] = ()) -> News:
        """Judge one record under the settings in force. others: alarms that are found elsewhere and are on."""
        self._config, self._next = config, update + 1
        changes = self._alarms.check(record, update, config.alarms, facts(config))
        known = {m.name: Alarm(m.name, m.since, m.text, m.remedy) for m in others}
        came = [alarm for name, alarm in known.items() if name not in self._others]
        went = [alarm for name, alarm in self._others.items() if name not in known]
        self._others = known
        return News([*changes.active, *known.values()], changes.on + came, changes.off + went)

    def scalars(self) -> dict[str, float]:
        """Metrics of the last record."""
        failures = float(self._failures + self._commands.failures)
        return self._alarms.scalars() | {"run/alarm_action_failures": failures}

    def act(self, update: int, news: News, say: Callable[[int, str], None]) -> None:
        """Do what the alarms that changed ask for, once each. say: shows a text on the dashboard.

        Waits for replay where publishing is to pause, as long as for any request of the learner.
        """
        for alarm in news.off:
            self._write(update, alarm, False)
            actions = self._actions(alarm.name)
            if "log" in actions:
                log.info("alarm %s is off at update %d", alarm.name, update)
            if "text" in actions:
                say(update, f"**{alarm.name}** is off.")
        for alarm in news.on:
            self._write(update, alarm, True)
            self._act_on(update, alarm, say)

    def _act_on(self, update: int, alarm: Alarm, say: Callable[[int, str], None]) -> None:
        actions, section = self._actions(alarm.name), self._config.alarms
        if "log" in actions or "stop" in actions:
            log.warning("alarm %s since update %d: %s. What to do: %s", *alarm)
        if "text" in actions:
            say(update, f"**{alarm.name}** is on since update {alarm.since}: {alarm.text}. What to do: {alarm.remedy}.")
        if "command" in actions and section.command:
            told = alarm._asdict() | {"update": update, "run": self._run, "folder": str(self._file.parent.absolute())}
            self._commands.start(section.command, alarm.name, told, section.command_timeout_s)
        if "pause" in actions:
            self._pause(alarm)
        if "stop" in actions and self.ending is None:
            self.ending = alarm

    def _pause(self, alarm: Alarm) -> None:
        try:
            self._client.tune({"weights.paused": True}, f"alarm {alarm.name}")
            log.warning("alarm %s: publishing is paused; to go on: asyncrl tune RUN weights.paused=false", alarm.name)
        except TransportError as exc:
            self._failures += 1
            log.warning("alarm %s: publishing could not be paused: %s", alarm.name, exc)

    def suspect(self) -> int | None:
        """The first update that an alarm which stops runs has against it, or may have; None without such an alarm.

        The next one may be bad, too, and is judged when its checkpoint has been written.
        """
        section = self._config.alarms
        stops = [name for name, rule in section.rules().items() if rule.enabled and "stop" in rule.actions]
        if not stops or not section.enabled:
            return None
        found = self._alarms.suspect(stops)
        return self._next if found is None else found

    def close(self, wait_s: float) -> None:
        """Wait for commands, at most wait_s and the end of a killed one."""
        self._commands.close(wait_s)

    def _actions(self, name: str) -> Sequence[str]:
        rule = self._config.alarms.rules().get(name)
        return PLAIN if rule is None else rule.actions

    # --- the file -------------------------------------------------------------------------------

    def _agree(self, update: int, resumed: bool) -> None:
        """What an earlier learner left in the file as on may be undone, and what it left as off may be on again."""
        on = _left_on(self._file)
        active = {a.name: a for a in self._alarms.active} if resumed else {}
        for name in on.keys() - active.keys():
            self._write(update, on[name], False)
        for name in active.keys() - on.keys():
            self._write(update, active[name], True)

    def _write(self, update: int, alarm: Alarm, on: bool) -> None:
        line: dict[str, Any] = {"update": update, "time": round(time.time(), 3), "on": on, **alarm._asdict()}
        line |= {"epoch": self._client.epoch, "actions": list(self._actions(alarm.name))}
        try:
            with self._file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")
        except OSError as exc:
            log.error("%s cannot be written: %s", self._file, exc)


def facts(config: Config) -> Facts:
    """What the rules need of the settings."""
    lag, longest = config.staleness.max_lag, config.sampling.max_new_tokens
    a = config.algorithm
    return Facts(lag, longest, config.generator.count, a.group_size, a.groups_per_update * a.group_size)


def earlier(run_dir: Path, first: int) -> list[dict[str, float]]:
    """The last records of updates before `first`, as far as they count."""
    file = run_dir / METRICS
    records = timeline(read_jsonl(file)) if file.exists() else []
    return [r for r in records if r["update"] < first and "policy/reward" in r][-MAX_READ:]


def ended_by(alarm: Alarm, checkpoint: str) -> str:
    """Why the run ends. checkpoint: the newest that is left, or "none"."""
    begins = (
        f"goes on from {checkpoint}" if checkpoint != "none" else "begins at the start model: no checkpoint is left"
    )
    return (
        f"alarm {alarm.name} ended the run (alarms.{alarm.name}.actions has stop): {alarm.text}. It began at update "
        f"{alarm.since}; checkpoints from there on are set aside as u<update>.alarm. What to do: {alarm.remedy}. "
        f"`asyncrl run RUN/config.yaml --resume KEY=VALUE` {begins}"
    )


def _left_on(file: Path) -> dict[str, Alarm]:
    """The alarms that are on by the file; lines that are none are passed over."""
    state: dict[str, Alarm | None] = {}
    for line in _lines(file):
        try:
            raw = json.loads(line)
            alarm = Alarm(str(raw["name"]), int(raw["since"]), str(raw["text"]), str(raw["remedy"]))
            state[alarm.name] = alarm if raw["on"] else None
        except (ValueError, KeyError, TypeError):
            continue
    return {name: alarm for name, alarm in state.items() if alarm is not None}


def _lines(file: Path) -> Iterable[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
