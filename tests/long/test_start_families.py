"""Every served family starts sharded as load_model loads it, and its export is what save_pretrained writes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

from asyncrl.models.families import SERVED
from asyncrl.models.load import skeleton
from asyncrl.models.names import stream
from tests.helpers.family_checks import build_tiny
from tests.helpers.moe_families import variants
from tests.learner.fill_worker import faults


@pytest.mark.parametrize("family", [*SERVED, *variants()])
def test_start_and_stream(family: str, tmp_path: Path, world: Any) -> None:
    model = build_tiny(family, seed=1)
    model.save_pretrained(tmp_path)
    assert faults(str(tmp_path), "float32", "eager", init_device_mesh("cpu", (1,))) == []
    # As the offline export does: names from a model without weights, values from elsewhere.
    live = model.state_dict()
    streamed = dict(stream(skeleton(tmp_path, "float32", "eager", "eager"), whole=lambda name: live[name]))
    saved = load_file(tmp_path / "model.safetensors")
    assert streamed.keys() == saved.keys()
    assert [n for n in saved if not torch.equal(saved[n], streamed[n])] == []
