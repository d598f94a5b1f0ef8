"""Records the logs that `test_health_runs.py` reads: the first stretch of each task's default run, five seeds.

    python tests/learn/record_defaults.py [TASK ...]        # minutes a task on one CPU thread

A file is one line with the configuration, then the lines of `metrics.jsonl`, numbers to five digits. A run is cut short after its
warm-up and looked at more often than by default, which changes nothing in training; everything else is the task's default, but for `PLAIN`.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from stochflow.runs.config import configure
from stochflow.runs.experiment import train

HERE = Path(__file__).parent
STEPS = {"tfbind8": 1000, "bits": 400, "gc": 1000, "peptide": 300, "rna": 400}
# these search by default and find objects long before their policy draws such; what is recorded is plain training of theirs
LONG = {"net": "transformer", "hidden": 64, "batch": 32, "lr": 1e-3, "beta": 3.0}
PLAIN: dict[str, dict[str, Any]] = {"peptide": LONG | {"objective": "logvar"}, "rna": LONG | {"objective": "tb"}}
LOOKS = {"log_every": 50, "eval_every": 200, "save_every": 1000, "device": "cpu", "threads": 1}


def short(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: short(v) for k, v in value.items()}
    if isinstance(value, list):
        return [short(v) for v in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def file_of(task: str) -> Path:
    return HERE / f"{task}-default-5-seeds.jsonl"


def record(task: str) -> Path:
    config = configure(task, seeds=5, steps=STEPS[task], **LOOKS, **PLAIN.get(task, {}))
    with tempfile.TemporaryDirectory() as folder:
        train(config, out=Path(folder) / "run")
        rows = [json.loads(line) for line in (Path(folder) / "run" / "metrics.jsonl").read_text().splitlines()]
    lines = [json.dumps({"config": config.to_dict()}), *(json.dumps(short(r)) for r in rows)]
    file_of(task).write_text("\n".join(lines) + "\n")
    return file_of(task)


if __name__ == "__main__":
    for name in sys.argv[1:] or STEPS:
        print(record(name), flush=True)
