"""Evaluations: when they open, who serves them, what they report, how they end."""

from dataclasses import replace

import pytest

from asyncrl.config import validate
from asyncrl.errors import ConfigError
from asyncrl.learner.recorder import evaluation_scalars
from asyncrl.metrics.names import is_known
from asyncrl.replay.evals import DETAILED, Evaluations
from asyncrl.replay.tally import Tally
from asyncrl.tasks.estimates import wilson
from asyncrl.tasks.held_out import Asked, asked_by_set, check_keep_best, metric_names
from asyncrl.types import Version
from asyncrl.wire import EvalAnswer, EvalResult, LeaseMsg
from tests.replay.support import make_prompts


def make(every=20, prompts=3, **changes):
    one_set = [replace(p, data_source="sum") for p in make_prompts(prompts, "e")]
    return Evaluations(one_set, Tally(), every=every, **changes)


def v(update, epoch=0):
    return Version(epoch, update)


def answers(leases: list[LeaseMsg], version: Version, reward=1.0, length=4, finish="stop") -> list[EvalResult]:
    return [
        EvalResult(
            x.eval_id, tuple(version), [EvalAnswer(x.prompt.prompt_id, x.sample, x.greedy, reward, length, finish)]
        )
        for x in leases
    ]


def serve(evals: Evaluations, version: Version, now=0.0, **reply) -> None:
    for result in answers(evals.lease("g0", version, 1000, now), version, **reply):
        evals.put(result)


def test_opens_at_the_first_version_and_then_at_or_after_every_due_update():
    evals = make(every=20)
    opened = []
    for update in range(0, 64, 6):
        evals.publish(v(update))
        serve(evals, v(update))
        opened = [e["version"] for e in evals.finished]
    assert opened == [0, 24, 42, 60]
    assert [e["eval_id"] for e in evals.finished] == ["0.0", "0.24", "0.42", "0.60"]


def test_off_and_without_prompts():
    for evals in (make(every=0), make(prompts=0)):
        evals.publish(v(0))
        evals.finish(v(0), 0.0)
        assert evals.num_open == 0


def test_the_last_version_is_evaluated_once():
    evals = make(every=20)
    evals.publish(v(0))
    serve(evals, v(0))
    evals.publish(v(16))
    evals.finish(v(16), 0.0)
    evals.finish(v(16), 1.0)
    assert evals.num_open == 1
    serve(evals, v(16))
    assert [e["version"] for e in evals.finished] == [0, 16] and evals.num_open == 0
    evals = make(every=20)
    evals.publish(v(0))
    evals.publish(v(20))
    evals.finish(v(20), 0.0)
    assert evals.num_open == 1


def test_leases_only_to_exact_holders_in_chunks_and_shared():
    evals = make(samples=2, greedy=True)
    evals.publish(v(4))
    assert evals.lease("g0", v(3), 9, 0.0) == [] and evals.lease("g0", v(5), 9, 0.0) == []
    first, second = evals.lease("g0", v(4), 4, 0.0), evals.lease("g1", v(4), 50, 0.0)
    assert (len(first), len(second)) == (4, 5) and evals.lease("g0", v(4), 9, 0.0) == []
    keys = [(x.prompt.prompt_id, x.sample, x.greedy) for x in first + second]
    assert sorted(keys) == sorted(
        [(f"e{i}", s, False) for i in range(3) for s in range(2)] + [(f"e{i}", 0, True) for i in range(3)]
    )
    assert len({x.lease_id for x in first + second}) == 9


