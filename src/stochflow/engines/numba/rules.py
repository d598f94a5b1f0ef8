"""The rules of worlds in the numbers of `lower.Lowered`, and the hash by which a state is found among others."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from stochflow.engines.lower import Lowered
from stochflow.engines.numba.jit import part


class World(NamedTuple):
    """A world, and which of its states go through the network."""

    rules: Lowered
    asked: int  # steps whose states go through the network
    keep: bool  # the rows of all steps, for a trace, or of two
    backward: bool  # a learned P_B
    flow: int  # the output that is a log-flow
    few: bool  # few outputs: the head is kept transposed


@part
def legal(rules, t, at, move):
    """Whether a move is legal after t moves; `at` = the state's coordinate along it."""
    if move == rules.stop:
        return t >= rules.least
    return rules.append or at < rules.size - 1


@part
def feature(rules, column, value):
    """The feature that is on where a column holds a value."""
    return column * rules.size + value


@part
def filled(rules, t):
    """Columns that have a feature after t moves."""
    return t if rules.append else rules.columns


@part
def successor(rules, number, move):
    """The number of the state to which a move leads."""
    if rules.append:
        return number * rules.size + 1 + move
    return number + rules.size ** (rules.columns - 1 - move)


@part
def slot(number, slots):
    """Where the search for a number begins among a power of two of slots."""
    return np.int64(np.uint64(number) * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)) & (slots - 1)
