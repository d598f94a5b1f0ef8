"""How the defaults of the population were chosen: what its parts bring, as variants of `Breeding`, on problems drawn by other seeds than the benchmark's.

    python benchmarks/design_tune.py --out benchmarks/results/design_tune.json

The search runs by itself, without a policy. Each variant's figure is the mean over the problems of the logarithms of the
mean of the 100 best, and of the 100 best at a distance, over those of the genetic algorithm, cut off where more counts
no longer. Problems of the kinds hairpin, peptide and rna were not looked at.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common import header, write
from design_search import asked, figures
from design_tasks import PROBLEMS, Problem

from stochflow.training.search.population import Breeder, Breeding
from stochflow.worlds.strings import Strings

SEEDS = range(100, 103)
VARIANTS: dict[str, tuple[Breeding, int]] = {  # and how many children are asked about at once
    "default": (Breeding(), 48),
    "no renewal": (Breeding(kinds=5), 48),
    "never anew": (Breeding(anew=False), 48),
    "no renewal, never anew": (Breeding(kinds=5, anew=False), 48),
}


def alone(problem: Problem, how: Breeding, n: int, seed: int) -> tuple[list[str], list[float]]:
    """What the population asks about by itself, and the scores."""
    torch.manual_seed(seed)
    env = Strings(problem.alphabet, problem.length, problem.min_length)
    breeder = Breeder(env, how=how)
    known: dict[str, float] = {}
    x = env.encode(problem.start) if problem.start else breeder.offspring(n)
    while True:
        texts = env.decode(x)
        new = [t for t in dict.fromkeys(texts) if t not in known][: problem.calls - len(known)]
        known |= dict(zip(new, problem.oracle(new), strict=True)) if new else {}
        if len(known) == problem.calls or not new:
            return list(known), list(known.values())
        value = torch.tensor([known[t] for t in texts])
        breeder.note(value)
        breeder.pool.note(x, value)
        x = breeder.offspring(n)


def cell(task: str, variant: str, seed: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    problem, begun = PROBLEMS[task](seed), time.process_time()
    if variant == "ga":
        found = asked(problem, "ga", seed)
    else:
        found = alone(problem, *VARIANTS[variant], seed)
    kept = figures(problem, *found)
    return {"task": task, "variant": variant, "seed": seed, "cpu_s": round(time.process_time() - begun, 1)} | {
        k: kept[k] for k in ("best", "top", "apart")
    }


def rate(cells: list[dict[str, Any]]) -> dict[str, float]:
    """The figure of each variant, over the problems that all variants have."""
    means: dict[tuple[str, str], dict[str, float]] = {}
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for c in cells:
        groups[c["task"], c["variant"]].append(c)
    for key, group in groups.items():
        means[key] = {k: sum(c[k] for c in group) / len(group) for k in ("top", "apart")}
    rated = {}
    for variant in VARIANTS:
        parts = []
        for task in {c["task"] for c in cells}:
            if (task, variant) in means and (task, "ga") in means:
                own, ga = means[task, variant], means[task, "ga"]
                for key, most in (("top", 1.1), ("apart", 1.5)):
                    parts.append(math.log(min(most, max(0.3, own[key] / max(ga[key], 1e-9)))))
        if parts:
            rated[variant] = sum(parts) / len(parts)
    return dict(sorted(rated.items(), key=lambda x: -x[1]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--time-limit", type=float, default=1e9)
    parser.add_argument("--seeds", type=int, default=len(SEEDS))
    given = parser.parse_args()
    tasks = [t for t in PROBLEMS if t not in ("hairpin", "peptide", "rna")]
    jobs = [(t, v, s) for s in SEEDS[: given.seeds] for t in tasks for v in ("ga", *VARIANTS)]
    cells = []
    with ProcessPoolExecutor(given.workers) as pool:
        waiting = {pool.submit(cell, *j) for j in jobs}
        try:
            for future in as_completed(waiting, timeout=given.time_limit):
                cells.append(future.result())
        except TimeoutError:
            print(f"time is up with {len(cells)} of {len(jobs)} cells")
            for process in pool._processes.values():
                process.terminate()
            pool.shutdown(wait=False, cancel_futures=True)
    rated = rate(cells)
    print(json.dumps(rated, indent=1))
    write(
        header("cpu", variants={k: [list(b), n] for k, (b, n) in VARIANTS.items()}) | {"rated": rated, "cells": cells},
        given.out,
    )


if __name__ == "__main__":
    main()
