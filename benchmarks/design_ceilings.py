"""What nobody can pass on two problems of `design_search.py`, whose goal at a distance depends on it.

    python benchmarks/design_ceilings.py --out benchmarks/results/design_ceilings.json

The promoter's highest score is found exactly. For the template, 100 strings at a distance cannot all be near a hidden
one: an upper bound of their mean, and what a search that knows the hidden strings reaches.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import header, write
from design_tasks import PROBLEMS, hidden_strings, promoter_sites, states

from stochflow.training.search.pool import apart
from stochflow.training.search.population import default_distance

RUN = math.log(0.9)  # of each letter that is the third of a run


def promoter(seed: int) -> float:
    """The highest score, over all places of the four sites and all strings: a recursion over letters, runs and the count of G and C."""
    sites, places = promoter_sites(seed)
    first = _highest(sites, np.array([places]), places)[0]
    reach = int(math.sqrt(-first * 36 / 0.125))  # places further off lose more than that by themselves
    steps = np.stack(np.meshgrid(*[np.arange(-reach, reach + 1)] * 4, indexing="ij"), -1).reshape(-1, 4)
    steps = steps[(steps**2).sum(1) <= -first * 36 / 0.125] + places
    steps = steps[(steps >= 0).all(1) & (steps <= 44).all(1)]
    return math.exp(
        max([first, *(_highest(sites, part, places).max() for part in np.array_split(steps, 1 + len(steps) // 2000))])
    )


def _highest(sites: np.ndarray, at: np.ndarray, places: tuple[int, ...]) -> np.ndarray:
    """[n] the highest log score where the sites are at `at` [n, 4]."""
    n = len(at)
    gain = np.zeros((n, 50, 4))
    for s, site in enumerate(sites):
        for j in range(6):
            np.add.at(gain, (np.arange(n), at[:, s] + j), 0.125 * (site[j] - site[j].max()))
    value = np.full((n, 4, 2, 51), -np.inf)  # last letter, whether it is in a run, how many are C or G
    for a in range(4):
        value[:, a, 0, int(a in (1, 2))] = gain[:, 0, a]
    for place in range(1, 50):
        new = np.full_like(value, -np.inf)
        for a in range(4):
            other = np.delete(value, a, 1).max((1, 2))
            again = np.maximum(value[:, a, 0], value[:, a, 1] + RUN)
            for run, before in enumerate((other, again)):
                if a in (1, 2):
                    new[:, a, run, 1:] = before[:, :-1] + gain[:, place, a, None]
                else:
                    new[:, a, run] = before + gain[:, place, a, None]
        value = new
    balance = -8 * (np.arange(51) / 50 - 0.5) ** 2
    return (value.max((1, 2)) + balance).max(1) - 0.125 * (((at - places) / 6.0) ** 2).sum(1)


def template_bound(seed: int) -> float:
    """No 100 strings at a distance d of each other have a higher mean.

    Strings one substitution from the same are within 2 of each other; two deletions at i < j differ in j - i places at
    most, two insertions in j - i + 1. So of each hidden string of length n one has edit distance 0, at most
    ceil(n / d) + ceil((n + 1) / (d - 1)) have 1, and all the others 2 or more.
    """
    distance, values = default_distance(40), []
    for target, top in zip(*hidden_strings(seed), strict=True):
        n = len(target)
        near = math.ceil(n / distance) + (math.ceil((n + 1) / (distance - 1)) if n < 40 else 0)
        for edits, count in ((0, 1), (1, near), (2, 100)):
            values += [float(top) * (1 - edits / min(40, n + edits)) ** 2] * count
    return sum(sorted(values, reverse=True)[:100]) / 100


def template_known(seed: int, tries: int = 6000) -> float:
    """The mean of the 100 best at a distance among strings a few insertions and deletions from the hidden ones."""
    problem, dice = PROBLEMS["template"](seed), np.random.default_rng(seed)
    texts: dict[str, None] = {}
    for target in hidden_strings(seed)[0]:
        for _ in range(tries):
            row = list(target)
            for _ in range(dice.integers(0, 4)):
                place = int(dice.integers(len(row)))
                if dice.random() < 0.5 and len(row) < 40:
                    row.insert(place, int(dice.integers(8)))
                elif len(row) > 20:
                    row.pop(place)
            texts["".join("ABCDEFGH"[i] for i in row)] = None
    made = list(texts)
    value = torch.tensor(problem.oracle(made))
    order = value.argsort(descending=True, stable=True)
    far = apart(states(problem, made)[order], default_distance(40), 100)
    return float(value[order][far].mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    found: dict[str, Any] = {
        "promoter": [promoter(s) for s in range(given.seeds)],
        "template": [template_bound(s) for s in range(given.seeds)],
        "template known": [template_known(s) for s in range(given.seeds)],
    }
    write(header("cpu", seeds=given.seeds) | found, given.out)


if __name__ == "__main__":
    main()
