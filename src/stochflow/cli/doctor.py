"""`stochflow doctor`: what this machine offers, and which engine would run a task."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from typing import Any

from stochflow import __version__
from stochflow.runs.config import Config

PACKAGES = ("torch", "numpy", "scipy", "numba", "safetensors", "tyro", "rich", "matplotlib", "jinja2")


def doctor(config: Config | None) -> str:
    """The page that the command prints; with a configuration also the engine of each operation."""
    import torch

    from stochflow.engines.choose import engines

    lines = [f"stochflow {__version__}, Python {platform.python_version()}, {platform.platform()}"]
    lines += ["", "packages", *[f"  {name:<12} {_version(name)}" for name in PACKAGES]]
    lines += ["", "devices", f"  cpu          {os.cpu_count()} cores, of which torch uses {torch.get_num_threads()}"]
    for i in range(torch.cuda.device_count()):
        properties: Any = torch.cuda.get_device_properties(i)
        lines.append(f"  cuda:{i}       {properties.name}, {properties.total_memory / 2**30:.0f} GiB")
    lines += ["", "engines, the fastest first"]
    for name, engine in engines().items():
        why = engine.unavailable()
        lines.append(f"  {name:<12} {'available' if why is None else 'not available: ' + why}")
        lines += [f"    {field.replace('_', ' '):<14} {text}" for field, text in engine.support._asdict().items()]
    lines += ["", *cache_lines()]
    return "\n".join(lines + ([] if config is None else ["", *_plan(config)]))


def cache_lines() -> list[str]:
    """Where compiled code is kept."""
    from stochflow.engines.numba import cache

    folder = cache.folder()
    if folder is None:
        return ["compiled code is not kept: there is no folder that belongs to you alone"]
    return [f"compiled code is kept in {folder} ({cache.size() / 2**20:.1f} MB); --clear-cache deletes it"]


def clear_cache() -> str:
    from stochflow.engines.numba import cache

    return f"deleted {cache.clear(others=True) / 2**20:.1f} MB of compiled code"


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        found = sys.modules.get(name)
        return getattr(found, "__version__", "not installed")


def _plan(config: Config) -> list[str]:
    """The engine of each operation for this task and these settings, and why not a faster one."""
    from stochflow.engines.choose import OPERATIONS
    from stochflow.runs.build import Experiment

    chosen = Experiment(config).trainer.engines
    lines = [f"{config.task.name} with these settings"]
    for operation in OPERATIONS:
        lines.append(f"  {operation:<12} {getattr(chosen, operation).name}")
        lines += [f"    not faster: {reason}" for reason in chosen.reasons[operation]]
    return lines
