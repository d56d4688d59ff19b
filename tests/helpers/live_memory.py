"""Counts the bytes of the tensors that a piece of code makes: its peak, and its largest tensor.

Exact and the same on every machine, unlike the memory of the process. Sees what operators return; what an operator
allocates inside and frees again stays unseen. What was there before counts only as far as it grows: FSDP empties the
storages of its whole parameters and fills them again, so run one step inside, `restart`, and then what is measured.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Tag = tuple[str, tuple[int, ...], str]
"""Operator, shape and dtype of what made a storage."""


class LiveMemory(TorchDispatchMode):
    """Use as a context. peak: most bytes of live storages made inside, at_peak: bytes by (operator, shape, dtype).

    largest: elements of the largest tensor that an operator returned inside, with its operator and shape.
    """

    def __init__(self) -> None:
        super().__init__()
        self._live: dict[int, tuple[weakref.ref[torch.UntypedStorage], Tag]] = {}
        # Of storages from outside: the fewest bytes they had.
        self._least: dict[int, int] = {}
        self.restart()

    def restart(self) -> None:
        """Forget the peak and the largest tensor so far."""
        self.peak = 0
        self.at_peak: Counter[Tag] = Counter()
        self.largest: tuple[int, str, tuple[int, ...]] = (0, "", ())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors((args, kwargs or {})):
            if self._add(tensor, str(func)):
                storage = tensor.untyped_storage()
                self._least[storage._cdata] = storage.nbytes()
        out = func(*args, **(kwargs or {}))
        grown = False
        for tensor in _tensors(out):
            grown |= self._add(tensor, str(func))
            if tensor.numel() > self.largest[0]:
                self.largest = (tensor.numel(), str(func), tuple(tensor.shape))
        if grown:
            self._measure()
        return out

    def _add(self, tensor: torch.Tensor, name: str) -> bool:
        """True when its storage was not known yet."""
        storage = tensor.untyped_storage()
        found = self._live.get(storage._cdata)
        if found is not None and found[0]() is storage:
            return False
        self._least.pop(storage._cdata, None)
        self._live[storage._cdata] = (weakref.ref(storage), (name, tuple(tensor.shape), str(tensor.dtype)))
        return True

    def _measure(self) -> None:
        sizes: list[tuple[Tag, int]] = []
        for key, (ref, tag) in list(self._live.items()):
            storage = ref()
            if storage is None:
                del self._live[key]
                continue
            size = storage.nbytes()
            if key in self._least:
                self._least[key] = min(self._least[key], size)
                size -= self._least[key]
            sizes.append((tag, size))
        total = sum(size for _, size in sizes)
        if total > self.peak:
            self.peak = total
            self.at_peak = Counter()
            for tag, size in sizes:
                self.at_peak[tag] += size


def _tensors(values: Any) -> list[torch.Tensor]:
    return [v for v in tree_leaves(values) if isinstance(v, torch.Tensor)]
