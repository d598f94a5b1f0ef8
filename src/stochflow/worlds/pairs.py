"""A synthesiser's noise, estimated from pairs of ordered and sequenced strings.

Maximum likelihood of the law of `Synthesis`. Where all lengths agree these are counts, letter by letter; otherwise
expectation and maximisation over all ways in which a string can have come about, so no single alignment is chosen.

Shape letters: N different pairs, n ordered letters, J sequenced ones, K letters.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from stochflow.errors import UserError
from stochflow.files.reading import MB, read_text, shown
from stochflow.worlds.synthesis import Synthesis

FILE = 256 * MB  # the most that is read
ROUNDS = 500  # of expectation and maximisation, at most
STILL = 1e-9  # change of the mean log-likelihood at which it ends
NEVER = 1e-6  # expected counts below it are what is left of a start that did not come true
ORDERED = ("ordered", "order", "designed", "design", "reference", "expected")  # names of columns that need not be named
SEQUENCED = ("sequenced", "made", "read", "observed")
SHOWN = 3  # errors of a letter in the summary; all of them are in the table
AT_ONCE = 1 << 23  # numbers of a table of all ways


class Rate(NamedTuple):
    """An estimated probability with its interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} ({self.low:.4f} to {self.high:.4f})"


class Noise(NamedTuple):
    """What pairs say about a synthesiser."""

    alphabet: str
    table: Tensor  # [K, K] float64, ordered x made
    low: Tensor  # [K, K] Clopper-Pearson intervals, each entry by itself
    high: Tensor
    counts: Tensor  # [K] cycles that made a letter, by the letter ordered; not whole where lengths differ
    insertion: Rate  # a cycle
    deletion: Rate
    pairs: int  # that were used
    left_out: int  # whose sequenced string has letters outside the alphabet
    level: float
    log_likelihood: float  # a pair, in nats

    def synthesis(self) -> Synthesis:
        """The law as a value."""
        return Synthesis(self.alphabet, self.table, self.insertion.value, self.deletion.value)

    def csv(self) -> str:
        """The table with names of rows and columns, as --confusion reads it; the rates in a line of comment."""
        lines = [f"# insertion {self.insertion}, deletion {self.deletion} a cycle, from {self.pairs} pairs"]
        lines.append("," + ",".join(self.alphabet))
        lines += [f"{a}," + ",".join(map(repr, row)) for a, row in zip(self.alphabet, self.table.tolist(), strict=True)]
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        lines = [f"{'ordered':<9}{'letters':>9}   {'made as ordered':<26}most frequent errors"]
        for i, letter in enumerate(self.alphabet):
            cells = [
                Rate(*(float(x[i, j]) for x in (self.table, self.low, self.high))) for j in range(len(self.alphabet))
            ]
            others = sorted(
                (c for c in zip(cells, self.alphabet, strict=True) if c[1] != letter and c[0].value), reverse=True
            )
            errors = ", ".join(f"{a} {c}" for c, a in others[:SHOWN]) or "none seen"
            lines.append(f"{letter:<9}{float(self.counts[i]):>9.0f}   {cells[i]!s:<26}{errors}")
        return "\n".join([*lines, f"insertions a letter: {self.insertion}", f"deletions a letter:  {self.deletion}"])


def read_pairs(path: str | Path, ordered: str = "", sequenced: str = "") -> tuple[list[str], list[str]]:
    """The two columns of a CSV; without names they are `ordered` and `sequenced`, or the only two there are."""
    lines = read_text(path, FILE).splitlines()
    mark = max(",;\t", key=(lines or [""])[0].count)
    rows = list(csv.reader(lines, delimiter=mark))
    rows = [[cell.strip() for cell in row] for row in rows if any(cell.strip() for cell in row)]
    if len(rows) < 2:
        raise UserError(f"{path} holds no pairs: give a CSV with a line of names and one pair of sequences a line")
    names, found = rows[0], []
    spelt = {name.lower(): name for name in names}
    one = ordered or next((spelt[word] for word in ORDERED if word in spelt), "")
    other = sequenced or next((spelt[word] for word in SEQUENCED if word in spelt), "")
    if len(names) == 2:  # the one that is left; the first is what was ordered where neither says which it is
        one = one or next(name for name in names if name != other)
        other = other or next((name for name in names if name != one), "")
    one, other = one or ORDERED[0], other or SEQUENCED[0]
    for name, flag in ((one, "--ordered"), (other, "--sequenced")):
        if name not in names:
            raise UserError(
                f'{path} has no column "{name}" but {shown(", ".join(names))}: name the right one with {flag}'
            )
        found.append(names.index(name))
    for number, row in enumerate(rows[1:], start=2):
        if len(row) <= max(found):
            raise UserError(f"line {number} of {path} has {len(row)} of {len(names)} columns: mend it")
    first, second = ([row[i].replace("-", "").upper() for row in rows[1:]] for i in found)
    return first, second


