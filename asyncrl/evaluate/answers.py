"""OUT/answers.jsonl: one line per response, written as it comes, and what a process that was killed left there.

An answer without a reward may be followed by another one to the same question: the last line counts, and `compact`
leaves it alone. OUT/eval.json says of which evaluation the answers are; those of another one are never mixed in.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from asyncrl.errors import ConfigError
from asyncrl.evaluate.questions import Key

FILE, NOTE, LOCK = "answers.jsonl", "eval.json", "eval.lock"

Record = dict[str, Any]
"""prompt_id, set, sample, greedy, prompt, response, tokens, extracted, gold, reward, parts, finish_reason, seconds,
attempts (how often it was asked for, those without a reward included); and error, where reward is null."""


class Answers:
    """The answers in a folder, which one process at a time adds to. Close it.

    identity: of `questions.identity`. lock: of `lock_of` the folder, where that is held already, and longer than this.
    ConfigError when another process writes there, when the folder has answers of another evaluation, and for a line in
    the middle that is none.
    """

    def __init__(
        self, out: Path, identity: Mapping[str, Any], about: Mapping[str, Any], lock: IO[str] | None = None
    ) -> None:
        self.out, self.path = out, out / FILE
        self._lock = lock_of(out) if lock is None else None
        try:
            _claim(out, identity, about)
            _cut_torn_line(self.path)
            self._by_key = {key_of(record): record for record in read(self.path)}
            self._lines: IO[str] = self.path.open("a", encoding="utf-8")
        except BaseException:
            self._unlock()
            raise

    @property
    def records(self) -> list[Record]:
        """The last line of each response."""
        return list(self._by_key.values())

    @property
    def done(self) -> set[Key]:
        """Responses with a reward; all others are to be asked for."""
        return {key for key, record in self._by_key.items() if record["reward"] is not None}

    @property
    def failed(self) -> set[Key]:
        """Responses that were asked for and have no reward."""
        return {key for key, record in self._by_key.items() if record["reward"] is None}

    def add(self, record: Record) -> None:
        """Write one answer. It outlives this process from here on, and takes the place of one without a reward."""
        before = self._by_key.get(key_of(record))
        record["attempts"] = 1 + (0 if before is None else before.get("attempts", 1))
        self._lines.write(json.dumps(record) + "\n")
        self._lines.flush()
        self._by_key[key_of(record)] = record

    def compact(self) -> None:
        """Leave one line for each response. Whenever the process is killed, the file is the old one or the new one."""
        if self.path.read_bytes().count(b"\n") == len(self._by_key):
            return
        self._lines.close()
        aside = self.path.with_suffix(".part")
        with aside.open("w", encoding="utf-8") as file:
            file.writelines(json.dumps(record) + "\n" for record in self.records)
            file.flush()
            os.fsync(file.fileno())
        aside.replace(self.path)
        self._lines = self.path.open("a", encoding="utf-8")

    def close(self) -> None:
        """Close the file and let others have the folder."""
        self._lines.close()
        self._unlock()

    def before(self, key: Key) -> Record | None:
        """What is there of a response: its last line."""
        return self._by_key.get(key)

    def _unlock(self) -> None:
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> Answers:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def key_of(record: Mapping[str, Any]) -> Key:
    """Which response a line is."""
    return Key(record["prompt_id"], record["sample"], record["greedy"])


def read(path: Path) -> list[Record]:
    """The whole lines of answers.jsonl, the last of each response. ConfigError for one that is no answer."""
    records: dict[Key, Record] = {}
    with path.open("rb") if path.exists() else open(os.devnull, "rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                record = json.loads(line)
                record["reward"]  # KeyError
                records[key_of(record)] = record
            except (ValueError, KeyError, TypeError) as exc:
                raise ConfigError(
                    f"{path}:{number} is no answer ({exc}); remove that line, or give another --out"
                ) from exc
    return list(records.values())


def lock_of(out: Path) -> IO[str]:
    """The lock of a folder, which is made if need be; close it. ConfigError when another process has it."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        handle = (out / LOCK).open("a", encoding="utf-8")
    except OSError as exc:
        raise ConfigError(f"{out} cannot be written: {exc}; give another folder as --out") from exc
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as exc:
        handle.close()
        raise ConfigError(f"another process writes answers to {out}; wait for it, or give another --out") from exc
    return handle


def _claim(out: Path, identity: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Note what the answers here are of. about: for readers only."""
    note = out / NOTE
    plain = json.loads(json.dumps(identity))
    if note.exists():
        try:
            had = json.loads(note.read_bytes())["identity"]
        except (ValueError, KeyError, TypeError) as exc:
            raise ConfigError(f"{note} cannot be read ({exc}); give another --out, or remove {out}") from exc
        different = [
            f"{k}: {had.get(k)!r} there, {plain.get(k)!r} now" for k in had | plain if had.get(k) != plain.get(k)
        ]
        if different:
            raise ConfigError(
                f"{out} has answers of another evaluation ({'; '.join(different)}); give another folder as --out, or "
                f"the same model and settings to go on, or remove {out}"
            )
    elif (out / FILE).exists():
        raise ConfigError(f"{out} has {FILE} without {NOTE}, which says what they are of; give another --out")
    aside = note.with_suffix(".part")
    aside.write_text(json.dumps({"identity": plain, **about}, indent=1) + "\n", encoding="utf-8")
    aside.replace(note)


def _cut_torn_line(path: Path) -> None:
    """What is appended must not be glued to half a line of a process that was killed."""
    if path.exists():
        data = path.read_bytes()
        os.truncate(path, data.rfind(b"\n") + 1)
