"""Two real ranks that start from model folders and compare with load_model, bit by bit; some save a checkpoint.

Usage: fill_worker.py RANK CASES.json OUT.json. CASES maps a name to folder, dtype and experts, and to a run folder
where update 1 is to be saved: every parameter of the start model times 1.25. OUT gets, by the same names, what is
wrong on any rank: an empty list is right.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from asyncrl.config import load_config
from asyncrl.learner.checkpoint import Checkpoints
from asyncrl.learner.shard import World, build_policy
from asyncrl.learner.start import model_fingerprint
from asyncrl.learner.step import Updater
from asyncrl.learner.stored import Progress
from asyncrl.models.describe import describe
from asyncrl.models.fill import fill_sharded, materialize
from asyncrl.models.head import decoder_layers
from asyncrl.models.load import load_model, skeleton
from asyncrl.process import end

RANKS = 2
LIMIT = timedelta(seconds=120)


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def faults(folder, dtype, experts, mesh):
    """What differs between a filled model, sharded over mesh, and a loaded one."""
    model = skeleton(folder, dtype, attention="eager", experts=experts)
    for layer in decoder_layers(model):
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    materialize(model, "cpu")
    fill_sharded(model, folder)
    reference = load_model(folder, dtype, attention="eager", experts=experts)
    ours, theirs = model.state_dict(), reference.state_dict()
    wrong = [f"names {ours.keys() ^ theirs.keys()}"] if ours.keys() != theirs.keys() else []
    for name, tensor in ours.items():
        if tensor.dtype != theirs[name].dtype or not torch.equal(whole(tensor), theirs[name]):
            wrong.append(f"value of {name}")
    buffers = dict(model.named_buffers())
    wrong += [f"buffer {n}" for n, b in reference.named_buffers() if not torch.equal(buffers[n], b)]
    ids = torch.arange(7)[None]
    with torch.no_grad():
        # Rope frequencies and ties show here only: they are in no state dict.
        if not torch.equal(model(ids).logits, reference(ids).logits):
            wrong.append("logits")
    return wrong


def save(run, world):
    """A checkpoint of update 1 in a run folder that has a config.yaml."""
    config = load_config([str(Path(run) / "config.yaml")], [])
    policy = build_policy(config.model, config.learner, False, world)
    updater = Updater(policy, config.learner, config.algorithm, world)
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter.mul_(1.25)
    fingerprint = model_fingerprint(config, describe(config.model.path))
    assert Checkpoints(Path(run), fingerprint, 1, world).save(policy, updater, Progress(0, 1, 1, 0.0))


def rank(number, cases, out):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{out}.store", rank=number, world_size=RANKS, timeout=LIMIT)
    mesh = init_device_mesh("cpu", (RANKS,))
    found = {}
    for name, case in json.loads(Path(cases).read_text()).items():
        run = case.pop("run")
        found[name] = faults(**case, mesh=mesh)
        if run is not None:
            save(run, World(number, RANKS, torch.device("cpu")))
    everything = [None] * RANKS
    dist.all_gather_object(everything, found)
    if number == 0:
        Path(out).write_text(json.dumps({name: [f for one in everything for f in one[name]] for name in found}))
    dist.destroy_process_group()


if __name__ == "__main__":
    rank(int(sys.argv[1]), *sys.argv[2:])
    # As a role ends: gloo's threads may abort a process that takes itself apart.
    end(0)
