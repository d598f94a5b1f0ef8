"""How time and memory grow: an iteration with horizon, batch, alphabet and seeds; exact evaluation with the number of states.

    PYTHONPATH=src python benchmarks/growth.py --out benchmarks/results/speed_growth_cpu.json
    PYTHONPATH=src python benchmarks/growth.py --device cuda --out benchmarks/results/speed_growth_gpu.json

Each figure is measured in a process of its own (forked before anything touches the device), so that its peak of memory is its own.
Iterations: trajectory balance, a 256 x 2 MLP, evaluation off. Exact evaluation: all states and moves of the space, then the law of a
64 x 2 MLP policy over it, the networks asked in chunks.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # any optimiser imports it when it is made: here it counts as import, not as memory of training
from common import write

import stochflow
from stochflow.law.exact import Graph, exact_law
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.runs.config import configure
from stochflow.runs.experiment import Experiment
from stochflow.runs.tasks import build

WINDOWS = 5
Row = dict[str, Any]

# what grows, and everything else that stays; bit sequences have any horizon and any alphabet
HORIZON: list[Row] = [{"task": "bits", "length": n, "bits": 1, "batch": 64} for n in (8, 16, 32, 64, 120)]
ALPHABET: list[Row] = [{"task": "bits", "length": 8 * b, "bits": b, "batch": 64} for b in (1, 2, 4, 6, 8, 10)]
BATCH: list[Row] = [{"task": "tfbind8", "stick": 0.25, "batch": n} for n in (16, 64, 256, 1024, 4096, 16384)]
SEEDS: list[Row] = [{"task": "tfbind8", "stick": 0.25, "batch": 16, "seeds": n} for n in (1, 2, 4, 8, 16)]
STATES: list[Row] = [
    {"task": "tfbind8", "stick": 0.25},
    *({"task": "grid", "ndim": d, "side": n, "stick": 0.0} for d, n in ((2, 8), (4, 20), (6, 10), (7, 10))),
]


def resident() -> int:
    """Peak resident bytes of this process so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10
    return 0


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def peak(device: str, before: int) -> float:
    """MiB: of the device, or of the process beyond what imports took."""
    return round((torch.cuda.max_memory_allocated() if device == "cuda" else resident() - before) / 2**20, 1)


def iteration(row: Row, device: str, budget: float) -> Row:
    """Median milliseconds over windows that together take about `budget` seconds, and the peak of memory."""
    before = resident()
    given = {k: v for k, v in row.items() if k != "task"}
    made = Experiment(
        configure(row["task"], **given, device=device, net="mlp", hidden=256, layers=2, objective="tb", lr=1e-3)
    )
    trainer = made.trainer
    trainer.train(4)
    wait(device)
    begun = time.perf_counter()
    trainer.train(7)
    wait(device)
    steps = max(1, int(budget / WINDOWS / ((time.perf_counter() - begun) / 3)))
    times, busy = [], []
    for _ in range(WINDOWS):
        begun, processor = time.perf_counter(), time.process_time()
        trainer.train(trainer.steps_done + steps)
        wait(device)
        times.append((time.perf_counter() - begun) / steps * 1e3)
        busy.append((time.process_time() - processor) / steps * 1e3)
    env = made.task.env
    return {
        "horizon": env.horizon,
        "moves": env.num_moves,
        "ms": round(statistics.median(times), 3),
        "processor_ms": round(statistics.median(busy), 3),
        "peak_mib": peak(device, before),
    }


def evaluation(row: Row, device: str, budget: float) -> Row:
    """Seconds to list a space and to push a policy's law through it, and the peak of memory."""
    before = resident()
    task = build(configure(row["task"], **{k: v for k, v in row.items() if k != "task"}).task)
    policy = Policy(task.env, MLP(64, 2)).to(device)
    begun = time.perf_counter()
    graph = Graph(task.env, device=device)
    wait(device)
    listed = time.perf_counter() - begun
    begun, rounds = time.perf_counter(), 0
    while rounds == 0 or time.perf_counter() - begun < budget / 2:
        law = exact_law(graph, task.channel, policy)
        wait(device)
        rounds += 1
    seconds = (time.perf_counter() - begun) / rounds
    assert abs(float(law.sum()) - 1) < 1e-6, "a law sums to one"
    mib = peak(device, before)
    return {
        "states": len(graph),
        "moves": task.env.num_moves,
        "graph_s": round(listed, 4),
        "law_s": round(seconds, 4),
        "peak_mib": mib,
        "bytes_a_state": round(mib * 2**20 / len(graph)),
    }


def alone(work: Callable[[Row, str, float], Row], row: Row, device: str, budget: float) -> Row:
    """`work(row)` in a child, which has its own peak of memory and may fail."""
    read, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        try:
            found = work(row, device, budget)
        except BaseException as problem:
            traceback.print_exc()
            found = {"error": f"{type(problem).__name__}: {problem}"[:200]}
        with os.fdopen(write_end, "w") as pipe:
            pipe.write(json.dumps(found))
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    status = os.waitpid(child, 0)[1]
    return json.loads(text) if text else {"error": f"the process ended with status {status}"}


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    a.add_argument("--only", nargs="+", default=["horizon", "alphabet", "batch", "seeds", "states"])
    a.add_argument("--budget", type=float, default=1.0, help="seconds per figure")
    a.add_argument("--most-states", type=float, default=1e8, help="larger spaces are left out")
    a.add_argument("--deadline", type=float, default=1e9, help="seconds after which nothing new is begun")
    a.add_argument("--hardware", default="", help="name of the machine, where it is not a GPU")
    a.add_argument("--out", type=Path)
    given = a.parse_args()
    tables = {"horizon": HORIZON, "alphabet": ALPHABET, "batch": BATCH, "seeds": SEEDS, "states": STATES}
    result: dict[str, Any] = {
        "versions": {"stochflow": stochflow.__version__, "python": sys.version.split()[0], "torch": torch.__version__},
        "device": given.device,
        "settings": {
            "net": "mlp 256 x 2 (exact evaluation: 64 x 2)",
            "objective": "tb",
            "windows": WINDOWS,
            "budget_s": given.budget,
        },
    }
    result["hardware"] = (
        alone(lambda *_: {"name": machine(given.device)}, {}, given.device, 0)["name"]
        if not given.hardware
        else given.hardware
    )
    begun = time.perf_counter()
    for name in given.only:
        result[name] = []
        for row in tables[name]:
            if row["task"] == "grid" and row["side"] ** row["ndim"] > given.most_states:
                continue
            if time.perf_counter() - begun > given.deadline:
                break
            work = evaluation if name == "states" else iteration
            result[name].append(row | alone(work, row, given.device, given.budget))
            print(name, result[name][-1], flush=True)
            write(result, given.out)


def machine(device: str) -> str:
    """Asked in a child: naming the GPU begins CUDA."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{names[0] if names else 'CPU'}, {torch.get_num_threads()} thread(s)"


if __name__ == "__main__":
    main()
