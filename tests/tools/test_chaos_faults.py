"""The plan of tools/chaos.py: the same for a seed, within its limits, every card once a deck."""

from itertools import islice

from chaos_lib import faults as f


def test_a_seed_gives_its_faults_and_another_seed_others():
    first, again, other = (list(islice(f.plan(seed, f.CARDS, f.Pace()), 100)) for seed in (1, 1, 2))
    assert first == again != other
    assert [x.number for x in first] == list(range(100))


def test_every_deck_has_every_card():
    dealt = [(x.kind, x.target) for x in islice(f.plan(3, f.CARDS, f.Pace()), 2 * len(f.CARDS))]
    assert sorted(dealt[: len(f.CARDS)]) == sorted(dealt[len(f.CARDS) :]) == sorted(f.CARDS)
    assert {kind for kind, _ in f.CARDS} == {kind for kind, _ in f.SHORT_CARDS} == {*f.PROCESS, *f.LINK}


def test_draws_stay_within_the_pace():
    pace = f.Pace()
    for x in islice(f.plan(4, f.CARDS, pace), 2000):
        low, high = {f.KILL: pace.down, f.TERMINATE: pace.down, f.STOP: pace.stop}.get(x.kind, pace.hold)
        assert low <= x.seconds <= high and 0 <= x.pick < 1 and pace.gap[0] <= x.gap <= pace.gap[1]
        low, high = pace.rate if x.kind == f.BANDWIDTH else pace.latency
        assert low <= x.value <= high and low <= x.back <= high
