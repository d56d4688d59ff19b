"""Alarms: every rule with a literal series that fires and one that does not, hysteresis, NaN, live thresholds."""

import math
import re
from pathlib import Path

import pytest

from asyncrl.config import validate
from asyncrl.errors import ConfigError
from asyncrl.metrics.alarm_history import KEPT, History
from asyncrl.metrics.alarms import RULES, Alarms, Facts
from asyncrl.sections.alarms import AlarmsSection

ROOT = Path(__file__).parents[2]
FACTS = Facts(max_lag=8, max_new_tokens=32, num_generators=2, group_size=8)

GOOD = {
    "policy/reward": 0.5, "policy/response_length": 20.0, "policy/truncated_fraction": 0.02,
    "policy/zero_variance_fraction": 0.4, "policy/responses": 64.0, "optim/stepped": 1.0, "optim/skipped_updates": 0.0,
    "mismatch/kl_k1": 0.01, "mismatch/kl_k3": 0.01, "mismatch/f_2": 0.01, "mismatch/ess": 0.97, "drift/mean": 0.02,
    "staleness/lag_mean": 8.0, "staleness/lag_p90": 8.0, "staleness/masked_token_fraction": 0.0,
    "staleness/masked_decile_9": 0.0, "staleness/left_out/count": 0.0, "staleness/trained/count": 64.0,
    "experts/unused_fraction": 0.0, "throughput/update_s": 10.0, "throughput/learner_busy_fraction": 0.9,
    "throughput/generator_busy_fraction": 0.6, "throughput/generator_idle/ahead_full": 0.4, "generator/alive": 2.0,
    "generator/g0/alive": 1.0, "generator/g1/alive": 1.0, "generator/g0/reward_errors": 0.0,
}  # fmt: skip
"""The quickstart looks like this."""


def section(**changes):
    return AlarmsSection.model_validate(changes)


def went(records, settings=None, facts=FACTS, alarms=None, first=0):
    """(update, name) of every alarm that went on and off."""
    alarms = alarms or Alarms()
    on, off = [], []
    for update, record in enumerate(records, first):
        changes = alarms.check(record, update, settings or AlarmsSection(), facts)
        on += [(update, a.name) for a in changes.on]
        off += [(update, a.name) for a in changes.off]
    return on, off


def good(n, **changes):
    return [GOOD | counted(i) | changes for i in range(n)]


def counted(i):
    """Counters of a healthy run after record i."""
    return {"staleness/trained/count": 64.0 * (i + 1)}


def with_(series, name, settings=None):
    return [GOOD | counted(i) | {name: value} for i, value in enumerate(series)]


def test_a_healthy_run_has_none_and_says_so_in_every_record():
    alarms = Alarms()
    assert went(good(300), alarms=alarms) == ([], [])
    assert alarms.scalars() == {f"alarm/{name}": 0.0 for name in RULES}
    assert set(RULES) == set(AlarmsSection().rules())


def test_f_2_fires_at_the_fifth_of_ten_and_not_at_the_fourth():
    bad = 0.12
    on, _ = went(with_([0.01, bad, 0.01, bad, 0.01, bad, 0.01, bad, 0.01, bad, 0.01], "mismatch/f_2"))
    assert on == [(9, "f_2")]
    # Five within eleven are not five of the last ten; the limit itself is not above it.
    assert went(with_([bad, bad, bad, bad, 0, 0, 0, 0, 0, 0, bad], "mismatch/f_2"))[0] == []
    assert went(with_([0.1] * 30, "mismatch/f_2"))[0] == []


def test_an_alarm_says_since_when_what_and_what_to_do():
    alarms = Alarms()
    went(with_([0.0, 0.2, 0.0, 0.2, 0.2, 0.2, 0.25], "mismatch/f_2"), alarms=alarms)
    (alarm,) = alarms.active
    assert (alarm.name, alarm.since) == ("f_2", 1)
    assert "25.0% of the tokens" in alarm.text and "limit 10.0%" in alarm.text
    assert "in 5 of the last 7 updates" in alarm.text
    assert "staleness.max_lag" in alarm.remedy


def test_it_goes_off_after_five_good_updates_in_a_row_and_does_not_flap():
    bad = [0.2] * 5
    flicker = [0.0, 0.0, 0.0, 0.0, 0.2] * 6
    on, off = went(with_(bad + flicker + [0.0] * 10, "mismatch/f_2"))
    assert on == [(4, "f_2")] and off == [(len(bad) + len(flicker) + 4, "f_2")]
    # It keeps its beginning, although that left the window long ago.
    alarms = Alarms()
    went(with_(bad + flicker, "mismatch/f_2"), alarms=alarms)
    assert alarms.active[0].since == 0
    # What led to it is forgotten then: it takes five new ones.
    on, off = went(with_(bad + [0.0] * 5 + [0.2] * 5, "mismatch/f_2"))
    assert on == [(4, "f_2"), (14, "f_2")] and off == [(9, "f_2")]


