"""`python -m sglang.launch_server` on a machine without a GPU; serve calls it with all else that this needs.

SGLang spawns its other processes, and each imports this file again: what is declared here is declared in all of them.
"""

import importlib.util
import os
import runpy
from pathlib import Path

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
import torch
from torch import library


def declare_torchvision():
    """Where torchvision's library does not load (built for CUDA, beside a CPU build of torch), declare its two names.

    The import of torchvision asks for them. Returns what keeps the declarations alive.
    """
    spec = importlib.util.find_spec("torchvision")
    try:
        for folder in spec.submodule_search_locations if spec else ():
            for file in Path(folder).glob("_C*.so"):
                torch.ops.load_library(file)
                return None
    except OSError:
        pass  # as torchvision does itself
    ops = library.Library("torchvision", "DEF")
    ops.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    ops.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    return ops


_kept = declare_torchvision()
if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
