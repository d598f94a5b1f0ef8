"""What the three libraries have in common when they are compared: the work, the clock, the exact law, and the way they are asked.

numpy and the standard library alone, because every interpreter imports it. A library is a function `make(task, spec) -> Runner`;
`serve(make)` answers one question a line. It imports the library once and forks for each question, so that memory peaks,
compiled programs and caches belong to one configuration and nobody pays for another's imports.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

# Deterministic worlds that all three can express. Rewards: the corner plateaus of Bengio et al. with base 1e-3; max(y, 1e-3)^3 of a
# measured landscape; exp(-Hamming distance to the nearest of 60 modes). Bit sequences are appended word by word.
TASKS: dict[str, dict[str, Any]] = {
    "grid2": {"title": "grid 2-D, side 8", "kind": "grid", "ndim": 2, "side": 8},
    "grid4": {"title": "grid 4-D, side 20", "kind": "grid", "ndim": 4, "side": 20},
    "tfbind8": {"title": "TFBind8", "kind": "letters", "letters": 4, "length": 8},
    "bits": {
        "title": "bit sequences, 120 bits in words of 8",
        "kind": "bits",
        "letters": 256,
        "length": 15,
        "word": 8,
        "modes": 60,
    },
}
HIDDEN, LAYERS = 256, 2
NET = {"hidden": HIDDEN, "layers": LAYERS, "objective": "TB", "precision": "float32, TF32 off", "optimiser": "Adam"}
LR = 1e-3
LOG_Z_LR = 0.1  # of the peers, whose log Z is a parameter like any other; stochflow gives its log Z a scale instead
WINDOWS = 5
SAMPLE = 5  # losses whose median is shown
ALONE = "PEERS_ALONE"  # in the environment: no fork, an interpreter for each question


class Runner(Protocol):
    """A training run of one library."""

    parameters: int

    def train(self, steps: int) -> list[float]:
        """Run at least `steps` iterations, wait for the device, return the losses one wants to see (at least the last)."""
        ...

    steps: int  # iterations done

    def restart(self, seed: int) -> None:
        """Begin again from other random numbers, without compiling again."""
        ...

    def logits(self, states: np.ndarray) -> np.ndarray:
        """Of the forward policy, [N, M] in the order of the moves of `Space`."""
        ...

    def log_rewards(self, states: np.ndarray) -> np.ndarray:
        """What the library itself pays for finished objects [N, D]."""
        ...

    def length(self) -> float:
        """Mean number of real decisions of the last batch: who skips finished trajectories is faster while they are short."""
        ...

    def memory(self) -> int:
        """Peak bytes of the device."""
        ...


class Space:
    """All states of a listed world, where each move leads and what is wanted: enough for the exact law of any policy.

    `child` [N, M] is -1 where a move is illegal; `stop` is the number of the STOP move or -1; `level` [N] is the longest way to a
    state; `log_reward` [N] is -inf where no object ends.
    """

    def __init__(self, states: np.ndarray, child: np.ndarray, level: np.ndarray, log_reward: np.ndarray, stop: int):
        self.states, self.child, self.level, self.log_reward, self.stop = states, child, level, log_reward, int(stop)
        self.legal = child >= 0
        self.complete = ~self.legal.any(1)
        if self.stop >= 0:  # wherever an object may end
            self.legal[~self.complete & np.isfinite(log_reward), self.stop] = True
        order = np.argsort(level, kind="stable")
        self.levels = np.split(order, np.flatnonzero(np.diff(level[order])) + 1)
        ends = np.isfinite(log_reward)
        weight = np.where(ends, np.exp(np.where(ends, log_reward - log_reward[ends].max(), 0.0)), 0.0)
        self.target = weight / weight.sum()

    def law(self, logits: np.ndarray) -> np.ndarray:
        """[N] probability that each state is the finished object."""
        x = np.where(self.legal, logits.astype(np.float64), -np.inf)
        with np.errstate(invalid="ignore"):
            p = np.exp(x - x.max(1, keepdims=True, initial=-1e300))
            p /= p.sum(1, keepdims=True)
        visits = np.zeros(len(self.states))
        visits[self.level == 0] = 1
        law = np.zeros_like(visits)
        for here in self.levels:
            done = self.complete[here]
            law[here[done]] = visits[here[done]]
            at = here[~done]
            flow = visits[at, None] * p[at]
            if self.stop >= 0:
                law[at] = flow[:, self.stop]
            real = self.child[at] >= 0
            np.add.at(visits, self.child[at][real], flow[real])
        return law

    def tv(self, logits: np.ndarray) -> float:
        return float(0.5 * np.abs(self.law(logits) - self.target).sum())


def load(folder: Path, task: str) -> tuple[dict[str, Any], Space | None]:
    """Tables of a task, and its space where it is listed."""
    with np.load(folder / f"{task}.npz") as stored:
        tables = {name: stored[name] for name in stored.files}
    if "child" not in tables:
        return tables, None
    return tables, Space(*(tables[k] for k in ("states", "child", "level", "log_reward", "stop")))


# the clock ----------------------------------------------------------------------------------------------------------------


def resident() -> int:
    """Peak resident bytes of this process so far."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) << 10
    return 0


