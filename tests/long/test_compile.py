"""torch.compile of the layers: capture, replay and recomputation stay, and no batch compiles anew. Minutes of CPU."""

import subprocess
from pathlib import Path

import pytest
import torch

from asyncrl.learner.layers import checkpoint_layers, compile_layers
from asyncrl.models.head import decoder_layers
from asyncrl.models.routes import RouteHook
from tests.helpers.tiny_models import FAMILIES

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.timeout(1800),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning"),
]


@pytest.mark.parametrize(
    ("name", "backend", "checkpointing"),
    [
        ("qwen3_moe", "eager", True),
        ("qwen3_moe", "aot_eager", False),
        ("qwen3_moe", "aot_eager", True),
        ("deepseek_v3", "aot_eager", True),
        ("qwen3_moe", "inductor", True),
    ],
)
def test_compiled_layers_give_the_numbers_of_plain_ones(name, backend, checkpointing):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    seeded = torch.Generator().manual_seed(0)
    model, compiled = FAMILIES[name](), FAMILIES[name]()
    hooks = [RouteHook(model), RouteHook(compiled)]
    compile_layers(decoder_layers(compiled), hooks[1], backend=backend)
    if checkpointing:
        checkpoint_layers(decoder_layers(compiled), hooks[1])
    graphs = []
    for batch, length in ((3, 9), (2, 5), (4, 12), (5, 33), (1, 7), (1, 11)):
        ids = torch.randint(0, 64, (batch, length), generator=seeded)
        forced = torch.rand(len(hooks[0].layers), batch, length, 8, generator=seeded).argsort(dim=-1)[..., :2]
        for replay in (False, True):
            found = []
            for each, hook in zip((model, compiled), hooks, strict=True):
                each.zero_grad()
                with hook.replay(forced) if replay else hook.record():
                    hidden = each.base_model(input_ids=ids, use_cache=False).last_hidden_state
                hidden.square().sum().backward()
                grads = [p.grad for p in each.parameters() if p.grad is not None]
                found.append([hook.native, hook.used, hidden, *grads])
            assert len(found[0]) == len(found[1]) > 20
            assert all(torch.equal(a, b) for a, b in zip(found[0][:2], found[1][:2], strict=True))
            for ours, theirs in zip(found[0][2:], found[1][2:], strict=True):
                if backend == "inductor":
                    torch.testing.assert_close(theirs, ours, atol=1e-3, rtol=1e-3)
                else:
                    assert torch.equal(ours, theirs)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    # One set of graphs for batches and one for single rows. 0 would say that nothing was compiled.
    assert 0 < graphs[0] == graphs[3] < graphs[4] == graphs[5]


def test_the_gpu_check_compiles_and_passes_on_a_cpu():
    command = [ROOT / "tools/gpu_check.sh", "--device", "cpu", "--size", "tiny", "--updates", "1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert "ok: every check passed" in done.stdout
