"""A plugin of SGLang, loaded in each of its processes by the entry point beside this file."""


def plug():
    """Let the host's copy of the routes be plain memory: SGLang pins it with CUDA."""
    import torch
    from sglang.srt.mem_cache.pool_host import common

    def alloc(dims, dtype, device=None, *args, **kwargs):
        return torch.empty(dims, dtype=dtype, device="cpu")

    common.ALLOC_MEMORY_FUNCS["cpu"] = alloc
