"""What a reader of the repository relies on: links, commands, pins, no traces of one machine."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
PAGES += sorted((ROOT / "docs").glob("*.md"))
# What .gitignore leaves out; models and runs only at the top.
CACHES = {".git", ".venv", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis", "__pycache__"}
MADE = {"runs", "models", "reports", "build", "dist"}


def text_files() -> list[Path]:
    found = []
    for path in sorted(ROOT.rglob("*")):
        parts = path.relative_to(ROOT).parts
        if not path.is_file() or CACHES & set(parts) or parts[0] in MADE or parts[0].endswith(".egg-info"):
            continue
        if path.suffix != ".log":
            found.append(path)
    return [p for p in found if b"\0" not in p.read_bytes()[:4096]]


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as the usual renderers make them."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_relative_links_resolve(page):
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    broken = []
    for link in links:
        if link.startswith(("http://", "https://", "mailto:")):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target) if target else page
        if not path.exists() or (anchor and anchor not in anchors(path)):
            broken.append(link)
    assert not broken


def test_every_page_of_the_docs_is_linked_from_the_readme():
    linked = set(re.findall(r"\]\(docs/([^)#]+)", (ROOT / "README.md").read_text()))
    assert {p.name for p in (ROOT / "docs").glob("*.md")} <= linked


def test_the_readme_opens_with_the_two_commands():
    readme = (ROOT / "README.md").read_text()
    block = re.search(r"```\n(.*?)```", readme, re.DOTALL)
    assert block is not None
    commands = [line.split("#")[0].strip() for line in block[1].splitlines()]
    assert commands == ["make quickstart", "make test"]


def test_the_commands_of_the_docs_are_targets_and_files_that_exist():
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    for page in PAGES:
        text = page.read_text()
        for target in re.findall(r"`make ([a-z-]+)`", text):
            assert target in targets, f"{page.name}: make {target}"
        for path in re.findall(r"\b((?:configs|tools|launch|tests|asyncrl)/[\w./-]+\.(?:py|yaml|sh))", text):
            assert (ROOT / path).exists(), f"{page.name}: {path}"


def test_no_path_of_a_machine_and_no_registry_host():
    # written apart so that this file does not find itself
    traces = [
        "/ro" + "ot/",
        "/wo" + "rk/",
        "/ho" + "me/",
        "/tm" + "p/",
        "/mn" + "t/",
        "pypi" + ".org",
        "pytorch" + ".org/whl",
    ]
    found = []
    for path in text_files():
        text = path.read_text(errors="replace")
        found += [f"{path.relative_to(ROOT)}: {trace}" for trace in traces if trace in text]
    assert not found, "\n".join(found)


def test_text_is_plain():
    found = []
    for path in text_files():
        text = path.read_text(errors="replace")
        if path.name != "LICENSE" and chr(0x2014) in text:
            found.append(f"{path.relative_to(ROOT)}: em dash")
        if path.suffix in (".py", ".sh", ".yaml", ".toml") and not text.isascii():
            found.append(f"{path.relative_to(ROOT)}: not ASCII")
        if text and not text.endswith("\n"):
            found.append(f"{path.relative_to(ROOT)}: no newline at the end")
    assert not found, "\n".join(found)


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.!]+", line) for line in lines), lines
    return {
        re.sub(r"[-_.]+", "-", name).lower(): version for name, _, version in (line.partition("==") for line in lines)
    }


def test_every_dependency_is_pinned_and_torch_to_no_particular_build():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(s for e in ("dev", "upcycle") for s in project["optional-dependencies"][e])]
    names = {re.sub(r"[-_.]+", "-", re.split(r"[^\w.-]", spec)[0]).lower() for spec in wanted}
    assert names <= set(pins())
    assert pins()["torch"] == "2.13.0"
    assert project["license"] == "Apache-2.0" and "Apache License" in (ROOT / "LICENSE").read_text()
    assert set(project["optional-dependencies"]) == {"dev", "upcycle", "sglang"}


def test_what_is_imported_is_declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = {re.split(r"[^\w.-]", spec)[0].replace("-", "_").lower() for spec in project["dependencies"]}
    names = {"zmq": "pyzmq", "yaml": "omegaconf"}
    used = set()
    for path in (ROOT / "asyncrl").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                used |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                used.add(str(node.module).partition(".")[0])
    third = {names.get(m, m) for m in used if m not in sys.stdlib_module_names and m != "asyncrl"}
    assert third - declared - {"sglang"} == set()


@pytest.mark.parametrize(
    "script", ["launch/local.sh", "launch/ssh.sh", "launch/slurm/job.sh", "tools/check", ".ci/run"]
)
def test_scripts_are_executable_and_parse(script):
    path = ROOT / script
    assert path.stat().st_mode & 0o111
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr


def test_local_launch_refuses_a_bad_config_before_it_starts_anything(tmp_path):
    command = ["bash", "launch/local.sh", "configs/quickstart.yaml", "staleness.max_lag=1", f"run.dir={tmp_path}/runs"]
    env = {"PYTHON": sys.executable, "PATH": "/usr/bin:/bin"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "staleness.max_lag=1" in done.stderr and "started" not in done.stdout
    assert not (tmp_path / "runs").exists()
    usage = subprocess.run(command[:2], cwd=ROOT, env=env, capture_output=True, text=True, timeout=30, check=False)
    assert usage.returncode == 2 and usage.stderr.startswith("usage:")


@pytest.mark.parametrize("page", ["metrics", "models"])
def test_generated_pages_are_up_to_date(page):
    command = [sys.executable, f"tools/{page}_reference.py", "--check", f"docs/{page}.md"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_configs_explain_themselves():
    for path in sorted((ROOT / "configs").rglob("*.yaml")):
        assert path.read_text().startswith("# "), path
        assert isinstance(yaml.safe_load(path.read_text()), dict)


def test_the_numbers_of_field_failures_in_the_tests_stand_in_their_table():
    table = {}
    for line in (ROOT / "docs/field_failures.md").read_text().splitlines():
        if line.startswith("| B"):
            number, *_, files = (cell.strip() for cell in line.strip("|").split("|"))
            table[number] = set(re.findall(r"`([^`]+)`", files))
    used: dict[str, set[str]] = {}
    for path in sorted((ROOT / "tests").rglob("*.py")):
        for number in re.findall(r"\bB\d{2}\b", path.read_text()):
            used.setdefault(number, set()).add(path.relative_to(ROOT / "tests").as_posix())
    assert {n: files - table.get(n, set()) for n, files in used.items() if files - table.get(n, set())} == {}
    assert all((ROOT / "tests" / file).is_file() for files in table.values() for file in files)