def speed(run: Runner, spec: dict[str, Any], begun: float) -> dict[str, Any]:
    """Median milliseconds an iteration over at least five windows that together take about `budget` seconds."""
    first = run.train(1)
    found: dict[str, Any] = {"first_s": round(time.perf_counter() - begun, 3)}
    while len(first) < SAMPLE:  # the second iteration is where a CUDA graph is recorded
        first += run.train(1)
    getattr(run, "settle", lambda: None)()  # what is still being compiled
    # trajectories grow while a policy learns, and time with them: all are timed after the same number of iterations
    run.train(max(1, spec.get("warm", 1) - run.steps))
    at, clock = run.steps, time.perf_counter()
    run.train(2)
    each = (time.perf_counter() - clock) / (run.steps - at)
    steps = min(max(1, int(spec["budget"] / WINDOWS / each)), spec.get("window") or 1 << 30)
    times, busy = [], []
    while len(times) < WINDOWS:
        at, clock, processor = run.steps, time.perf_counter(), time.process_time()
        run.train(steps)
        times.append((time.perf_counter() - clock) / (run.steps - at) * 1e3)
        busy.append((time.process_time() - processor) / (run.steps - at) * 1e3)
    ms = statistics.median(times)
    found |= {"memory": run.memory()}  # before looking at losses, which is no part of training
    last: list[float] = []
    while len(last) < SAMPLE:
        last += run.train(1)
    found |= {
        "ms": round(ms, 4),
        "ms_low": round(min(times), 4),
        "ms_high": round(max(times), 4),
        "processor_ms": round(
            statistics.median(busy), 4
        ),  # of all threads: what the wall clock says on an idle machine, at one thread
        "trajectories_a_second": round(spec["batch"] * spec.get("seeds", 1) / ms * 1e3),
        "iterations": run.steps,
        "length": round(run.length(), 2),
        "loss_first": statistics.median(first[:SAMPLE]),
        "loss_last": statistics.median(last[-SAMPLE:]),
    }
    return found


def until(run: Runner, space: Space, spec: dict[str, Any]) -> dict[str, Any]:
    """Seconds of training until the exact TV of the policy is at most `tv`; what evaluation takes is not on the clock.

    The policy is looked at after 1.15 times as many iterations each time, so that the figure is at most that much too large.
    The first iteration, where programs are compiled and graphs recorded, is counted in `first_s` of the speed rows and not here.
    """
    run.train(1)
    run.train(4)
    spent, path, goal = 0.0, [], 50.0
    while True:
        at, clock = run.steps, time.perf_counter()
        run.train(max(1, int(goal) - at))
        spent += time.perf_counter() - clock
        tv = space.tv(run.logits(space.states))
        path.append([run.steps, round(spent, 4), round(tv, 5)])
        if tv <= spec["tv"] or spent >= spec["most"]:
            break
        goal = max(1.15 * run.steps, run.steps + 1)
    return {
        "reached": tv <= spec["tv"],
        "seconds": round(spent, 4),
        "iterations": run.steps,
        "tv": round(tv, 5),
        "path": path,
    }