def test_what_is_not_a_number_is_no_comparison_but_an_alarm_of_its_own():
    nan = math.nan
    on, off = went(with_([0.2, nan, 0.2, nan, 0.2, 0.2, nan, 0.2] + [0.0] * 5, "mismatch/f_2"))
    assert on == [(1, "not_finite"), (7, "f_2")]
    # not_finite is judged with every record, and needs five good ones after update 6.
    assert off == [(11, "not_finite"), (12, "f_2")]
    # They take no place in the window: five of the last ten that are numbers.
    assert (14, "f_2") in went(with_([0.2] * 4 + [nan] * 10 + [0.2], "mismatch/f_2"))[0]
    missing = [{k: v for k, v in GOOD.items() if k.startswith("optim/")}] * 40
    assert went(missing) == ([], [])
    alarms = Alarms()
    went(with_([math.inf], "optim/grad_norm"), alarms=alarms)
    assert "optim/grad_norm" in alarms.active[0].text


def test_thresholds_and_switches_are_read_with_every_record():
    alarms, series = Alarms(), with_([0.2] * 4, "mismatch/f_2")
    assert went(series, alarms=alarms)[0] == []
    assert went(series[:1], section(f_2={"above": 0.3}), alarms=alarms, first=4) == ([], [])
    assert went(series[:1], section(f_2={"above": 0.1}), alarms=alarms, first=5)[0] == [(5, "f_2")]
    assert went(series[:1], section(f_2={"enabled": False}), alarms=alarms, first=6) == ([], [(6, "f_2")])
    assert "alarm/f_2" not in alarms.scalars()
    assert went(series * 3, section(enabled=False), alarms=alarms, first=7) == ([], [])
    assert alarms.scalars() == {}


def test_a_resumed_learner_knows_what_its_windows_held():
    series = with_([0.2] * 6, "mismatch/f_2")
    first = Alarms()
    assert (
        first.replay(({"update": u, "time": 1.0} | r for u, r in enumerate(series[:4])), AlarmsSection(), FACTS) == []
    )
    assert went(series[4:5], alarms=first, first=4)[0] == [(4, "f_2")]
    second = Alarms()
    (on,) = second.replay(({"update": u, "time": 1.0} | r for u, r in enumerate(series)), AlarmsSection(), FACTS)
    assert (on.name, on.since) == ("f_2", 0)
    assert went(series[5:], alarms=second, first=6) == ([], [])  # it is on already


def test_the_first_bad_update_is_known_while_an_alarm_builds_up():
    alarms = Alarms()
    went(with_([0.0, 0.0, 0.2, 0.0, 0.2], "mismatch/f_2"), alarms=alarms)
    assert alarms.active == [] and alarms.suspect(["f_2", "truncation"]) == 2
    assert alarms.suspect(["truncation"]) is None
    went(with_([0.0] * 8, "mismatch/f_2"), alarms=alarms, first=5)
    assert alarms.suspect(["f_2"]) == 4  # update 2 left the window of ten
    went(with_([0.2] * 4, "mismatch/f_2"), alarms=alarms, first=13)
    (alarm,) = alarms.active if alarms.active else [None]
    assert alarm is None and alarms.suspect(["f_2"]) == 13


# --- each rule: what fires, when, with which words, and what does not ------------------------------

