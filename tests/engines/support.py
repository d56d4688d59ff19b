"""What a plain forward of the same model says about a completion, and a batch that is stepped by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from asyncrl.engines.base import Turn
from asyncrl.engines.batch import Batch
from asyncrl.engines.choose import make_decoder
from asyncrl.engines.decoder import Decoder
from asyncrl.engines.requests import Request
from asyncrl.models.names import Loader
from asyncrl.models.routes import RouteHook
from asyncrl.types import Completion, ModelInfo, SamplingParams, Version

# Experts of the usual 0.02 would hardly show in the logits; sharper routers would amplify rounding.
LOUD: dict[str, Any] = {"initializer_range": 0.1, "router_scale": 4.0}

MakeDecoder = Callable[[PreTrainedModel, RouteHook | None, int], Decoder]


class Stepper:
    """A model in a Batch without a thread; `batch.step()` is called by the test."""

    def __init__(
        self,
        model: PreTrainedModel,
        rows: int = 8,
        seed: int = 0,
        make: MakeDecoder = make_decoder,
        dense: bool = False,
    ) -> None:
        self.model = model
        self.hook = None if dense else RouteHook(model)
        layers = self.hook.layers if self.hook else ()
        experts, top_k = (self.hook.num_experts, self.hook.top_k) if self.hook else (0, 0)
        self.info = ModelInfo(layers, experts, top_k, model.config.vocab_size)
        self.decoder = make(model, self.hook, rows)
        self.batch = Batch(self.decoder, self.info, Version(0, 0), rows, seed, torch.device("cpu"))

    def submit(self, prompt: Iterable[int], n: int, sampling: SamplingParams, turn: Turn | None = None) -> Request:
        """Queue a request; read `completions` and `error` of what comes back once it has ended."""
        request = Request(np.array(list(prompt), dtype=np.int32), n, sampling, lambda ended: None, turn)
        self.batch.submit(request)
        return request

    def finish(self, limit: int = 2000) -> None:
        """Step until nothing is left."""
        for _ in range(limit):
            if not self.batch.busy:
                return
            self.batch.step()
        raise AssertionError(f"still busy after {limit} steps")

    def load(self, version: Version, weights: Iterable[tuple[str, Tensor]]) -> None:
        """What the engine does between two steps."""
        Loader(self.model).load(weights)
        self.decoder.refresh()
        self.batch.set_version(version)

    def check(self, request: Request, atol: float = 1e-5) -> None:
        """Every completion against a plain forward over prompt + response."""
        assert request.error is None and len(request.completions) == request.n
        for done in request.completions:
            check(self.model, self.hook, request.prompt_ids, done, request.sampling, atol)


def plain_forward(
    model: PreTrainedModel, hook: RouteHook | None, ids: NDArray[np.int32]
) -> tuple[Tensor, NDArray[np.int64] | None]:
    """Logits [S, V] and native routes [S, L, K] of one sequence, without cache or batch."""
    tokens = torch.from_numpy(ids).long()[None]
    with torch.no_grad():
        if hook is None:
            return model(tokens).logits[0], None
        with hook.record():
            logits = model(tokens).logits[0]
        return logits, hook.native[:, 0].transpose(0, 1).numpy()


def check(
    model: PreTrainedModel,
    hook: RouteHook | None,
    prompt: NDArray[np.int32],
    done: Completion,
    sampling: SamplingParams,
    atol: float = 1e-5,
) -> None:
    """Log-probs within atol, routes equal as sets, greedy tokens the argmax, lengths and reason right."""
    tokens, count, first = done.token_ids, len(done.token_ids), len(prompt) - 1
    logits, routes = plain_forward(model, hook, np.concatenate((prompt, tokens)).astype(np.int32))
    logp = torch.log_softmax(logits[first:-1].double() / sampling.temperature, dim=-1)
    wanted = logp.gather(1, torch.from_numpy(tokens).long()[:, None])[:, 0].numpy()
    np.testing.assert_allclose(done.logprobs, wanted, rtol=0, atol=atol)
    if sampling.greedy:
        np.testing.assert_array_equal(tokens, logits[first:-1].argmax(-1).numpy())
    if routes is None:
        assert done.routes is None
    else:
        assert done.routes is not None and done.routes.dtype == np.uint8
        np.testing.assert_array_equal(np.sort(done.routes, axis=-1), np.sort(routes[:-1], axis=-1))
    stops = np.isin(tokens, sampling.stop_token_ids)
    assert not stops[:-1].any()
    assert done.finish_reason == ("stop" if stops[-1] else "length")
    assert stops[-1] or count == sampling.max_new_tokens
    assert [s.start for s in done.segments] == [0, *(s.end for s in done.segments)][:-1]
    assert done.segments[-1].end == count
