"""Each rule as a deterministic automaton over letters.

Shape letters: Q states of one automaton, K letters of the alphabet, L the longest string.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import singledispatch
from typing import Any

import numpy as np

from stochflow.worlds.rules import language as say
from stochflow.worlds.rules.edits import hamming, levenshtein
from stochflow.worlds.rules.peptides import Charge, Hydrophobicity
from stochflow.worlds.rules.regex import Matcher
from stochflow.worlds.rules.states import DEAD, MINIMISED, MOST_ALONE, MOST_MADE, MOST_READ, Automaton, TooMany


def build(rule: say.Rule, alphabet: str, longest: int) -> list[Automaton]:
    """The automata whose intersection is the rule; TooMany where one of them has too many states."""
    rule.check(alphabet, longest)
    return [_trimmed(a) for a in _build(rule, alphabet, longest)]


@singledispatch
def _build(rule: say.Rule, alphabet: str, longest: int) -> list[Automaton]:
    raise NotImplementedError(f"no automaton for {type(rule).__name__}")


# made from functions --------------------------------------------------------------------------------------------


def _explore(
    rule: say.Rule,
    start: Hashable,
    step: Callable[[Any, str], Hashable | None],
    accepts: Callable[[Any], bool],
    alphabet: str,
    longest: int,
) -> Automaton:
    """The automaton that functions of hashable states describe; `step` gives None where a string is lost."""
    number: dict[Hashable, int] = {start: 0}
    order: list[Hashable] = [start]
    table: list[list[int]] = []
    while len(table) < len(order):
        row = []
        for letter in alphabet:
            after = step(order[len(table)], letter)
            if after is None:
                row.append(DEAD)
                continue
            if after not in number:
                if len(order) >= MOST_MADE:
                    raise TooMany(rule, f"needs more than {MOST_MADE:,} states by itself")
                number[after] = len(order)
                order.append(after)
            row.append(number[after])
        table.append(row)
    good = np.array([accepts(state) for state in order])
    return Automaton(rule, np.array(table, dtype=np.int32), np.repeat(good[:, None], longest + 1, 1))


def _trimmed(a: Automaton) -> Automaton:
    """Without edges to states from which nothing is accepted, and with equivalent states merged where that is cheap."""
    step, accept = a.step, a.accept
    alive: Any = accept.any(1)
    while True:
        more = alive | np.where(step >= 0, alive[step], False).any(1)
        if (more == alive).all():
            break
        alive = more
    step = np.where((step >= 0) & alive[step], step, DEAD)
    if len(step) > MINIMISED:
        return Automaton(a.rule, step.astype(np.int32), accept)
    kind = np.unique(accept, axis=0, return_inverse=True)[1].reshape(-1)
    while True:
        rows = np.column_stack([kind, np.where(step >= 0, kind[step], DEAD)])
        first, finer = np.unique(rows, axis=0, return_index=True, return_inverse=True)[1:]
        finer = finer.reshape(-1)
        if len(first) == kind.max() + 1:
            break
        kind = finer
    new = np.arange(len(first))  # the start's class changes places with class 0
    new[[0, finer[0]]] = new[[finer[0], 0]]
    pick = first[new]
    merged = np.where(step[pick] >= 0, new[finer[step[pick]]], DEAD).astype(np.int32)
    return Automaton(a.rule, merged, accept[pick])


# motifs ---------------------------------------------------------------------------------------------------------


class _Shift:
    """All places at which a motif may have begun, as bits (shift-and), for several patterns of letter sets at once."""

    def __init__(self, forms: Sequence[tuple[str, ...]], alphabet: str):
        self.masks = dict.fromkeys(alphabet, 0)
        self.begins = self.ends = 0
        place = 0
        for form in dict.fromkeys(forms):
            self.begins |= 1 << place
            for allowed in form:
                for letter in allowed:
                    self.masks[letter] |= 1 << place
                place += 1
            self.ends |= 1 << (place - 1)

    def step(self, state: int, letter: str) -> int:
        """The state after one more letter; a full match is a bit of `ends`."""
        return ((state & ~self.ends) << 1 | self.begins) & self.masks[letter]


@_build.register
def _forbidden(rule: say.Forbidden, alphabet: str, longest: int) -> list[Automaton]:
    shift = _Shift([form for m in rule.motifs for form in rule.forms(m, alphabet)], alphabet)

    def step(state: int, letter: str) -> int | None:
        after = shift.step(state, letter)
        return None if after & shift.ends else after

    return [_explore(rule, 0, step, lambda s: True, alphabet, longest)]


@_build.register
def _required(rule: say.Required, alphabet: str, longest: int) -> list[Automaton]:
    found = []
    for motif in rule.motifs:
        shift = _Shift(rule.forms(motif, alphabet), alphabet)

        def step(state: int, letter: str, shift: _Shift = shift) -> int:
            after = shift.step(state, letter) if state >= 0 else -1
            return -1 if state < 0 or after & shift.ends else after

        found.append(_explore(rule, 0, step, lambda s: s < 0, alphabet, longest))
    return found


@_build.register
def _regex(rule: say.Regex, alphabet: str, longest: int) -> list[Automaton]:
    matcher = Matcher(rule.pattern, alphabet)
    read = 0

    def step(state: frozenset[int], letter: str) -> frozenset[int]:
        nonlocal read
        read += len(state)
        if read > MOST_READ:
            raise TooMany(rule, f"needs more than {MOST_READ:,} steps to become an automaton")
        return matcher.step(state, letter)

    return [_explore(rule, matcher.start, step, lambda s: matcher.accepts(s) != rule.forbid, alphabet, longest)]


# positions ------------------------------------------------------------------------------------------------------


def _by_position(rule: say.Rule, sets: dict[int, str], alphabet: str, longest: int, needed: int) -> Automaton:
    """Letters `sets[i]` at position i, anything elsewhere; strings shorter than `needed` are not accepted."""
    last = max([needed, *sets], default=0)
    step = np.repeat(np.minimum(np.arange(last + 1) + 1, last)[:, None], len(alphabet), 1).astype(np.int32)
    for place, allowed in sets.items():
        step[place - 1, [letter not in allowed for letter in alphabet]] = DEAD
    accept = np.repeat((np.arange(longest + 1) >= needed)[None], last + 1, 0)
    return Automaton(rule, step, accept)


@_build.register
def _fixed(rule: say.Fixed, alphabet: str, longest: int) -> list[Automaton]:
    places = rule.places()
    found = [_by_position(rule, places, alphabet, longest, max(places))] if places else []
    if rule.suffix:
        size = len(rule.suffix)
        shift = _Shift([tuple(rule.suffix)], alphabet)

        def step(state: int, letter: str) -> int:  # a full match may be the beginning of a later one
            return (state << 1 | 1) & shift.masks[letter]

        found.append(_explore(rule, 0, step, lambda s: bool(s >> (size - 1) & 1), alphabet, longest))
    return found


@_build.register
def _allowed(rule: say.Allowed, alphabet: str, longest: int) -> list[Automaton]:
    sets = say.pattern_sets(rule.pattern, alphabet, str(rule))
    return [_by_position(rule, dict(enumerate(sets, start=rule.at)), alphabet, longest, 0)]


@_build.register
def _length(rule: say.Length, alphabet: str, longest: int) -> list[Automaton]:
    sizes = np.arange(longest + 1)
    accept = (sizes >= rule.least) & (sizes <= (longest if rule.most is None else rule.most))
    return [Automaton(rule, np.zeros((1, len(alphabet)), dtype=np.int32), accept[None])]


@_build.register
def _homopolymer(rule: say.Homopolymer, alphabet: str, longest: int) -> list[Automaton]:
    most = min(rule.longest, longest)

    def step(state: tuple[str, int], letter: str) -> tuple[str, int] | None:
        run = state[1] + 1 if state[0] == letter else 1
        return None if run > most else (letter, run)

    return [_explore(rule, ("", 0), step, lambda s: True, alphabet, longest)]


# counts ---------------------------------------------------------------------------------------------------------


@_build.register
def _gc(rule: say.GC, alphabet: str, longest: int) -> list[Automaton]:
    adds = np.array([letter in "GC" for letter in alphabet], dtype=np.int64)
    sizes = np.arange(longest + 1)
    if rule.window is None:
        counts = np.arange(longest + 2)
        low = rule.low * sizes - say.SLACK
        high = rule.high * sizes + say.SLACK
        accept = (counts[:, None] >= low) & (counts[:, None] <= high)
        step = np.minimum(counts[:, None] + adds, longest + 1).astype(np.int32)
        return [Automaton(rule, step, accept)]
    return [_window(rule, adds, longest)]


def _window(rule: say.GC, adds: np.ndarray, longest: int) -> Automaton:
    """States are the marks of the last w - 1 letters; before so many were read, all letters so far."""
    w = rule.window or 1
    if 2**w - 1 > MOST_ALONE:
        raise TooMany(rule, f"needs {2**w - 1:,} states by itself, the marks of its last {w - 1} letters")
    step = np.full((2**w - 1, len(adds)), DEAD, dtype=np.int64)
    for read in range(w):
        marks = np.arange(2**read)
        after = marks[:, None] << 1 | adds
        if read < w - 1:
            step[2**read - 1 + marks] = 2 ** (read + 1) - 1 + after
            continue
        counts = sum(after >> bit & 1 for bit in range(w))
        fine = np.array([rule.fits(c, w) for c in range(w + 1)])[counts]
        step[2**read - 1 + marks] = np.where(fine, 2**read - 1 + (after & 2 ** (w - 1) - 1), DEAD)
    accept = np.ones((len(step), longest + 1), dtype=bool)
    return _reached(Automaton(rule, step.astype(np.int32), accept))


def _reached(a: Automaton) -> Automaton:
    """Without the states that no string leads to."""
    seen = np.zeros(len(a.step), dtype=bool)
    front = np.array([0])
    while len(front):
        seen[front] = True
        after = np.unique(a.step[front])
        after = after[after >= 0]
        front = after[~seen[after]]
    new = np.cumsum(seen) - 1
    step = a.step[seen]
    return Automaton(a.rule, np.where(step >= 0, new[step], DEAD).astype(np.int32), a.accept[seen])


@_build.register(Charge)
@_build.register(Hydrophobicity)
def _summed(rule: Charge | Hydrophobicity, alphabet: str, longest: int) -> list[Automaton]:
    value = rule.values(alphabet)
    adds = np.array([value[letter] for letter in alphabet])
    unit = int(np.gcd.reduce(adds)) or 1
    adds = adds // unit
    low, high = min(0, int(adds.min())) * longest, max(0, int(adds.max())) * longest
    if high - low + 1 > MOST_ALONE:
        raise TooMany(
            rule,
            f"needs {high - low + 1:,} states by itself, one for each sum in steps of {rule.step:g}: take a larger step",
        )
    size = high - low + 1
    sums = np.arange(size)
    sums = np.where(sums > high, sums - size, sums)  # 0 first: it is the start
    after = sums[:, None] + adds
    step = np.where((after >= low) & (after <= high), after % size, DEAD).astype(np.int32)
    least, most = np.array([rule.bounds(n) for n in range(longest + 1)]).T
    value_of = (sums * unit * rule.step)[:, None]
    return [Automaton(rule, step, (value_of >= least - say.SLACK) & (value_of <= most + say.SLACK))]


@_build.register
def _edits(rule: say.EditBudget, alphabet: str, longest: int) -> list[Automaton]:
    return [levenshtein(rule, alphabet, longest) if rule.indels else hamming(rule, alphabet, longest)]