RISE = [0.02] * 20 + [0.3] * 12
CASES = {
    "kl_rising": (
        # The mean of ten crosses 0.1 with the third value of 0.3: (7 x 0.02 + 3 x 0.3) / 10.
        [GOOD | {"mismatch/kl_k1": v, "mismatch/kl_k3": v} for v in RISE],
        (24, "rose to 0.16 nats per token (mean of 10 updates), from 0.02"),
        # As large from the start on, or with a large k3 of single tokens only, or from small to small.
        [
            good(40, **{"mismatch/kl_k1": 0.3, "mismatch/kl_k3": 0.3}),
            [GOOD | {"mismatch/kl_k1": 0.02, "mismatch/kl_k3": v} for v in RISE],
            [GOOD | {"mismatch/kl_k1": v / 4, "mismatch/kl_k3": v / 4} for v in RISE],
        ],
    ),
    "ess_falling": (
        [r | {"staleness/lag_p90": 6.0} for r in with_([0.98] * 12 + [0.4] * 5, "mismatch/ess")],
        (16, "an effective sample of 40% of the tokens (limit 70%; the best 10 updates had 98%)"),
        [with_([0.98, 0.98, 0.98, 0.1] * 10, "mismatch/ess")],
    ),
    "drift_rising": (
        # (3 x 0.02 + 7 x 0.06) / 10 = 0.048 > 1.5 x 0.02; above 0.03 from the third on.
        with_([0.02] * 30 + [0.06] * 7, "drift/mean"),
        (34, "rose to 0.04 (mean of 10 updates) from 0.02 in the first 20 updates of the same lag (8.0)"),
        [
            # Older data drifts more: that is no finding.
            with_([0.02] * 30, "drift/mean")
            + [GOOD | {"drift/mean": 0.06, "staleness/lag_mean": 16.0} for _ in range(25)],
            with_([0.01] * 30 + [0.025] * 20, "drift/mean"),
        ],
    ),
    "lag_at_cap": (
        good(3, **{"mismatch/ess": 0.5}),
        (2, "8 updates old, the limit of staleness.max_lag=8, and the effective sample is 50% of the tokens"),
        [good(30), good(4, **{"mismatch/ess": 0.5, "staleness/lag_p90": 7.0})],
    ),
    "learner_starving": (
        good(7, **{"throughput/learner_busy_fraction": 0.3, "throughput/generator_busy_fraction": 0.9}),
        (6, "over the last 30 s the learner worked 30% of the time"),
        # Too short a time to say; and one long wait among many updates.
        [
            good(12, **{"throughput/learner_busy_fraction": 0.3, "throughput/update_s": 1.0}),
            with_([0.9, 0.9, 0.9, 0.0, 0.9, 0.9], "throughput/learner_busy_fraction"),
        ],
    ),
    "generators_starving": (
        good(7, **{"throughput/generator_busy_fraction": 0.1, "throughput/generator_idle/ahead_full": 0.7}),
        (6, "were sampling 10% of the time; most of the rest went to ahead_full"),
        [good(20, **{"throughput/generator_busy_fraction": 0.3})],
    ),
    "truncation": (
        good(5, **{"policy/truncated_fraction": 0.5}),
        (4, "50% of the responses ended at sampling.max_new_tokens=32"),
        [good(20, **{"policy/truncated_fraction": 0.1})],
    ),
    "zero_variance": (
        good(5, **{"policy/zero_variance_fraction": 1.0}),
        (4, "100% of the groups have equal rewards and teach nothing (limit 95%; mean reward 0.5)"),
        [good(20, **{"policy/zero_variance_fraction": 0.9})],
    ),
    "dead_experts": (
        good(5, **{"experts/unused_fraction": 0.25}),
        (4, "no token was routed to 25% of the experts"),
        [good(20, **{"experts/unused_fraction": 0.04})],
    ),
    "reward_length_collapse": (
        [GOOD] * 10 + [GOOD | {"policy/reward": 0.1, "policy/response_length": 5.0}] * 6,
        # Means of five with two bad ones: reward 0.34 < 0.7 x 0.5, length 14 < 0.8 x 20. Two updates on, 0.18 and 8.
        (13, "mean reward fell to 0.18 from 0.5, and the mean length to 8 tokens from 20"),
        [
            [GOOD] * 10 + [GOOD | {"policy/reward": 0.1}] * 10,
            [GOOD] * 10 + [GOOD | {"policy/response_length": 5.0}] * 10,
            [GOOD | {"policy/reward": 0.05 * i, "policy/response_length": 5.0 + i} for i in range(20)],
        ],
    ),
    "dead_generator": (
        [GOOD, GOOD, GOOD | {"generator/g1/alive": 0.0, "generator/alive": 1.0}],
        (2, "no heartbeat from g1; 1 generators are alive"),
        # It never lived, as far as this learner knows: replay has it from before.
        [[GOOD | {"generator/old/alive": 0.0}] * 20],
    ),
    "masked_tokens": (
        good(5, **{"staleness/masked_token_fraction": 0.2, "staleness/lag_p90": 7.0}),
        (4, "20% of the tokens are masked for their age (limit 10%)"),
        [good(20, **{"staleness/masked_token_fraction": 0.08, "staleness/masked_decile_9": 0.25})],
    ),
    "unweighted_tokens": (
        good(5, **{"mismatch/weight_zero": 0.75}),
        (4, "the correction leaves 75% of the loss tokens out (weight 0, limit 50%)"),
        [good(20, **{"mismatch/weight_zero": 0.4})],
    ),
    "skipped_updates": (
        [
            GOOD,
            GOOD | {"optim/stepped": 0.0, "optim/skipped_updates": 1.0, "optim/skipped/gradient": 1.0},
            GOOD | {"optim/skipped_updates": 1.0, "optim/skipped/gradient": 1.0},
            GOOD | {"optim/stepped": 0.0, "optim/skipped_updates": 2.0, "optim/skipped/gradient": 2.0},
        ],
        (3, "2 batches so far made no optimizer step (2 x gradient)"),
        [[GOOD, GOOD | {"optim/stepped": 0.0}] + [GOOD] * 20],
    ),
    "reward_errors": (
        [GOOD | {"generator/g0/reward_errors": 2.0 * i} for i in range(4)],
        (3, "2 groups could not be scored while 8 were trained"),
        [
            [GOOD | {"generator/g0/reward_errors": float(i // 5)} for i in range(40)],
            [GOOD | {"verifier/errors": float(i)} for i in range(40)],  # 1 response of 65
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_the_rule_fires_with_its_numbers_and_not_without_cause(name):
    fires, (update, words), others = CASES[name]
    alarms = Alarms()
    on, _ = went(fires[: update + 1], alarms=alarms)
    assert on == [(update, name)]
    assert words in next(a.text for a in alarms.active if a.name == name)
    for series in others:
        assert name not in [n for _, n in went(series)[0]]


def test_every_alarm_but_those_with_tests_of_their_own_is_among_the_cases():
    assert set(RULES) - set(CASES) == {"f_2", "not_finite"}


def test_lag_at_cap_and_masked_tokens_count_what_is_dropped_for_its_age():
    # Of 64 + 16 responses since the record before, 16 were dropped: 20 %.
    rows = [GOOD | {"staleness/left_out/count": 16.0 * i, "staleness/trained/count": 64.0 * i} for i in range(7)]
    alarms = Alarms()
    assert went(rows, alarms=alarms)[0] == [(3, "lag_at_cap"), (5, "masked_tokens")]
    texts = {a.name: a.text for a in alarms.active}
    assert "20% of the data is left out for its age" in texts["lag_at_cap"]
    assert "20% of the responses are dropped for their age" in texts["masked_tokens"]
    # What was dropped before counts no more.
    assert went(
        [GOOD | {"staleness/left_out/count": 900.0, "staleness/trained/count": 64.0 * i} for i in range(9)]
    ) == (
        [],
        [],
    )


def test_masked_tokens_finds_them_in_the_long_answers():
    rows = good(5, **{"staleness/masked_token_fraction": 0.08, "staleness/masked_decile_9": 0.4})
    rows = [r | {"staleness/lag_p90": 7.0} for r in rows]
    alarms = Alarms()
    assert went(rows, alarms=alarms)[0] == [(4, "masked_tokens")]
    assert "of the longest tenth of the responses it is 40%" in alarms.active[0].text
    # Where a larger share is allowed, long answers that are masked like the others are no finding.
    rows = [r | {"staleness/masked_token_fraction": 0.3} for r in rows]
    assert went(rows, section(masked_tokens={"above": 0.5}, lag_at_cap={"enabled": False})) == ([], [])


def test_a_starving_learner_is_told_when_generators_stand_still_too():
    idle = {"throughput/generator_busy_fraction": 0.3, "throughput/generator_idle/version_too_old": 0.5}
    rows = good(7, **idle | {"throughput/learner_busy_fraction": 0.2, "throughput/generator_idle/loading": 0.2})
    alarms = Alarms()
    assert went(rows, alarms=alarms)[0] == [(6, "learner_starving")]
    assert "the generators stand still as well: their weights are too old" in alarms.active[0].remedy


def test_who_lived_is_remembered_as_long_as_records_are():
    history = History()
    for update in range(KEPT + 2):
        history.add(update, {"generator/g0/alive": float(update == 0), "generator/g1/alive": 1.0})
        # The newest record itself says nothing of before.
        assert history.lived("g1") is (update > 0) and history.lived("g0") is (0 < update < KEPT)
    assert not history.lived("g2")


def test_nobody_starves_in_a_pause():
    still = {"throughput/learner_busy_fraction": 0.02, "throughput/generator_busy_fraction": 0.01}
    paused = good(7, **still | {"throughput/learner_idle/publishing": 0.9})
    assert went(paused) == ([], [])
    assert {name for _, name in went(good(7, **still))[0]} == {"learner_starving", "generators_starving"}


def test_a_generator_that_never_came_is_missed_after_a_minute_and_one_that_returns_is_not():
    one = {k: v for k, v in GOOD.items() if "/g1/" not in k} | {"generator/alive": 1.0}
    assert went([one] * 7)[0] == [(5, "dead_generator")]  # 6 x 10 s
    dead = GOOD | {"generator/g1/alive": 0.0, "generator/alive": 1.0}
    on, off = went([GOOD, dead, dead, GOOD, GOOD, GOOD, GOOD, GOOD])
    assert (on, off) == ([(1, "dead_generator")], [(7, "dead_generator")])


def test_responses_without_a_reward_are_an_alarm_although_their_groups_go_on():
    rows = [GOOD | {"verifier/errors": 4.0 * i, "verifier/timeouts": 4.0 * i} for i in range(5)]
    alarms = Alarms()
    assert went(rows, alarms=alarms)[0] == [(3, "reward_errors")]
    assert "8 responses have no reward, against 64 that trained" in alarms.active[0].text


@pytest.mark.parametrize("per_s", [2.5, 10, 30])
def test_failures_that_are_counted_once_a_second_are_no_flicker_where_updates_are_faster(per_s):
    # A quarter of the responses has no reward, and generators say so with their heartbeats: most records show none.
    lost = [math.floor(i / per_s) * per_s * 21.0 for i in range(300)]
    rows = [GOOD | {"throughput/update_s": 1 / per_s, "verifier/errors": n} for n in lost]
    alarms = Alarms()
    on, off = went(rows, alarms=alarms)
    assert [name for _, name in on] == ["reward_errors"] and off == []
    found = re.search(r"; (\d+) responses have no reward, against (\d+) that trained", alarms.active[0].text)
    # 21 for every 64, give or take one heartbeat.
    assert 0.15 < int(found[1]) / int(found[2]) < 0.7
    # One group of many is none, whenever it comes.
    assert went([r | {"verifier/errors": 8.0 * (i > 50)} for i, r in enumerate(rows)])[0] == []


def test_an_update_that_lacks_responses_is_bad_at_once_where_scoring_fails():
    # 60 updates in 3 s, each with 48 of its 64 responses; counters come with heartbeats.
    short = GOOD | {"throughput/update_s": 0.05, "policy/responses": 48.0}
    facts = FACTS._replace(num_responses=64)
    alarms = Alarms()
    rows = [short | {"verifier/errors": 16.0 * 4 * (i // 4) + 20} for i in range(60)]
    on, off = went(rows, facts=facts, alarms=alarms)
    assert [name for _, name in on] == ["reward_errors"] and on[0][0] < 10 and off == []
    assert "16 of the 64 responses of this update are missing; " in alarms.active[0].text
    # Sampling that ended in time (on_timeout=partial) is another cause, also where a verifier fails now and then.
    for each in (0.0, 1.0):
        assert went([short | {"verifier/errors": each * i} for i in range(60)], facts=facts)[0] == []


def test_a_counter_that_starts_again_is_no_finding():
    # A generator that was restarted counts its reward errors from 0.
    rows = [GOOD | {"generator/g0/reward_errors": v} for v in (50.0, 0.0, 0.0, 0.0, 0.0)]
    assert went(rows)[0] == []


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"f_2": {"updates": 11}}, "alarms.f_2.window >= 11"),
        ({"truncation": {"actions": ["command"]}}, "alarms.command names no program"),
        ({"truncation": {"actions": ["mail"]}}, "alarms.truncation.actions"),
    ],
)
def test_what_cannot_work_is_refused(settings, why):
    with pytest.raises(ConfigError, match=re.escape(why)):
        validate({"model": {"path": "m"}, "alarms": settings})


def test_the_page_has_every_alarm_with_its_keys_and_nothing_else():
    rows = {}
    for line in (ROOT / "docs" / "alarms.md").read_text().split("## Actions")[0].splitlines():
        if found := re.match(r"\| `(\w+)` \|", line):
            rows[found[1]] = line
    rules = AlarmsSection().rules()
    assert set(rows) == set(RULES)
    common = {"enabled", "actions", "updates", "window"}
    for name, row in rows.items():
        fields = type(rules[name]).model_fields
        wanted = {f"`{key}: {getattr(rules[name], key):g}`" for key in fields if key not in common}
        assert set(re.findall(r"`\w+: [^`]+`", row)) == wanted, name
        assert f"{rules[name].updates} of {rules[name].window}" in row, name
