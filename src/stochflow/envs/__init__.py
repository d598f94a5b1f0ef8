"""Environments: grids and strings."""

from stochflow.envs.grid import Grid
from stochflow.envs.strings import Strings

__all__ = ["Grid", "Strings"]
