"""What `asyncrl run` says at its end: numbers of any size, alarms that were raised, a cut evaluation."""

import io
import json

from rich.console import Console

from asyncrl.progress import Raised, View, print_summary


def summary(tmp_path, records, alarms=(), width=100):
    view, out = View(4), io.StringIO()
    for record in records:
        view.add(record)
    print_summary(view, Console(file=out, width=width), tmp_path, 3.0, 2.0, alarms)
    return out.getvalue()


def evaluated(update, failed):
    return {"update": update, "eval/sampled_accuracy": 0.5, "eval/greedy_accuracy": 0.25, "eval/failed": failed}


def test_a_sound_run_has_no_word_of_trouble(tmp_path):
    said = summary(tmp_path, [{"update": 0, "policy/reward": 0.5}, evaluated(0, 3.0), evaluated(4, 0.0)])
    assert "0.500 -> 0.500" in said and "alarms:" not in said and "cut short" not in said


def test_a_last_evaluation_that_was_cut_short_and_alarms_are_named(tmp_path):
    said = summary(tmp_path, [evaluated(0, 0.0), evaluated(4, 3.0)], ["reward_errors", "f_2"])
    assert f"alarms:    reward_errors, f_2 ({tmp_path / 'alarms.jsonl'})" in said
    assert "the last evaluation (update 4) was cut short: 3 responses are missing" in said


def test_rewards_of_any_size_fit_in_the_table(tmp_path):
    records = [{"update": i, "policy/reward": x} for i, x in enumerate((-1e30, 1e30))]
    assert "-1e+30 -> 1e+30" in summary(tmp_path, records, width=80)
    view = View(1)
    view.add({"update": 0, "policy/reward": 1.234e30})
    assert view.line().startswith("reward 1.234e+30  held-out -")


def test_alarms_are_those_that_went_on_since_this_start(tmp_path):
    file = tmp_path / "alarms.jsonl"
    assert Raised(tmp_path).names() == []
    file.write_text(json.dumps({"name": "old", "on": True}) + "\n")
    raised = Raised(tmp_path)
    lines = [("f_2", True), ("old", False), ("kl_rising", True), ("f_2", False), ("f_2", True)]
    with file.open("a") as out:
        out.writelines(json.dumps({"name": name, "on": on}) + "\n" for name, on in lines)
        out.write('{"name": "ha')
    assert raised.names() == ["f_2", "kl_rising"]
    assert Raised(tmp_path).names() == []
