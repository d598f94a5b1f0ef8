"""What a setting may be: the same ranges for flags, Python and `config.json`. No torch here."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from stochflow.errors import UserError
from stochflow.files.reading import shown

# name: least and greatest; beyond them a value is a slip of the pen, or nothing that a machine can do
TRAIN: dict[str, tuple[float, float]] = {
    "steps": (1, 10**12),
    "batch": (1, 10**8),
    "seeds": (1, 10**5),
    "seed": (0, 2**31 - 1),
    "hidden": (1, 10**6),
    "layers": (1, 1000),
    "heads": (1, 10**4),
    "lr": (0, 10),
    "dynamics_lr": (0, 10),
    "explore": (0, 1),
    "explore_tau": (0, 1e12),
    "clip": (0, 1e12),
    "dynamics_clip": (0, 1e12),
    "subtb_lambda": (0, 1e3),
    "gamma": (0, 1),
    "kl_weight": (0, 1e6),
    "entropy_average": (0, 1),
    "replay": (0, 1),
    "replay_size": (1, 10**10),
    "dynamics_off_pol_rounds": (1, 10**5),
    "dynamics_sample_size": (1, 10**8),
    "log_every": (1, 10**12),
    "eval_every": (1, 10**12),
    "save_every": (1, 10**12),
    "oracle_timeout": (0, 1e9),
    "oracle_retries": (0, 1000),
    "threads": (0, 1024),
    "look": (0, 10**8),
    "lag": (0, 1000),
    "oracle_calls": (0, 10**12),
    "children": (0, 10**8),
    "ask_every": (1, 10**9),
}
FORECAST: dict[str, tuple[float, float]] = {
    "horizon": (1, 10**5),
    "window": (0, 10**6),
    "season": (0, 10**6),
    "beta": (0, 1e9),
    "bins": (4, 256),
    "stride": (1, 10**6),
    "origins": (0, 10**5),
    "samples": (1, 10**8),
    "steps": (1, 10**9),
    "batch": (1, 10**6),
    "lr": (0, 10),
    "hidden": (1, 10**5),
    "seed": (-(2**31), 2**31 - 1),
    "seeds": (1, 10**4),
}
TASKS: dict[str, dict[str, tuple[float, float]]] = {
    "grid": {"ndim": (1, 10**4), "side": (2, 10**6), "base": (0, 1e6)},
    "tfbind8": {"floor": (0, 1)},
    "bits": {"length": (1, 10**5), "bits": (1, 10), "modes": (1, 10**6), "mode_seed": (0, 2**31 - 1)},
    "gc": {"length": (1, 10**5)},
    "peptide": {"min_length": (0, 50), "floor": (0, 1)},
    "rna": {"floor": (0, 1)},
}
OF_ALL_TASKS = {"stick": (0.0, 1.0), "beta": (0.0, 1e4), "ramp": (0.0, 1e12)}


def check_numbers(settings: Mapping[str, Any], ranges: Mapping[str, tuple[float, float]], where: str = "--") -> None:
    """UserError for the first number that is not finite, does not fit into 64 bits, or lies outside its range."""
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        said = f"{where}{name.replace('_', '-') if where == '--' else name}"
        if not math.isfinite(value):
            raise UserError(f"{said} is {value}, but it must be a finite number")
        low, high = ranges.get(name, (-(2**63), 2**63 - 1))
        if not low <= value <= high:
            want = f"between {_plain(low)} and {_plain(high)}" if name in ranges else "a number of at most 64 bits"
            raise UserError(f"{said} is {shown(value, 40)}, but it must be {want}")


def _plain(value: float) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
