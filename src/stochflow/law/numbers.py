"""What was given as numbers, as an array. Pages about saved runs need it, and load no torch for it."""

from __future__ import annotations

from typing import Any

import numpy as np

from stochflow.errors import UserError, one_line


def numbers(name: str, values: Any) -> np.ndarray:
    """A flat array of numbers; UserError where these are none."""
    try:
        given = values.detach().cpu() if hasattr(values, "detach") else values
        return np.asarray(given, dtype=np.float64).reshape(-1)
    except (TypeError, ValueError) as problem:
        raise UserError(f"{name} are {one_line(repr(values), 80)}, but they must be numbers") from problem
