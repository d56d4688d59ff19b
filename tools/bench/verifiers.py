"""Verdicts per CPU second: what the rules of `math` decide, against the library math-verify alone, on the same answers.

`integers` are whole numbers on both sides. All are single-threaded and warm; the rules never ask the library here.
`pool` is the whole way through worker processes and back, in wall time, groups of 8.

    python tools/bench/verifiers.py [--count 1000] [--seconds 2] [--workers 1]
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable

from asyncrl.tasks.pool import RewardPool
from asyncrl.tasks.rewards import score
from asyncrl.tasks.rewards.mathematics import by_rules, load
from asyncrl.tasks.rewards.numbers import normalise, value_of

FORMS = [
    ("{n}", "{n}"), ("0{n}", "{n}"), ("{n}", "{m}"), ("{n}", "-{n}"), ("{n}000", "{n},000"), ("{n}", "{n}.0"),
    (r"\frac{{{n}}}{{7}}", r"\dfrac{{{n}}}{{7}}"), ("0.{n}", r"\frac{{1}}{{{n}}}"), ("{n}", r"{n}\text{{ cm}}"),
    ("{n}", r"{n}^\circ"),
]  # fmt: skip
"""(gold, given), as answers of contests look; the rules decide all of them."""


def answers(count: int) -> list[tuple[str, str]]:
    """Different ones, since the library remembers the last twenty."""
    made = [FORMS[i % len(FORMS)] for i in range(count)]
    return [(g.format(n=i + 1, m=i + 2), a.format(n=i + 1, m=i + 2)) for i, (g, a) in enumerate(made)]


def by_rules_alone(gold: str, given: str) -> bool:
    return score("math", f"The answer is \\boxed{{{given}}}.", gold) == 1.0


def by_library_alone(gold: str, given: str) -> bool:
    library = load()
    want = library.parse(f"\\boxed{{{gold}}}", parsing_timeout=5)
    return bool(library.verify(want, library.parse(f"The answer is \\boxed{{{given}}}.", parsing_timeout=5)))


def rate(verify: Callable[[str, str], bool], pairs: list[tuple[str, str]]) -> float:
    """Verdicts per CPU second: the median of five stretches."""
    rates = []
    for part in (pairs[i::5] for i in range(5)):
        start = time.process_time()
        for pair in part:
            verify(*pair)
        rates.append(len(part) / (time.process_time() - start))
    return statistics.median(rates)


async def through_pool(workers: int, seconds: float) -> float:
    group = [("math", f"The answer is \\boxed{{{given}}}.", gold) for gold, given in answers(8)]
    with RewardPool(workers, 60.0) as pool:
        await asyncio.gather(*(pool.score_many(group) for _ in range(4 * workers)))
        count, start = 0, time.monotonic()
        while time.monotonic() - start < seconds:
            await asyncio.gather(*(pool.score_many(group) for _ in range(4)))
            count += 4 * len(group)
        return count / (time.monotonic() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=2.0)
    parser.add_argument("--workers", type=int, default=1)
    arguments = parser.parse_args()
    few, many = answers(arguments.count), answers(50 * arguments.count)
    for gold, given in few:
        plain = normalise(gold)
        assert by_rules(plain, value_of(plain), normalise(given)) is not None
    by_library_alone("1", "2")
    ours, theirs = rate(by_rules_alone, many), rate(by_library_alone, few)
    whole = rate(by_rules_alone, [(str(i), str(i + i % 2)) for i in range(50 * arguments.count)])
    print(f"integers {whole:10.0f} verdicts per CPU second ({1e6 / whole:.1f} us each)")
    print(f"rules    {ours:10.0f} verdicts per CPU second ({1e6 / ours:.1f} us each)")
    print(f"library  {theirs:10.0f} verdicts per CPU second ({1e6 / theirs:.0f} us each)")
    print(f"the library takes {whole / theirs:.0f} x and {ours / theirs:.0f} x as long")
    piped = asyncio.run(through_pool(arguments.workers, arguments.seconds))
    print(f"pool     {piped:10.0f} verdicts per second of wall time, {arguments.workers} worker(s), groups of 8")


if __name__ == "__main__":
    main()
