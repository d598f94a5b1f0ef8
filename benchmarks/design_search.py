"""How good and how different the designs are that equal numbers of oracle calls find.

    python benchmarks/design_search.py --out benchmarks/results/design_search.json

One cell is a problem, an arm and a seed; cells run in `--workers` processes of one thread each, the dear ones first, and
every finished cell is appended to the JSON-lines file beside `--out` at once: the same command goes on where it was
stopped. `--time-limit` seconds end the whole, with what is there written to `--out`.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from common import header, write
from design_tasks import PROBLEMS, Problem, states

import stochflow
from stochflow.baselines.rivals import RIVALS, Asker
from stochflow.training.search.pool import apart
from stochflow.training.search.population import default_distance
from stochflow.worlds.strings import Strings

PLAIN: dict[str, Any] = {"search": "none", "replay": 0.0, "replay_rank": False, "ask_every": 1, "objective": "tb", "net": "mlp", "batch": 64, "lr": 1e-3, "steps": 100_000}  # fmt: skip
ARMS: dict[str, dict[str, Any]] = {
    "plain": PLAIN,
    "replay by rank": PLAIN | {"replay": 0.5, "replay_rank": True, "objective": "logvar"},
    "local search": PLAIN | {"search": "local", "children": 48},
    "population": PLAIN | {"search": "population", "children": 48},
    "wide": {"batch": 224, "children": 100},
    "transformer": {"net": "transformer", "hidden": 64},
    "default": {},
}
MAIN = ("random", "ga", "mcmc", "plain", "default")
COST = {"transformer": 9, "wide": 4, "default": 3, "replay by rank": 2, "local search": 2, "population": 2, "plain": 2}
MARKS = (0.25, 0.5, 0.75, 0.9)


def asked(problem: Problem, arm: str, seed: int) -> tuple[list[str], list[float]]:
    """All objects that an arm asked about and their scores, in order."""
    if arm in RIVALS:
        torch.manual_seed(seed)
        env = Strings(problem.alphabet, problem.length, problem.min_length)
        start = env.encode(problem.start) if problem.start else None
        asker = Asker(env, lambda x: torch.tensor(problem.oracle(env.decode(x))), problem.calls, start)
        RIVALS[arm](asker)
        objects, scores = asker.answers()
        return env.decode(objects), scores.tolist()
    task = stochflow.strings_task(problem.oracle, problem.alphabet, problem.length, problem.min_length)
    with tempfile.TemporaryDirectory() as folder:
        more: dict[str, Any] = {}
        if problem.start:
            known = Path(folder) / "known.txt"
            known.write_text("\n".join(problem.start) + "\n")
            more["start"] = str(known)
        run = Path(folder) / "run"
        stochflow.train(task, out=run, seed=seed, oracle_calls=problem.calls, **ARMS[arm], **more)
        answers = [json.loads(line) for line in (run / "oracle.jsonl").read_text().splitlines()]
        summary = json.loads((run / "summary.json").read_text())
    asked.summary = summary  # type: ignore[attr-defined]
    return [a["text"] for a in answers], [a["score"] for a in answers]


def figures(problem: Problem, texts: list[str], scores: list[float]) -> dict[str, Any]:
    """What counts: the best, the mean of the 100 best, and of the 100 best at a distance, missing ones at the lowest score."""
    value = torch.tensor(scores, dtype=torch.float64)
    order = value.argsort(descending=True, stable=True)
    objects, ranked = states(problem, texts)[order], value[order]
    distance = default_distance(problem.length)
    among = min(len(ranked), 20_000)
    far = apart(objects[:among], distance, 100)
    best = objects[:100]
    top, n = float(ranked[:100].mean()), len(best)
    span = (problem.ceiling if problem.ceiling is not None else top) - problem.low
    calls = {}
    for mark in MARKS:
        over = (value >= problem.low + mark * span).nonzero()
        calls[str(mark)] = int(over[0]) + 1 if len(over) else None
    curve = {}
    for count in (250, 500, 1000, 2000, 5120, 10_000):
        if count <= len(value):
            so_far = value[:count].sort(descending=True).values
            curve[str(count)] = float(so_far[:100].mean())
    known = states(problem, problem.start) if problem.start else None
    return {
        "best": float(ranked[0]),
        "top": top,
        "apart": float((ranked[:among][far].sum() + problem.low * (100 - int(far.sum()))) / 100),
        "apart_count": int(far.sum()),
        "distance": distance,
        "diversity": float((best.unsqueeze(1) != best).sum()) / (n * (n - 1)),
        "novelty": None if known is None else float((best.unsqueeze(1) != known).sum(-1).amin(1).double().mean()),
        "calls_until": calls,
        "curve": curve,
        "calls": len(texts),
    }


def cell(name: str, arm: str, seed: int, calls: int) -> dict[str, Any]:
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    problem = PROBLEMS[name](seed)
    if calls:
        problem = problem._replace(calls=min(calls, problem.calls))
    begun = time.process_time()
    texts, scores = asked(problem, arm, seed)
    cpu = time.process_time() - begun
    found = {"task": name, "arm": arm, "seed": seed, "cpu_s": round(cpu, 1)} | figures(problem, texts, scores)
    assert len(set(texts)) == len(texts) <= problem.calls
    if arm not in RIVALS:
        summary = asked.summary  # type: ignore[attr-defined]
        found["policy"] = {k: summary.get(k) for k in ("sample_score", "top_score", "diversity", "distinct", "law")}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--tasks", default="", help="names with semicolons between; default: all")
    parser.add_argument("--arms", default=",".join(MAIN))
    parser.add_argument("--without", default="", help="names of tasks to leave out, with semicolons between")
    parser.add_argument("--calls", type=int, default=0, help="fewer calls than a problem's own, to try it out")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--time-limit", type=float, default=1e9)
    asked_for = parser.parse_args()
    begun = time.monotonic()
    names = [n for n in asked_for.tasks.split(";") if n] or list(PROBLEMS)
    names = [n for n in names if n not in asked_for.without.split(";")]
    arms = asked_for.arms.split(",")
    lines = asked_for.out.with_suffix(".jsonl") if asked_for.out else None
    done: list[dict[str, Any]] = []
    if lines is not None and lines.exists():
        done = [json.loads(line) for line in lines.read_text().splitlines()]
    have = {(d["task"], d["arm"], d["seed"]) for d in done}
    cells = [
        (n, a, s) for s in range(asked_for.seeds) for a in sorted(arms, key=lambda a: -COST.get(a, 0)) for n in names
    ]
    with ProcessPoolExecutor(asked_for.workers) as pool:
        waiting = {pool.submit(cell, *c, asked_for.calls) for c in cells if c not in have}
        try:
            for future in as_completed(waiting, timeout=asked_for.time_limit):
                found = future.result()
                done.append(found)
                print(
                    {k: found[k] for k in ("task", "arm", "seed", "best", "top", "apart", "diversity", "cpu_s")},
                    flush=True,
                )
                if lines is not None:
                    lines.parent.mkdir(parents=True, exist_ok=True)
                    with lines.open("a") as file:
                        file.write(json.dumps(found) + "\n")
        except TimeoutError:
            print(f"time is up with {len(done)} of {len(cells)} cells")
            for process in pool._processes.values():
                process.terminate()
            pool.shutdown(wait=False, cancel_futures=True)
    done.sort(key=lambda d: (names.index(d["task"]) if d["task"] in names else 99, d["arm"], d["seed"]))
    write(
        header("cpu", calls=asked_for.calls, seeds=asked_for.seeds)
        | {"wall_s": round(time.monotonic() - begun), "cells": done},
        asked_for.out,
    )


if __name__ == "__main__":
    main()
