"""The screen of `asyncrl status`: its lines, and that it can be read on a narrow terminal without colour."""

import io

import pytest
from rich.console import Console

from asyncrl.watch.derive import derive
from asyncrl.watch.status import duration, number, screen, share, size
from asyncrl.watch.view import render
from tests.watch.states import empty, full, generator

ADDRESS = "tcp://127.0.0.1:43211"
QUARANTINE = {"phase": "resync", "reason": "drift z 12.5", "resyncs": 1, "update": 40}
ALARM = {"name": "f_2", "since": 40, "text": "F(2) above 0.1 in 6 of the last 10 updates", "remedy": "lower learner.lr"}


def drawn(state, width=80, before=None, **options):
    out = io.StringIO()
    console = Console(file=out, width=width, no_color=True)
    console.print(render(screen("runs/r", ADDRESS, state, derive(state, before)), **options))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def text(state, **options):
    """Its words, whatever the line breaks."""
    return " ".join(" ".join(drawn(state, **options)).split())


@pytest.mark.parametrize("width", [80, 120])
@pytest.mark.parametrize(
    "state", [empty(), full(), full(failure="x " * 200), full(counters={f"reason_{i}": i for i in range(40)})]
)
def test_no_line_is_cut_or_too_long(state, width):
    lines = drawn(state, width)
    assert max(map(len, lines)) <= width
    assert "\u2026" not in "".join(lines), "an ellipsis hides what it stands for"


def test_a_running_run_on_80_columns():
    assert (
        drawn(full())
        == """\
r  tcp://127.0.0.1:43211  replay up 2 min 10 s
  run        running
  updates    [###########.............] 57/120, 0.92 s each, 58 s to go
  version    newest 0.56 (epoch.update), held: 0.56 by 1, 0.48 by 1
  lag        mean 3.25, p90 6, max 7 of at most 8 updates
  queue      32 groups queued, 8 being sampled, 64 taken; 81.2 kB of 2.15 GB
  learner    2 ranks, 5,210 tok/s, busy 71%, idle: few_groups 20%, other 8.8%,
             heard 0 s ago
! generators 2 of 3 alive, 4,900 tok/s, busy 50%, no lease because ahead_full
             83%, version_too_old 17% (since the last record)
  learning   reward 0.742, entropy 0.0167, length 19.6, grad norm 0.172; record
             of 2 s ago
  mismatch   KL k1 0.0021, k3 0.00104, F(2) 0.13%, ESS 99.88%, drift 0.0124
  held-out   accuracy sampled 81%, greedy 84% at update 40
  dropped    stale 12, lease_expired 1

   generator  version  tok/s  busy  in flight  failed  drift z  now
   g0            0.56  4,900   50%         32       0      0.3  alive
!  g2            0.52      -     -          -       0        -  dead for 75 s
   g10           0.48      -     -         32       3     12.5  alive, 8 behind""".splitlines()
    )


def test_a_run_that_has_not_begun_says_what_is_missing():
    assert (
        drawn(empty())
        == """\
r  tcp://127.0.0.1:43211  replay up 3 s
  run        waiting for the learner
  updates    [........................] 0/120
  version    run epoch 0, none is published yet
  lag        no record yet; at most 8
  queue      0 groups queued, 0 being sampled, 0 taken; 0 B of 2.15 GB
! learner    not heard yet
! generators 0 of 0 alive
  learning   no record yet""".splitlines()
    )


def test_alarms_name_their_remedy_and_live_settings_what_they_replace():
    report = full()["report"] | {"alarms": [ALARM]}
    tuned = {"seq": 2, "in_force": 1, "values": {"staleness.max_lag": "4"}, "config": {"staleness.max_lag": "8"}}
    said = text(full(report=report, tuned=tuned))
    assert "! alarm f_2: F(2) above 0.1 in 6 of the last 10 updates (since update 40) to do: lower learner.lr" in said
    assert said.index("! alarm") < said.index(" version ") < said.index(" tuned "), "what is wrong comes first"
    assert "tuned staleness.max_lag=4 (config: 8); the newest change waits for the next take" in said


