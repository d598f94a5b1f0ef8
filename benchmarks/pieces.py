"""What each optimisation of the engines earns: its lines, and how much slower an iteration is without it.

    python benchmarks/pieces.py --device cpu --out benchmarks/results/pieces_cpu.json
    python benchmarks/pieces.py --device cuda --out benchmarks/results/pieces_gpu.json
    python benchmarks/pieces.py --check                      # whether every piece can still be switched off

A piece is switched off in a copy of the sources, by replacing some of their text; the copy is measured in a process of its own
beside one with every piece, twice each in turn. On the CPU the time is that of the main thread, so that others on the machine
matter less; on a GPU, where compiling is done side by side, one process at a time is on the clock. Figures are minima of
the medians of five windows.
"""

from __future__ import annotations

import argparse
import ast
import fcntl
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

SOURCE = Path(__file__).resolve().parents[1] / "src"
ROWS: dict[str, tuple[str, dict[str, Any]]] = {
    "grid2": ("grid", {"ndim": 2, "side": 8}),
    "grid4": ("grid", {"ndim": 4, "side": 20}),
    "tfbind8": ("tfbind8", {"stick": 0.0}),
    "noise": ("tfbind8", {"stick": 0.25}),
    "bits": ("bits", {"length": 120, "bits": 8}),
}
CPU = "grid2/16 grid4/16 tfbind8/16 noise/16 bits/16 grid2/512 tfbind8/512"
GPU = "grid2/16 grid4/16 tfbind8/16 bits/16 grid4/512 tfbind8/512"


class Piece(NamedTuple):
    """An optimisation: `edits` (file, text, other text) switch it off; `lines` are whole files, functions ("file:name") and a number
    of lines beside them."""

    name: str
    device: str
    rows: str
    edits: tuple[tuple[str, str, str], ...]
    lines: tuple[str, ...] = ()
    more: int = 0


N, C = "engines/numba/", "engines/cuda/"
OFF = '"switched off"'
ALWAYS = (N + "many.py", "BEFORE = 2000 ", "BEFORE = 100 ")  # in every copy
WALK_ROW = """sums[seed, new, j] = sums[seed, r, j] + weights[seed, on, j]
                        for j in range(sums.shape[2] if axes > 0 else 0):
                            sums[seed, new, j] -= weights[seed, on - 1, j]  # which was on until then"""
WALK_WHOLE = """sums[seed, new, j] = first_bias[seed, 0, j]
                        for axis in range(axes if axes > 0 else t + 1):
                            to_add = feature(rules, axis, place[seed, new, axis] if axes > 0 else states[t + 1, seed, one, axis])
                            for j in range(sums.shape[2]):
                                sums[seed, new, j] += weights[seed, to_add, j]"""
