"""stochflow, torchgfn and gfnx on the same work in one go: milliseconds an iteration, peak memory, time to a given exact TV.

    python benchmarks/peers/fetch.py /tmp/peers                     # once: an environment for each peer, from PyPI
    python benchmarks/peers/compare.py --device cpu --threads 2 --batches 16 --peers /tmp/peers --out benchmarks/results/speed_cpu.json

Every library answers in its own interpreter; each configuration is asked of all three, one after the other, before the next
begins, so that ratios are taken within minutes on one machine. Where nothing can be installed, `--carried .peers` takes the
peers' wheels from a folder that fetch.py made (`PYTHONPATH=.peers/gfnx`) and this interpreter runs all three.

The work: trajectory balance, a 256 x 2 MLP on one-hot states, Adam at 1e-3, float32 without TF32, no evaluation
while the clock runs. The peers do not explore, which is their quickest way; stochflow explores as by default, at its own cost.
Figures are medians of five windows after warm-up; losses and parameter counts are kept to show that each learns.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from work import ALONE, NET, TASKS, WINDOWS

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIBRARIES = ("stochflow", "torchgfn", "gfnx")
LEARNED = 1500  # iterations after which the seeds of a grid walk alike, at batch 16
# exact TV to reach, by task; batch 16 is what the peers' own examples use on grids
GOALS = ({"task": "grid2", "batch": 16, "tv": 0.05}, {"task": "tfbind8", "batch": 512, "tv": 0.2})


class Library:
    """An interpreter with one library in it, waiting for questions."""

    def __init__(self, name: str, python: str, path: str, threads: int | None, log: Path):
        self.name, self.python, self.path, self.threads, self.log = name, python, path, threads, log
        self.alone = False  # whether every question gets a fresh interpreter
        self._start()
        self._wait()

    def _start(self) -> None:
        name, threads, log = self.name, self.threads, self.log
        set_threads = {} if threads is None else {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
        environment = {**os.environ, **set_threads, "PYTHONPATH": self.path, "PYTHONUNBUFFERED": "1"}
        environment |= {
            "PYTORCH_NVML_BASED_CUDA_CHECK": "1"
        }  # asking whether there is a GPU must not begin CUDA before the fork
        if self.alone:
            environment[ALONE] = "1"
        self.begun = time.perf_counter()
        self.process = subprocess.Popen(
            [self.python, str(HERE / f"run_{name}.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("a"),
            env=environment,
            text=True,
            # processors are given to the process, which is the one way that OpenMP, MKL and XLA all understand
            preexec_fn=None
            if threads is None
            else lambda: os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:threads])),
        )

    def _wait(self) -> None:
        """Until it has imported its library."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"{self.name} did not start:\n{self.log.read_text()[-2000:]}")
        self.versions = json.loads(line)["versions"]
        self.import_s = round(time.perf_counter() - self.begun, 3)

    def ask(self, spec: dict[str, Any]) -> dict[str, Any]:
        """The answer; a library that will not start CUDA in a child gets an interpreter for each question from then on.

        The next one imports while the others answer; it touches no GPU before it is asked.
        """
        if self.alone:
            self._wait()
        found = self._ask(spec)
        if self.alone:
            self.process.wait()
            self._start()
        if (
            not self.alone
            and spec["device"] == "cuda"
            and any(w in found.get("error", "") for w in ("fork", "nitializ"))
        ):
            print(f"{self.name}: {found['error']}: an interpreter for each question from now on", flush=True)
            self.close()
            self.alone = True
            self._start()
            return self.ask(spec)
        return found

    def _ask(self, spec: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps(spec), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        return json.loads(line) if line else {"error": "the interpreter is gone"}

    def close(self) -> None:
        assert self.process.stdin is not None
        if self.process.poll() is None:
            self.process.stdin.close()
            self.process.wait()


def hardware(device: str) -> str:
    if device == "cuda":
        asked = subprocess.run(
            ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True, check=False
        )
        return asked.stdout.strip().splitlines()[0] if asked.returncode == 0 else "CUDA"
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def commit() -> str | None:
    asked = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    return asked.stdout.strip() or None


def questions(given: argparse.Namespace) -> list[tuple[str, dict[str, Any], tuple[str, ...]]]:
    """(kind, question, who is asked), most telling first, so that a run that is out of time has lost least."""
    asked: list[tuple[str, dict[str, Any], tuple[str, ...]]] = []
    beside: list[tuple[str, dict[str, Any], tuple[str, ...]]] = []
    for at, batch in enumerate(given.batches):
        who = tuple(n for n in given.libraries if n != "torchgfn" or batch <= given.torchgfn_most)
        asked += [("speed", {"task": t, "batch": batch}, who) for t in given.tasks]
        more = asked if at == 0 else beside
        if given.seeds and "stochflow" in given.libraries:
            more += [
                ("seeds", {"task": t, "batch": batch, "seeds": s}, ("stochflow",))
                for t in given.tasks
                for s in (1, *given.seeds)
            ]
        if (
            "tfbind8" in given.tasks and "stochflow" in given.libraries
        ):  # noise with a learned model of it: the peers have no such thing
            more.append(("noise", {"task": "tfbind8", "batch": batch, "stick": 0.25}, ("stochflow",)))
        if at == 0 and given.most > 0:
            asked += [
                ("tv", goal | {"most": given.most, "tv_seeds": given.tv_seeds}, given.libraries)
                for goal in GOALS
                if goal["task"] in given.tasks
            ]
    asked += beside
    for batch in given.compiled:
        asked += [("compiled", {"task": t, "batch": batch}, ("stochflow",)) for t in given.tasks]
    return asked


def compare(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    begun = time.perf_counter()
    ours = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    carried = {name: str(given.carried / name) if given.carried else "" for name in LIBRARIES}
    paths = {
        "stochflow": ours,
        **{
            n: os.pathsep.join(p for p in (carried[n], os.environ.get("PYTHONPATH", "")) if p)
            for n in ("torchgfn", "gfnx")
        },
    }
    pythons = {"stochflow": given.ours_python, "torchgfn": given.torchgfn_python, "gfnx": given.gfnx_python}
    subprocess.run(
        [pythons["stochflow"], str(HERE / "run_stochflow.py"), "--export", str(folder)],
        env={**os.environ, "PYTHONPATH": ours},
        check=True,
    )
    threads = given.threads if given.device == "cpu" else None
    made = {
        name: Library(name, pythons[name], paths[name], threads, folder / f"{name}.log") for name in given.libraries
    }
    result: dict[str, Any] = {
        "date": datetime.date.today().isoformat(),
        "commit": given.commit or commit(),
        "device": given.device,
        "hardware": hardware(given.device)
        + ("" if threads is None else f", {threads} thread{'s' if threads > 1 else ''}"),
        "versions": {name: library.versions for name, library in made.items()},
        "import_s": {name: library.import_s for name, library in made.items()},
        "settings": {
            **NET,
            "lr": 1e-3,
            "windows": WINDOWS,
            "budget_s": given.budget,
            "window": given.window,
            "stochflow": dict(given.settings),
        },
        "speed": [],
        "noise": [],
        "seeds": [],
        "tv": [],
        "compiled": [],
    }
    common = {
        "device": given.device,
        "threads": given.threads,
        "folder": str(folder),
        "budget": given.budget,
        "limit": given.limit,
    }
    for kind, question, who in questions(given):
        row: dict[str, Any] = dict(question)
        for name in who:
            left = given.deadline - (time.perf_counter() - begun)
            if left < 15:
                row[name] = {"error": "no time left in this run"}
                continue
            spec = {
                **common,
                **question,
                "limit": int(min(given.limit, left)),
                "chunk": chunk(given, question),
                "warm": warm(given, question),
            }
            if given.window and question["task"].startswith("grid"):  # whose trajectories grow while a policy learns
                spec["window"] = given.window
            if name == "stochflow":
                spec["settings"] = dict(given.settings) | ({"compile": True} if kind == "compiled" else {})
            row[name] = made[name].ask(spec)
            shown = {
                k: v
                for k, v in row[name].items()
                if k
                in (
                    "ms",
                    "processor_ms",
                    "length",
                    "loss_first",
                    "loss_last",
                    "memory",
                    "parameters",
                    "first_s",
                    "seconds",
                    "reached",
                    "error",
                    "reward_error",
                )
            }
            print(f"{time.perf_counter() - begun:6.1f} s  {kind:5} {question} {name}: {shown}", flush=True)
        result[kind].append(row)
        result["wall_s"] = round(time.perf_counter() - begun, 1)
        if given.out:
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.write_text(json.dumps(result, indent=1) + "\n")
    for library in made.values():
        library.close()
    return result


def chunk(given: argparse.Namespace, question: dict[str, Any]) -> int:
    """How many iterations gfnx compiles into one call: enough that the call itself costs nothing, few enough for a window."""
    if given.device == "cuda" or question["batch"] <= 16:
        return 20
    return 5 if question["batch"] <= 512 else 1


def warm(given: argparse.Namespace, question: dict[str, Any]) -> int:
    """Iterations before the clock starts: as many as the slowest of the three can be asked for. Seeds learn to walk at different times, so that one and
    many of them are timed when all have."""
    if given.warm is not None:
        return int(given.warm)
    if "seeds" in question and question["task"].startswith("grid") and question["batch"] <= 16:
        return LEARNED
    return 300 if given.device == "cpu" and question["batch"] <= 16 else 20


def pair(text: str) -> tuple[str, Any]:
    key, _, value = text.partition("=")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    a.add_argument("--threads", type=int, default=1, help="processors for each library, on the CPU")
    a.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    a.add_argument("--batches", type=int, nargs="+", default=[16, 512, 4096])
    a.add_argument("--seeds", type=int, nargs="*", default=[], help="stacked seeds to time besides, stochflow alone")
    a.add_argument(
        "--compiled", type=int, nargs="*", default=[], help="batches to time besides with --compile, stochflow alone"
    )
    a.add_argument(
        "--torchgfn-most", type=int, default=1 << 30, help="the largest batch to ask of torchgfn: it is slow to measure"
    )
    a.add_argument("--libraries", nargs="+", default=list(LIBRARIES), choices=LIBRARIES)
    a.add_argument("--budget", type=float, default=2.0, help="seconds of measuring a figure")
    a.add_argument(
        "--warm", type=int, help="iterations before the clock starts (default 300 at batch 16 on the CPU, else 20)"
    )
    a.add_argument(
        "--window",
        type=int,
        help="on grids, the most iterations a window: all libraries are then timed over the same stretch of learning",
    )
    a.add_argument(
        "--most",
        type=float,
        default=30.0,
        help="seconds of training after which a TV counts as not reached; 0: not asked",
    )
    a.add_argument("--tv-seeds", type=int, default=3, help="runs of which the median time to a TV is taken")
    a.add_argument("--limit", type=int, default=120, help="seconds after which one configuration is given up")
    a.add_argument("--deadline", type=float, default=1e9, help="seconds after which nothing new is begun")
    a.add_argument("--peers", type=Path, help="where fetch.py made gfnx-venv and torchgfn-venv")
    a.add_argument("--carried", type=Path, help="where fetch.py put the peers' wheels; this interpreter then runs them")
    a.add_argument("--ours-python", default=sys.executable)
    a.add_argument("--gfnx-python")
    a.add_argument("--torchgfn-python")
    a.add_argument(
        "--settings", type=pair, nargs="*", default=[], metavar="KEY=VALUE", help="further settings of stochflow's run"
    )
    a.add_argument("--commit", help="what is measured, where git cannot say")
    a.add_argument("--logs", type=Path, help="keep the libraries' standard error here")
    a.add_argument("--out", type=Path)
    given = a.parse_args()
    given.libraries = tuple(given.libraries)
    for name in ("gfnx", "torchgfn"):
        there = (
            sys.executable
            if given.carried
            else str(given.peers / f"{name}-venv/bin/python")
            if given.peers
            else sys.executable
        )
        setattr(given, f"{name}_python", getattr(given, f"{name}_python") or there)
    if given.carried:
        given.carried = given.carried.resolve()
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        compare(given, folder)


if __name__ == "__main__":
    main()
