"""Plates chosen without a model, at random and by a genetic algorithm: what a campaign's own are compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from stochflow.design.generate import child, random_texts
from stochflow.design.space import Space

Choice = Callable[[Space, Mapping[str, float], float, int, int], list[str]]


def random_plate(space: Space, known: Mapping[str, float], sign: float, count: int, seed: int) -> list[str]:
    """Uniform walks, uniform strings where there are rules; none of them measured."""
    if space.rules is not None and space.rules.exact:
        import torch

        drawn = space.rules.sample(20 * count, torch.Generator().manual_seed(seed))
    else:
        drawn = random_texts(space.env, 20 * count, seed)
    return [t for t in dict.fromkeys(drawn) if t not in known and space.accepts(t)][:count]


def genetic_plate(space: Space, known: Mapping[str, float], sign: float, count: int, seed: int) -> list[str]:
    """Crossed and mutated from the best measured; `sign` is -1 where less is better."""
    rng = np.random.default_rng(seed)
    parents = sorted(known, key=lambda t: (-sign * known[t], t))[: max(20, count // 2)]
    found: dict[str, None] = {}
    for _ in range(200 * count):
        if len(found) == count:
            break
        text = child(space.env, parents, rng)
        if text not in known and space.accepts(text):
            found[text] = None
    return list(found)


CHOICES: dict[str, Choice] = {"random": random_plate, "genetic algorithm": genetic_plate}