def estimate(ordered: Sequence[str], sequenced: Sequence[str], alphabet: str = "ACGT", level: float = 0.95) -> Noise:
    """The noise that turned each ordered string into the sequenced one beside it.

    Pairs whose sequenced string has letters outside the alphabet, such as an N, are left out and counted. Intervals are
    Clopper and Pearson's at `level`, for each number by itself.
    """
    if len(ordered) != len(sequenced):
        raise UserError(
            f"{len(ordered)} ordered and {len(sequenced)} sequenced strings make no pairs: give as many of each"
        )
    if not 0 < level < 1:
        raise UserError(f"intervals at level {level} cannot be had: give one between 0 and 1, such as 0.95")
    known = set(alphabet)
    for i, text in enumerate(ordered, start=1):
        if set(text) - known:
            raise UserError(
                f"pair {i} orders {text[:40]!r}, with letters outside {alphabet!r}: correct it, or give the alphabet"
            )
    used = Counter((x, y) for x, y in zip(ordered, sequenced, strict=True) if not set(y) - known and x)
    if not used:
        raise UserError(f"none of {len(ordered)} pairs has sequences over {alphabet!r} alone: check the two columns")
    missing = [a for a in alphabet if not any(a in x for x, _ in used)]
    if missing:
        raise UserError(
            f"no pair orders the letter {', '.join(missing)}, so what becomes of it is not known: add pairs that do, or give an alphabet without it"
        )
    total = sum(used.values())
    same = all(len(x) == len(y) for x, y in used)
    made = Synthesis(
        alphabet, torch.eye(len(alphabet)) * 0.9 + 0.1 / len(alphabet), *((0.0, 0.0) if same else (0.01, 0.01))
    )
    before = -np.inf
    for _ in range(1 if same else ROUNDS):
        seen = _expected(made, used)
        made = seen.best(alphabet)
        if seen.log_likelihood - before < STILL * total:
            break
        before = seen.log_likelihood
    final = _expected(made, used)
    return _with_intervals(made, seen, total, len(ordered) - total, level, final.log_likelihood / total)


class _Counts(NamedTuple):
    """Expected numbers of what happened in all cycles."""

    kept: np.ndarray  # [K, K] ordered letter x made letter
    deleted: float
    inserted: float
    cycles: float
    log_likelihood: float

    def best(self, alphabet: str) -> Synthesis:
        rows = self.kept.sum(1, keepdims=True)
        if not (rows > 0).all():
            lost = alphabet[int((rows[:, 0] <= 0).argmax())]
            raise UserError(
                f"whenever {lost} was ordered no letter was made, so what becomes of it is not known: add pairs"
            )
        return Synthesis(
            alphabet, torch.from_numpy(self.kept / rows), self.inserted / self.cycles, self.deleted / self.cycles
        )


