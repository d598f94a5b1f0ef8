"""How a world looks to compiled code: the one place where engines learn the rules of an environment.

Two kinds of world are covered, with these rules (t = moves made so far):

    append: a move writes its letter into column t   legal: every letter; STOP from `least` letters on   feature t * size + letter
    lattice: a move raises its own coordinate by one  legal: below size - 1; STOP always                  feature axis * size + coordinate

`tests/engines/test_lower.py` holds these rules to `moves`, `step`, `features` and `index` of the environments themselves.
"""

from __future__ import annotations

from typing import NamedTuple

from stochflow.worlds.env import Env, numbers
from stochflow.worlds.grid import Grid
from stochflow.worlds.strings import Strings


class Lowered(NamedTuple):
    """The numbers that describe a world to compiled code."""

    append: bool  # a sequence that grows by a letter; else a lattice point
    size: int  # letters of the alphabet; places along an axis
    least: int  # letters before STOP is legal
    stop: int  # the move that ends an object; -1: none does
    moves: int  # M, STOP included
    columns: int  # D
    horizon: int  # T
    tree: bool  # every state has one parent
    free: bool  # objects take exactly T moves, all of them always legal
    blank: int  # what every column of the initial state holds
    numbered: bool  # states have numbers below 2^62

    @property
    def states_asked(self) -> int:
        """States of a trajectory that go through the network: in a tree the last one need not, whose P_B is 1."""
        return self.horizon + (not self.tree)


def lower(env: Env) -> Lowered | None:
    """The environment as compiled code sees it; None: only plain torch covers it. (A subclass may have other rules.)"""
    if env.contexts is not None or type(env) not in (Grid, Strings):
        return None
    append = isinstance(env, Strings)
    size = env.tokens if isinstance(env, Strings) else env.side if isinstance(env, Grid) else 0
    least = (env.min_length or 0) if isinstance(env, Strings) else 0
    stop = -1 if env.stop is None else env.stop
    blank = int(env.initial((1,))[0, 0])
    return Lowered(
        append, size, least, stop, env.num_moves, env.state_dim, env.horizon, env.tree, env.free, blank, numbers(env)
    )
