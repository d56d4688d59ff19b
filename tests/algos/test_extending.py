"""docs/extending.md, done: its blocks go into a copy of the package, which then trains with the new method.

The other kinds of methods are added the same way, with the shortest file each: a file and a line have to be enough.
"""

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from asyncrl.algos.seam import INPUTS
from asyncrl.process import role_environment
from tests.helpers.tiny_models import qwen3_moe

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/extending.md"
PARTS = ("asyncrl", "configs", "docs", "tests", "tools", "pyproject.toml", "README.md")


class Block(NamedTuple):
    """A block of code and where it goes: a new file, or a file with the line after which it stands."""

    text: str
    file: str
    owner: str = ""
    after: str = ""


def blocks(page: str) -> list[Block]:
    """The Python blocks of the page. The paragraph above each says where it goes, in one of three ways."""
    found = []
    for above, text in re.findall(r"\n\n([^\n]+):\n\n```python\n(.*?)```", page, re.DOTALL):
        if new := re.search(r"`([\w.]+)`, a new file in `([\w/]+)`", above):
            found.append(Block(text, f"{new[2]}/{new[1]}"))
        elif line := re.search(r"last in `(\w+)` of `([\w/.]+)`", above):
            found.append(Block(text, line[2], line[1]))
        elif key := re.search(r"after `(\w+)` in `(\w+)` of `([\w/.]+)`", above):
            found.append(Block(text, key[3], key[2], key[1]))
        else:
            raise AssertionError(f"nothing says where this block goes: {above}")
    return found


