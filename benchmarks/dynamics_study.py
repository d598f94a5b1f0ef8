"""Does a learned model of the noise save samples? Exact TV against oracle calls, for five ways of knowing the noise.

    PYTHONPATH=src python benchmarks/dynamics_study.py --out benchmarks/results/dynamics_study.json
    PYTHONPATH=src python benchmarks/dynamics_study.py --render benchmarks/results/dynamics_study.json > docs/dynamics-study.md

256 strings of DNA, five seeds stacked, marginal detailed balance. Results are written after each run; a run that is there
is not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

LENGTH, EXPONENT, BATCH, SEEDS = 4, 2.0, 64, 5
LOOKS = (25, 50, 100, 200, 400, 800)  # steps
WORLDS = {"slip": "Slip(0.25)", "growing": "a slip that grows along the string, from 0 to 0.5"}
MODELS = {  # key -> what the table calls it
    "known": "the true channel",
    "tabular": "counted (`tabular`)",
    "neural": "learned (`neural`)",
    "thought": "learned, reads earlier thoughts (`thought`)",
    "none": "none: the realised move is taken for one's own choice (`naive-db`)",
}


def channel_of(world: str) -> Any:
    import torch

    from stochflow.worlds.channels import Slip
    from stochflow.worlds.env import Channel

    class Growing(Channel):
        """A slip whose chance is half the share of the string that is there."""

        def log_probs(self, state: Any, legal: Any, action: Any, memory: Any = None) -> Any:
            alpha = (0.5 * (state < 4).sum(-1) / max(LENGTH - 1, 1)).clamp(max=0.5).unsqueeze(-1)
            itself = torch.arange(legal.shape[-1], device=legal.device) == action.unsqueeze(-1)
            p = (1 - alpha) * itself + alpha / legal.sum(-1, keepdim=True)
            return torch.where(legal, p.clamp(min=1e-30).log(), -1e9)

    return Slip(0.25) if world == "slip" else Growing()


def run_one(world: str, model: str, steps: int) -> dict[str, Any]:
    """Train one model of the noise and look at the exact law after each of LOOKS."""
    import torch

    from stochflow.law import metrics
    from stochflow.law.exact import Graph, exact_law, target_law
    from stochflow.law.floors import floor
    from stochflow.learn.objectives import MARGINAL, REALISED, DetailedBalance
    from stochflow.nets.lookup import Lookup
    from stochflow.nets.policy import Policy
    from stochflow.noise.dynamics import Known, Neural, Tabular
    from stochflow.noise.thoughts import Attention, ThoughtDynamics
    from stochflow.scores.oracles import Table
    from stochflow.scores.rewards import Power
    from stochflow.training.sources import OnPolicy
    from stochflow.training.trainer import NoiseTraining, Trainer
    from stochflow.types import Task
    from stochflow.worlds.strings import Strings

    env = Strings("ACGT", LENGTH)
    scores = 0.05 + torch.rand(4**LENGTH, generator=torch.Generator().manual_seed(0))
    task = Task(env, channel_of(world), Table(env, scores), Power(EXPONENT, 1e-6))
    rows = list(range(SEEDS))
    torch.manual_seed(0)
    policy = Policy(env, Lookup(32, 1), seeds=rows)
    made = {
        "known": lambda: Known(env, task.channel),
        "none": lambda: Known(env, task.channel),
        "tabular": lambda: Tabular(env, rows),
        "neural": lambda: Neural(env, rows, 32),
        "thought": lambda: ThoughtDynamics(env, rows, Attention(16, 2, 1), 32),
    }[model]()
    objective = DetailedBalance(REALISED if model == "none" else MARGINAL)
    trainer = Trainer(
        task, policy, made, objective, OnPolicy(task, policy, BATCH, 0.1), lr=1e-2, noise=NoiseTraining(5e-3)
    )
    graph = Graph(env)
    target = target_law(graph, task).target
    found = floor(task, graph)
    curve, noise = {}, {}
    begun = time.process_time()
    for until in (n for n in LOOKS if n <= steps):
        trainer.train(until)
        with trainer.averaged():
            curve[str(until)] = metrics.tv(exact_law(graph, task.channel, policy), target).tolist()
            noise[str(until)] = metrics.dynamics_report(env, made, task.channel, trainer.act()).kernel_tv.tolist()
    return {
        "world": world,
        "model": model,
        "seeds": rows,
        "batch": BATCH,
        "tv": curve,
        "dynamics_tv": noise,
        "floor_tv": found.floor_tv,
        "limit_tv": found.naive_tv if model == "none" else found.floor_tv_reverse_kl,
        "naive_tv": found.naive_tv,
        "cpu_seconds": round(time.process_time() - begun, 1),
    }


def study(args: argparse.Namespace) -> None:
    import numpy
    import torch

    import stochflow

    torch.set_num_threads(1)
    out = Path(args.out)
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"study": "dynamics", "runs": []}
    versions = {
        "stochflow": stochflow.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
    }
    found |= {"device": f"{platform.machine()} CPU, 1 thread", "versions": versions}
    done = {(r["world"], r["model"]) for r in found["runs"]}
    for world in WORLDS:
        for model in MODELS:
            if (world, model) in done:
                continue
            run = run_one(world, model, args.steps)
            found["runs"].append(run)
            part = out.with_suffix(".part")
            part.write_text(json.dumps(found, indent=1) + "\n")
            os.replace(part, out)
            print(f"{world} {model}: {run['cpu_seconds']} s of CPU", file=sys.stderr, flush=True)


# the page -----------------------------------------------------------------------------------------------------------


def cell(values: list[float]) -> str:
    """Median over seeds with its bootstrap interval."""
    from stochflow.law.metrics import interval

    i = interval(values)
    return f"{i.median:.4f} [{i.low:.4f}, {i.high:.4f}]"


def first_within(run: dict[str, Any], level: float) -> str:
    """Oracle calls per seed at the first look whose median TV is at most `level`."""
    from stochflow.law.metrics import interval

    for steps, tv in run["tv"].items():
        if interval(tv).median <= level:
            return f"{int(steps) * run['batch']:,}"
    return "not reached"


def in_short(runs: dict[str, dict[str, Any]]) -> str:
    """The calls that each model needs to come halfway from the naive law to the limit, in a sentence."""
    level = (runs["none"]["naive_tv"] + runs["known"]["limit_tv"]) / 2
    needed = ", ".join(f"{key} {first_within(run, level)}" for key, run in runs.items() if key != "none")
    last = {key: cell(list(run["tv"].values())[-1]) for key, run in runs.items()}
    return (
        f"Oracle calls per seed until the median TV is at most {level:.3f}, halfway from what ignoring the noise ends at to what can be reached: {needed}. "
        f"At the end known is at {last['known']}, neural at {last['neural']}, and ignoring the noise at {last['none']}."
    )


def answer(found: dict[str, Any]) -> str:
    """The first sentence of the page: in how many cases a learned model needs no more calls than the true channel."""
    runs = {(r["world"], r["model"]): r for r in found["runs"]}
    same, cases, lost = 0, 0, 0
    for world in {w for w, _ in runs}:
        level = (runs[world, "none"]["naive_tv"] + runs[world, "known"]["limit_tv"]) / 2
        known = first_within(runs[world, "known"], level)
        lost += first_within(runs[world, "none"], level) == "not reached"
        for model in ("tabular", "neural", "thought"):
            cases += 1
            same += first_within(runs[world, model], level) == known
    return (
        f"**In short.** Yes: a model learned on the way comes halfway from the naive law to the limit after as many oracle calls as the true channel itself, in {same} of {cases} cases, and "
        f"training that ignores the noise never comes there, in {lost} of {len({w for w, _ in runs})} worlds."
    )


def render(found: dict[str, Any]) -> str:
    """The page that a results file makes."""
    v = found["versions"]
    lines = [
        "# Does a learned model of the noise save samples?",
        "",
        "<!-- Rendered by benchmarks/dynamics_study.py from benchmarks/results/dynamics_study.json; edit neither by hand. -->",
        "",
        answer(found),
        "",
        f"{4**LENGTH} strings of DNA with random scores, exponent {EXPONENT:g}; marginal detailed balance, a look-up trunk, batches of {BATCH}, five seeds. The model of",
        "the noise is what changes. Each figure is the median over seeds of the exact TV to the target, executed through the true noise, with a 95 %",
        "bootstrap interval. A model learns from the same trajectories that the oracle is asked about, so it costs no further call.",
        "",
        f"Measured on {found['device']} with stochflow {v['stochflow']}, torch {v['torch']}, Python {v['python']}.",
    ]
    for world, words in WORLDS.items():
        runs = {key: r for key in MODELS for r in found["runs"] if (r["world"], r["model"]) == (world, key)}
        if len(runs) < len(MODELS):
            continue
        some = runs["known"]
        looks = list(some["tv"])
        lines += ["", f"## {words[0].upper()}{words[1:]}", "", in_short(runs), ""]
        lines += [
            f"Best achievable TV {some['floor_tv']:.4f}; limit of detailed balance {some['limit_tv']:.4f}, of ignoring the noise {some['naive_tv']:.4f}.",
            "",
        ]
        lines += ["| model of the noise | " + " | ".join(f"{int(n) * BATCH:,} calls" for n in looks) + " |"]
        lines += ["|---" * (len(looks) + 1) + "|"]
        for key, r in runs.items():
            lines.append(f"| {MODELS[key]} | " + " | ".join(cell(r["tv"][n]) for n in looks) + " |")
        lines += ["", "Distance of the learned kernel from the true one (mean TV over the steps of a batch):", ""]
        lines += [
            "| model | " + " | ".join(f"{int(n) * BATCH:,} calls" for n in looks) + " |",
            "|---" * (len(looks) + 1) + "|",
        ]
        for key in ("tabular", "neural", "thought"):
            lines.append(f"| {key} | " + " | ".join(cell(runs[key]["dynamics_tv"][n]) for n in looks) + " |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="benchmarks/results/dynamics_study.json")
    parser.add_argument("--steps", type=int, default=LOOKS[-1])
    parser.add_argument("--render", metavar="JSON", help="print the page of a results file instead")
    args = parser.parse_args()
    if args.render:
        sys.stdout.write(render(json.loads(Path(args.render).read_text())))
    else:
        study(args)


if __name__ == "__main__":
    main()
