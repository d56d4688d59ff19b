"""Small files in the layouts of public data sets, made up here: the columns and types are theirs, no text is."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

DAPO_HEAD = (
    "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
    "$Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
DAPO_TAIL = '\n\nRemember to put your answer on its own line after "Answer:".'

MESSAGES = pa.list_(pa.struct([("content", pa.string()), ("role", pa.string())]))
TRUTH = pa.struct([("ground_truth", pa.string()), ("style", pa.string())])
GRID = pa.struct([("header", pa.list_(pa.string())), ("rows", pa.list_(pa.list_(pa.string())))])


def parquet(path: Path, rows: Sequence[dict[str, Any]], schema: dict[str, pa.DataType], row_group: int = 1000) -> Path:
    pq.write_table(pa.Table.from_pylist(list(rows), schema=pa.schema(schema)), path, row_group_size=row_group)
    return path


def jsonl(path: Path, rows: Sequence[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def table(path: Path, rows: Sequence[dict[str, Any]]) -> Path:
    with path.open("w", newline="") as handle:
        writer = csv.DictWriter(handle, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def dapo_row(question: str, answer: str | None, index: str = "u-1", source: str = "math_dapo") -> dict[str, Any]:
    return {
        "data_source": source,
        "prompt": [{"content": DAPO_HEAD + question + DAPO_TAIL, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": index},
    }


DAPO_SCHEMA = {
    "data_source": pa.string(),
    "prompt": MESSAGES,
    "ability": pa.string(),
    "reward_model": TRUTH,
    "extra_info": pa.struct([("index", pa.string())]),
}


def dapo(path: Path, rows: Sequence[dict[str, Any]], row_group: int = 1000) -> Path:
    return parquet(path, rows, DAPO_SCHEMA, row_group)


def dapo_processed(path: Path) -> Path:
    row = dapo_row("What is 2+3?", "5")
    row |= {"prompt": "What is 2+3?", "solution": "5", "source_prompt": row["prompt"]}
    return parquet(
        path, [row], DAPO_SCHEMA | {"prompt": pa.string(), "solution": pa.string(), "source_prompt": MESSAGES}
    )


def verl_gsm8k(path: Path) -> Path:
    question = (
        'Ann has 3 eggs and buys 15. How many? Let\'s think step by step and output the final answer after "####".'
    )
    info = {"split": "train", "index": 7, "answer": "3+15=18\n#### 18", "question": "Ann has 3 eggs and buys 15."}
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "18"},
        "extra_info": info,
    }
    types = {"split": pa.string(), "index": pa.int64(), "answer": pa.string(), "question": pa.string()}
    return parquet(path, [row], DAPO_SCHEMA | {"extra_info": pa.struct(list(types.items()))})


def verl_math(path: Path) -> Path:
    row = {
        "data_source": "DigitalLearningGmbH/MATH-lighteval",
        "prompt": [
            {
                "role": "user",
                "content": "Halve one. Let's think step by step and output the final answer within \\boxed{}.",
            }
        ],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": "\\frac{1}{2}"},
        "extra_info": {"split": "train", "index": 0},
    }
    return parquet(
        path, [row], DAPO_SCHEMA | {"extra_info": pa.struct([("split", pa.string()), ("index", pa.int64())])}
    )


def zebra_row(redacted: bool = False) -> dict[str, Any]:
    cells = [["1", "___"], ["2", "___"]] if redacted else [["1", "Eric"], ["2", "Arnold"]]
    return {
        "id": "lgp-test-2x1-1",
        "size": "2*1",
        "puzzle": "There are 2 houses. Eric is left of Arnold.",
        "solution": {"header": ["House", "Name"], "rows": cells},
        "created_at": "2024-07-03T21:21:29",
    }


def zebra_grid(path: Path, redacted: bool = False) -> Path:
    text = dict.fromkeys(("id", "size", "puzzle", "created_at"), pa.string())
    return parquet(path, [zebra_row(redacted)], text | {"solution": GRID})


CHOICE = {
    "id": "mc-1",
    "puzzle": "There are 2 houses. Eric is left of Arnold.",
    "question": "Who lives in House 2?",
    "choices": ["Eric", "Arnold"],
    "answer": "Arnold",
    "created_at": "2024-07-11T00:00:00",
}


def zebra_choice(path: Path) -> Path:
    text = dict.fromkeys(("id", "puzzle", "question", "answer", "created_at"), pa.string())
    return parquet(path, [CHOICE], text | {"choices": pa.list_(pa.string())})


def synlogic(path: Path) -> Path:
    row = {
        "data_source": "game_of_24",
        "prompt": [{"role": "user", "content": "Make 24 of 1 2 3 4."}],
        "ability": "logic",
        "reward_model": {"answer": "", "solution": "", "style": "rule"},
        "extra_info": {"game_data_str": json.dumps({"question": "q", "answer": "1*2*3*4"}), "index": 4},
    }
    reward = pa.struct([("answer", pa.string()), ("solution", pa.string()), ("style", pa.string())])
    info = pa.struct([("game_data_str", pa.string()), ("index", pa.int64())])
    return parquet(path, [row], DAPO_SCHEMA | {"reward_model": reward, "extra_info": info})
