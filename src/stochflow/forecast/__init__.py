"""Time series as objects: futures are sampled, and intervals follow from the samples."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOME = {
    "Forecaster": "forecaster",
    "Backtest": "backtest",
    **dict.fromkeys(["Forecasted", "forecast_command"], "command"),
    "Forecast": "config",
    "shipped": "frame",
}
__all__ = [*_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'stochflow.forecast' has no attribute {name!r}")
    return getattr(import_module(f"stochflow.forecast.{_HOME[name]}"), name)
