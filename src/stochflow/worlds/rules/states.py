"""What an automaton is, and how large one may become."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from stochflow.worlds.rules.language import Rule

MOST_STATES = 2_000_000  # pairs of position and joint state of all rules; README of the limit: docs/rules.md
MOST_ALONE = 1 << 19  # states of one rule's automaton
MOST_MADE = 1 << 17  # of one whose states are made one by one
MOST_BANDS = 1 << 27  # numbers in all bands of the edit-distance table at one position
MOST_READ = 1 << 21  # nodes of an expression that are looked at while its sets are made
MINIMISED = 20_000  # states up to which equivalent ones are merged
DEAD = -1


FEW = 2**62  # numbers below it are 64-bit integers


def pack(states: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """One number for each row of joint states [n, R], equal where the rows are equal; column i holds 0 to sizes[i] - 1."""
    code = np.zeros(len(states), dtype=np.int64)
    bound = 1
    for column, size in enumerate(sizes):
        if bound * size >= FEW:
            code = np.unique(code, return_inverse=True)[1].reshape(-1)
            bound = len(states)
        code = code * size + states[:, column]
        bound *= size
    return code


class TooMany(Exception):
    """A rule multiplies the states beyond the limit."""

    def __init__(self, rule: Rule, words: str):
        super().__init__(words)
        self.rule, self.words = rule, words


class Automaton(NamedTuple):
    """State 0 is the start. A string is accepted by the state it leads to and its length."""

    rule: Rule
    step: np.ndarray  # [Q, K] int32, DEAD where no string can be accepted any more
    accept: np.ndarray  # [Q, L+1] bool
