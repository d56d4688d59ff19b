"""tools/sglang_contract.py without a server: its lines, its exit status, and what it says when nothing answers.

What it finds out about a real server is tested in tests/sglang/test_contract.py.
"""

import socket
from pathlib import Path

import pytest
import sglang_contract
from sglang_contract_lib.report import MISSING, OK, SKIPPED, WRONG, Report

from asyncrl.engines.sglang.client import Refused
from asyncrl.errors import RouteError


def test_missing_and_wrong_lines_make_the_exit_status(capsys):
    report = Report()
    report.add(OK, "flags", "fine")
    report.add(SKIPPED, "update", "not asked for")
    assert report.status == 0
    report.add(MISSING, "abort", "no such path")
    assert report.status == 1
    assert capsys.readouterr().out.splitlines()[0].split() == ["ok", "flags", "fine"]


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (Refused("POST /x", 404, "Not Found"), MISSING),
        (Refused("POST /x", 400, "no"), WRONG),
        (RouteError("r: expected 3 rows"), WRONG),
        (TimeoutError(), WRONG),
    ],
)
def test_an_error_of_a_check_becomes_its_line(error, status):
    report = Report()
    with report.check("abort"):
        raise error
    assert [line[:2] for line in report.lines] == [(status, "abort")]
    assert str(error) in report.lines[0][2]


def test_an_error_that_is_ours_is_not_the_servers():
    with pytest.raises(KeyError), Report().check("abort"):
        raise KeyError("bug")


def test_a_server_that_is_not_there_is_named(capsys):
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        assert sglang_contract.main([url]) == 1
    assert capsys.readouterr().out.startswith("WRONG    server")


@pytest.mark.parametrize("arguments", [["host:1"], ["http://h:1", "--api-key-file", "/no/such/file"]])
def test_an_unusable_option_is_an_error_of_the_caller(capsys, arguments):
    assert sglang_contract.main(arguments) == 2
    assert capsys.readouterr().err.startswith("error: ")


def test_the_model_folder_is_the_given_one_or_the_servers_own(tmp_path):
    own = {"model_path": str(tmp_path)}
    assert sglang_contract._folder(Path("/given"), own) == Path("/given")
    assert sglang_contract._folder(None, own) is None  # no config.json there
    (tmp_path / "config.json").write_text("{}")
    assert sglang_contract._folder(None, own) == tmp_path
    assert sglang_contract._folder(None, {"model_path": "Qwen/Qwen3-30B-A3B"}) is None