def test_trouble_is_marked_and_named():
    said = text(full(restarts=2, first_failure="g1: out of memory", quarantine={"g10": QUARANTINE}))
    assert "replay up 2 min 10 s, started again 2 times" in said
    assert "! first failure g1: out of memory" in said
    assert "1 in quarantine" in said and "! quarantine g10: drift z 12.5 (resync)" in said
    assert "! g10 0.48 - - 32 3 12.5 quarantine: resync" in said
    said = text(full(learner={"ranks": 1, "seen_s": 95.0}, waiting="12 of 32 groups for update 57, 0 leased"))
    assert "! run silent: the learner was not heard for 95 s" in said
    assert "waits or waited for: 12 of 32 groups for update 57, 0 leased" in said
    values = full()["report"]["values"] | {"mismatch/f_2": 0.14}
    said = text(full(report=full()["report"] | {"values": values}))
    assert "! mismatch KL k1 0.0021, k3 0.00104, F(2) 14%" in said


def test_of_a_large_fleet_those_with_trouble_are_shown_first():
    fleet = {f"g{i}": generator() for i in range(200)} | {"g150": generator(alive=False, seen_s=20.0)}
    lines = drawn(full(generators=fleet), max_rows=5)
    assert lines[-6].split()[:2] == ["!", "g150"] and lines[-5].split()[0] == "g0"
    assert lines[-1].strip() == "and 195 more generators"
    assert len(drawn(full(generators=fleet))) > 200


def test_numbers_in_words():
    assert [number(x) for x in (0.0, 0.012449, 3.25, 5210.4)] == ["0", "0.0124", "3.25", "5,210"]
    assert [share(x) for x in (0.0, 0.0013, 0.0881, 0.71, 0.9988, 1.0)] == [
        "0%",
        "0.13%",
        "8.8%",
        "71%",
        "99.88%",
        "100%",
    ]
    assert [size(x) for x in (0, 999, 81153, 2147483648, 5e15)] == ["0 B", "999 B", "81.2 kB", "2.15 GB", "5e+03 TB"]
    assert [duration(x) for x in (0.4, 119, 130, 3599, 7200, 90000, 200000)] == [
        "0 s", "119 s", "2 min 10 s", "59 min", "2 h 0 min", "25 h 0 min", "2 d 7 h",
    ]  # fmt: skip


def test_held_out_sets_have_a_line_each_where_there_is_more_to_say():
    one = {"avg_at_1": 0.81, "pass_at_1": 0.81, "greedy": 0.84, "ci_low": 0.77, "ci_high": 0.85}
    math = {
        "avg_at_8": 0.4, "pass_at_1": 0.4, "pass_at_4": 0.55, "pass_at_8": 0.6, "maj_at_8": 0.5, "greedy": 0.43,
        "ci_low": 0.37, "ci_high": 0.43, "truncated": 0.03,
    }  # fmt: skip
    newest = full()["evaluations"][-1]
    assert "chain_sum:" not in text(full(evaluations=[newest | {"sets": {"chain_sum": one}}]))
    cut = newest | {"sets": {"chain_sum": one, "math": math}, "status": "cut short"}
    shown = text(full(evaluations=[cut]), width=140)
    assert "greedy 84% at update 40, cut short" in shown
    assert "chain_sum: avg@1 81% (77% to 85%), greedy 84%" in shown
    assert "math: avg@8 40% (37% to 43%), pass@8 60%, maj@8 50%, greedy 43%, truncated 3%" in shown
    failing = newest | {"sets": {"math": math | {"failed": 3.0}}}
    assert "3 without an answer" in text(full(evaluations=[failing]), width=140) and "without an answer" not in shown
    alone = text(full(evaluations=[newest | {"sets": {"math": math}}]), width=140)
    assert "math: avg@8" in alone
    assert "zebra: no answer" in text(full(evaluations=[newest | {"sets": {"zebra": {"count": 0.0}}}]))
