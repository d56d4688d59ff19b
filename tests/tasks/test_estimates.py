"""What answers say of a set, worked by hand, and properties of pass@k."""

import math
import random
from itertools import combinations, pairwise
from math import comb

import pytest

from asyncrl.tasks.estimates import Answer, estimate, estimates, ks, majority, pass_at, summary, wilson


def answer(prompt, sample, reward, extracted="", greedy=False, length=4, truncated=False, parts=None):
    return Answer(prompt, sample, greedy, reward, length, truncated, extracted, parts or {})


def test_pass_at_k_is_the_unbiased_estimate_of_chen_et_al():
    # n = 5 samples, c = 2 right: pass@2 = 1 - C(3, 2) / C(5, 2) = 1 - 3/10.
    assert pass_at([1, 0, 0, 1, 0], 2) == pytest.approx(0.7)
    assert pass_at([1, 0, 0, 1, 0], 4) == pytest.approx(1.0)
    for n in range(1, 9):
        for c in range(n + 1):
            for k in range(1, n + 1):
                right = 1 - comb(n - c, k) / comb(n, k)
                assert pass_at([1.0] * c + [0.0] * (n - c), k) == pytest.approx(right)
    assert math.isnan(pass_at([1.0], 2)) and math.isnan(pass_at([], 1)) and math.isnan(pass_at([1.0], 0))


def test_pass_at_k_of_other_rewards_is_the_expected_best():
    rewards = [0.25, -1.0, 0.5, 2.0]
    for k in range(1, 5):
        best = [max(drawn) for drawn in combinations(rewards, k)]
        assert pass_at(rewards, k) == pytest.approx(sum(best) / len(best))


@pytest.mark.parametrize("seed", range(200))
def test_pass_at_k_never_falls_with_k_and_begins_at_the_mean(seed):
    rng = random.Random(seed)
    n = rng.randint(1, 64)
    rewards = [rng.random() if seed % 2 else float(rng.random() < 0.3) for _ in range(n)]
    values = [pass_at(rewards, k) for k in range(1, n + 1)]
    assert values[0] == pytest.approx(sum(rewards) / n) and values[-1] == pytest.approx(max(rewards))
    assert all(b >= a - 1e-12 for a, b in pairwise(values))


def test_the_majority_is_of_answers_and_a_tie_goes_to_the_first():
    def group(*texts):
        return [answer("p", i, float(text == "6"), text) for i, text in enumerate(texts)]

    assert majority(group("6", "7", "6")) == 1.0
    assert majority(group("7", "7", "6")) == 0.0
    assert majority(group("6", "7")) == 1.0 and majority(group("7", "6")) == 0.0
    # Samples count in their own order, not in that of their arrival.
    assert majority(reversed(group("6", "7"))) == 1.0
    # No answer is no vote, however often it is given.
    assert majority(group("", "", "6")) == 1.0
    assert majority(group("", "")) == 0.0 and majority([]) == 0.0


def test_wilson_by_hand():
    # 8 of 10: (0.8 + 0.19207) / 1.38415 -+ 0.33942 / 1.38415.
    low, high = wilson(0.8, 10)
    assert (low, high) == (pytest.approx(0.49016, abs=1e-5), pytest.approx(0.94331, abs=1e-5))
    # Nothing of 10: 3.84146 / 13.84146.
    assert wilson(0.0, 10) == (0.0, pytest.approx(0.27753, abs=1e-5))


def test_the_interval_counts_prompts_and_not_answers():
    # Prompts that are solved always or never: 40 answers say no more than 10 prompts.
    same = estimate([1.0] * 8 + [0.0] * 2, 40)
    assert (same.low, same.high) == (pytest.approx(wilson(0.8, 10)[0]), pytest.approx(wilson(0.8, 10)[1]))
    assert same.stderr == pytest.approx(math.sqrt(0.8 * 0.2 * 10 / 9 / 10))
    # Every prompt at 0.5 says as much as that many coins.
    assert estimate([0.5] * 10, 40)[2:4] == pytest.approx(wilson(0.5, 40))
    # Between: values 0.25 and 0.75 have stderr 0.0833, so 0.25 / 0.00694 = 36 answers' worth.
    between = estimate([0.25, 0.75] * 5, 40)
    assert between.stderr == pytest.approx(0.25 * math.sqrt(10 / 9 / 10))
    assert between[2:4] == pytest.approx(wilson(0.5, 36.0))