LOOKUP = """found = slots[seed, at]
                    while found >= 0 and not (
                        number[seed, found] == to and (parent[seed, found] == r or not rules.append)
                    ):
                        at = (at + 1) & (slots.shape[1] - 1)
                        found = slots[seed, at]
"""
LEAST_ROWS = "sum(min(batch, size ** min(t, 62)) if append else batch for t in range(world.asked))"
PIECES = (
    Piece("compiled loops: the whole engine", "cpu", CPU,
          ((N + "covers.py", "    env, policy = request.task.env, request.policy\n", f"    return {OFF}\n"),),
          tuple(N + name for name in "cache covers engine gradient jit many noise products ready rules settings update walk".split())),
    Piece("several iterations in one call", "cpu", CPU, ((N + "many.py", "BEFORE = 100 ", "BEFORE = 1 << 60 "),), (N + "many",)),
    Piece("the noise model in compiled loops", "cpu", "noise/16 noise/512",
          ((N + "covers.py", "    weight, rules = dynamics.head.weight, lower(dynamics.env)\n", f"    return {OFF}\n"),), (N + "noise",)),
    Piece("the update in compiled loops", "cpu", "grid2/16 tfbind8/16 bits/16",
          ((N + "engine.py", "norms = self._update(flat).step(flat, step.item())\n",
            "from stochflow.engines.eager import Eager\n        self.plain = getattr(self, 'plain', None) or Eager()\n        norms = self.plain.update(flat, step, False)\n"),
           (N + "many.py", "BEFORE = 100 ", "BEFORE = 1 << 60 ")), (N + "update",)),
    Piece("each distinct state once", "cpu", CPU,
          ((N + "walk.py", LOOKUP, "found = -1\n"), (N + "walk.py", LEAST_ROWS, "batch * world.asked")), (), 14),
    Piece("a first layer that grows by a row", "cpu", CPU, ((N + "walk.py", WALK_ROW, WALK_WHOLE),), (), 0),
    Piece("zeros behind a ReLU are skipped", "cpu", CPU,
          ((N + "products.py", "count += (not x[r, k] <= 0) if low == 0 else (x[r, k] != 0)", "values[count] = max(x[r, k], low)\n                    count += 1"),), (), 5),
    Piece("eight terms of a product at a time", "cpu", CPU,
          ((N + "products.py", "                for i in range(0, count, 8):\n                    _add_eight(values, terms, i, w, out[r])",
            "                for i in range(count):\n                    for j in range(w.shape[1]):\n                        out[r, j] += values[i] * w[terms[i], j]"),), (N + "products:_add_eight",), 3),
    Piece("blocks of rows and terms that fit the cache", "cpu", CPU, ((N + "products.py", "ROWS, TERMS = 16, 64", "ROWS, TERMS = 1 << 20, 1 << 12"),), (), 4),
    Piece("heads of few outputs transposed", "cpu", CPU, ((N + "walk.py", "FEW = 24 ", "FEW = 0 "),), (N + "products:dots", N + "products:outer"), 12),
    Piece("an exponential that becomes vectors", "cpu", CPU, ((N + "gradient.py", "weights[r, m] = _exp(line[m])", "weights[r, m] = np.exp(line[m])"),), (N + "gradient:_exp",)),
    Piece("updates in pieces that fit the cache", "cpu", "tfbind8/16 bits/16", ((N + "update.py", "PIECE = 1 << 11 ", "PIECE = 1 << 24 "),), (), 6),
    Piece("aligned arrays", "cpu", CPU, ((N + "jit.py", 'return torch.empty(shape, dtype=torch.float32, device="cpu").numpy()', "return np.empty(shape, dtype=np.float32)"),), (N + "jit:floats",)),
    Piece("logarithms of random numbers without torch", "cpu", CPU,
          ((N + "walk.py", "in_parts(lambda a, b: _log_exponential(found[:, a:b]), noise, 1 + count * noise // THREAD_NUMBERS)",
            "drawn[:, :noise].clamp_(min=2**-25).log_().neg_().log_()"),), (N + "walk:_log_exponential",), 1),
    Piece("one graph", "cuda", GPU, (("training/trainer.py", "capture: bool = True", "capture: bool = False"),), ("engines/capture",), 40),
    Piece("the walk and gradient kernels", "cuda", GPU,
          ((C + "engine.py", '        if request.policy.device.type != "cuda":', f'        if True:\n            return {OFF}\n        if request.policy.device.type != "cuda":'),),
          (C + "walk", C + "walk.cu", C + "gradient", C + "residuals.cu", C + "backward.cu", C + "weight_gradients.cu")),
    Piece("the gradient kernels", "cuda", GPU,
          ((C + "engine.py", '        """Of a whole iteration by trace: the traced walk and the updates are compiled too."""\n', f'        """Off."""\n        if job is not None:\n            return {OFF}\n'),),
          (C + "gradient", C + "residuals.cu", C + "backward.cu", C + "weight_gradients.cu")),
    Piece("the noise kernels", "cuda", "noise/16 noise/512",
          ((C + "engine.py", "        return noise.why_not(dynamics)\n", f"        return {OFF}\n"),), (C + "noise", C + "noise.cu")),
    Piece("the update kernels", "cuda", "grid2/16 tfbind8/16 bits/16 bits/512",
          ((C + "engine.py", "        if flat not in self._spans:\n", "        from stochflow.engines.eager import Eager\n        self.plain = getattr(self, 'plain', None) or Eager()\n        if flat is not None:\n            return self.plain.update(flat, step, ends)\n        if flat not in self._spans:\n"),),
          (C + "update", C + "update.cu")),
    Piece("early states once", "cuda", "grid2/512 grid4/512 tfbind8/512 tfbind8/4096",
          ((C + "early.py", "_worth_sharing(policy, steps, batch) if numbers(policy.env) else None", "None"),), (C + "early",), 45),
    Piece("letters of long alphabets one by one", "cuda", "bits/16 bits/512", ((C + "gradient.py", "self.net.features > MANY_FEATURES", "self.net.features > 1 << 30"),), (C + "letter_gradients.cu", C + "gradient:_letter_kernel"), 12),
    Piece("rewards looked up by number", "cuda", "grid2/16 tfbind8/16 tfbind8/512", (("training/trainer.py", "known = worth.of_all(task, device) if", "known = None if"),), ("scores/worth",), 20),
    Piece("random numbers by key and step", "cuda", "grid2/16 tfbind8/16 bits/16", ((C + "walk.py", "    keyed = True\n", "    keyed = False\n"),), ("training/sources:_keep_key",), 14),
    Piece("several trajectories per block", "cuda", "grid4/512 tfbind8/512 bits/512 tfbind8/4096", ((C + "walk.py", "    return min(threads // 32, 1 if walks <= 132", "    return min(1, 1 if walks <= 132"),), (), 3),
    Piece("weights of the walk in registers", "cuda", GPU, ((C + "walk.py", "    held = min(fours, (HELD if small else HELD_BESIDE)[rows])", "    held = 1"),), (), 12),
    Piece("weights of the walk in shared memory", "cuda", GPU, ((C + "walk.py", "placed[name] = int(through and shared + more <= most)", "placed[name] = 0"),), (), 12),
    Piece("sums of weight gradients in shares", "cuda", GPU, ((C + "gradient.py", "parts = min(-(-of.rows // SHARE), max(1, programs // (tiles * of.policy.num_seeds)))", "parts = 1"),), (), 12),
    Piece("tensor cores in a walk", "cuda", "tfbind8/4096 bits/4096 grid4/4096", ((C + "walk.cu", "#define TENSOR (ROWS == 8 && UNITS == 4 && SHARES == 4)", "#define TENSOR 0"),), (), 50),
    Piece("a large head in shared memory", "cuda", "bits/16 bits/512", ((C + "walk.py", "head_kept = max(0, min(max(4, hidden * kept // threads // 4), (most - shared) // (16 * threads) * 4))", "head_kept = 0"),), (), 8),
    Piece("small tiles of the backward pass", "cuda", "grid2/16 grid4/16 tfbind8/16 bits/16", ((C + "gradient.py", "    if hidden >= BLOCK and -(-some // BLOCK) * across >= MANY_BLOCKS:", "    if hidden >= BLOCK:"),), (), 25),
    Piece("large tiles of the backward pass", "cuda", "grid4/512 tfbind8/512 bits/512 tfbind8/4096", ((C + "gradient.py", "    if hidden >= BLOCK and -(-some // BLOCK) * across >= MANY_BLOCKS:", "    if hidden > 1 << 30:"),), (), 25),
    Piece("pieces of trajectories in the noise kernels", "cuda", "noise/16 noise/512", ((C + "noise.py", "piece = LENGTH if seeds * batch > FEW else LENGTH // 2", "piece = 32"),), (), 10),
)  # fmt: skip


