"""How quick an iteration could be at all on this CPU: its matrix products and its update alone, everything else for nothing.

    PYTHONPATH=src python benchmarks/cpu_floor.py --threads 2 --out benchmarks/results/cpu_floor.json

Of each task of the comparison at batch 16, the states that a batch meets are counted in a real run, each distinct one once a seed. Then the products
of a network of that size over so many states are timed, as few and as large as they can be: through each layer once, back through each once, and
the sums that weights get. (A rollout has to ask step by step, in many small products, so this is less than anyone can do who adds up every term.) The
first layer, whose inputs are flags, is left out. Beside it stand one fused Adam step and the average of the weights, which read and write every parameter.

The same by the loops of stochflow, which pass over terms that are nothing: the states of the last batch asked again step by step, what is said to them and
to the weights, and an update, one call after the other with nothing in between. What part of each layer's outputs is something stands beside it.
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

import numpy as np
import torch

import stochflow
from stochflow.runs.config import configure
from stochflow.engines.numba.compiled import in_parts, loops
from stochflow.engines.numba.walk import draw
from stochflow.runs.experiment import Experiment
from stochflow.engines.flat import FlatParameters

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
        room = trainer.source.trace.room
        reached = room.rows.begin[:, room.world.asked]
        met.append(float(reached.mean()))
        some.append([float((layer[0, : reached[0]] > 0).mean()) for layer in room.rows.inputs[:LAYERS]])
    states = round(sum(met) / len(met))
    outputs, flat = trainer.policy.head.weight.shape[2], trainer.policy_flat
    x, y, said = torch.randn(seeds, states, HIDDEN), torch.randn(seeds, states, HIDDEN), torch.randn(seeds, states, outputs)
    second, head = torch.randn(seeds, HIDDEN, HIDDEN), torch.randn(seeds, HIDDEN, outputs)

    def products() -> None:
        torch.bmm(x, second)  # onward
        torch.bmm(y, head)
        torch.bmm(said, head.mT)  # and back
        torch.bmm(said.mT, y)
        torch.bmm(y, second.mT)
        torch.bmm(x.mT, y)

    fresh = FlatParameters(trainer.policy, LR, 1e9)

    def update() -> None:
        fresh._adam(LR)
        fresh.average.lerp_(fresh.values, 0.1)

    with torch.no_grad():
        found = {"products_ms": milliseconds(products, budget), "update_ms": milliseconds(update, budget)}
    work = loops_alone(trainer)
    found["loops_ms"] = milliseconds(lambda: in_parts(work, seeds), budget)
    return {
        "task": task,
        "title": TASKS[task]["title"],
        "seeds": seeds,
        "states": states,
        "parameters": sum(p.numel() for p in flat.named.values()) // seeds,
        "something": [round(sum(layer) / len(layer), 3) for layer in zip(*some, strict=True)],
    } | {name: round(value, 4) for name, value in found.items()}


def loops_alone(trainer: Any) -> Callable[[int, int], None]:
    """What the loops do with every number of an iteration, for some of the seeds."""
    compiled, (room, way, _) = loops(), trainer.source.trace
    world, rows, kept, flat = room.world, room.rows, room.kept, trainer.policy_flat._compiled
    count, (chance, _) = rows.begin[:, world.asked].copy(), draw(trainer.task, room, None)
    asked = ((0, 100), False, False, 1 << 62, 0, world, room.net, rows, way, chance)
    taught = (rows.inputs, kept.said.slope, kept.to_inputs)
    updated = (0, *flat.given(1e9, np.array([[0.0, 1.0, 0.0]])))  # a step of nothing

    def work(s: int, e: int) -> None:
        compiled.walk(s, e, 0, world.asked, *asked)
        compiled.back(s, e, 0, 1, world.few, count, room.net.stages, *taught)
        compiled.teach(s, e, 0, 1, world.few, count, *taught, kept.to_stages, kept.to_biases)
        compiled.update(s, e, 0, 1, True, True, *updated)

    return work


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--threads", type=int, default=2)
    a.add_argument("--budget", type=float, default=1.0, help="seconds a figure")
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
    result = {"hardware": f"{given.hardware}, {given.threads} thread(s)", "versions": versions, "batch": BATCH, "rows": rows}
    if given.out:
        given.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
