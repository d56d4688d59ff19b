"""tools/sglang_contract.py against a real server: all is well, it is left as it was, and every corruption is named."""

from collections.abc import Iterator

import pytest
import sglang_contract

from asyncrl.engines.sglang.flags import _RULES
from tests.helpers import sglang_server
from tests.helpers.corrupting_proxy import CorruptingProxy
from tests.helpers.sglang_server import Server

CHECKS = {
    "server", "flags", "keys", "generate", "vocabulary", "temperature", "start_len", "stop token", "extra_key",
    "abort", "pause", "weights", "update",
}  # fmt: skip


@pytest.fixture(scope="module")
def moe_server(can_serve, untied_moe, tmp_path_factory) -> Iterator[Server]:
    running = sglang_server.start(tmp_path_factory.mktemp("contract") / "server.log", untied_moe)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def proxy(moe_server) -> Iterator[CorruptingProxy]:
    with CorruptingProxy(moe_server.url, num_experts=8) as made:
        yield made


@pytest.fixture
def corrupt(proxy):
    yield proxy.corrupt
    proxy.honest()


def checked(capsys, *arguments: str) -> tuple[int, dict[str, str], str]:
    """Exit status, the last status of each check, and all that was printed."""
    status = sglang_contract.main([*arguments, "--answer-s", "20"])
    text = capsys.readouterr().out
    lines = [line.split(None, 1) for line in text.splitlines()]
    found = {}
    for word, rest in lines:
        name = next((check for check in sorted(CHECKS | {"weight_versions", "restore", "everything else"}, key=len)
                     [::-1] if rest.startswith(check)), rest)  # fmt: skip
        found[name] = word
    return status, found, text


def state(server: Server) -> tuple[str, list[dict[str, str]]]:
    """The label and all checksums."""
    ranks = server.call("/weights_checker", {"action": "checksum", "selector": "all"})[1]["ranks"]
    return server.call("/model_info")[1]["weight_version"], [rank["checksums"] for rank in ranks]


def test_a_good_server_passes_every_check_and_is_left_as_it_was(moe_server, capsys):
    before = state(moe_server)
    status, found, text = checked(capsys, moe_server.url, "--model", str(moe_server.model), "--updates")
    assert status == 0, text
    assert found == dict.fromkeys([*CHECKS, "weight_versions", "restore"], "ok"), text
    assert state(moe_server) == before
    assert moe_server.generate([2, 3, 4], 4)["meta_info"]["completion_tokens"] == 4  # it is not paused
    # Again: no group of the first time is in the way.
    assert checked(capsys, moe_server.url, "--updates")[0] == 0
    assert state(moe_server) == before


def test_every_flag_that_is_checked_is_one_of_this_version(moe_server):
    info = moe_server.call("/server_info")[1]
    assert [rule.key for rule in _RULES if rule.key not in info] == []


CORRUPTIONS = {
    "zeros": "generate",
    "repeated_row": "generate",
    "row_too_many": "generate",
    "row_missing": "generate",
    "id_too_large": "generate",
    "negative_id": "generate",
    "no_routes_field": "generate",
    "stale_prefix": "generate",
    "nan_logprobs": "generate",
    "null_logprobs": "generate",
    "positive_logprobs": "generate",
    "logprob_missing": "generate",
    "logprobs_shifted": "generate",
    "no_logprobs": "generate",
    "no_output_ids": "generate",
    "no_weight_versions": "generate",
    "swapped_version": "generate",
    "version_gap": "generate",
    "cut_short": "generate",
    "http_500": "generate",
    "no_json": "generate",
    "cut_connection": "generate",
    "stop_token_cut": "stop token",
    "ignores_stop_tokens": "stop token",
    "ignores_temperature": "temperature",
    "ignores_cache_key": "extra_key",
}


@pytest.mark.long
@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corrupted_reply_fails_the_check_that_is_there_for_it(proxy, corrupt, capsys, name):
    corrupt(name)
    status, found, text = checked(capsys, proxy.url)
    assert status == 1 and proxy.corrupted[name]
    assert found[CORRUPTIONS[name]] in ("WRONG", "MISSING"), text


def test_a_server_that_ignores_the_start_of_the_routes_is_understood(proxy, corrupt, capsys):
    corrupt("ignores_start_len")
    status, _, text = checked(capsys, proxy.url)
    assert status == 0, text
    assert "the server sends all rows again" in text


@pytest.mark.long
@pytest.mark.parametrize(
    ("path", "name", "check"),
    [
        ("/abort_request", "ignores_abort", "abort"),
        ("/pause_generation", "ignored", "pause"),
        ("/weights_checker", "refused", "weights"),
        ("/server_info", "http_500", "server"),
    ],
)
def test_a_path_that_does_not_do_its_work_is_named(proxy, corrupt, capsys, path, name, check):
    corrupt(name, path)
    status, found, text = checked(capsys, proxy.url)
    assert status == 1 and found[check] in ("WRONG", "MISSING"), text


@pytest.mark.parametrize(
    "path",
    [
        "/init_weights_update_group",
        "/begin_weight_update",
        "/update_weights_from_distributed",
        "/end_weight_update",
    ],
)
def test_an_update_that_fails_is_named_and_put_right(moe_server, proxy, corrupt, capsys, path):
    before = state(moe_server)
    corrupt("success_false", path, times=1)
    status, found, text = checked(capsys, proxy.url, "--updates", "--timeout-s", "20")
    assert status == 1 and found["update"] == "WRONG", text
    assert found["restore"] == "ok", text
    assert state(moe_server) == before


def test_keys_are_used_and_asked_for(start_server, untied_moe, tmp_path, capsys):
    keys = tmp_path / "key", tmp_path / "admin"
    for file, key in zip(keys, ("one", "two"), strict=True):
        file.write_text(key)
        file.chmod(0o600)
    server = start_server(model=untied_moe, key="one", admin_key="two")
    given = ["--api-key-file", str(keys[0]), "--admin-key-file", str(keys[1])]
    status, found, text = checked(capsys, server.url, *given)
    assert (status, found["keys"]) == (0, "ok"), text
    assert "they are asked for" in text
    status, found, text = checked(capsys, server.url, "--api-key-file", str(keys[1]))
    assert (status, found["server"]) == (1, "WRONG") and "401" in text, text


def test_a_server_without_routes_is_told_which_flag_it_needs(proxy, corrupt, capsys):
    corrupt("no_routes_flag", "/server_info")
    status, found, text = checked(capsys, proxy.url)
    assert (status, found["flags"]) == (1, "WRONG")
    assert "--enable-return-routed-experts" in text and "everything else" in text


def test_a_tied_checkpoint_whose_output_matrix_the_server_lacks_is_named_and_stays_so(start_server, capsys):
    server = start_server()
    before = state(server)
    status, found, text = checked(capsys, server.url, "--updates")
    assert (status, found["weights"], found["temperature"]) == (0, "skipped", "skipped"), text
    assert "lm_head.weight is not the embeddings" in text
    assert "WRONG" not in found.values(), text
    assert state(server) == before