def test_result_by_hand():
    evals = make(prompts=2, samples=1, greedy=True)
    evals.publish(v(0))
    rewards = {("e0", False): (1.0, 4, "stop"), ("e1", False): (0.0, 8, "length")}
    rewards |= {("e0", True): (1.0, 2, "stop"), ("e1", True): (1.0, 2, "stop")}
    for x in evals.lease("g0", v(0), 10, 0.0):
        reward, length, finish = rewards[x.prompt.prompt_id, x.greedy]
        for result in answers([x], v(0), reward, length, finish):
            evals.put(result)
    low, high = wilson(0.5, 2)
    of_set = {
        "avg_at_1": 0.5, "pass_at_1": 0.5, "greedy": 1.0, "prompts": 2.0, "count": 4.0, "length": 6.0,
        "truncated": 0.5, "no_answer": 1.0, "stderr": 0.5, "ci_low": low, "ci_high": high,
        "failed": 0.0,
    }  # fmt: skip
    assert evals.finished == [
        {
            "eval_id": "0.0", "label": "0.0", "requested": "0.0", "status": "complete", "version": 0,
                "epoch": 0, "count": 4, "failed": 0,
            "response_length": 6.0, "truncated_fraction": 0.5, "sampled_accuracy": 0.5, "greedy_accuracy": 1.0,
            "sets": {"sum": of_set},
        }
    ]  # fmt: skip


def test_an_answer_counts_once():
    evals = make(prompts=2, greedy=False)
    evals.publish(v(0))
    a, b = evals.lease("g0", v(0), 10, 0.0)
    for reward in (1.0, 0.0):
        evals.put(answers([a], v(0), reward)[0])
    evals.put(answers([b], v(0), float("nan"))[0])
    assert evals.num_open == 1
    evals.put(answers([b], v(0), 1.0)[0])
    assert evals.finished[0]["sampled_accuracy"] == 1.0
    evals.put(answers([b], v(0), 1.0)[0])
    assert evals._tally.counters == {"eval_duplicate": 2, "eval_late": 1}


def test_dead_generator_failed_and_expired_leases_are_given_out_again():
    evals = make(prompts=3, greedy=False, lease_timeout_s=10.0)
    evals.publish(v(0))
    a, b, c = evals.lease("g0", v(0), 3, 0.0)
    assert not evals.fail("g1", a.lease_id, "x") and evals.fail("g0", a.lease_id, "EngineError: no")
    assert evals.lease("g1", v(0), 9, 5.0)[0].prompt.prompt_id == a.prompt.prompt_id
    evals.tick(v(0), {v(0)}, 10.0)
    again = evals.lease("g2", v(0), 9, 10.0)
    assert [x.prompt.prompt_id for x in again] == [b.prompt.prompt_id, c.prompt.prompt_id]
    evals.generator_lost("g2")
    assert [x.attempt for x in evals.lease("g1", v(0), 9, 11.0)] == [3, 3]


def test_a_response_is_asked_for_a_bounded_number_of_times():
    evals = make(prompts=1, greedy=False, max_attempts=2)
    evals.publish(v(0))
    for _ in range(2):
        (lease,) = evals.lease("g0", v(0), 9, 0.0)
        evals.fail("g0", lease.lease_id, "x")
    assert evals.num_open == 0 and evals.finished == [] and evals._tally.counters["eval_empty"] == 1


def test_when_nobody_holds_the_version_any_more_the_newest_is_used_and_said():
    evals = make(prompts=2, greedy=False)
    evals.publish(v(4))
    (a,) = evals.lease("g0", v(4), 1, 0.0)
    evals.put(answers([a], v(4), 0.0)[0])
    evals.publish(v(8))
    evals.tick(v(8), {v(4), v(0)}, 1.0)
    (b,) = evals.lease("g0", v(4), 9, 1.0)
    # g0 dies, g1 holds the newest: everything is asked again, so that one version answers for all.
    evals.generator_lost("g0")
    evals.tick(v(8), {v(8)}, 2.0)
    serve(evals, v(8), reward=1.0)
    (result,) = evals.finished
    assert (result["version"], result["label"], result["requested"], result["count"]) == (8, "0.8", "0.4", 2)
    assert result["sampled_accuracy"] == 1.0
    evals.put(answers([b], v(4))[0])
    assert evals._tally.counters["eval_moved"] == 1 and evals._tally.counters["eval_late"] == 1


