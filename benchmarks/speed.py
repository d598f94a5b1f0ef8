"""Milliseconds an iteration: tasks x batches x seeds, captured and eager, with the operators behind them.

    PYTHONPATH=src python benchmarks/speed.py --device cuda --out benchmarks/results/speed_own_gpu.json
    PYTHONPATH=src python benchmarks/speed.py --device cpu --out benchmarks/results/speed_own_cpu.json

The network is a 256 x 2 MLP and the objective trajectory balance throughout; evaluation is off. A figure is the median of five
windows after warm-up; ratios are taken within one run, because machines are noisy. benchmarks/peers compares with other libraries.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from common import header, write

from stochflow.runs.config import configure
from stochflow.runs.experiment import Experiment

TASKS: dict[str, dict[str, Any]] = {
    "grid 2-D side 8": {"task": "grid", "ndim": 2, "side": 8},
    "grid 4-D side 20": {"task": "grid", "ndim": 4, "side": 20},
    "tfbind8, stick 0.25, neural dynamics": {"task": "tfbind8", "stick": 0.25},
    "bit sequences, 120 bits in words of 8": {"task": "bits", "length": 120, "bits": 8},
}
WINDOWS = 5


def make(settings: dict[str, Any], batch: int, seeds: int, device: str, capture: bool) -> Any:
    given = {k: v for k, v in settings.items() if k != "task"}
    config = configure(
        settings["task"],
        **given,
        batch=batch,
        seeds=seeds,
        device=device,
        net="mlp",
        hidden=256,
        objective="tb",
        lr=1e-3,
    )
    trainer = Experiment(config).trainer
    trainer.iteration = trainer.iteration._replace(capture=capture)
    return trainer


def milliseconds(trainer: Any, wait: Any, budget: float) -> float:
    """Median over windows that together take about `budget` seconds."""
    trainer.train(trainer.steps_done + 4)
    wait()
    begun = time.perf_counter()
    trainer.train(trainer.steps_done + 3)
    wait()
    steps = max(3, int(budget / WINDOWS / ((time.perf_counter() - begun) / 3)))
    found = []
    for _ in range(WINDOWS):
        begun = time.perf_counter()
        trainer.train(trainer.steps_done + steps)
        wait()
        found.append((time.perf_counter() - begun) / steps * 1e3)
    return statistics.median(found)


def operators(trainer: Any) -> int:
    """How many of torch's operators one iteration calls (eager)."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as seen:
        trainer.iterate()
    return sum(e.count for e in seen.key_averages() if e.key.startswith("aten::"))


def measure(device: str, batches: list[int], seeds: list[int], budget: float) -> list[dict[str, Any]]:
    cuda = device == "cuda"
    wait = torch.cuda.synchronize if cuda else lambda: None
    rows = []
    for name, settings in TASKS.items():
        for batch in batches:
            for many in seeds:
                trainer = None  # its memory goes before the next one's peak is taken
                gc.collect()
                if cuda:
                    torch.cuda.reset_peak_memory_stats()
                trainer = make(settings, batch, many, device, capture=True)
                row: dict[str, Any] = {
                    "task": name,
                    "batch": batch,
                    "seeds": many,
                    "ms": round(milliseconds(trainer, wait, budget), 3),
                }
                row["trajectories_a_second"] = round(batch * many / row["ms"] * 1e3)
                if cuda:
                    row["peak_mib"] = torch.cuda.max_memory_allocated() >> 20
                    if batch == batches[0] and many == 1:
                        row["eager_ms"] = round(
                            milliseconds(make(settings, batch, many, device, capture=False), wait, budget), 3
                        )
                elif many == 1:
                    row["operators"] = operators(trainer)
                row["loss"] = float(trainer.stats["loss"].median())
                row["parameters"] = sum(p.numel() for p in trainer.policy.parameters()) // many
                rows.append(row)
                print(row, flush=True)
    return rows


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    a.add_argument("--batches", type=int, nargs="+", default=[16, 512, 4096])
    a.add_argument("--seeds", type=int, nargs="+", default=[1, 8])
    a.add_argument("--budget", type=float, default=2.0, help="seconds per figure")
    a.add_argument("--out", type=Path)
    given = a.parse_args()
    rows = measure(given.device, given.batches, given.seeds, given.budget)
    write({**header(given.device, batches=given.batches, seeds=given.seeds), "rows": rows}, given.out)


if __name__ == "__main__":
    main()