def last_line(source: str, owner: str, after: str) -> int:
    """Number of the line of `source` below which a block goes: in a table before its end, in a class after a key."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == owner:
            return node.end_lineno - 1
        if isinstance(node, ast.ClassDef) and node.name == owner:
            (place,) = [i for i, n in enumerate(node.body) if isinstance(n, ast.AnnAssign) and n.target.id == after]
            words = node.body[place + 1]
            assert isinstance(words, ast.Expr), f"{after} has no docstring"
            return words.end_lineno
    raise AssertionError(f"no {owner}")


def apply(block: Block, copy: Path) -> None:
    path = copy / block.file
    if not block.owner:
        assert not path.exists(), f"{block.file} is there already"
        path.write_text(block.text)
        return
    lines = path.read_text().splitlines(keepends=True)
    at = last_line("".join(lines), block.owner, block.after)
    path.write_text("".join([*lines[:at], block.text, *lines[at:]]))


def copy_of_the_repository(folder: Path) -> Path:
    ignore = shutil.ignore_patterns("__pycache__", "*.pyc", "images")
    for part in PARTS:
        if (ROOT / part).is_dir():
            shutil.copytree(ROOT / part, folder / part, ignore=ignore)
        else:
            shutil.copy(ROOT / part, folder / part)
    return folder


def changed(copy: Path) -> set[str]:
    """Files of the package that the copy has or has otherwise."""
    files = {p.relative_to(copy) for p in (copy / "asyncrl").rglob("*.py")}
    files |= {p.relative_to(ROOT) for p in (ROOT / "asyncrl").rglob("*.py")}

    def text(path):
        return path.read_bytes() if path.exists() else None

    return {f.as_posix() for f in files if text(copy / f) != text(ROOT / f)}


def run(copy: Path, *command: object) -> str:
    env = {**role_environment(1), "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"}
    words = [sys.executable, *map(str, command)]
    done = subprocess.run(words, cwd=copy, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def run_tests(copy: Path, *words: str) -> str:
    paths = [copy / "tests" / word if word.endswith(".py") else word for word in words]
    return run(copy, "-m", "pytest", "-v", "-p", "no:cacheprovider", *paths)


def train(copy: Path, model: str, store: Path, *overrides: str) -> dict:
    fast = ("learner.lr=0.01", "learner.warmup_updates=0", "staleness.updates_per_take=4")
    out = run(copy, copy / "tests/algos/extended_worker.py", copy, model, store, *fast, *overrides)
    return json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    qwen3_moe(hidden=32, layers=2, experts=8, top_k=2, vocab=64, seed=3).save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def copy(tmp_path_factory):
    """The repository after a reader did what the page says."""
    folder = copy_of_the_repository(tmp_path_factory.mktemp("copy"))
    for block in blocks(PAGE.read_text()):
        apply(block, folder)
    return folder


def test_the_page_names_the_inputs_that_there_are():
    rows = re.findall(r"^\| \w+ \| `(\w+)` \| ([^|]+) \|", PAGE.read_text(), re.MULTILINE)
    assert {folder: tuple(re.findall(r"`(\w+)`", names)) for folder, names in rows} == INPUTS


def test_nothing_but_the_methods_and_the_settings_is_touched(copy):
    assert changed(copy) == {
        "asyncrl/algos/surrogates/sapo.py",
        "asyncrl/algos/registry.py",
        "asyncrl/sections/algorithm.py",
    }


def test_the_run_command_of_the_page_is_a_config(copy):
    (words,) = re.findall(r"^asyncrl run (.*sapo.*)$", PAGE.read_text(), re.MULTILINE)
    code = (
        "import sys\n"
        "from asyncrl import tunable\n"
        "from asyncrl.config import load_config\n"
        "a = load_config(sys.argv[1], sys.argv[2:]).algorithm\n"
        "assert (a.surrogate, a.tau_pos, a.tau_neg) == ('sapo', 1.0, 1.05)\n"
        "assert 'torch' not in sys.modules\n"
        "try: tunable.check('algorithm.tau_neg')\n"
        "except ValueError as refused: print(refused)\n"
    )
    said = run(copy, "-c", code, *words.split())
    assert said.startswith("algorithm.tau_neg cannot be changed in a running job: it is another objective")


def test_a_knob_of_it_is_refused_where_it_would_do_nothing(copy):
    code = (
        "import sys\n"
        "from asyncrl.config import load_config\n"
        "try: load_config('configs/quickstart.yaml', sys.argv[1:])\n"
        "except ValueError as refused: print(refused)\n"
    )
    assert "algorithm.tau_pos=2.0 is a knob of sapo, and has no effect" in run(copy, "-c", code, "algorithm.tau_pos=2")
    said = run(copy, "-c", code, "algorithm.surrogate=sapo")
    assert "algorithm.surrogate=sapo changes nothing" in said and "staleness.updates_per_take=4" in said
    said = run(copy, "-c", code, "algorithm.surrogate=spao")
    assert "'gmpo' or 'sapo'" in said and "did you mean 'sapo'?" in said


def test_its_own_test_and_those_of_every_method_pass(copy):
    names = ("algos/test_sapo.py", "algos/test_registry.py", "algos/test_surrogates_registry.py", "test_tunable.py")
    said = run_tests(copy, *names, "-k", "sapo or test_registry or test_tunable")
    by_file = {name: len(re.findall(rf"tests/{name}::.* PASSED", said)) for name in names}
    assert all(by_file.values()) and " SKIPPED" not in said, by_file


def test_it_is_in_the_house_style(copy):
    files = [copy / block.file for block in blocks(PAGE.read_text())]
    run(copy, "-m", "ruff", "check", "--no-cache", *files)
    run(copy, "-m", "ruff", "format", "--check", "--no-cache", *files)


def test_the_page_of_settings_gets_its_name_and_keys(copy):
    out = copy / "config.md"
    run(copy, copy / "tools/config_reference.py", out)
    rows = {row.split("`")[1]: row for row in out.read_text().splitlines() if row.startswith("| `")}
    assert r"\| gmpo \| sapo | `clip` |" in rows["algorithm.surrogate"]
    assert "float, > 0, <= 1000 | `1.05` | sapo: " in rows["algorithm.tau_neg"]


def test_an_update_trains_with_it(copy, model, tmp_path):
    sapo = train(copy, model, tmp_path / "sapo", "algorithm.surrogate=sapo")
    clip = train(copy, model, tmp_path / "clip", "algorithm.surrogate=clip")
    # 4 sigma(0), 4 sigma(1), 4 sigma(-0.5) of tau 1; 3 times 4 / 1.05 sigma(1.05 (r - 1)).
    assert sapo["losses"] == pytest.approx([-2.0, -2.924234, -1.510163, 5.714286, 8.466001, 4.247823], abs=1e-5)
    assert clip["losses"] == pytest.approx([-1.0, -1.27, -0.5, 3.0, 6.0, 2.4], abs=1e-5)
    assert [outcome for outcome, _ in sapo["updates"]] == ["stepped"] * 2
    # With pi = pi_old the gradients are the same, after a step they are not.
    (first, second), (first_clip, second_clip) = ([norm for _, norm in r["updates"]] for r in (sapo, clip))
    assert first == pytest.approx(first_clip, rel=1e-3) and first > 0
    assert second != pytest.approx(second_clip, rel=1e-2)


OTHERS = [
    Block(
        "import torch\n\n\ndef half(logp, mask, share=0.5):\n    return torch.full_like(logp, share) * (mask != 0)\n",
        "asyncrl/algos/corrections/half.py",
    ),
    Block('    "half": Correction("corrections.half:half", ("share",)),\n', "asyncrl/algos/registry.py", "CORRECTIONS"),
    Block('    share: float = 0.5\n    """half."""\n', "asyncrl/sections/algorithm.py", "CorrectionSection", "floor"),
    Block(
        "def sign(groups, height=1.0):\n    return groups.centred.sign() * height\n", "asyncrl/algos/advantages/sign.py"
    ),
    Block('    "sign": Advantage("advantages.sign:sign", ("height",)),\n', "asyncrl/algos/registry.py", "ADVANTAGES"),
    Block("def total(sum_B, part=1.0):\n    return sum_B.sum() * part\n", "asyncrl/algos/aggregate/total.py"),
    Block('    "total": Method("aggregate.total:total", ("part",)),\n', "asyncrl/algos/registry.py", "AGGREGATIONS"),
    Block(
        '    height: float = 1.0\n    """sign."""\n    part: float = 1.0\n    """total."""\n',
        "asyncrl/sections/algorithm.py",
        "AlgorithmSection",
        "aggregation",
    ),
]


def test_the_other_kinds_are_added_the_same_way(model, tmp_path):
    copy = copy_of_the_repository(tmp_path / "copy")
    for block in OTHERS:
        apply(block, copy)
    words = ("algorithm.correction.kind=half", "algorithm.advantage=sign", "algorithm.aggregation=total")
    knobs = ("algorithm.correction.share=0.25", "algorithm.height=2", "algorithm.part=0.5")
    got = train(copy, model, tmp_path / "others", *words, *knobs)
    assert got["losses"] == pytest.approx([x / 8 for x in (-1.0, -1.27, -0.5, 3.0, 6.0, 2.4)], abs=1e-5)
    assert [outcome for outcome, _ in got["updates"]] == ["stepped"] * 2
    assert all("/algos/" in f or "/sections/" in f for f in changed(copy))
    run_tests(copy, "test_tunable.py")
