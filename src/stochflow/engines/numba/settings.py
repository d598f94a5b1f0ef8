"""numba without the settings of the working directory: a `.numba_config.yaml` there may be a stranger's.

It could name modules to import (cache_locator_classes) and folders whose pickles are loaded (cache_dir), and numba reads
it when it is imported and again whenever it compiles.
"""

from __future__ import annotations

import os
from typing import Any

from stochflow.files.shield import import_without

FILE = ".numba_config.yaml"


def shielded() -> Any:
    """The numba module, which reads its settings from the environment alone; ImportError where there is none."""
    there = os.path.lexists(FILE)
    numba = import_without("numba", FILE)
    config: Any = numba.config
    if getattr(config, "_config_fname", None) == FILE:
        config._config_fname = os.devnull  # no regular file: not read
        if there:
            config.reload_config()
    return numba


def why_not() -> str | None:
    """Why numba is not used here: its settings cannot be kept away from a file of the working directory."""
    config: Any = shielded().config
    if os.path.lexists(FILE) and getattr(config, "_config_fname", FILE) != os.devnull:
        return f"the working directory holds {FILE}, which could direct compiled code: run from another folder"
    return None
