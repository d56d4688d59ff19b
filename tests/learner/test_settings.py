"""The learner's side of live settings: what a take puts in force, what is published while paused."""

import logging

import torch

from asyncrl.config import validate
from asyncrl.learner.publishing import Due
from asyncrl.learner.settings import LiveSettings, as_text, is_paused
from asyncrl.types import Version
from asyncrl.wire import Tuned
from tests.learner.test_publishing import Gated, Learner, model  # noqa: F401  (a fixture)
from tests.learner.test_update import setup

CONFIG = validate({"model": {"path": "m"}})
LAG, EVERY, Q = "staleness.max_lag", "staleness.sync_every", "algorithm.rdc.q"


def test_a_take_puts_its_settings_in_force_and_says_by_what_to_publish():
    live = LiveSettings(CONFIG)
    assert live.take(Tuned(), Tuned()) is None
    assert live.take(Tuned(1, {Q: "0.5"}), Tuned(2, {Q: "0.5", LAG: "3"})) == {Q: ("0.08", "0.5")}
    assert (live.config.algorithm.rdc.q, live.config.staleness.max_lag) == (0.5, 8)
    assert (live.seq, live.coming.staleness.max_lag) == (1, 3)
    assert live.take(Tuned(1, {Q: "0.5"}), Tuned(2, {Q: "0.5", LAG: "3"})) is None, "nothing new"
    assert live.take(Tuned(3), Tuned(3)) == {Q: ("0.5", "0.08")}, "what is not tuned any more is the config's again"
    assert live.config == live.coming == CONFIG


def test_a_role_with_another_config_leaves_out_what_contradicts_it(caplog):
    live = LiveSettings(validate({"model": {"path": "m"}, "staleness": {"max_lag": 8, "sync_every": 9}}))
    with caplog.at_level(logging.ERROR):
        live.take(Tuned(1, {LAG: "3"}), Tuned(1, {LAG: "3"}))
    assert live.config.staleness.max_lag == 8 and "change 1 of the live settings is left out" in caplog.text


def test_the_metrics_have_the_clip_range_of_the_surrogate_where_none_is_set():
    gspo = {"surrogate": "gspo", "eps_high": 0.01}
    live = LiveSettings(validate({"model": {"path": "m"}, "staleness": {"updates_per_take": 2}, "algorithm": gspo}))
    values = live.scalars()
    assert (values["settings/eps_low"], values["settings/eps_high"]) == (3e-4, 0.01)
    live.take(Tuned(1, {"algorithm.eps_high": "null"}), Tuned(1, {}))
    assert live.scalars()["settings/eps_high"] == 4e-4


def test_the_metrics_have_what_is_in_force():
    live = LiveSettings(CONFIG)
    live.take(Tuned(4, {LAG: "3", "learner.lr": "0.001"}), Tuned(4, {}))
    values = live.scalars()
    assert (values["tune/changes"], values["settings/max_lag"], values["settings/lr"]) == (4.0, 3.0, 0.001)
    assert values["settings/sync_every"] == 4.0 and values["settings/groups_in_flight"] == 32.0
    assert as_text(4, {LAG: ("8", "3")}).splitlines()[-1] == "| `staleness.max_lag` | 8 | 3 |"


def test_a_run_may_begin_paused_and_a_change_ends_that():
    paused = validate({"model": {"path": "m"}, "weights": {"paused": True}})
    assert is_paused(Tuned(), paused) and not is_paused(Tuned(1, {"weights.paused": "false"}), paused)
    assert not is_paused(Tuned(), CONFIG) and is_paused(Tuned(1, {"weights.paused": "true"}), CONFIG)


def test_paused_only_what_is_final_is_published(model):  # noqa: F811
    publisher = Gated()
    publisher.gate.set()
    made = Learner(model, publisher, sync_every=1, max_lag=2)
    made.publish(0)
    p = made.publishing
    p.follow(Due(1, 2), True)
    for update in (1, 2):
        made.publish(update)
        assert not p.held(update, 1), "the next take can do with version 0"
    made.publish(3)
    assert p.held(3, 1) and p.published == 0
    assert p.held(2, 2), "a take of two updates needs a version before"
    p.follow(Due(1, 8), True)
    assert not p.held(3, 1), "a looser rule needs none yet"
    p.follow(Due(1, 2), False)
    assert not p.held(3, 1)
    made.publish(3)
    p.follow(Due(1, 2), True)
    made.publish(4, final=True)
    assert [v for v, _ in made.told] == [Version(0, 0), Version(0, 3), Version(0, 4)]


def test_other_settings_of_versions_hold_at_once(model):  # noqa: F811
    publisher = Gated()
    publisher.gate.set()
    made = Learner(model, publisher, sync_every=4, max_lag=16)
    for update in range(3):
        made.publish(update)
    made.publishing.follow(Due(1, 0), False)
    made.publish(3)
    assert [v.update for v, _ in made.told] == [0, 3]


def test_the_optimizer_goes_on_with_other_settings_and_the_same_moments(model_dir, world):
    config, _, updater = setup(model_dir, world)
    before = {k: v.clone() for k, v in updater.state().items()}
    other = {"lr": 0.01, "weight_decay": 0.25, "warmup_updates": 0}
    updater.tune(config.learner.model_copy(update=other), config.algorithm)
    (group,) = updater._optimizer.param_groups
    assert (group["weight_decay"], updater.skip(3, "loss").lr, group["lr"]) == (0.25, 0.01, 0.01)
    after = updater.state()
    assert all(torch.equal(before[k], after[k]) for k in before) and len(before) == len(after)
