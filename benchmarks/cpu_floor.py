"""How quick an iteration could be at all on this CPU: its matrix products and its update alone.

    PYTHONPATH=src python benchmarks/cpu_floor.py --threads 2 --out benchmarks/results/cpu_floor.json

Of each task of the comparison at batch 16, the states that a batch meets are counted in a real run, each distinct one once per seed. Then the products
of a network of that size over so many states are timed, as few and as large as they can be: through each layer once, back through each once, and
the sums that weights get. (A rollout has to ask step by step, in many small products, so this is less than anyone can do who adds up every term.) The
first layer, whose inputs are flags, is left out. Beside it stand one fused Adam step and the average of the weights, which read and write every parameter.

Beside it stands which part of each layer's outputs is not zero: stochflow's loops skip the others.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import stochflow
from stochflow.runs.config import configure
from stochflow.runs.experiment import Experiment

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from run_stochflow import settings
from work import HIDDEN, LAYERS, LR, TASKS, WINDOWS

BATCH, WARM_UP, LOOKED_AT = 16, {"grid": 1500}, 20  # on grids a policy has to learn to walk, as in compare.py


def milliseconds(work: Callable[[], object], budget: float) -> float:
    """The least of several windows: a floor is what a quiet machine does."""
    for _ in range(20):
        work()
    found = []
    for _ in range(WINDOWS):
        begun, rounds = time.perf_counter(), 0
        while time.perf_counter() - begun < budget / WINDOWS:
            work()
            rounds += 1
        found.append((time.perf_counter() - begun) / rounds * 1e3)
    return min(found)


def measure(task: str, seeds: int, threads: int, budget: float) -> dict[str, Any]:
    name, given = settings(task)
    fixed = {"net": "mlp", "hidden": HIDDEN, "layers": LAYERS, "objective": "tb", "lr": LR}
    trainer = Experiment(configure(name, **fixed, **given, batch=BATCH, seeds=seeds, threads=threads)).trainer
    trainer.train(WARM_UP.get(name, 300))
    met, some = [], []
    for _ in range(LOOKED_AT):
        trainer.iterate(False)
        space = trainer.source.traces.space
        reached = space.rows.begin[:, space.world.asked]
        met.append(float(reached.mean()))
        some.append([float((layer[0, : reached[0]] > 0).mean()) for layer in space.rows.inputs[:LAYERS]])
    states = round(sum(met) / len(met))
    outputs, flat = trainer.policy.head.weight.shape[2], trainer.policy_flat
    x, y, slope = (
        torch.randn(seeds, states, HIDDEN),
        torch.randn(seeds, states, HIDDEN),
        torch.randn(seeds, states, outputs),
    )
    second, head = torch.randn(seeds, HIDDEN, HIDDEN), torch.randn(seeds, HIDDEN, outputs)

    def products() -> None:
        torch.bmm(x, second)  # onward
        torch.bmm(y, head)
        torch.bmm(slope, head.mT)  # and back
        torch.bmm(slope.mT, y)
        torch.bmm(y, second.mT)
        torch.bmm(x.mT, y)

    values = torch.zeros_like(flat.values, requires_grad=True)
    values.grad, average = torch.randn_like(values.detach()), values.detach().clone()
    adam = torch.optim.Adam([values], lr=LR, fused=True)

    def update() -> None:
        adam.step()
        average.lerp_(values, 0.1)

    with torch.no_grad():
        found = {"products_ms": milliseconds(products, budget), "update_ms": milliseconds(update, budget)}
    return {
        "task": task,
        "title": TASKS[task]["title"],
        "seeds": seeds,
        "states": states,
        "parameters": sum(p.numel() for p in flat.named.values()) // seeds,
        "nonzero": [round(sum(layer) / len(layer), 3) for layer in zip(*some, strict=True)],
    } | {name: round(value, 4) for name, value in found.items()}


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--threads", type=int, default=2)
    a.add_argument("--budget", type=float, default=1.0, help="seconds per figure")
    a.add_argument("--hardware", default=f"{platform.machine()} CPU")
    a.add_argument("--out", type=Path)
    given = a.parse_args()
    torch.set_num_threads(given.threads)
    rows = []
    for seeds in (1, 8):
        for task in TASKS:
            rows.append(measure(task, seeds, given.threads, given.budget))
            print(rows[-1], flush=True)
    versions = {"stochflow": stochflow.__version__, "python": sys.version.split()[0], "torch": torch.__version__}
    result = {
        "hardware": f"{given.hardware}, {given.threads} thread(s)",
        "versions": versions,
        "batch": BATCH,
        "rows": rows,
    }
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
