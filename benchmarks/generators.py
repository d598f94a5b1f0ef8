"""How far the documents' generators come on TFBind8 at stick .25 in 60 seconds of CPU time on one thread.

    PYTHONPATH=src OMP_NUM_THREADS=1 python benchmarks/generators.py --out benchmarks/results/generators.json
    PYTHONPATH=src python benchmarks/generators.py --render benchmarks/results/generators.json

The table stands in docs/source-documents.md. A run that is there is not repeated.
"""

from __future__ import annotations

import argparse
import json
import platform
import runpy
import sys
from pathlib import Path
from typing import Any

NAMES = {"db": "`StochasticDBGFlowNetGenerator`", "kl2": "`StochasticKL2GFlowNetGenerator`"}


def study(out: Path, seconds: float, seeds: int) -> None:
    import torch

    import stochflow

    torch.set_num_threads(1)
    page = runpy.run_path(str(Path(__file__).parents[1] / "examples/generators_tfbind8.py"))
    found: dict[str, Any] = (
        json.loads(out.read_text()) if out.exists() else {"seconds": seconds, "stick": 0.25, "runs": []}
    )
    versions = {"stochflow": stochflow.__version__, "python": platform.python_version(), "torch": torch.__version__}
    found |= {"device": f"{platform.machine()} CPU, 1 thread", "versions": versions}
    done = {(r["generator"], r["seed"]) for r in found["runs"]}
    for seed in range(seeds):
        for name in NAMES:
            if (name, seed) not in done:
                words = ["--generator", name, "--seconds", str(seconds), "--clock", "cpu", "--seed", str(seed)]
                found["runs"].append({"generator": name, "seed": seed} | page["main"](words))
                out.write_text(json.dumps(found, indent=1) + "\n")


def render(found: dict[str, Any]) -> str:
    """A table, a row a generator."""
    v = found["versions"]
    lines = [
        "| generator | seeds | steps | exact TV | modes expected in 2,048 strings (of 328) |",
        "|---|---|---|---|---|",
    ]
    for name, words in NAMES.items():
        runs = [r for r in found["runs"] if r["generator"] == name]
        if runs:
            tv, modes, steps = ([r[key] for r in runs] for key in ("tv", "modes_expected", "steps"))
            span = [f"{min(x):.{d}f} to {max(x):.{d}f}" for x, d in ((steps, 0), (tv, 4), (modes, 1))]
            lines.append(f"| {words} | {len(runs)} | {' | '.join(span)} |")
    told = f"{found['seconds']:g} seconds of CPU time, {found['device']}, stochflow {v['stochflow']}, torch {v['torch']}, Python {v['python']}"
    return "\n".join([*lines, "", f"({told}: `benchmarks/generators.py`.)", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/generators.json"))
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--render", metavar="JSON", help="print the table of a results file instead")
    args = parser.parse_args()
    if args.render:
        sys.stdout.write(render(json.loads(Path(args.render).read_text())))
    else:
        study(args.out, args.seconds, args.seeds)


if __name__ == "__main__":
    main()