def _expected(made: Synthesis, used: Counter[tuple[str, str]]) -> _Counts:
    """The expected counts under the law `made`, given the pairs."""
    kept, sums = np.zeros((made.letters, made.letters)), np.zeros(3)
    log_likelihood = 0.0
    by_size = sorted(used.items(), key=lambda item: (len(item[0][0]), len(item[0][1])))
    at = 0
    while at < len(by_size):
        longest = max(len(by_size[at][0][0]), len(by_size[at][0][1])) + 2
        part = by_size[at : at + max(1, AT_ONCE // (2 * longest) ** 2)]
        at += len(part)
        x, y = made.encode([p[0] for p, _ in part]), made.encode([p[1] for p, _ in part])
        weight = np.array([n for _, n in part], dtype=np.float64)
        log_likelihood += _add(made, x, y, weight, kept, sums)
    kept[kept < NEVER] = 0
    sums[sums < NEVER] = 0
    cycles = float(sum(len(x) * n for (x, _), n in used.items()))
    return _Counts(kept, float(sums[0]), float(sums[1]), cycles, log_likelihood)


def _add(
    made: Synthesis, x: np.ndarray, y: np.ndarray, weight: np.ndarray, kept: np.ndarray, sums: np.ndarray
) -> float:
    """Add the expected counts of pairs x [N, n], y [N, J] to `kept` and `sums`; their log-likelihood."""
    d, r, k = made.deletion, made.insertion, made.letters
    p = made.table.numpy()
    forward, scale = made.forward(x, y)
    sizes, wide = (y >= 0).sum(1), y.shape[1]
    ends = forward[-1][np.arange(len(y)), sizes]
    behind = np.zeros((len(y), wide + 1))  # of the cycles still to come, scaled; [N, J+1]
    behind[np.arange(len(y)), sizes] = 1
    letter, there = y.clip(0), y >= 0
    for i in range(x.shape[1] - 1, -1, -1):
        on, row = x[:, i] >= 0, x[:, i].clip(0)
        chance = np.where(there, p[row[:, None], letter], 0)  # of making each sequenced letter in this cycle
        here = forward[i]
        none = d * (1 - r) * here * behind
        one = (1 - d) * (1 - r) * chance * here[:, :-1] * behind[:, 1:]
        swap = d * r / k * there * here[:, :-1] * behind[:, 1:]
        two = (
            (1 - d) * r / k * chance[:, :-1] * there[:, 1:] * here[:, :-2] * behind[:, 2:]
            if wide > 1
            else np.zeros((len(y), 0))
        )
        whole = none.sum(1) + one.sum(1) + swap.sum(1) + two.sum(1)
        share = np.where(on & (whole > 0), weight / np.where(whole > 0, whole, 1), 0)
        sums[0] += float(share @ (none.sum(1) + swap.sum(1)))
        sums[1] += float(share @ (swap.sum(1) + two.sum(1)))
        made_here = one.copy()
        made_here[:, : two.shape[1]] += two
        np.add.at(kept, (row[:, None].repeat(wide, 1), letter), made_here * share[:, None])
        before = d * (1 - r) * behind
        before[:, :-1] += ((1 - d) * (1 - r) * chance + d * r / k * there) * behind[:, 1:]
        if wide > 1:
            before[:, :-2] += (1 - d) * r / k * chance[:, :-1] * there[:, 1:] * behind[:, 2:]
        before = np.where(on[:, None], before, behind)
        top = before.max(1, keepdims=True)
        behind = before / np.where(top > 0, top, 1)
    with np.errstate(divide="ignore"):
        return float(weight @ (np.log(ends) + scale))


def _with_intervals(
    made: Synthesis, seen: _Counts, pairs: int, left_out: int, level: float, log_likelihood: float
) -> Noise:
    from scipy.stats import beta

    tail = (1 - level) / 2

    def interval(hits: np.ndarray, tries: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Clopper and Pearson's, which the beta distribution extends to counts that are not whole."""
        misses = np.maximum(tries - hits, 0)
        low = np.where(hits > 1e-9, beta.ppf(tail, np.maximum(hits, 1e-9), misses + 1), 0.0)
        high = np.where(misses > 1e-9, beta.ppf(1 - tail, hits + 1, np.maximum(misses, 1e-9)), 1.0)
        return low, high

    tries = seen.kept.sum(1)
    low, high = interval(seen.kept, tries[:, None])

    def rate(hits: float) -> Rate:
        under, over = interval(np.array(hits), np.array(seen.cycles))
        return Rate(hits / seen.cycles, float(under), float(over))

    return Noise(
        alphabet=made.alphabet,
        table=made.table,
        low=torch.from_numpy(low),
        high=torch.from_numpy(high),
        counts=torch.from_numpy(tries),
        insertion=rate(seen.inserted),
        deletion=rate(seen.deleted),
        pairs=pairs,
        left_out=left_out,
        level=level,
        log_likelihood=log_likelihood,
    )