def test_answers_of_another_version_are_asked_again():
    evals = make(prompts=2, greedy=False)
    evals.publish(v(4))
    a, b = evals.lease("g0", v(4), 2, 0.0)
    evals.put(answers([a], v(4))[0])
    evals.put(answers([b], v(8))[0])
    assert evals._tally.counters["eval_other_version"] == 1
    (again,) = evals.lease("g0", v(4), 9, 0.0)
    assert again.prompt.prompt_id == b.prompt.prompt_id
    # The very first answer may move the evaluation: nothing is lost by it.
    evals = make(prompts=2, greedy=False)
    evals.publish(v(4))
    a, b = evals.lease("g0", v(4), 2, 0.0)
    evals.put(answers([a], v(8))[0])
    serve(evals, v(8))
    assert evals.finished[0]["label"] == "0.8" and evals.finished[0]["count"] == 2


@pytest.mark.parametrize("answered", [0, 1])
def test_time_runs_from_the_first_lease_and_ends_it(answered):
    evals = make(prompts=2, greedy=False, timeout_s=30.0)
    evals.publish(v(0))
    evals.tick(v(0), set(), 1000.0)
    leases = evals.lease("g0", v(0), 2, 1000.0)
    for result in answers(leases[:answered], v(0)):
        evals.put(result)
    evals.tick(v(0), {v(0)}, 1029.9)
    assert evals.num_open == 1
    evals.tick(v(0), {v(0)}, 1030.0)
    assert evals.num_open == 0 and [e["count"] for e in evals.finished] == [1] * answered
    assert [e["status"] for e in evals.finished] == ["cut short"] * answered
    # The generator is told to stop, so that it may load again.
    assert evals.drain_cancelled() == [("g0", x.lease_id) for x in leases[answered:]]


def test_after_the_last_update_an_evaluation_that_nobody_serves_ends_too():
    evals = make(timeout_s=30.0)
    evals.publish(v(0))
    evals.finish(v(0), 100.0)
    evals.tick(v(0), set(), 129.0)
    assert evals.num_open == 1
    evals.tick(v(0), set(), 130.0)
    assert evals.num_open == 0 and evals._tally.counters["eval_empty"] == 1


def test_an_evaluation_that_nobody_began_is_superseded():
    evals = make(every=4)
    evals.publish(v(0))
    evals.publish(v(4))
    assert evals.num_open == 1 and evals._tally.counters["eval_superseded"] == 1
    evals.lease("g0", v(4), 1, 0.0)
    evals.publish(v(8))
    # Both are open; when nobody holds 4 any more, the older one ends instead of measuring 8 a second time.
    assert evals.num_open == 2
    evals.tick(v(8), {v(8)}, 0.0)
    serve(evals, v(8))
    assert [e["version"] for e in evals.finished] == [8] and evals.num_open == 0


def two_sets(**sets):
    """Two prompts of math, one of zebra."""
    prompts = [replace(p, data_source="zebra" if i == 2 else "math") for i, p in enumerate(make_prompts(3, "e"))]
    return Evaluations(prompts, Tally(), every=20, samples=2, greedy=True, sets=sets)


def test_every_set_is_asked_for_its_own_number_of_answers():
    evals = two_sets(zebra=Asked(4, False))
    evals.publish(v(0))
    keys = [(x.prompt.prompt_id, x.sample, x.greedy) for x in evals.lease("g0", v(0), 100, 0.0)]
    assert sorted(keys) == sorted(
        [(f"e{i}", s, False) for i in (0, 1) for s in (0, 1)]
        + [(f"e{i}", 0, True) for i in (0, 1)]
        + [("e2", s, False) for s in range(4)]
    )
    greedy_alone = two_sets(zebra=Asked(0, True), math=Asked(0, True))
    greedy_alone.publish(v(0))
    serve(greedy_alone, v(0))
    assert greedy_alone.finished[0]["sets"]["zebra"]["greedy"] == 1.0
    assert "sampled_accuracy" not in greedy_alone.finished[0]