def until_each(run: Runner, space: Space, spec: dict[str, Any]) -> dict[str, Any]:
    """The same for a few seeds; the median over seeds, those that never arrive counting as the longest."""
    runs = []
    for seed in range(spec["tv_seeds"]):
        if seed:
            run.restart(seed)
        runs.append(until(run, space, spec))
    order = sorted(runs, key=lambda r: (not r["reached"], r["seconds"]))
    middle = order[len(order) // 2]
    return {
        "seconds": middle["seconds"] if middle["reached"] else None,
        "iterations": middle["iterations"] if middle["reached"] else None,
        "reached": sum(r["reached"] for r in runs),
        "runs": runs,
    }


def answer(make: Callable[..., Runner], spec: dict[str, Any]) -> dict[str, Any]:
    """One question: {task, batch, device, folder, budget} for speed, with {tv, most, tv_seeds} besides for time to a TV."""
    begun, before = time.perf_counter(), resident()
    tables, space = load(Path(spec["folder"]), spec["task"])
    loaded = time.perf_counter() - begun
    begun += loaded  # the tables are the benchmark's, not the library's
    run = make(tables, spec)
    found: dict[str, Any] = {"parameters": run.parameters, **getattr(run, "notes", {})}
    if "tv" in spec:
        assert space is not None, f"{spec['task']} is not listed, so its TV is not exact"
        found |= until_each(run, space, spec)
    else:
        found |= speed(run, spec, begun)
        if spec["device"] == "cpu":
            found["memory"] = max(0, found["memory"] - before)
    # the same reward on the same objects, or the comparison means nothing
    few = np.random.default_rng(0).permutation(len(tables["objects"]))[:512]
    found["reward_error"] = float(np.abs(run.log_rewards(tables["objects"][few]) - tables["log_rewards"][few]).max())
    return found


# asking -------------------------------------------------------------------------------------------------------------------


def serve(make: Callable[..., Runner], versions: Callable[[], dict[str, str]]) -> None:
    """Read questions from standard input, one JSON object a line, and answer each on standard output; a child for each."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints goes to standard error
    print(json.dumps({"ready": True, "versions": versions()}), file=out, flush=True)
    for line in sys.stdin:
        spec = json.loads(line)
        if os.environ.get(ALONE):  # this interpreter answers one question and is gone
            print(json.dumps(_answered(make, spec)), file=out, flush=True)
            os._exit(0)
        print(json.dumps(_in_child(make, spec)), file=out, flush=True)


def _answered(make: Callable[..., Runner], spec: dict[str, Any]) -> dict[str, Any]:
    """The answer, or what went wrong: one configuration may fail without taking the others with it."""
    signal.alarm(int(spec.get("limit", 300)))
    try:
        return answer(make, spec)
    except BaseException as problem:
        traceback.print_exc()
        sys.stderr.flush()
        return {"error": f"{type(problem).__name__}: {problem}"[:300]}


def _in_child(make: Callable[..., Runner], spec: dict[str, Any]) -> dict[str, Any]:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        found = _answered(make, spec)
        with os.fdopen(write, "w") as pipe:
            pipe.write(json.dumps(found))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    status = os.waitpid(child, 0)[1]
    if not text:
        late = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGALRM
        return {
            "error": f"not finished within {spec.get('limit', 300)} s"
            if late
            else f"the process ended with status {status}"
        }
    return json.loads(text)
