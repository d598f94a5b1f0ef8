"""What a run leaves behind and what looking at it takes: the size of a long run's folder, a million samples, twenty runs compared.

    OMP_NUM_THREADS=1 PYTHONPATH=src python benchmarks/run_folder.py --steps 1000000 --out benchmarks/results/run_folder.json

The long run is the smallest there is (two cells, a batch of two), with the default intervals of log, look and checkpoint: its log grows as any
run's does. Each part runs in processes of its own, as a user's commands do; memory is the peak resident memory of the command's process.
`python benchmarks/run_folder.py --page docs/report.md` renders the table of the page again.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULT = HERE / "results" / "run_folder.json"
TINY = "--side 2 --ndim 1 --batch 2 --hidden 4 --layers 1 --device cpu --threads 1 --quiet".split()
SMALL = "--side 4 --stick 0.25 --seeds 5 --steps 40 --batch 16 --hidden 16 --eval-every 20 --device cpu --threads 1 --quiet".split()
MB = 1e6


def command(*words: str) -> tuple[float, int]:
    """Seconds and peak bytes of one command."""
    begun = time.perf_counter()
    child = subprocess.Popen([sys.executable, "-m", "stochflow", *words], stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode != 0:
        raise SystemExit(f"stochflow {' '.join(words)} failed")
    return time.perf_counter() - begun, used.ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def size(path: Path) -> int:
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


def long_run(folder: Path, steps: int) -> dict[str, Any]:
    seconds, _ = command("train", "grid", *TINY, "--steps", str(steps), "--out", str(folder / "long"))
    run = folder / "long"
    log = run / "metrics.jsonl"
    return {
        "steps": steps,
        "seconds": round(seconds),
        "folder_mb": round(size(run) / MB, 3),
        "log_mb": round(log.stat().st_size / MB, 3),
        "log_lines": len(log.read_text().splitlines()),
        "checkpoints_mb": round(size(run / "checkpoints") / MB, 3),
    }


def samples(folder: Path, counts: list[int]) -> list[dict[str, Any]]:
    run = str(folder / "strings")
    command("train", "tfbind8", "--steps", "50", "--device", "cpu", "--threads", "1", "--quiet", "--out", run)
    rows = []
    for count in counts:
        file = folder / f"{count}.csv"
        seconds, memory = command("sample", run, "-n", str(count), "--out", str(file))
        with file.open() as f:
            first = f.readline().strip()
            written = sum(1 for _ in f)
        assert written == count
        assert first.endswith(",mode")
        rows.append(
            {
                "samples": count,
                "seconds": round(seconds, 1),
                "memory_mb": round(memory / MB),
                "file_mb": round(file.stat().st_size / MB, 1),
            }
        )
        file.unlink()
    return rows


def comparison(folder: Path, runs: int) -> dict[str, Any]:
    names = [str(folder / f"arm{i:02d}") for i in range(runs)]
    for i, name in enumerate(names):
        command("train", "grid", *SMALL, "--lr", f"{1e-3 * (1 + i):g}", "--out", name)
    seconds, memory = command("compare", *names, "--out", str(folder / "compare.html"))
    return {"runs": runs, "seeds": 5, "seconds": round(seconds, 1), "memory_mb": round(memory / MB)}


# the page -------------------------------------------------------------------------------------------------------


def table(found: dict[str, Any]) -> str:
    long, drawn, arms = found["long_run"], found["samples"], found["compare"]
    lines = ["| what | measured |", "|---|---|"]
    lines.append(
        f"| folder of a run of {long['steps']:,} steps (default intervals: {long['log_lines']:,} lines of log) | "
        f"{long['folder_mb']:.2f} MB: log {long['log_mb']:.2f} MB, checkpoints {long['checkpoints_mb']:.2f} MB |"
    )
    for row in drawn:
        lines.append(
            f"| `stochflow sample` of {row['samples']:,} TFBind8 sequences, with reward, log-probability and mode | "
            f"{row['seconds']:.0f} s, {row['memory_mb']} MB of memory at most, {row['file_mb']} MB of CSV |"
        )
    lines.append(
        f"| `stochflow compare` of {arms['runs']} runs of {arms['seeds']} seeds | {arms['seconds']:.0f} s, {arms['memory_mb']} MB |"
    )
    return "\n".join(lines)


def rendered(page: str, found: dict[str, Any]) -> str:
    """The page with its table made again from the figures."""
    made = f"<!-- run_folder -->\n{table(found)}\n<!-- end -->"
    return re.sub(r"<!-- run_folder -->\n.*?<!-- end -->", lambda _: made, page, flags=re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--samples", type=int, nargs="+", default=[10_000, 1_000_000])
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--page", type=Path, help="only render the table of this page again")
    asked = parser.parse_args()
    if asked.page:
        asked.page.write_text(rendered(asked.page.read_text(), json.loads(RESULT.read_text())))
        return
    from common import header, write

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        found: dict[str, Any] = header("cpu", steps=asked.steps, samples=asked.samples, runs=asked.runs)
        found["compare"] = comparison(folder, asked.runs)
        found["samples"] = samples(folder, asked.samples)
        found["long_run"] = long_run(folder, asked.steps)
    write(found, asked.out)
    print(table(found))


if __name__ == "__main__":
    main()
