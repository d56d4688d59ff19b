"""What two small requests say about a server's temperature, worked out from the logits [2, 1, 0, -1]."""

import asyncio
import math

import pytest

from asyncrl.engines.sglang.checks import check_temperature, check_vocabulary
from asyncrl.engines.sglang.client import Refused
from asyncrl.errors import EngineError

LOGITS = (2.0, 1.0, 0.0, -1.0)


class Given:
    """A client whose server answers with the log-probs at temperature `at(asked)`."""

    url = "http://host:1"

    def __init__(self, at=lambda asked: asked, logits=LOGITS, error=None, reply=None):
        self.at, self.logits, self.error, self.reply = at, logits, error, reply
        self.asked = []

    async def post(self, path, body):
        self.asked.append(body)
        if self.error is not None:
            raise self.error
        if self.reply is not None:
            return self.reply
        scaled = [x / self.at(body["sampling_params"]["temperature"]) for x in self.logits]
        total = math.log(sum(map(math.exp, scaled)))
        return {"meta_info": {"output_top_logprobs": [[[x - total, i, None] for i, x in enumerate(scaled)]]}}


@pytest.mark.parametrize("temperature", [0.2, 0.6, 0.9, 1.1, 1.5, 3.0])
def test_log_probs_at_the_asked_temperature_pass_and_those_at_1_do_not(temperature):
    assert asyncio.run(check_temperature(Given(), temperature))
    with pytest.raises(EngineError, match=r"log-probs at temperature 1 for samples at"):
        asyncio.run(check_temperature(Given(at=lambda asked: 1.0), temperature))
    with pytest.raises(EngineError, match=r"log-probs at temperature"):
        asyncio.run(check_temperature(Given(at=lambda asked: asked * asked), temperature))


def test_at_temperature_1_nothing_is_asked():
    client = Given()
    assert asyncio.run(check_temperature(client, 1.0))
    assert client.asked == []


def test_logits_that_are_all_equal_tell_nothing():
    assert not asyncio.run(check_temperature(Given(logits=(0.0, 0.0, 0.0)), 0.6))


def test_the_two_requests_share_no_cache_with_any_other():
    client = Given()
    asyncio.run(check_temperature(client, 0.6))
    first, second = client.asked
    assert [body["sampling_params"]["temperature"] for body in client.asked] == [1.0, 0.6]
    assert first["extra_key"] != second["extra_key"] and first["input_ids"] == second["input_ids"]
    assert first["top_logprobs_num"] == 16


def test_a_server_without_top_log_probs_is_named():
    with pytest.raises(EngineError, match=r"http://host:1 gave no output_top_logprobs"):
        asyncio.run(check_temperature(Given(reply={"meta_info": {}}), 0.6))


def test_the_largest_token_of_the_run_is_asked_for():
    client = Given(reply={})
    asyncio.run(check_vocabulary(client, 64))
    assert client.asked[0]["token_ids_logprob"] == [63]


def test_only_a_refusal_about_the_vocabulary_is_one():
    small = Refused("POST x", 400, "token_ids_logprob contains out-of-vocabulary token id 63; valid range is [0, 16).")
    with pytest.raises(EngineError, match=r"has 64 tokens, that of http://host:1 fewer"):
        asyncio.run(check_vocabulary(Given(error=small), 64))
    with pytest.raises(Refused, match="busy"):
        asyncio.run(check_vocabulary(Given(error=Refused("POST x", 503, "busy")), 64))