def test_sets_by_hand():
    evals = two_sets(zebra=Asked(1, False))
    evals.publish(v(0))
    told = {  # reward, extracted, length, finish, parts
        ("e0", 0, False): (1.0, "6", 2, "stop", {"format": 1.0}), ("e0", 1, False): (0.0, "7", 4, "length", {}),
        ("e1", 0, False): (0.0, "", 2, "stop", {"format": 0.0}), ("e1", 1, False): (1.0, "2", 4, "stop", {}),
        ("e0", 0, True): (1.0, "6", 9, "stop", {}), ("e1", 0, True): (0.0, "", 9, "stop", {}),
        ("e2", 0, False): (0.5, "1", 8, "stop", {}),
    }  # fmt: skip
    for x in evals.lease("g0", v(0), 100, 0.0):
        reward, extracted, length, finish, parts = told[x.prompt.prompt_id, x.sample, x.greedy]
        answer = EvalAnswer(x.prompt.prompt_id, x.sample, x.greedy, reward, length, finish, extracted, parts)
        evals.put(EvalResult(x.eval_id, (0, 0), [answer]))
    (result,) = evals.finished
    # Over all answers as ever: (1 + 0 + 0 + 1 + 0.5) / 5 sampled, 1/2 greedy.
    assert result["sampled_accuracy"] == 0.5 and result["greedy_accuracy"] == 0.5 and result["count"] == 7
    math = result["sets"]["math"]
    assert (math["avg_at_2"], math["pass_at_1"], math["pass_at_2"], math["greedy"]) == (0.5, 0.5, 1.0, 0.5)
    assert math["maj_at_2"] == 1.0  # a tie goes to the first, and no answer does not vote
    assert (math["length"], math["truncated"], math["no_answer"], math["part/format"]) == (3.0, 0.25, 0.25, 0.5)
    zebra = result["sets"]["zebra"]
    assert zebra["avg_at_1"] == 0.5 and "greedy" not in zebra and "stderr" not in zebra  # of one prompt
    record = evaluation_scalars(result)
    assert (record["eval/math/pass_at_2"], record["eval/greedy_accuracy"], record["eval/version"]) == (1.0, 0.5, 0)
    assert [name for name in record if not is_known(name)] == []


def test_an_evaluation_that_is_cut_short_says_what_it_has_of_every_set():
    evals = two_sets()
    evals.publish(v(0))
    for x in evals.lease("g0", v(0), 3, 0.0):
        evals.put(answers([x], v(0))[0])
    evals.tick(v(0), {v(0)}, 180.0)
    (result,) = evals.finished
    assert result["status"] == "cut short" and result["sets"]["zebra"] == {
        "prompts": 0.0, "count": 0.0, "failed": 3.0,
    }  # fmt: skip
    assert result["sets"]["math"]["prompts"] == 2.0 and result["sets"]["math"]["count"] == 3.0


def test_responses_without_an_answer_are_counted_and_no_evaluation_with_some_is_complete():
    evals = make(prompts=4, greedy=False, max_attempts=2)
    evals.publish(v(0))
    first = evals.lease("g0", v(0), 9, 0.0)
    for x in first[:3]:
        evals.put(answers([x], v(0))[0])
    evals.fail("g0", first[3].lease_id, "x")
    (again,) = evals.lease("g0", v(0), 9, 0.0)
    evals.fail("g0", again.lease_id, "x")
    (result,) = evals.finished
    # The mean is of the survivors; that it is says the status, and how many are missing the count.
    assert (result["status"], result["failed"], result["sampled_accuracy"]) == ("cut short", 1, 1.0)
    record = evaluation_scalars(result)
    assert (record["eval/sum/failed"], record["eval/sum/count"], record["eval/failed"]) == (1.0, 3.0, 1.0)
    assert [name for name in record if not is_known(name)] == []


def test_rewards_that_need_not_name_an_answer_have_no_share_without_one():
    for names_answers, extracted, there in ((False, "", False), (False, "6", True), (True, "", True)):
        evals = make(prompts=1, greedy=False, names_answers=names_answers)
        evals.publish(v(0))
        (x,) = evals.lease("g0", v(0), 9, 0.0)
        answer = EvalAnswer(x.prompt.prompt_id, x.sample, x.greedy, 1.0, 4, "stop", extracted)
        evals.put(EvalResult(x.eval_id, (0, 0), [answer]))
        assert ("no_answer" in evals.finished[0]["sets"]["sum"]) is there


