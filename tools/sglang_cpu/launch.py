import os
import runpy

os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
import torch

_ops = torch.library.Library("torchvision", "DEF")
_ops.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
_ops.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
