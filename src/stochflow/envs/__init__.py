"""Environments: grids, strings, and any of them under a condition."""

from stochflow.envs.conditioned import Conditioned
from stochflow.envs.grid import Grid
from stochflow.envs.strings import Strings

__all__ = ["Conditioned", "Grid", "Strings"]
