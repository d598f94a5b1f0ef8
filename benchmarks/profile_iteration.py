"""What one iteration consists of: torch's operators and, on a GPU, kernels, by torch alone and by the fastest engine, with and without torch.compile.

PYTHONPATH=src python benchmarks/profile_iteration.py --out benchmarks/results/profile_cpu.json
PYTHONPATH=src python benchmarks/profile_iteration.py --device cuda --out benchmarks/results/profile_gpu.json
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from common import header, write
from torch.profiler import ProfilerActivity, profile

from stochflow.runs.config import configure
from stochflow.runs.experiment import Experiment

TASKS: dict[str, dict[str, Any]] = {
    "grid 2-D, side 8": {"task": "grid", "ndim": 2, "side": 8},
    "grid 4-D, side 20": {"task": "grid", "ndim": 4, "side": 20},
    "TFBind8": {"task": "tfbind8", "stick": 0.0},
    "TFBind8, stick 0.25, learned noise": {"task": "tfbind8", "stick": 0.25},
}
STEPS = {
    "cpu": 100,
    "cuda": 20,
}  # on the CPU, where many go at once, as many as there are from one line of the log to the next


def make(settings: dict[str, Any], batch: int, device: str, kernel: bool, compiled: bool) -> Any:
    given = {k: v for k, v in settings.items() if k != "task"} | ({"compile": True} if compiled else {})
    engine = "auto" if kernel else "eager"
    config = configure(
        settings["task"],
        **given,
        batch=batch,
        device=device,
        net="mlp",
        hidden=256,
        objective="tb",
        lr=1e-3,
        engine=engine,
    )
    return Experiment(config).trainer


def go(trainer: Any, cuda: bool) -> None:
    if not cuda:
        trainer.train(trainer.steps_done + STEPS["cpu"], STEPS["cpu"])
        return
    for _ in range(STEPS["cuda"]):
        trainer.iterate(note=False)


def measure(trainer: Any, cuda: bool) -> dict[str, Any]:
    wait = torch.cuda.synchronize if cuda else lambda: None
    clock = time.perf_counter if cuda else time.process_time  # others may use this CPU
    for _ in range(3):
        go(trainer, cuda)
    found = []
    for _ in range(5):
        wait()
        begun = clock()
        go(trainer, cuda)
        wait()
        found.append((clock() - begun) / STEPS["cuda" if cuda else "cpu"] * 1e3)
    trainer.iteration, trainer._steps = trainer.iteration._replace(capture=False), {}  # a replay shows no operators
    trainer.iterate(note=False)
    with profile(activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * cuda) as seen:
        if cuda:
            trainer.iterate(note=False)
        else:
            go(trainer, cuda)
        wait()
    events = seen.key_averages()
    row: dict[str, Any] = {
        "ms": round(statistics.median(found), 3),
        "operators": round(
            sum(e.count for e in events if e.key.startswith("aten::")) / (1 if cuda else STEPS["cpu"]), 1
        ),
    }
    if cuda:
        kernels = [
            e for e in events if e.device_type == torch.autograd.DeviceType.CUDA and not e.key.startswith("Optimizer")
        ]
        row["kernels"] = sum(e.count for e in kernels)
        longest = sorted(kernels, key=lambda e: -e.self_device_time_total)[:8]
        row["longest_us"] = {e.key[:60]: round(e.self_device_time_total, 1) for e in longest}
    return row


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    a.add_argument("--batch", type=int, default=16)
    a.add_argument("--out", type=Path)
    given = a.parse_args()
    cuda = given.device == "cuda"
    torch.set_num_threads(1)
    variants = [(False, False), (True, False), (True, True)] if cuda else [(True, False)]
    rows = []
    for kernel, compiled in variants:
        for name, settings in TASKS.items():
            row = {"task": name, "kernel": kernel and cuda, "compiled": compiled}
            rows.append(row | measure(make(settings, given.batch, given.device, kernel, compiled), cuda))
            print(rows[-1], flush=True)
            write({**header(given.device, batch=given.batch, steps=STEPS[given.device]), "rows": rows}, given.out)


if __name__ == "__main__":
    main()
