def plug():
    import torch
    from sglang.srt.mem_cache.pool_host import common

    def alloc(dims, dtype, device=None, *args, **kwargs):
        return torch.empty(dims, dtype=dtype, device="cpu")

    common.ALLOC_MEMORY_FUNCS["cpu"] = alloc
