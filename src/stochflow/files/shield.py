"""Packages imported without the settings that they would read from the working directory, which may be a stranger's folder."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any


def import_without(module: str, settings: str) -> Any:
    """The module, imported from another folder where the current one holds a file of this name; ImportError as usual."""
    if module in sys.modules or not os.path.lexists(settings):
        return importlib.import_module(module)
    here = os.getcwd()
    os.chdir(os.path.dirname(os.path.abspath(__file__)))
    try:
        return importlib.import_module(module)
    finally:
        os.chdir(here)


def plain_matplotlib() -> Any:
    """matplotlib with its own defaults: a `matplotlibrc` here could have it run LaTeX, or import a module."""
    settings = "matplotlibrc"
    there, new = os.path.lexists(settings), "matplotlib" not in sys.modules
    matplotlib = import_without("matplotlib", settings)
    if there and not new and os.path.realpath(matplotlib.matplotlib_fname()) == os.path.realpath(settings):
        matplotlib.rcdefaults()
    return matplotlib
