"""Ehrlich functions against their definition, spelled out letter by letter."""

from __future__ import annotations

import itertools

import pytest
import torch

from stochflow.errors import UserError
from stochflow.scores.ehrlich import Ehrlich
from stochflow.worlds.check import check_env


def by_hand(f: Ehrlich, row: list[int]) -> float:
    if any(not bool(f.allowed[a, b]) for a, b in itertools.pairwise(row)):
        return 0.0
    product = 1.0
    for motif, offset in zip(f.motifs.tolist(), f.offsets.tolist(), strict=True):
        best = 0
        for at in range(len(row) - offset[-1]):
            best = max(best, sum(row[at + o] == m for m, o in zip(motif, offset, strict=True)))
        product *= int(best * f.quantization / len(motif)) / f.quantization
    return product


@pytest.mark.parametrize("quantization", [4, 2, 1])
def test_the_score_is_the_published_product(quantization):
    f = Ehrlich.random(6, 12, 2, 4, seed=3, quantization=quantization)
    torch.manual_seed(0)
    rows = [f.env().encode([f.start(i)])[0] for i in range(40)] + list(torch.randint(6, (60, 12)))
    known = f.env().encode([f.optimum()])[0]
    for i in range(12):
        changed = known.clone()
        changed[i] = (changed[i] + 1) % 6
        rows.append(changed)
    found = f.score(torch.stack(rows))
    assert found.tolist() == [by_hand(f, row.tolist()) for row in rows]
    assert float(found.max()) > 0


@pytest.mark.parametrize("size", [(20, 15, 2, 4), (20, 32, 2, 4), (20, 64, 8, 4), (32, 32, 4, 4)])
def test_the_benchmark_sizes_have_a_feasible_optimum_and_start(size):
    for seed in range(5):
        f = Ehrlich.random(*size, seed=seed)
        assert f([f.optimum()]) == [1.0]
        start = f.env().encode([f.start(seed)])
        assert bool(f.feasible(start).all())
        assert bool((~f.allowed).any(1).float().mean() > 0.5)  # most letters may not be followed by some other


def test_where_the_rule_is_known_only_feasible_strings_can_be_built():
    f = Ehrlich.random(3, 5, 1, 2, seed=1)
    env = f.env()
    check_env(env)
    ends = env.all_states()
    ends = ends[(ends != env.pad).all(1)]
    walked = torch.tensor(list(itertools.product(range(3), repeat=5)))
    assert set(map(tuple, walked[f.feasible(walked)].tolist())) == set(map(tuple, ends.tolist()))
    with pytest.raises(UserError, match="do not fit"):
        Ehrlich.random(4, 6, 2, 4)
