"""Where time goes that is not work: shares by reason that add up to 1, whatever the number of pauses."""

import pytest

from asyncrl.learner.idle import generator_idle, learner_idle


def test_several_pauses_in_one_window_add_up():
    # 10 s: 4 s of work; waited 1 s and then 2 s for groups, published for 1 s.
    idle = learner_idle(10.0, 4.0, 3.0, {"groups": 1.0 + 2.0}, publishing=1.0)
    assert idle == pytest.approx({"groups": 0.3, "transfer": 0.0, "publishing": 0.1, "other": 0.2})
    assert sum(idle.values()) == pytest.approx(1 - 4.0 / 10.0)


def test_what_replay_did_not_wait_for_is_the_transfer_of_the_take():
    idle = learner_idle(10.0, 5.0, 4.0, {"groups": 1.0, "stragglers": 2.0, "version": 0.0}, checkpoint=0.5)
    assert idle == pytest.approx(
        {"groups": 0.1, "stragglers": 0.2, "transfer": 0.1, "checkpoint": 0.05, "other": 0.05}
    )  # fmt: skip


def test_clocks_that_disagree_give_no_share_above_what_is_left():
    # Replay counted 6 s of waiting, the learner waited 3 s; and the pauses are longer than what is left.
    idle = learner_idle(10.0, 6.0, 3.0, {"groups": 4.0, "version": 2.0}, publishing=5.0, checkpoint=1.0)
    assert idle == pytest.approx(
        {"groups": 0.2, "version": 0.1, "transfer": 0.0, "publishing": 0.1, "checkpoint": 0.0, "other": 0.0}
    )
    assert learner_idle(0.0, 0.0, 0.0, {}) == {}


def test_a_generators_idle_time_is_loading_and_then_what_its_requests_were_refused_for():
    idle = generator_idle(0.5, 0.1, {"ahead_full": 6.0, "version_too_old": 2.0, "capacity": 0.0})
    assert idle == pytest.approx(
        {"loading": 0.1, "other": 0.0, "ahead_full": 0.3, "version_too_old": 0.1, "capacity": 0.0}
    )  # fmt: skip


def test_without_a_refused_request_the_rest_is_other_and_every_known_reason_has_a_point():
    assert generator_idle(0.5, 0.1, {"capacity": 0.0}) == pytest.approx({"loading": 0.1, "other": 0.4, "capacity": 0.0})
    assert generator_idle(1.2, 0.3, {}) == {"loading": 0.0, "other": 0.0}
