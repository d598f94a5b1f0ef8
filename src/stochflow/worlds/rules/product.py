"""All rules at once: the product of their automata, built position by position, and exact counts by dynamic programming.

Shape letters: R rules, n joint states at a position, N of all positions, C classes of letters that no rule tells apart,
K letters, L the longest string.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from stochflow.worlds.rules.states import DEAD, FEW, MOST_STATES, Automaton, TooMany, pack


class Product(NamedTuple):
    """The joint automaton, position by position, with nothing in it that cannot be completed. Node 0 is the start."""

    letter_class: np.ndarray  # [K] the class of each letter
    begins: np.ndarray  # [L+2] the nodes of position t are begins[t] to begins[t + 1]
    after: np.ndarray  # [N, C] int32: the node after a letter of this class; N where no string can be completed
    ends: np.ndarray  # [N] bool: the string may end here
    log_count: np.ndarray  # [N] float64: log number of ways to complete
    strings: int  # how many, exactly


def _classes(automata: Sequence[Automaton], letters: int) -> np.ndarray:
    """The class of each letter, [K]: letters of one class lead to the same state in every automaton."""
    columns = [np.unique(a.step, axis=1, return_inverse=True)[1].reshape(-1) for a in automata]
    if not columns:
        return np.zeros(letters, dtype=np.int64)
    return np.unique(np.stack(columns), axis=1, return_inverse=True)[1].reshape(-1)


def _completable(a: Automaton, shortest: int, longest: int) -> np.ndarray:
    """[L+1, Q] whether a state at position t can still be completed, by this rule alone."""
    alive = np.zeros((longest + 1, len(a.step)), dtype=bool)
    columns = np.unique(a.step, axis=1)
    for t in range(longest, -1, -1):
        if t >= shortest:
            alive[t] = a.accept[:, t]
        if t < longest:
            alive[t] |= np.where(columns >= 0, alive[t + 1][columns], False).any(1)
    return alive


def _culprit(automata: Sequence[Automaton], states: np.ndarray, sizes: Sequence[int], total: int) -> TooMany:
    """The rule without which fewest states would be left, with what it multiplies."""
    fewest: tuple[int, int] | None = None
    for i in range(len(automata)):
        others = [j for j in range(len(automata)) if automata[j].rule is not automata[i].rule]
        left = len(np.unique(pack(states[:, others], [sizes[j] for j in others])))
        if fewest is None or left < fewest[0]:
            fewest = (left, i)
    assert fewest is not None
    left, i = fewest
    words = (
        f"multiplies {left:,} joint states of the other rules to {len(states):,} at one position"
        if left > 1
        else f"alone has {len(states):,} states at one position"
    )
    return TooMany(automata[i].rule, f"{words} (more than {MOST_STATES:,} at all positions)")


def multiply(automata: Sequence[Automaton], letters: int, lengths: tuple[int, int], most: int = MOST_STATES) -> Product:
    """The product over strings of these lengths; `strings` 0 where the rules contradict each other."""
    shortest, longest = lengths
    of_letter = _classes(automata, letters)
    one_of = np.unique(of_letter, return_index=True)[1]  # a letter of each class, [C]
    tables = [a.step[:, one_of] for a in automata]
    sizes = [len(a.step) for a in automata]
    alive = [_completable(a, shortest, longest) for a in automata]
    states = np.zeros((1, len(automata)), dtype=np.int32)
    if not all(a[0, 0] for a in alive):
        states = states[:0]
    layers, nexts, total = [states], [], len(states)
    for t in range(longest):
        after = np.empty((len(states), len(one_of), len(automata)), dtype=np.int32)
        good = np.ones(after.shape[:2], dtype=bool)
        for i, table in enumerate(tables):
            to = table[states[:, i]]
            good &= (to >= 0) & alive[i][t + 1][to]
            after[..., i] = to
        found = after[good]
        _, first, back = np.unique(pack(found, sizes), return_index=True, return_inverse=True)
        to = np.full(good.shape, DEAD, dtype=np.int64)
        to[good] = back.reshape(-1)
        nexts.append(to)
        states = found[first]
        total += len(states)
        if total > most:
            raise _culprit(automata, states, sizes, total)
        layers.append(states)
    ends = [_accepting(automata, s, t) & (t >= shortest) for t, s in enumerate(layers)]
    return _counted(of_letter, nexts, ends)


def _accepting(automata: Sequence[Automaton], states: np.ndarray, t: int) -> np.ndarray:
    good = np.ones(len(states), dtype=bool)
    for i, a in enumerate(automata):
        good &= a.accept[states[:, i], t]
    return good


def _counted(of_letter: np.ndarray, nexts: list[np.ndarray], ends: list[np.ndarray]) -> Product:
    """Counts from the last position back; nodes that cannot be completed are dropped."""
    share = np.bincount(of_letter)  # letters in each class
    longest = len(nexts)
    big = sum(len(of_letter) ** n for n in range(longest + 1)) >= FEW
    kind = object if big else np.int64
    counts: np.ndarray = ends[longest].astype(kind)
    logs, kept, tables, final = [], [], [], []
    below: np.ndarray | None = None  # the new number of each node of the next position
    for t in range(longest, -1, -1):
        if t < longest:
            padded = np.append(counts, np.zeros(1, dtype=kind))
            to = nexts[t]
            counts = ends[t].astype(kind)
            for c, letters in enumerate(share):
                counts = counts + padded[to[:, c]] * int(letters)
        live = (counts > 0).astype(bool)
        if t < longest:
            assert below is not None
            table = np.append(below, -1)[nexts[t][live]]
        else:
            table = np.full((int(live.sum()), len(share)), -1, dtype=np.int64)
        tables.append(table)
        below = np.where(live, np.cumsum(live) - 1, -1)
        kept.append(int(live.sum()))
        final.append(ends[t][live])
        logs.append(np.array([math.log(c) for c in counts[live].tolist()]))
    total = int(counts.sum()) if len(counts) else 0
    sizes = kept[::-1]
    begins = np.concatenate([[0], np.cumsum(sizes)])
    nodes = int(begins[-1])
    shifted = [
        np.where(table >= 0, table + begins[t + 1], nodes).astype(np.int32) for t, table in enumerate(tables[::-1])
    ]
    return Product(
        of_letter, begins, np.concatenate(shifted), np.concatenate(final[::-1]), np.concatenate(logs[::-1]), total
    )
