"""From the start of the interpreter to the end of the first training step, where nothing was ever compiled and where it was.

    PYTHONPATH=src python benchmarks/first_step.py --rounds 3 --out benchmarks/results/first_step.json

On the CPU some loops are compiled when they are called first, and kept on the disk: each round begins with an empty folder for that, and then starts again.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import header, write

TASKS = {"grid 2-D, side 8": "grid", "TFBind8, stick 0.25, learned noise": "tfbind8"}
CODE = "from stochflow.runs.config import configure; from stochflow.runs.experiment import Experiment; Experiment(configure('{task}')).trainer.train(1)"


def seconds(task: str, kept: str) -> float:
    begun = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", CODE.format(task=task)], check=True, env=os.environ | {"NUMBA_CACHE_DIR": kept}
    )
    return time.perf_counter() - begun


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--rounds", type=int, default=3)
    a.add_argument("--hardware", default=f"{platform.machine()} CPU")
    a.add_argument("--out", type=Path)
    given = a.parse_args()
    rows = []
    for title, task in TASKS.items():
        found: dict[str, list[float]] = {"first_s": [], "later_s": []}
        for _ in range(given.rounds):
            with tempfile.TemporaryDirectory() as kept:
                found["first_s"].append(seconds(task, kept))
                found["later_s"].append(seconds(task, kept))
        rows.append({"title": title} | {name: round(statistics.median(x), 2) for name, x in found.items()})
        print(rows[-1], flush=True)
    write(header("cpu", rounds=given.rounds) | {"hardware": given.hardware, "rows": rows}, given.out)


if __name__ == "__main__":
    main()
