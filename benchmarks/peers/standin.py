"""Empty modules in the place of packages that a peer imports but the measured code never calls.

gfnx imports plotting, graph and replay packages when it is imported, torchgfn graph networks and attention. Where they are not
installed a stand-in lets the import succeed; using one raises. Where they are installed, they are used.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Iterable, Sequence


class _Named(type):
    def __getattr__(cls, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *args: object, **kwargs: object) -> object:
        raise RuntimeError("a stand-in for a package that is not installed was called")


class _Nothing(metaclass=_Named):
    def __class_getitem__(cls, item: object) -> type:
        return cls


class _Module(types.ModuleType):
    __path__ = ()  # it has parts, and all of them are stand-ins

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: set[str]):
        self.packages = packages

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: object = None
    ) -> importlib.machinery.ModuleSpec | None:
        here = fullname.split(".")[0] in self.packages
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if here else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def install(packages: Iterable[str]) -> list[str]:
    """Stand-ins for those that are not there; their names."""
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    sys.meta_path.append(_Finder(set(absent)))
    return absent