def edited(piece: Piece | None, to: Path) -> Path:
    """A copy of the sources without the piece. What is compiled after many iterations is compiled after a hundred."""
    shutil.copytree(SOURCE, to)
    for file, text, other in (ALWAYS, *(piece.edits if piece else ())):
        path = to / "stochflow" / file
        found = path.read_text()
        if text not in found:
            raise SystemExit(f"{piece.name if piece else 'all'}: {file} does not hold {text!r} any more")
        path.write_text(found.replace(text, other))
    return to


def lines(piece: Piece) -> int:
    """Of its files and functions, and those beside them."""
    total = piece.more
    for spec in piece.lines:
        name, _, function = spec.partition(":")
        path = SOURCE / "stochflow" / (name if name.endswith(".cu") else f"{name}.py")
        text = path.read_text()
        if not function:
            total += len(text.splitlines())
            continue
        (node,) = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name == function]
        total += (node.end_lineno or 0) - min([node.lineno, *[d.lineno for d in node.decorator_list]]) + 1
    return total


def child(rows: list[str], device: str, budget: float, lock: str) -> None:
    """Measure the rows with whatever sources are on the path; a JSON object on standard output."""
    import torch

    from stochflow.runs.config import configure
    from stochflow.runs.experiment import Experiment

    found: dict[str, Any] = {}
    for row in rows:
        name, batch = row.split("/")
        task, given = ROWS[name]
        config = configure(
            task, **given, batch=int(batch), net="mlp", hidden=256, objective="tb", lr=1e-3, threads=1, device=device
        )
        trainer = Experiment(config).trainer  # compiles kernels
        with open(lock, "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            found[row] = milliseconds(trainer, int(batch), name, device == "cuda", budget)
    hardware = torch.cuda.get_device_name() if device == "cuda" else ""
    print(json.dumps({"rows": found, "hardware": hardware, "torch": torch.__version__}), flush=True)


def milliseconds(trainer: Any, batch: int, name: str, cuda: bool, budget: float) -> float:
    """Of an iteration: the median of five windows."""
    import torch

    clock = time.perf_counter if cuda else time.thread_time

    def spent(steps: int) -> float:
        begun = clock()
        trainer.train(trainer.steps_done + steps)
        if cuda:
            torch.cuda.synchronize()
        return clock() - begun

    spent(30 if cuda or batch > 16 else 250)
    many, begun = getattr(trainer.source.traces, "many", None), time.perf_counter()
    while hasattr(many, "ready") and not many.ready and time.perf_counter() - begun < 300:
        time.sleep(0.1)
    count = max(5, int(20 * budget / 5 / max(spent(20), 1e-6)))
    if cuda and name.startswith("grid"):
        count = min(count, 40)  # over the same stretch of learning
    return statistics.median(1000 * spent(count) / count for _ in range(5))


def measure(pieces: list[Piece], device: str, budget: float, together: int, rounds: int, out: Path | None) -> None:
    every = sorted({row for p in pieces for row in p.rows.split()})
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        asked: list[tuple[str, list[str], Path]] = []
        for i, piece in enumerate([None, *pieces]):
            path = edited(piece, folder / str(i))
            asked.append((piece.name if piece else "", piece.rows.split() if piece else every, path))
        waiting = [job for _ in range(rounds) for job in asked]
        running: list[tuple[str, subprocess.Popen[str]]] = []
        best: dict[tuple[str, str], float] = {}
        failed: dict[str, str] = {}
        told: dict[str, Any] = {}
        while waiting or running:
            while waiting and len(running) < together:
                name, rows, path = waiting.pop(0)
                words = [
                    sys.executable,
                    __file__,
                    "--child",
                    *rows,
                    "--device",
                    device,
                    "--budget",
                    str(budget),
                    "--lock",
                    str(folder / "lock"),
                ]
                process = subprocess.Popen(
                    words,
                    env={
                        **os.environ,
                        "PYTHONPATH": str(path),
                        "OMP_NUM_THREADS": "1",
                        "XDG_CACHE_HOME": str(folder / "cache"),
                    },
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    text=True,
                )
                running.append((name, process))
            name, process = running.pop(0)
            answer, err = process.communicate()
            if process.returncode:
                failed[name] = (err.strip().splitlines() or ["?"])[-1]
                print(f"{name or 'every piece'}: {failed[name]}", flush=True)
                continue
            told = json.loads(answer.splitlines()[-1])
            for row, ms in told["rows"].items():
                best[name, row] = min(ms, best.get((name, row), ms))
            print(
                f"{name or 'every piece'}: " + "  ".join(f"{row} {ms:.4g}" for row, ms in told["rows"].items()),
                flush=True,
            )
            if out is not None:
                out.write_text(json.dumps(result(pieces, device, best, failed, told), indent=1) + "\n")


def result(
    pieces: list[Piece], device: str, best: dict[tuple[str, str], float], failed: dict[str, str], told: dict[str, Any]
) -> dict[str, Any]:
    """What was measured so far."""
    found: list[dict[str, Any]] = []
    for p in pieces:
        both = [row for row in p.rows.split() if (p.name, row) in best and ("", row) in best]
        rows = {row: {"ms": round(best["", row], 5), "without_ms": round(best[p.name, row], 5)} for row in both}
        found.append(
            {"name": p.name, "lines": lines(p), "rows": rows} | ({"failed": failed[p.name]} if p.name in failed else {})
        )
    hardware = told.get("hardware") or cpu()
    return {
        "device": device,
        "hardware": hardware,
        "torch": told.get("torch"),
        "date": time.strftime("%Y-%m-%d"),
        "pieces": found,
    }


def cpu() -> str:
    names = [
        line.split(":", 1)[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return f"{names[0] if names else 'a CPU'}, one thread"


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    a.add_argument("--only", nargs="*", help="words of the pieces to measure")
    a.add_argument("--budget", type=float, default=1.0, help="seconds of measuring a figure")
    a.add_argument("--together", type=int, default=1, help="processes at once; one of them is on the clock")
    a.add_argument("--rounds", type=int, default=2)
    a.add_argument("--out", type=Path)
    a.add_argument("--check", action="store_true")
    a.add_argument("--child", nargs="*")
    a.add_argument("--lock", default="")
    given = a.parse_args()
    if given.child:
        child(given.child, given.device, given.budget, given.lock)
        return
    pieces = [
        p
        for p in PIECES
        if p.edits
        and (given.check or p.device == given.device)
        and (not given.only or any(w in p.name for w in given.only))
    ]
    if given.check:
        with tempfile.TemporaryDirectory() as temporary:
            for i, piece in enumerate(pieces):
                edited(piece, Path(temporary) / str(i))
        return
    measure(pieces, given.device, given.budget, given.together, given.rounds, given.out)


if __name__ == "__main__":
    main()
