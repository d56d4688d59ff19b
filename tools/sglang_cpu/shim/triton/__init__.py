"""Lets `import triton` pass: SGLang imports it at module level and, on a CPU, compiles nothing with it."""

import importlib.abc
import importlib.machinery
import sys
import types
from typing import ClassVar


def _give(name):
    """A type where torch asks with isinstance, else something that can be called."""
    if name.startswith("__") or name == "active":
        raise AttributeError(name)
    return type(name, (), {}) if name.lstrip("_")[:1].isupper() else _Anything()


class _Anything:
    """A name of triton: decorates, subscripts and compares as nothing."""

    def __init__(self, *args, **kwargs):
        pass

    def __call__(self, *args, **kwargs):
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]
        return self

    def __getattr__(self, name):
        return _give(name)

    def __getitem__(self, key):
        return _Anything()


class _Module(types.ModuleType):
    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name):
        return _give(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("triton."):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.append(_Finder())
__version__ = "3.9.0"


def __getattr__(name):
    if name.startswith("__") or name == "active":
        raise AttributeError(name)
    return _Anything()
