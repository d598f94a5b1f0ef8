"""Where a user's module is looked for, and importing it: what was located is what runs, and nothing else that lies beside it.

The current folder comes last on Python's path, so that what lies there stands in for no installed module, today or at a
later import; the module that was named is taken from there all the same. Source there is compiled anew: in `__pycache__`
could lie the code of another.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from importlib.machinery import (
    EXTENSION_SUFFIXES,
    SOURCE_SUFFIXES,
    ExtensionFileLoader,
    FileFinder,
    ModuleSpec,
    PathFinder,
    SourceFileLoader,
)
from pathlib import Path
from types import CodeType, ModuleType

_added: set[str] = set()  # folders that were put on Python's path here
_anew: set[str] = set()  # folders whose modules are compiled anew


def import_user(name: str) -> ModuleType:
    """The module of this full name, as `find_spec` finds it."""
    importlib.invalidate_caches()
    here, top = current_folder(), name.partition(".")[0]
    if here is not None and (here in _added or here not in sys.path):
        found = None if top in sys.modules else find_spec(top, search_path())
        _added.add(here)
        sys.path[:] = [*(p for p in sys.path if p != here), here]
        if found is not None and found.loader is not None and lies_in(found.origin, here):
            _load(top, found)
    return importlib.import_module(name)


def _load(name: str, found: ModuleSpec) -> None:
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module
    try:
        found.loader.exec_module(module)  # type: ignore[union-attr]
    except BaseException:
        sys.modules.pop(name, None)
        raise


def search_path() -> list[str]:
    """Where a user's module is looked for: the current folder, unless it lies in a run folder, then Python's path."""
    here = current_folder()
    if here is None or (here in sys.path and here not in _added):
        return list(sys.path)
    return [here, *(p for p in sys.path if p != here)]


def current_folder() -> str | None:
    """The current folder, where modules of the user's may lie; None in a run folder, or where it is gone."""
    try:
        here = os.getcwd()
    except OSError:
        return None
    return None if in_run_folder(here) else here


def in_run_folder(path: str | os.PathLike[str]) -> bool:
    """Whether this folder is a run folder or lies in one."""
    real = Path(os.path.realpath(path))
    return any(os.path.exists(p / "config.json") and os.path.isdir(p / "checkpoints") for p in (real, *real.parents))


def find_spec(module: str, path: list[str]) -> ModuleSpec | None:
    """As an import would find it: the finders are asked, and no module is run."""
    loaded = getattr(sys.modules.get(module), "__spec__", None)
    if loaded is not None:
        return loaded
    here = current_folder()
    if here is not None:
        _compile_anew(here)
    for finder in sys.meta_path:
        ask = getattr(finder, "find_spec", None)
        top = "." not in module
        given = None if top and finder is not PathFinder else path
        found = None if ask is None else ask(module, given)
        if found is not None:
            return found
    return None


def lies_in(file: str | None, folder: str) -> bool:
    """Whether a file lies in or below a folder, as both are named."""
    return file is not None and os.path.abspath(file).startswith(folder.rstrip(os.sep) + os.sep)


class _Anew(SourceFileLoader):
    """Source that is compiled each time; what was compiled before is neither read nor written."""

    def get_code(self, fullname: str) -> CodeType | None:
        path = self.get_filename(fullname)
        return self.source_to_code(self.get_data(path), path)


def _compile_anew(folder: str) -> None:
    """From now on modules in and below this folder are compiled from their source."""
    if folder in _anew:
        return
    _anew.add(folder)

    def hook(path: str) -> FileFinder:
        installed = any(p != folder and lies_in(p, folder) and (path == p or lies_in(path, p)) for p in sys.path)
        if installed or not (path == folder or lies_in(path, folder)) or not os.path.isdir(path):
            raise ImportError(f"{path} is for another finder")
        return FileFinder(path, (ExtensionFileLoader, EXTENSION_SUFFIXES), (_Anew, SOURCE_SUFFIXES))

    sys.path_hooks.insert(0, hook)
    for path in [p for p in sys.path_importer_cache if p == folder or lies_in(p, folder)]:
        del sys.path_importer_cache[path]
