"""The rules of the house on the source text: who imports whom, what is banned, how long files may be."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "asyncrl"
FILES = sorted(PACKAGE.rglob("*.py"))

# What each unit may import of asyncrl, besides itself. A unit is a folder or a file of the package.
BELOW: dict[str, set[str]] = {
    "errors": set(),
    "parent": set(),
    "suggest": set(),
    "types": {"errors"},
    # the config for its type only; see test_rules_import_the_config_for_its_type_only
    "rules": {"config", "rules_algorithm", "rules_task"},
    "rules_algorithm": {"config", "sections"},
    "rules_engine": {"config"},
    "rules_task": {"config"},
    "sections": {"suggest"},
    "config": {"errors", "rules", "rules_engine", "rules_task", "suggest", "sections"},
    "tunable": {"errors", "suggest", "config"},
    "arrays": {"errors"},
    "wire": {"arrays", "errors", "types"},
    "algos": {"errors"},
    "transport": {"errors"},
    "tasks": {"errors", "parent", "types", "config", "sections"},
    "metrics": {"errors", "sections", "types"},
    "replay": {"errors", "types", "config", "tunable", "arrays", "wire", "transport", "tasks"},
    "models": {"errors", "types"},
    "weights": {"errors", "parent", "types", "models", "transport"},
    "engines": {"errors", "types", "models"},
    "generator": {"errors", "types", "config", "arrays", "wire", "transport", "tasks", "models", "weights", "engines"},
    "learner": {
        "errors",
        "types",
        "config",
        "tunable",
        "sections",
        "arrays",
        "wire",
        "transport",
        "algos",
        "models",
        "weights",
        "metrics",
    },
}
# Single modules besides, torch-free ones: what replay must know of the model, and which methods a config may name.
ALSO: dict[str, set[str]] = {
    "replay": {"asyncrl.models.describe"},
    "sections": {"asyncrl.algos.registry"},
    "rules_algorithm": {"asyncrl.algos.registry"},
}
FREE = {module.removeprefix("asyncrl.").replace(".", "/") for modules in ALSO.values() for module in modules}
# Commands and supervision sit on top: they may import everything, nothing below imports them.
TOP = {
    "__init__", "__main__", "cli", "launcher", "preflight", "preflight_reference", "preflight_sglang", "process",
    "progress", "remote", "restarts", "resume", "supervisor", "watch", "lens", "samples", "evaluate",
}  # fmt: skip

# Third-party packages that live behind one border.
HOMES: dict[str, set[str]] = {
    "zmq": {"transport", "weights/zmq"},
    "omegaconf": {"config"},
    "yaml": {"config"},
    "pydantic": {"config", "sections"},
    "msgspec": {
        "arrays",
        "wire",
        "weights",
        "learner/checkpoint",
        "learner/dump",
        "learner/dumping",
        "learner/saved",
        "learner/stored",
        "learner/table",
        "replay/peers",
        "replay/snapshot",
    },
    "tensorboard": {"metrics/events"},
    "typer": {"cli", "watch/commands", "lens/command", "samples/command", "evaluate/command"},
    "matplotlib": {"lens/plots"},
    "pyarrow": {"tasks/data"},
    "jsonschema": {"tasks/rewards"},
    "transformers": {"models", "engines"},
    "reasoning_gym": {"tasks"},
    "sglang": {"engines"},
    "aiohttp": {"engines/sglang"},
    "torch.distributed": {"learner", "launcher", "weights/collective"},
}
TORCH = {"algos", "models", "weights", "engines", "generator", "learner", "launcher", "lens", "samples", "evaluate"}


def unit_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def module_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").as_posix()


def imports(path: Path) -> Iterator[tuple[int, str]]:
    """Line and dotted name of every import, also those inside functions."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)


def where(path: Path, line: int) -> str:
    return f"{path.relative_to(ROOT)}:{line}"


