"""Slow procedures: sizes that cannot be made in time are refused, and replay says what it makes."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest

from asyncrl import tasks
from asyncrl.config import load_config
from asyncrl.errors import TaskError, TransportError
from asyncrl.sections.task import TaskSection
from asyncrl.tasks import procedural
from asyncrl.tasks.procedural import cost
from asyncrl.tasks.procedural.grids import SIZES
from asyncrl.tasks.procedural.names import NOT_ENABLED
from asyncrl.transport.rendezvous import wait_for_address

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs" / "procedural.md"


def section(*train: dict[str, object], held_out: tuple[dict[str, object], ...] = ()) -> TaskSection:
    return TaskSection.model_validate({"name": "sources", "train": train, "eval": held_out})


def test_a_size_that_takes_longer_than_the_start_may_is_refused() -> None:
    with pytest.raises(TaskError) as caught:
        tasks.check(section({"procedural": "gcd"}, {"procedural": "futoshiki"}), 180.0)
    assert str(caught.value) == (
        "task.train[1].size=1000, the default, takes about 400 s to make from futoshiki, longer than "
        "run.start_timeout_s=180, within which replay must be ready; set task.train[1].size <= 450, or "
        "run.start_timeout_s=600"
    )
    tasks.check(section({"procedural": "futoshiki", "size": 450}), 180.0)
    tasks.check(section({"procedural": "futoshiki"}), 600.0)


def test_held_out_items_and_all_sources_together_count() -> None:
    held_out = {"procedural": "zebra_grid", "options": {"size": "5*5"}, "size": 100}
    with pytest.raises(
        TaskError, match=r"^task\.eval\[0\]\.size=100 takes about 148 s .*set task\.eval\[0\]\.size <= "
    ):
        tasks.check(section(held_out=(held_out,)), 140.0)
    tasks.check(section(held_out=(held_out,)), 180.0)
    futoshiki = {"procedural": "futoshiki", "size": 200}
    with pytest.raises(TaskError, match=r"about 148 s \(228 s with all other sources\).*size <= 67, or "):
        tasks.check(section(futoshiki, held_out=(held_out,)), 180.0)


def test_every_size_of_a_grid_has_a_cost_and_bigger_ones_cost_more() -> None:
    each = {(h, f): cost.item_s("zebra_grid", {"size": f"{h}*{f}"}, held_out=False) for h in SIZES for f in SIZES}
    assert all(each[h, f] < each[h + 1, f] and each[h, f] < each[h, f + 1] for h in range(2, 6) for f in range(2, 6))
    assert cost.item_s("futoshiki", {}, held_out=True) == 3 * cost.item_s("futoshiki", {}, held_out=False)
    assert set(cost.DRAW_S) <= set(procedural.NAMES)


def test_the_procedures_of_the_config_files_are_made_in_time() -> None:
    config = load_config([ROOT / "configs" / "quickstart.yaml", ROOT / "configs" / "procedural.yaml"])
    tasks.check(config.task, config.run.start_timeout_s)


def test_what_is_made_is_said_meanwhile(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(procedural, "SAY_EVERY_S", 0.0)
    with caplog.at_level(logging.INFO):
        procedural.items("gcd", {}, 5, seed=1, held_out=False, key="task.train[0]")
    said = [r.getMessage() for r in caplog.records]
    assert re.fullmatch(r"task\.train\[0\]: made 4 of 5 items of gcd so far, in \d+ draws", said[-1])


def test_who_waits_for_replay_is_told_where_to_look(tmp_path: Path) -> None:
    with pytest.raises(TransportError) as caught:
        wait_for_address(tmp_path / "replay.address", 0.01)
    for words in ("within run.start_timeout_s=0.01 s", "still be reading or making", str(tmp_path / "logs/replay.log")):
        assert words in str(caught.value)


@pytest.mark.parametrize(
    ("name", "why"),
    [("countdown", "several right answers"), ("rubiks_cube", "no gold answer"), ("composite", "weights")],
)
def test_a_dataset_that_is_not_enabled_says_why(name: str, why: str) -> None:
    with pytest.raises(
        TaskError, match=rf"procedural='{name}' is a dataset of reasoning-gym that is not enabled: .*{why}"
    ):
        tasks.check(section({"procedural": name}))


def test_the_reasons_are_those_of_the_docs() -> None:
    table = DOCS.read_text().partition("## Not enabled")[2]
    rows = re.findall(r"^\| (`.*`) \| (.*) \|$", table, re.MULTILINE)
    assert {n: why for names, why in rows for n in re.findall(r"`([a-z0-9_]+)`", names)} == NOT_ENABLED
