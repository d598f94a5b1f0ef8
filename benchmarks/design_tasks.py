"""Problems of design over strings for `design_search.py`: texts in, scores out, each drawn by a seed.

`tuned` says whether the defaults of stochflow were chosen while looking at problems of this kind (with other seeds).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from stochflow.scores.data import tfbind8
from stochflow.scores.ehrlich import Ehrlich
from stochflow.scores.landscapes import PeptideProxy, RNAFold
from stochflow.worlds.strings import PROTEIN, Strings

Oracle = Callable[[Sequence[str]], list[float]]


class Problem(NamedTuple):
    oracle: Oracle
    alphabet: str
    length: int
    min_length: int | None
    calls: int
    low: float  # lowest score, which a missing design counts as
    ceiling: float | None  # highest score, where it is known
    start: list[str]  # known sequences; none: begin from random ones
    tuned: bool
    local: bool  # whether the score is a sum over windows of the string


def tokens(texts: Sequence[str], alphabet: str) -> np.ndarray:
    place = {c: i for i, c in enumerate(alphabet)}
    return np.array([[place[c] for c in t] for t in texts])


def ehrlich(letters: int, length: int, motifs: int, size: int, seed: int) -> Problem:
    made = Ehrlich.random(letters, length, motifs, size, seed=1000 + seed)
    return Problem(made, made.alphabet, length, None, 5120, 0.0, 1.0, [made.start(seed)], True, False)


def promoter_sites(seed: int) -> tuple[np.ndarray, tuple[int, ...]]:
    """Four sites [4, 6, 4] and their best places."""
    return np.random.default_rng(500 + seed).normal(size=(4, 6, 4)), (5, 15, 27, 38)


def promoter(seed: int) -> Problem:
    """DNA of 50 letters: four binding sites near their places, half G and C, no runs of one letter."""
    sites, places = promoter_sites(seed)

    def oracle(texts: Sequence[str]) -> list[float]:
        x = tokens(texts, "ACGT")
        count, total = x.shape[1] - 5, 0.0
        for site, place in zip(sites, places, strict=True):
            fit = sum(site[j][x[:, j : j + count]] for j in range(6)) - site.max(1).sum()
            total = total + (0.5 * fit - 0.5 * ((np.arange(count) - place) / 6.0) ** 2).max(1)
        strong = ((x == 1) | (x == 2)).mean(1)
        runs = ((x[:, 2:] == x[:, 1:-1]) & (x[:, 1:-1] == x[:, :-2])).sum(1)
        return (np.exp(0.25 * total - 8 * (strong - 0.5) ** 2) * 0.9**runs).tolist()

    return Problem(oracle, "ACGT", 50, None, 10_000, 0.0, 1.0, [], True, True)


def contacts(seed: int) -> Problem:
    """Sequences of 60 residues: energies of 60 random triples of places anywhere in the chain; not local."""
    dice = np.random.default_rng(600 + seed)
    triples = [dice.choice(60, 3, replace=False) for _ in range(60)]
    first, second = dice.normal(size=(60, 20, 20)), dice.normal(size=(60, 20, 20))

    def oracle(texts: Sequence[str]) -> list[float]:
        x, energy = tokens(texts, PROTEIN), 0.0
        for (i, j, k), a, b in zip(triples, first, second, strict=True):
            energy = energy + a[x[:, i], x[:, j]] + 0.7 * b[x[:, j], x[:, k]]
        return (1 / (1 + np.exp(3 - 2.2 * energy / 60))).tolist()

    return Problem(oracle, PROTEIN, 60, None, 10_000, 0.0, None, [], True, False)


def hidden_strings(seed: int) -> tuple[list[np.ndarray], np.ndarray]:
    """Six strings of 25 to 40 letters, and their heights."""
    dice = np.random.default_rng(700 + seed)
    return [dice.integers(0, 8, dice.integers(25, 41)) for _ in range(6)], np.linspace(1.0, 0.8, 6)


def template(seed: int) -> Problem:
    """Strings of 20 to 40 letters over 8: closeness by edit distance to the nearest of six hidden ones; not local."""
    hidden, height = hidden_strings(seed)

    def oracle(texts: Sequence[str]) -> list[float]:
        size = np.array([len(t) for t in texts])
        x = tokens([t.ljust(40, "A") for t in texts], "ABCDEFGH")
        best = np.zeros(len(x))
        for target, top in zip(hidden, height, strict=True):
            steps = np.arange(len(target) + 1.0)
            row = np.tile(steps, (len(x), 1))
            for i in range(int(size.max(initial=0))):  # a row of the table of edit distances, for all texts
                new = np.minimum(row[:, :-1] + (target != x[:, i : i + 1]), row[:, 1:] + 1)
                new = np.concatenate([np.full((len(x), 1), i + 1.0), new], 1)
                new = np.minimum.accumulate(new - steps, 1) + steps
                row = np.where((i < size)[:, None], new, row)
            best = np.maximum(best, top * (1 - row[:, -1] / np.maximum(size, len(target))) ** 2)
        return best.tolist()

    return Problem(oracle, "ABCDEFGH", 40, 20, 10_000, 0.0, 1.0, [], True, False)


def hairpin(seed: int) -> Problem:
    """RNA of 80 letters: pairs between places far apart, in three stems, strong ones in turn, and a hidden loop; not local."""
    dice = np.random.default_rng(800 + seed)
    order = dice.permutation(80)
    left, right, loop = order[:30], order[30:60], order[60:]
    wanted = dice.integers(0, 4, 20)
    pair = np.full((4, 4), 0.0)
    pair[0, 3] = pair[3, 0] = 0.8
    pair[1, 2] = pair[2, 1] = 1.0
    pair[2, 3] = pair[3, 2] = 0.3

    def oracle(texts: Sequence[str]) -> list[float]:
        x = tokens(texts, "ACGU")
        bonds = pair[x[:, left], x[:, right]]
        stems = bonds.reshape(len(x), 3, 10)
        zipped = (stems[..., 1:] * stems[..., :-1]).mean((1, 2))  # neighbours in a stem hold together
        match = (x[:, loop] == wanted).mean(1)
        share = (x == 2).mean(1)
        return (zipped * (0.5 + 0.5 * match) * np.exp(-4 * np.maximum(0, share - 0.3))).tolist()

    return Problem(oracle, "ACGU", 80, None, 10_000, 0.0, 1.0, [], False, False)


def rna(seed: int) -> Problem:
    fold = RNAFold("((((....))))..((((....))))")
    return Problem(fold, "ACGU", 26, None, 10_000, 0.0, 1.0, [], True, False)


def peptide(seed: int) -> Problem:
    """The log-odds of the shipped peptide network, for peptides of 10 to 50 residues; may be negative."""
    env = Strings(PROTEIN, 50, 10)
    proxy = PeptideProxy(env)

    def oracle(texts: Sequence[str]) -> list[float]:
        chance = proxy(env.encode(texts)).double().clamp(1e-7, 1 - 1e-7)
        return (chance.log() - (1 - chance).log()).tolist()

    return Problem(oracle, PROTEIN, 50, 10, 10_000, -16.1, 16.1, [], False, True)


def tf8(seed: int) -> Problem:
    """TFBind8, begun from 128 sequences of the table's lower half."""
    scores = np.asarray(tfbind8("SIX6_REF_R1"), dtype=float)
    low = np.argsort(scores, kind="stable")[: len(scores) // 2]
    start = np.random.default_rng(seed).choice(low, 128, replace=False)
    letters = np.array(list("ACGT"))
    known = ["".join(letters[(i // 4 ** np.arange(7, -1, -1)) % 4]) for i in start]
    place = 4 ** np.arange(7, -1, -1)

    def oracle(texts: Sequence[str]) -> list[float]:
        return scores[(tokens(texts, "ACGT") * place).sum(1)].tolist()

    return Problem(oracle, "ACGT", 8, None, 2000, float(scores.min()), 1.0, known, True, False)


PROBLEMS: dict[str, Callable[[int], Problem]] = {
    "ehrlich 20, 15, 2, 4": lambda seed: ehrlich(20, 15, 2, 4, seed),
    "ehrlich 20, 32, 2, 4": lambda seed: ehrlich(20, 32, 2, 4, seed),
    "ehrlich 20, 64, 8, 4": lambda seed: ehrlich(20, 64, 8, 4, seed),
    "ehrlich 32, 32, 4, 4": lambda seed: ehrlich(32, 32, 4, 4, seed),
    "promoter": promoter,
    "contacts": contacts,
    "template": template,
    "hairpin": hairpin,
    "peptide": peptide,
    "tfbind8, lower half": tf8,
    "rna": rna,
}


def states(problem: Problem, texts: Sequence[str]) -> torch.Tensor:
    return Strings(problem.alphabet, problem.length, problem.min_length).encode(texts)