def is_under(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def test_every_unit_has_its_place():
    units = {unit_of(path) for path in FILES}
    assert units - set(BELOW) - TOP == set()


def test_imports_go_down_only():
    wrong = []
    for path in FILES:
        unit = unit_of(path)
        if unit in TOP:
            continue
        for line, name in imports(path):
            parts = name.split(".")
            target = parts[1] if parts[0] == "asyncrl" and len(parts) > 1 else None
            if target in (None, "__version__", unit) or target in BELOW[unit]:
                continue
            if any(is_under(name, module) for module in ALSO.get(unit, ())):
                continue
            wrong.append(f"{where(path, line)}: {unit} imports {name}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("rules", ["rules.py", "rules_algorithm.py", "rules_engine.py", "rules_task.py"])
def test_rules_import_the_config_for_its_type_only(rules):
    tree = ast.parse((PACKAGE / rules).read_text())
    guarded = [n for n in tree.body if isinstance(n, ast.If) and ast.unparse(n.test) == "TYPE_CHECKING"]
    inside = [n for block in guarded for n in block.body]
    assert all(isinstance(n, ast.ImportFrom) for n in inside)
    types = {str(n.module) for n in inside if isinstance(n, ast.ImportFrom)}
    assert "asyncrl.config" in types and all(is_under(m, "asyncrl.sections") for m in types - {"asyncrl.config"})
    outside = [n for n in tree.body if isinstance(n, ast.ImportFrom)]
    # `from asyncrl import rules_task`, which is one of them
    known = {"rules.py": {"asyncrl"}, "rules_algorithm.py": {"asyncrl.algos.registry"}}.get(rules, set())
    assert {str(n.module) for n in outside if str(n.module).startswith("asyncrl")} <= known


@pytest.mark.parametrize("package", HOMES)
def test_third_parties_stay_at_home(package):
    homes = HOMES[package]
    wrong = [
        where(path, line)
        for path in FILES
        if not any(f"{module_of(path)}/".startswith(f"{home}/") for home in homes)
        for line, name in imports(path)
        if is_under(name, package)
    ]
    assert not wrong, f"{package} may be imported in {sorted(homes)} only: {wrong}"


def test_torch_stays_out_of_the_light_side():
    wrong = [
        where(path, line)
        for path in FILES
        if unit_of(path) not in TORCH or module_of(path) in {*FREE, "algos/__init__", "models/__init__"}
        for line, name in imports(path)
        if is_under(name, "torch") or is_under(name, "transformers")
    ]
    assert not wrong, wrong


LIGHT = {
    "types, config, wire": ["types", "config", "wire"],
    "transport": ["transport"],
    "replay": ["replay"],
    "tasks": ["tasks"],
    "metrics": ["metrics"],
    "models/describe": ["models/describe"],
    "algos/registry, sections": ["algos/registry", "sections"],
    "cli": ["cli", "preflight"],
}


@pytest.mark.parametrize("names", LIGHT.values(), ids=LIGHT)
def test_the_light_side_really_imports_without_torch(names):
    modules = []
    for name in names:
        path = PACKAGE / name
        found = sorted(path.rglob("*.py")) if path.is_dir() else [path.with_suffix(".py")]
        assert found, f"{name} has no code"
        modules += [".".join(("asyncrl", *p.relative_to(PACKAGE).with_suffix("").parts)) for p in found]
    modules = [m.removesuffix(".__init__") for m in modules]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "heavy = {'torch', 'transformers', 'tensorflow', 'sglang'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr


BANNED_MODULES = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
BANNED_CALLS = {
    "eval": "evaluates text",
    "exec": "evaluates text",
    "__import__": "use importlib",
    "recv_pyobj": "unpickles what a peer sent",
    "send_pyobj": "pickles",
    "torch.load": "unpickles; weights are safetensors or raw frames",
    "torch.save": "pickles; weights are safetensors or raw frames",
    "os.system": "runs a shell",
    "os.popen": "runs a shell",
    "os.fork": "processes are spawned",
    "yaml.load": "use OmegaConf in config.py",
}


def calls(tree: ast.AST) -> Iterator[tuple[ast.Call, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield node, ast.unparse(node.func)


def test_tools_and_tests_fork_no_process_either():
    """A fork after torch, numba or zmq copies their locks and none of their threads."""
    paths = [path for folder in ("tools", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(paths) > 100
    assert [p.name for p in paths for _, name in calls(ast.parse(p.read_text())) if name == "os.fork"] == []


def test_nothing_received_can_be_unpickled_or_evaluated():
    wrong = []
    for path in FILES:
        wrong += [f"{where(path, n)}: {m}" for n, m in imports(path) if m.split(".")[0] in BANNED_MODULES]
        for node, name in calls(ast.parse(path.read_text())):
            for banned, why in BANNED_CALLS.items():
                # a method of that last name too (socket.recv_pyobj), but model.eval() is torch's
                if name == banned or (banned.endswith("_pyobj") and name.endswith("." + banned)):
                    wrong.append(f"{where(path, node.lineno)}: {name} {why}")
            for keyword in node.keywords:
                value = keyword.value
                is_true = isinstance(value, ast.Constant) and value.value is True
                is_false = isinstance(value, ast.Constant) and value.value is False
                if (keyword.arg == "shell" and is_true) or (keyword.arg in ("weights_only", "safe_load") and is_false):
                    wrong.append(f"{where(path, node.lineno)}: {keyword.arg}={ast.unparse(value)}")
                if keyword.arg == "allow_pickle" and not is_false:
                    wrong.append(f"{where(path, node.lineno)}: allow_pickle")
    assert not wrong, "\n".join(wrong)


def test_processes_are_spawned():
    wrong = []
    for path in FILES:
        for node, name in calls(ast.parse(path.read_text())):
            if name.endswith(("get_context", "set_start_method")):
                assert node.args, f"{where(path, node.lineno)}: name the start method"
                if ast.unparse(node.args[0]) != "'spawn'":
                    wrong.append(where(path, node.lineno))
            if name in (
                "multiprocessing.Process",
                "mp.Process",
                "multiprocessing.Queue",
                "mp.Queue",
                "Pool",
                "mp.Pool",
            ):
                wrong.append(f"{where(path, node.lineno)}: {name} forks here by default")
    assert not wrong, wrong


def test_broad_excepts_live_in_two_places():
    """Process mains (log, exit 1) and the metrics sink (log, go on)."""
    allowed = {"metrics/sink", "cli", "__main__", "supervisor", "tasks/worker", "tasks/environments/worker"}
    wrong = []
    for path in FILES:
        if module_of(path) in allowed:
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ExceptHandler):
                continue
            caught = ast.unparse(node.type) if node.type else "everything"
            reraises = any(isinstance(n, ast.Raise) for n in ast.walk(node))
            if caught in ("Exception", "BaseException", "everything") and not reraises:
                wrong.append(f"{where(path, node.lineno)}: except {caught}")
    assert not wrong, "\n".join(wrong)


def test_files_and_functions_stay_readable():
    long = []
    for path in FILES:
        text = path.read_text()
        lines = text.count("\n")
        if lines > 400:
            long.append(f"{path.relative_to(ROOT)}: {lines} lines, at most 400")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or 0) - node.lineno + 1
                if length > 80:
                    long.append(f"{where(path, node.lineno)}: {node.name} has {length} lines, at most 80")
    assert not long, "\n".join(long)


def test_every_module_says_what_it_is():
    missing = [str(p.relative_to(ROOT)) for p in FILES if not ast.get_docstring(ast.parse(p.read_text()))]
    assert not missing
