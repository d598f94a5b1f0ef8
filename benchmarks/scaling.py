"""What a second worker, rank or cell at once is worth on this machine: rows of docs/scaling.md.

    PYTHONPATH=src:benchmarks python benchmarks/scaling.py --out benchmarks/results/scaling.json     # measures, a few minutes
    PYTHONPATH=src:benchmarks python benchmarks/scaling.py --render                                    # writes the tables into the page

The oracle takes 50 ms per object: once waiting (a server, a file, a GPU elsewhere), once computing. Every figure is wall time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
PAGE, RESULT = ROOT / "docs" / "scaling.md", ROOT / "benchmarks" / "results" / "scaling.json"
BEGIN, END = "<!-- {}: benchmarks/scaling.py -->", "<!-- end of {} -->"
OBJECT = 0.05  # seconds
TEXTS = 64


def waiting(texts: list[str]) -> list[float]:
    time.sleep(OBJECT * len(texts))
    return [0.1 + t.count("G") for t in texts]


def computing(texts: list[str]) -> list[float]:
    end = time.process_time() + OBJECT * len(texts)
    while time.process_time() < end:
        sum(range(1000))
    return [0.1 + t.count("G") for t in texts]


def oracles(rounds: int) -> list[dict[str, Any]]:
    """Seconds for one batch of TEXTS, by workers; the median of `rounds`."""
    import scaling  # by name: what is sent to workers must not be __main__'s

    from stochflow import Strings
    from stochflow.scores.oracles import Host
    from stochflow.scores.workers import Remote

    texts = ["".join("ACGT"[(i >> 2 * k) % 4] for k in range(6)) for i in range(TEXTS)]
    rows = []
    for kind in ("waiting", "computing"):
        own = Host(getattr(scaling, kind), Strings("ACGT", 6))
        for workers in ("none", "1", "2", "ray:2"):
            begun = time.perf_counter()
            asked = own if workers == "none" else Remote(own, workers)
            if isinstance(asked, Remote):
                asked.warm()
            start = time.perf_counter() - begun
            took = []
            for _ in range(rounds):
                begun = time.perf_counter()
                asked.raw(texts)
                took.append(time.perf_counter() - begun)
            if isinstance(asked, Remote):
                asked.close()
            rows.append({"oracle": kind, "workers": workers, "seconds": sorted(took)[len(took) // 2], "start": start})
            print(rows[-1], flush=True)
    return rows


def lags() -> list[dict[str, Any]]:
    """Seconds of a short run whose oracle waits, by --lag; the learning of an iteration takes about as long as its oracle."""
    from stochflow import strings_task, train

    def quick(texts: list[str]) -> list[float]:
        time.sleep(0.02)
        return [0.1 + t.count("G") for t in texts]

    rows = []
    for lag in (0, 1, 2):
        with tempfile.TemporaryDirectory() as folder:
            task = strings_task(quick, "ACGT", 16)
            rest: dict[str, Any] = {"net": "transformer", "hidden": 32, "batch": 16, "eval_every": 1000, "steps": 60}
            begun = time.perf_counter()
            train(task, out=f"{folder}/run", lag=lag, objective="tb", **rest)
            rows.append({"lag": lag, "seconds": time.perf_counter() - begun})
        print(rows[-1], flush=True)
    return rows


def alternating(measured: Callable[[int], float], rounds: int) -> dict[int, float]:
    """Median seconds with one and with two, taken in turns after one unmeasured round, so that no side pays for compiling."""
    found: dict[int, list[float]] = {1: [], 2: []}
    for i in range(rounds + 1):
        for count in (1, 2):
            seconds = measured(count)
            if i:
                found[count].append(seconds)
    return {count: sorted(took)[len(took) // 2] for count, took in found.items()}


def ranks(rounds: int) -> list[dict[str, Any]]:
    """Trajectories a second of training, by ranks: each has the whole batch, so that two of them see twice as many."""

    def measured(count: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            words = f"train tfbind8 --batch 1024 --steps 120 --log-every 30 --eval-every 1000 --engine eager --out {folder}/run --quiet"
            start = [sys.executable, "-m"]
            if count > 1:
                start += f"torch.distributed.run --standalone --nproc-per-node {count} -m".split()
            subprocess.run([*start, "stochflow", *words.split()], check=True, capture_output=True)
            lines = [json.loads(line) for line in (Path(folder) / "run/metrics.jsonl").read_text().splitlines()]
        return float(lines[2]["time"] - lines[0]["time"])

    rows = []
    for count, seconds in alternating(measured, rounds).items():
        rows.append({"ranks": count, "seconds": seconds, "per_second": count * 1024 * 60 / seconds})
        print(rows[-1], flush=True)
    return rows


def cells(rounds: int) -> list[dict[str, Any]]:
    """Seconds of a sweep of four cells, by cells at once; imports included."""

    def measured(workers: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            words = f"sweep grid --side 16 --stick 0.25 --grid lr=1e-3,5e-3 objective=db,tb --steps 500 --seeds 5 --workers {workers} --quiet"
            begun = time.perf_counter()
            subprocess.run(
                [sys.executable, "-m", "stochflow", *words.split(), "--out", f"{folder}/s"],
                check=True,
                capture_output=True,
            )
            return time.perf_counter() - begun

    rows = []
    for workers, seconds in alternating(measured, rounds).items():
        rows.append({"cells": workers, "seconds": seconds})
        print(rows[-1], flush=True)
    return rows


# the page -------------------------------------------------------------------------------------------------------


def tables(found: dict[str, Any]) -> dict[str, str]:
    """Markdown by the name of its place in the page."""
    of = {(r["oracle"], r["workers"]): r for r in found["oracles"]}
    lines = [
        "| workers | oracle that waits, s | factor | oracle that computes, s | factor | to start, s |",
        "|---|---|---|---|---|---|",
    ]
    names = {"none": "none (in the training process)", "1": "1 process", "2": "2 processes", "ray:2": "2 on Ray"}
    for workers, name in names.items():
        parts = [name]
        for kind in ("waiting", "computing"):
            row, base = of[kind, workers], of[kind, "none"]
            parts += [f"{row['seconds']:.2f}", f"{base['seconds'] / row['seconds']:.2f}"]
        start = of["waiting", workers]["start"]
        lines.append("| " + " | ".join([*parts, f"{start:.1f}" if workers != "none" else "-"]) + " |")
    rest = ["| what | one | two | factor |", "|---|---|---|---|"]
    a, b = found["ranks"]
    rest.append(
        f"| ranks: trajectories a second, TFBind8, batch 1024 each | {a['per_second']:.0f} | {b['per_second']:.0f} | {b['per_second'] / a['per_second']:.2f} |"
    )
    a, b = found["cells"]
    rest.append(
        f"| sweep cells at once: seconds for four cells | {a['seconds']:.0f} | {b['seconds']:.0f} | {a['seconds'] / b['seconds']:.2f} |"
    )
    lag = ["| `--lag` | 60 iterations, s | factor |", "|---|---|---|"]
    lag += [
        f"| {r['lag']} | {r['seconds']:.1f} | {found['lags'][0]['seconds'] / r['seconds']:.2f} |" for r in found["lags"]
    ]
    h = found["header"]
    note = f"{h['hardware']}, {h['date']}; Python {h['python']}, torch {h['torch']}, Ray {h['ray']}; load average {h['load']:.1f} before and {h['load_after']:.1f} after."
    return {"workers": "\n".join([*lines, "", note]), "lag": "\n".join(lag), "growth": "\n".join(rest)}


def rendered(page: str) -> str:
    """The page with its tables as the result says."""
    for name, text in tables(json.loads(RESULT.read_text())).items():
        before, rest = page.split(BEGIN.format(name))
        after = rest.split(END.format(name))[1]
        page = f"{before}{BEGIN.format(name)}\n{text}\n{END.format(name)}{after}"
    return page


def header() -> dict[str, Any]:
    from importlib import metadata

    return {
        "hardware": f"{platform.machine()} CPU, {os.cpu_count()} cores",
        "date": time.strftime("%Y-%m-%d"),
        "python": platform.python_version(),
        "torch": metadata.version("torch"),
        "ray": metadata.version("ray"),
        "load": os.getloadavg()[0],
    }


if __name__ == "__main__":
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--out", type=Path, default=RESULT)
    a.add_argument("--rounds", type=int, default=3)
    a.add_argument("--render", action="store_true")
    given = a.parse_args()
    if given.render:
        PAGE.write_text(rendered(PAGE.read_text()))
    else:
        result = {
            "header": header(),
            "oracles": oracles(given.rounds),
            "lags": lags(),
            "ranks": ranks(given.rounds),
            "cells": cells(given.rounds),
        }
        result["header"]["load_after"] = os.getloadavg()[0]
        given.out.write_text(json.dumps(result, indent=1) + "\n")
