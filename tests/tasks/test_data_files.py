"""What is said of a file that cannot be used: which file, which row, which column, what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from asyncrl.errors import TaskError
from asyncrl.sections.task import SourceSection
from asyncrl.tasks.data import parquet
from asyncrl.tasks.data.files import Seen
from asyncrl.tasks.data.layouts import Wants
from asyncrl.tasks.data.load import check, load
from tests.tasks import data_files as make

KEY = "task.train[0]"


def texts(path: object, **keys: str) -> list[str]:
    return [item.text for item in load(SourceSection(path=str(path), **keys), KEY, Wants())[0]]


def refusal(path: object, **keys: str) -> str:
    with pytest.raises(TaskError) as caught:
        load(SourceSection(path=str(path), **keys), KEY, Wants())
    return str(caught.value)


GOOD = {"problem": "p", "answer": "1"}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"problem": None, "answer": "1"}, "line 2: column 'problem' is missing (null)"),
        ({"problem": "  ", "answer": "1"}, "line 2: column 'problem' is empty"),
        ({"problem": 5, "answer": "1"}, "line 2: column 'problem' is 5 (int), where a text or a list of"),
        ({"problem": [], "answer": "1"}, "line 2: column 'problem' is [] (list), where a text or a list of"),
        ({"problem": ["x"], "answer": "1"}, "line 2: column 'problem', message 1, is 'x' (str), where {role, content}"),
        (
            {"problem": [{"role": "tool", "content": "c"}], "answer": "1"},
            "column 'problem', message 1, has the role 'tool'",
        ),
        (
            {"problem": [{"role": "user", "content": None}], "answer": "1"},
            "line 2: column 'problem', message 1, its content is missing (null)",
        ),
        (
            {"problem": [{"role": "assistant", "content": "c"}], "answer": "1"},
            "ends with a message of 'assistant'; the last one must be the user's",
        ),
        ({"answer": "1"}, "line 2: column 'problem' is missing (null)"),
        ({"problem": "q"}, "line 2: column 'answer' is missing (null)"),
        ({"problem": "q", "answer": ""}, "line 2: column 'answer' is empty"),
        ({"problem": "q", "answer": True}, "line 2: column 'answer' is True (bool), where a text or a number belongs"),
        ({"problem": "q", "answer": {"a": 1}}, "line 2: column 'answer' is {'a': 1} (dict)"),
        ({"problem": "q", "answer": "so\n#### "}, "line 2: column 'answer' marks an empty answer"),
        (["q", "1"], "line 2 is a list, where an object with columns belongs"),
    ],
)
def test_a_wrong_row_is_named_with_its_column(tmp_path: Path, row: object, words: str) -> None:
    said = refusal(make.jsonl(tmp_path / "f.jsonl", [GOOD, row]))
    assert words in said and str(tmp_path / "f.jsonl") in said


def test_a_wrong_row_of_parquet_is_counted_over_row_groups(tmp_path: Path) -> None:
    rows = [make.dapo_row(f"q{i}", "1") for i in range(7)]
    rows[5]["reward_model"]["ground_truth"] = None
    said = refusal(make.dapo(tmp_path / "d.parquet", rows, row_group=2))
    assert "d.parquet' row 6: column 'reward_model.ground_truth' is missing (null)" in said


def test_a_null_struct_is_a_missing_answer(tmp_path: Path) -> None:
    rows = [make.dapo_row("q", "1"), make.dapo_row("r", "1") | {"reward_model": None}]
    assert "row 2: column 'reward_model.ground_truth' is missing" in refusal(make.dapo(tmp_path / "d.parquet", rows))


def test_a_solution_without_a_mark_is_no_answer(tmp_path: Path) -> None:
    said = refusal(make.jsonl(tmp_path / "f.jsonl", [{"problem": "p", "solution": "It follows " * 40, "type": "A"}]))
    assert "line 1: column 'solution' has neither #### nor a \\boxed{}" in said
    assert texts(make.jsonl(tmp_path / "f.jsonl", [{"problem": "p", "solution": "12"}])) == ["p"]


def test_a_line_that_is_not_json_is_named(tmp_path: Path) -> None:
    file = tmp_path / "f.jsonl"
    file.write_text(json.dumps(GOOD) + "\n\n{'problem': 1}\n")
    assert f"'{file}' line 3 is not JSON: " in refusal(file) and "line 1" not in refusal(file)


def test_lines_in_a_json_file_get_the_hint(tmp_path: Path) -> None:
    file = tmp_path / "f.json"
    file.write_text(json.dumps(GOOD) + "\n" + json.dumps(GOOD))
    assert "rename it to .jsonl" in refusal(file)
    file.write_text('{"rows": []}')
    assert "must hold a list of objects" in refusal(file)


@pytest.mark.parametrize("name", ["f.jsonl", "f.json", "f.csv"])
def test_an_empty_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text("")
    assert f"task.train[0].path: '{tmp_path / name}' is empty" in refusal(tmp_path / name)


def test_files_without_rows_are_refused(tmp_path: Path) -> None:
    (tmp_path / "f.csv").write_text("problem,answer\n")
    assert "is empty" in refusal(tmp_path / "f.csv")
    assert "is empty: it has no rows" in refusal(make.dapo(tmp_path / "d.parquet", []))


@pytest.mark.parametrize("mark", [";", "\t", "|"])
def test_a_csv_with_another_separator_is_refused(tmp_path: Path, mark: str) -> None:
    (tmp_path / "f.csv").write_text(f"problem{mark}answer\nq,r{mark}1\n")
    assert f"has {mark!r} between its cells" in refusal(tmp_path / "f.csv")
    (tmp_path / "f.csv").write_text(f'"problem{mark}",answer\nq,1\n')
    assert "no prompt column" in refusal(tmp_path / "f.csv")


def test_csv_rows_of_another_width_are_refused(tmp_path: Path) -> None:
    (tmp_path / "f.csv").write_text('problem,answer\n"two\nlines",1\nq,1,2\n')
    assert "line 4 has more cells" in refusal(tmp_path / "f.csv")
    (tmp_path / "f.csv").write_text("problem,answer\nq\n")
    assert "line 2 has fewer cells" in refusal(tmp_path / "f.csv")


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "f.csv").write_text("problem,problem,answer,,\na,b,1,,\n")
    assert "has two columns named 'problem'; rename one" in refusal(tmp_path / "f.csv")
    (tmp_path / "f.csv").write_text("problem,answer,,\na,1,,\n")  # as spreadsheets write empty columns
    assert load(SourceSection(path=str(tmp_path / "f.csv")), "task.train[0]", Wants())[0][0].text == "a"
    twice = pa.table([pa.array(["a"]), pa.array(["b"]), pa.array(["1"])], names=["problem", "problem", "answer"])
    pq.write_table(twice, tmp_path / "f.parquet")
    assert "has two columns named 'problem'; rename one" in refusal(tmp_path / "f.parquet")


def test_odd_json_is_refused_in_a_sentence_or_taken_as_text(tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text('[{"problem": "q", "answer": ' + "9" * 5000 + "}]")  # more than int() reads
    assert "f.json' is not JSON: Exceeds the limit" in refusal(tmp_path / "f.json")
    deep = "[" * 800 + "]" * 800
    (tmp_path / "f.jsonl").write_text('{"problem": "q", "answer": "1", "more": ' + deep + "}\n")
    with pytest.raises(TaskError, match="line 1 has a value that is nested too deeply"):
        load(SourceSection(path=str(tmp_path / "f.jsonl")), "task.train[0]", Wants(answers=False, columns=True))
    (tmp_path / "f.jsonl").write_text('{"problem": "q", "answer": ' + deep + "}\n")
    assert "nested too deeply" in refusal(tmp_path / "f.jsonl")
    brackets = "[" * 100_000
    file = make.jsonl(tmp_path / "g.jsonl", [{"problem": brackets, "answer": "1"}])
    assert load(SourceSection(path=str(file)), "task.train[0]", Wants())[0][0].text == brackets


def test_half_of_a_surrogate_pair_in_the_name_of_a_column_can_travel(tmp_path: Path) -> None:
    (tmp_path / "f.jsonl").write_text('{"problem": "q", "answer": "1", "\\ud800": "x"}\n')
    for wants in (Wants(), Wants(columns=True)):
        items, _ = load(SourceSection(path=str(tmp_path / "f.jsonl")), "task.train[0]", wants)
        assert '"?": "x"' in items[0].extra and items[0].extra.encode()


@pytest.mark.parametrize("game", ['{"question": "q"}', '{"answer": ""}', '{"answer": null}', "broken"])
def test_a_game_without_an_answer_has_no_gold(tmp_path: Path, game: str) -> None:
    row = {"prompt": "q", "reward_model": {"ground_truth": ""}, "extra_info": {"game_data_str": game}}
    file = make.jsonl(tmp_path / "f.jsonl", [row])
    assert "line 1: column 'extra_info.game_data_str' has no answer" in refusal(file)
    own = load(SourceSection(path=str(file)), "task.train[0]", Wants(answers=False, columns=True))
    assert own[0][0].answer == ""


def test_files_of_another_kind_are_refused(tmp_path: Path) -> None:
    (tmp_path / "f.txt").write_text("x")
    assert "has the extension '.txt'; known are .parquet, .jsonl, .json, .csv" in refusal(tmp_path / "f.txt")
    (tmp_path / "f.jsonl.gz").write_text("x")
    assert "unpack it first" in refusal(tmp_path / "f.jsonl.gz")
    (tmp_path / "f.parquet").write_text("x")
    assert "is no Parquet file" in refusal(tmp_path / "f.parquet")
    (tmp_path / "f.jsonl").write_bytes(b'{"problem": "\xff"}\n')
    assert "is not UTF-8 text" in refusal(tmp_path / "f.jsonl")


def test_a_damaged_parquet_file_is_named(tmp_path: Path) -> None:
    file = make.dapo(tmp_path / "d.parquet", [make.dapo_row(f"q{i}", "1") for i in range(100)])
    data = bytearray(file.read_bytes())
    data[20:400] = bytes(380)
    file.write_bytes(data)
    assert f"'{file}' cannot be read" in refusal(file)


def test_what_is_not_there_is_named_with_its_key(tmp_path: Path) -> None:
    assert f"task.train[0].path='{tmp_path}/no.csv' does not exist; relative paths begin at" in refusal(
        tmp_path / "no.csv"
    )
    assert "no*.csv' matches no file" in refusal(tmp_path / "no*.csv")
    assert "is a folder; name a file, or a pattern such as" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({}, "has no prompt column; its columns are text, gold; set task.train[0].prompt_key"),
        ({"prompt_key": "text"}, "has no answer column; its columns are text, gold; set task.train[0].answer_key"),
        (
            {"prompt_key": "txt"},
            "(there is none named 'txt'); its columns are text, gold; set task.train[0].prompt_key",
        ),
        (
            {"prompt_key": "text", "answer_key": "a.b"},
            "(there is none named 'a.b'); its columns are text, gold; set task.train[0].answer_key",
        ),
    ],
)
def test_columns_that_are_not_found_are_listed_with_the_key_to_set(tmp_path: Path, keys: dict, words: str) -> None:
    assert words in refusal(make.jsonl(tmp_path / "f.jsonl", [{"text": "a", "gold": "b"}]), **keys)


def test_a_pattern_reads_several_files_in_order(tmp_path: Path) -> None:
    for name in "cab":
        make.jsonl(tmp_path / f"part-{name}.jsonl", [{"problem": name, "answer": "1"}])
    assert texts(tmp_path / "part-*.jsonl") == ["a", "b", "c"]


def test_repeats_are_counted_and_rows_of_two_answers_left_out(tmp_path: Path) -> None:
    rows = [("a", "1"), ("b", "2"), ("a", "1"), ("c", "3"), ("c", "4"), (" a ", " 1"), ("c", "5"), ("c", "3")]
    file = make.jsonl(tmp_path / "f.jsonl", [{"problem": p, "answer": a} for p, a in rows])
    items, counts = load(SourceSection(path=str(file)), KEY, Wants())
    assert [item.text for item in items] == ["a", "b"]
    # of c: 3, 4 and 5 contradict one another, the second 3 repeats a row
    assert counts == {"rows": 8, "duplicate": 3, "conflicting": 3}
    assert counts["rows"] == len(items) + counts["duplicate"] + counts["conflicting"]


@pytest.mark.parametrize("batch", [3, 1000])
def test_rows_that_repeat_are_found_over_batches_of_parquet(
    tmp_path: Path, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parquet, "BATCH", batch)
    rows = [make.dapo_row(f"q{i % 10}", str(i % 10), f"uuid-{i}") for i in range(1000)]
    rows[500]["prompt"].insert(0, {"role": "system", "content": "s"})  # another length: no fast path there
    items, counts = load(SourceSection(path=str(make.dapo(tmp_path / "d.parquet", rows))), KEY, Wants())
    assert (len(items), counts) == (11, {"rows": 1000, "duplicate": 989})
    assert [i.answer for i in items[:10]] == [str(i) for i in range(10)]
    assert items[0].where.endswith("row 1") and items[10].where.endswith("row 501")


def test_one_row_of_each_kind_is_made_of_a_batch(tmp_path: Path) -> None:
    rows = [make.dapo_row(f"q{i % 10}", str(i % 20), f"uuid-{i}") for i in range(200)]
    seen = Seen()
    keys = ("prompt", "reward_model.ground_truth")
    made = list(parquet.rows(make.dapo(tmp_path / "d.parquet", rows), ("prompt", "reward_model"), keys, seen))
    assert [number for number, _ in made] == list(range(1, 21))  # the first of 20 different ones
    assert made[13][1] == {k: rows[13][k] for k in ("prompt", "reward_model")}
    assert (seen.rows, seen.repeats, len(seen.keys)) == (200, 180, 20)
    batch = next(pq.ParquetFile(tmp_path / "d.parquet").iter_batches())
    first, times = parquet.different(batch, keys)
    assert first.tolist() == list(range(20)) and times.tolist() == [10] * 20


def test_strings_of_any_arrow_type_are_read(tmp_path: Path) -> None:
    columns = {
        "problem": pa.array(["a", "b", "a"]).dictionary_encode(),
        "answer": pa.array(["1", "2", "1"], pa.large_string()),
    }
    pq.write_table(pa.table(columns), tmp_path / "f.parquet")
    assert texts(tmp_path / "f.parquet") == ["a", "b"]


def test_the_first_rows_are_looked_at_before_anything_starts(tmp_path: Path) -> None:
    rows = [GOOD, {"problem": None, "answer": "1"}]
    file = make.jsonl(tmp_path / "f.jsonl", rows)
    with pytest.raises(TaskError, match="line 2: column 'problem' is missing"):
        check(SourceSection(path=str(file)), KEY, Wants())
    with pytest.raises(TaskError, match=r"task\.train\[0\]\.path=.*does not exist"):
        check(SourceSection(path=str(tmp_path / "none.jsonl")), KEY, Wants())
