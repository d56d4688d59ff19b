"""A few seconds of tools/fuzz.py against a real replay process, and what the fuzzer would notice."""

import pytest
from fuzz import Fuzzer
from fuzz_input import check_decoders


@pytest.mark.parametrize("curve", [False, True])
def test_a_few_seconds_of_malformed_input(tmp_path, curve):
    tmp_path.chmod(0o700)
    said = []
    fuzzer = Fuzzer(7, tmp_path, tmp_path / "kept", curve)
    good = fuzzer.run(4.0, 60.0, 400.0, said.append)
    assert good, (fuzzer.failures, said)
    assert fuzzer.sent["messages"] > 50 and fuzzer.sent["names"] > 0


def test_a_decoder_that_raises_something_else_is_noticed():
    assert check_decoders([b"msg", b"\xc1"]) == ""
    assert check_decoders(["msg", 5]).startswith("decode: TypeError")
