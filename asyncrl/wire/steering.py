"""Messages that watch and steer a run: live settings, the learner's reports, verdicts on generators."""

from __future__ import annotations

from typing import Annotated

import msgspec

from asyncrl.wire.fields import Name, Number, Struct, Text

Values = Annotated[dict[Name, Text], msgspec.Meta(max_length=256)]
"""Settings by config key, as JSON."""


class Tuned(msgspec.Struct, array_like=True, gc=False, frozen=True):
    """The live settings in force: every tuned key with its value as JSON. seq counts changes from 1, 0 before any."""

    seq: int = 0
    values: Values = {}


class Settings(Struct, tag="settings"):
    """The live settings changed. Told to generators; the learner gets them with its takes."""

    tuned: Tuned


class Tune(Struct, tag="tune"):
    """Change live settings, or undo the last `undo` changes. Anyone who may ask for the status may send it.

    values: new values by config key, as JSON. by: who asks, for the log. Answered by TuneReply.
    """

    values: Values = {}
    undo: int = 0
    by: Text = ""
    key: Name = ""
    """Of this request: one that is sent again with the same key is done once."""


class TuneReply(Struct, tag="tune_reply"):
    """Whether a Tune was done, what became of it in words, and the live settings now."""

    ok: bool
    text: Text
    tuned: Tuned
    key: Name = ""


class AlarmMsg(Struct):
    """An alarm that is on: its name, since which update, what is wrong with which numbers, and what to do."""

    name: Name
    since: Number
    text: Text
    remedy: Text


class Report(Struct, tag="report"):
    """The learner's last record, for whoever asks for the state of the run. Answered by an Ack."""

    update: Number
    values: Annotated[dict[Name, float], msgspec.Meta(max_length=4096)]
    alarms: Annotated[list[AlarmMsg], msgspec.Meta(max_length=256)] = []
    seq: int = 0
    epoch: Number = 0


class Verdict(Struct, tag="verdict"):
    """What the learner's drift sentinel makes of a generator: quarantine it (sound is False), or let it in again.

    boot: of the process that is meant; of another one it says nothing. Answered by an Ack.
    """

    generator_id: Name
    sound: bool
    reason: Text
    seq: int = 0
    epoch: Number = 0
    boot: Name = ""


class Resync(Struct, tag="resync"):
    """Load this version whole, even if it is held already: the weights here are in doubt."""

    epoch: int
    update: int
    source: str
