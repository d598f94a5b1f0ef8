"""Edit budgets as automata: substitutions by counting, insertions and deletions by the band of the edit-distance table."""

from __future__ import annotations

import numpy as np

from stochflow.worlds.rules.language import EditBudget
from stochflow.worlds.rules.states import DEAD, MOST_ALONE, MOST_BANDS, Automaton, TooMany, pack


def hamming(rule: EditBudget, alphabet: str, longest: int) -> Automaton:
    """States are (letters read, substitutions so far)."""
    wild, size = rule.wild_type, len(rule.wild_type)
    most = min(rule.most, size)  # no distance is larger
    wide = most + 1
    step = np.full(((size + 1) * wide, len(alphabet)), DEAD, dtype=np.int32)
    for place, w in enumerate(wild):
        for done in range(wide):
            for k, letter in enumerate(alphabet):
                after = done + (letter != w)
                if after <= most:
                    step[place * wide + done, k] = (place + 1) * wide + after
    accept = np.zeros((len(step), longest + 1), dtype=bool)
    if size <= longest and rule.least <= most:
        accept[size * wide + rule.least : size * wide + wide, size] = True
    return Automaton(rule, step, accept)


def levenshtein(rule: EditBudget, alphabet: str, longest: int) -> Automaton:
    """States are (letters read, the band of the edit-distance table around that letter), so every string has one.

    Cell d of the band after j letters holds the distance to the first j + d - most letters of the wild type, capped at
    most + 1.
    """
    wild, most = rule.wild_type, min(rule.most, max(len(rule.wild_type), longest))  # no distance is larger
    cap, width = most + 1, 2 * most + 1
    band = np.full((1, width), cap, dtype=np.int32)
    for d in range(width):
        prefix = d - most  # letters of the wild type
        if 0 <= prefix <= min(len(wild), most):
            band[0, d] = prefix
    tables, accepted, total = [], [], 1
    for j in range(longest + 1):
        end = len(wild) - j + most
        last = band[:, end] if 0 <= end < width else np.full(len(band), cap)
        accepted.append((last >= rule.least) & (last <= most))
        if j == longest:
            tables.append(np.full((len(band), len(alphabet)), DEAD, dtype=np.int64))
            break
        if len(band) * len(alphabet) * width > MOST_BANDS:
            raise TooMany(rule, f"needs more than {len(band):,} states at one position by itself")
        after = np.stack([_next_band(band, letter, j + 1, wild, most) for letter in alphabet], 1)  # [n, K, width]
        lost = after.min(-1) > most
        found = after[~lost].reshape(-1, width)
        _, first, back = np.unique(pack(found, [cap + 1] * width), return_index=True, return_inverse=True)
        rows = found[first]
        if total + len(rows) > MOST_ALONE:
            raise TooMany(rule, f"needs more than {MOST_ALONE:,} states by itself")
        table = np.full(lost.shape, DEAD, dtype=np.int64)
        table[~lost] = back.reshape(-1) + total
        tables.append(table)
        total += len(rows)
        band = rows
        if not len(band):
            break
    accept = np.zeros((sum(len(t) for t in tables), longest + 1), dtype=bool)
    begin = 0
    for j, good in enumerate(accepted):
        accept[begin : begin + len(good), j] = good
        begin += len(good)
    return Automaton(rule, np.concatenate(tables).astype(np.int32), accept)


def _next_band(band: np.ndarray, letter: str, j: int, wild: str, most: int) -> np.ndarray:
    """The band [n, width] after the string's letter number j."""
    cap, width = most + 1, 2 * most + 1
    after = np.full_like(band, cap)
    for d in range(width):
        i = j + d - most  # letters of the wild type
        if i < 0 or i > len(wild):
            continue
        best = np.full(len(band), j if i == 0 else cap)
        if i > 0:
            best = np.minimum(best, band[:, d] + (wild[i - 1] != letter))  # i - 1 letters after j - 1
            if d > 0:
                best = np.minimum(best, after[:, d - 1] + 1)
        if d + 1 < width:
            best = np.minimum(best, band[:, d + 1] + 1)
        after[:, d] = np.minimum(best, cap)
    return after