def test_an_interval_at_the_border_has_a_width_and_stays_inside():
    all_right = estimate([1.0] * 4, 32)
    assert all_right.stderr == 0.0 and all_right.high == 1.0 and all_right.low == pytest.approx(wilson(1.0, 4)[0])


def test_rewards_outside_0_and_1_have_a_plain_interval():
    e = estimate([-1.0, 1.0, 3.0])
    assert (e.value, e.stderr) == (1.0, pytest.approx(2 / math.sqrt(3)))
    assert e.low == pytest.approx(1 - 1.96 * e.stderr, abs=1e-4) and e.high == pytest.approx(2 - e.low)


def test_one_prompt_and_none():
    one = estimate([0.5], 8)
    assert one.value == 0.5 and math.isnan(one.stderr) and one[2:4] == wilson(0.5, 1)
    for none in (estimate([]), estimate([math.nan])):
        assert none.prompts == 0 and math.isnan(none.value) and math.isnan(none.low)
    assert estimates([], 4) == {} and summary([], 4) == {"prompts": 0.0, "count": 0.0}
    assert ks(0) == [] and ks(1) == [1] and ks(6) == [1, 2, 4] and ks(8) == [1, 2, 4, 8]


SET = [
    answer("a", 0, 1.0, "6", length=2, parts={"format": 1.0}),
    answer("a", 1, 0.0, "7", length=4, parts={"format": 0.0}),
    answer("a", 2, 1.0, "6", length=6),
    answer("a", 3, 0.0, "", length=8, truncated=True),
    answer("b", 0, 0.0, "1", length=2),
    answer("b", 1, 0.0, "1", length=2),
    answer("b", 2, 1.0, "2", length=2),
    answer("b", 3, 0.0, "1", length=2),
    answer("a", 0, 1.0, "6", greedy=True, length=100),
    answer("b", 0, 0.0, "1", greedy=True, length=100),
]


def test_a_set_by_hand():
    got = summary(SET, 4)
    assert got.pop("ci_low") == pytest.approx(estimate([0.5, 0.25], 8).low)
    assert got.pop("ci_high") == pytest.approx(estimate([0.5, 0.25], 8).high)
    assert got == {
        "avg_at_4": 0.375, "pass_at_1": pytest.approx(0.375),
        # a: 1 - C(2,2)/C(4,2) = 5/6; b: 1 - C(3,2)/C(4,2) = 1/2.
        "pass_at_2": pytest.approx((5 / 6 + 1 / 2) / 2), "pass_at_4": pytest.approx(1.0),
        "maj_at_4": 0.5, "greedy": 0.5, "prompts": 2.0, "count": 10.0,
        "length": 3.5, "truncated": 0.125, "no_answer": 0.125,
        "stderr": pytest.approx(0.125), "part/format": 0.5,
    }  # fmt: skip


def test_the_share_without_an_answer_is_not_measured_where_rewards_name_none():
    none = [answer("a", 0, 1.0), answer("b", 0, 0.0)]
    assert summary(none, 1)["no_answer"] == 1.0 and "no_answer" not in summary(none, 1, names_answers=False)
    some = [*none, answer("a", 0, 1.0, "6", greedy=True)]
    assert summary(some, 1, names_answers=False)["no_answer"] == 1.0


def test_what_is_not_there_yet_is_not_made_up():
    # Prompt b has one of four samples: it counts for the mean and for pass@1 only.
    got = summary([a for a in SET if a.prompt == "a" or a.sample == 0], 4)
    assert got["avg_at_4"] == pytest.approx(0.25) and got["pass_at_1"] == pytest.approx(0.25)
    assert got["pass_at_2"] == pytest.approx(5 / 6) and got["maj_at_4"] == 1.0
    # Rewards that name no answer have no majority, and greedy answers alone have an interval of their own.
    assert "maj_at_2" not in summary([answer("a", 0, 1.0), answer("a", 1, 1.0)], 2)
    alone = summary([answer("a", 0, 1.0, "6", greedy=True, length=9), answer("b", 0, 0.0, "6", greedy=True)], 0)
    assert alone["greedy"] == 0.5 and alone["length"] == 6.5 and "avg_at_0" not in alone
    assert alone["ci_low"] == pytest.approx(wilson(0.5, 2)[0])