@pytest.mark.parametrize("changes", [{}, {"greedy": False}, {"samples": 4}, {"samples": 3}])
def test_the_names_that_can_come_are_those_that_come(changes):
    section = validate({"model": {"path": "m"}, "eval": {"samples": 2} | changes})
    kept = {"samples": section.eval.samples, "greedy": section.eval.greedy}
    prompts = [replace(p, data_source="chain_sum") for p in make_prompts(3, "e")]
    evals = Evaluations(prompts, Tally(), every=20, **kept)
    evals.publish(v(0))
    for i, x in enumerate(evals.lease("g0", v(0), 1000, 0.0)):
        answer = EvalAnswer(x.prompt.prompt_id, x.sample, x.greedy, float(i % 2), 4, "stop", "6", {"format": 1.0})
        evals.put(EvalResult(x.eval_id, (0, 0), [answer]))
    came = evaluation_scalars(evals.finished[0]).keys() - {"eval/version", "eval/epoch", "eval/chain_sum/part/format"}
    assert set(metric_names(section.task, section.eval)) == came
    for name in (*came, "eval/chain_sum/part/format", None):
        check_keep_best(name, section.task, section.eval)


def test_a_metric_that_no_evaluation_has_is_refused_with_those_that_can_come():
    task = {"name": "sources", "eval": [{"path": "a/math.jsonl", "samples": 4}, {"path": "b/math.jsonl"}]}
    c = validate({"model": {"path": "m"}, "task": task, "eval": {"every": 5, "greedy": False}})
    for name in ("eval/math-2/avg_at_1", "eval/math/pass_at_2", "eval/math/part/format/strict"):
        check_keep_best(name, c.task, c.eval)
    for name, shown in (
        ("eval/e9/avg_at_4", "eval/sampled_accuracy, .*eval/math/avg_at_4, .*eval/math-2/avg_at_1"),
        ("eval/math/avg_at_8", "are eval/math/avg_at_4, "), ("eval/math/greedy", "eval/math/maj_at_4"),
        ("eval/greedy_accuracy", "eval/sampled_accuracy"), ("eval/e9/part/format", "eval/math/avg_at_4"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=f"learner.keep_best={name}: no evaluation will have such.*{shown}"):
            check_keep_best(name, c.task, c.eval)


def test_what_is_kept_of_many_evaluations_stays_small():
    evals = make(every=1, prompts=1)
    for update in range(DETAILED + 3):
        evals.publish(v(update))
        serve(evals, v(update))
    assert [("sets" in e) for e in evals.finished] == [False] * 3 + [True] * DETAILED


def test_sets_that_no_prompt_is_of_and_equal_ids_are_refused():
    with pytest.raises(ValueError, match="no held-out prompt is of \\['aime'\\]"):
        two_sets(aime=Asked(1, True))
    with pytest.raises(ValueError, match="same prompt_id"):
        Evaluations(make_prompts(2, "e") + make_prompts(1, "e"), Tally(), every=1)


SETS = {
    "model": {"path": "x"},
    "task": {"name": "sources", "train": [{"procedural": "a"}], "eval": [{"path": "data/aime.parquet", "samples": 8}]},
}


def test_a_set_takes_what_it_does_not_say_from_the_section_eval():
    config = validate(SETS | {"eval": {"samples": 2, "greedy": False}})
    assert asked_by_set(config.task, config.eval) == {"aime": Asked(8, False)}
    more = {**SETS["task"], "eval": [{"procedural": "zebra_grid"}, {"path": "b.csv", "name": "b2", "greedy": True}]}
    config = validate(SETS | {"task": more, "eval": {"samples": 2, "greedy": False}})
    assert asked_by_set(config.task, config.eval) == {"zebra_grid": Asked(2, False), "b2": Asked(2, True)}


@pytest.mark.parametrize("greedy", [{"eval": {"greedy": False}}, {}])
def test_a_set_that_is_asked_for_nothing_is_refused(greedy):
    own = {"samples": 0} | ({} if greedy else {"greedy": False})
    task = {**SETS["task"], "eval": [{"path": "a.csv", **own}]}
    with pytest.raises(ConfigError, match=r"task\.eval\[0\] is asked for nothing: samples=0 and greedy=false"):
        validate(SETS | {"task": task} | greedy)
    task["eval"][0]["greedy"] = True
    assert validate(SETS | {"task": task} | greedy).task.eval[0].samples == 0
