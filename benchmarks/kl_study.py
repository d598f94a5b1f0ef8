"""Does the KL / entropy-ratio term help? Eight objectives side by side, on TFBind8 and on the 8x8 grid, at three noises.

    PYTHONPATH=src python benchmarks/kl_study.py --device cuda --out benchmarks/results/kl_study.json
    PYTHONPATH=src python benchmarks/kl_study.py --render benchmarks/results/kl_study.json > docs/kl-study.md

Every run trains five seeds stacked, with learned (neural) dynamics, on the same number of trajectories, and is measured
by the exact law of its averaged weights. Results are written after each run; a run that is already there is not repeated.
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

STICKS = (0.1, 0.25, 0.5)
GAMMA = 0.25
METHODS = {  # key, as `--objective` knows it -> what the table calls it
    "intended-db": "GFN-DB, intended labels",
    "naive-db": "GFN-DB, realised labels",
    "sdb": "SGFN-DB, exact posterior (= marginal DB)",
    "sdb-head": "SGFN-DB, posterior learned by likelihood",
    "sdb-published": "SGFN-DB as published",
    "flow-kl": "flow KL alone",
    "sgfn-kl": "SGFN-KL, exact posterior",
    "sgfn-kl-published": "SGFN-KL over the published form",
}
STEPS = {"tfbind8": 1500, "grid": 2000}  # everything else is the task's own default


def make_objective(key: str, weight: float) -> Any:
    from stochflow.learn import objectives as o

    return {
        "intended-db": lambda: o.DetailedBalance(o.INTENDED),
        "naive-db": lambda: o.DetailedBalance(o.REALISED),
        "sdb": lambda: o.DetailedBalance(o.JOINT),
        "sdb-head": lambda: o.DetailedBalance(o.HEAD),
        "sdb-published": lambda: o.DetailedBalance(o.PUBLISHED),
        "flow-kl": lambda: o.FlowKL(),
        "sgfn-kl": lambda: o.SGFNKL((GAMMA,), weight),
        "sgfn-kl-published": lambda: o.SGFNKL((GAMMA,), weight, o.PUBLISHED),
    }[key]()


def run_one(
    task_name: str, stick: float, key: str, seeds: int, steps: int, weight: float, device: str, yardsticks: dict
) -> dict[str, Any]:
    """Train one method and measure it three times: after a quarter, a half and all of its steps."""
    import torch

    from stochflow.law import metrics
    from stochflow.law.exact import exact_law
    from stochflow.law.floors import limit_tv
    from stochflow.law.measure import Yardstick
    from stochflow.learn import objectives
    from stochflow.nets.lookup import Lookup
    from stochflow.nets.mlp import MLP
    from stochflow.nets.policy import Policy
    from stochflow.noise.dynamics import Neural
    from stochflow.runs import config
    from stochflow.runs.tasks import grid_task, tfbind8_task
    from stochflow.training.sources import OnPolicy
    from stochflow.training.trainer import Iteration, NoiseTraining, Trainer

    spec = config.train_for(config.TASKS[task_name](), {})
    where = torch.device(device)
    if (task_name, stick) not in yardsticks:
        made = tfbind8_task(stick=stick) if task_name == "tfbind8" else grid_task(stick=stick)
        yardsticks[task_name, stick] = Yardstick(made, where)
    yard = yardsticks[task_name, stick]
    task = yard.task
    torch.manual_seed(0)
    rows = list(range(seeds))
    objective = make_objective(key, weight)
    net = Lookup(spec.hidden, spec.layers) if spec.net == "lookup" else MLP(spec.hidden, spec.layers)
    policy = Policy(task.env, net, seeds=rows, back_action=objective.form.back_action).to(where)
    dynamics = Neural(task.env, rows).to(where)
    source = OnPolicy(task, policy, spec.batch, spec.explore, spec.explore_tau)
    noise = NoiseTraining(spec.dynamics_lr, spec.dynamics_clip)
    trainer = Trainer(
        task, policy, dynamics, objective, source, lr=spec.lr, noise=noise, iteration=Iteration(spec.clip)
    )
    target = yard.target.target
    curve: dict[str, list[float]] = {}
    seconds = 0.0
    for share in (0.25, 0.5, 1.0):
        until = round(steps * share)
        begun = time.perf_counter()
        trainer.train(until)
        trainer.stats  # noqa: B018 - waits for the device
        seconds += time.perf_counter() - begun
        with trainer.averaged():
            law = exact_law(yard.graph, task.channel, policy)
            curve[str(until)] = metrics.tv(law, target).tolist()
            if share == 1.0:
                end = {
                    "kl_target_model": metrics.kl(target, law).tolist(),
                    "kl_model_target": metrics.kl(law, target).tolist(),
                }
                fit = metrics.dynamics_report(task.env, dynamics, task.channel, trainer.act())
    floor = yard.floor
    extra = {}
    if isinstance(objective, objectives.SGFNKL):
        from stochflow.learn.evaluate import evaluate

        with torch.no_grad():
            t = evaluate(task, policy, dynamics, trainer.score(trainer.act()), None, objective.needs)
            band = objective.band(t)
            from stochflow.learn.entropy import mean_entropy_ratio

            extra = {
                "entropy_high": band.high.tolist(),
                "entropy_low": band.low.tolist(),
                "r_gamma": mean_entropy_ratio(band.high, band.low, objective.gammas).tolist(),
            }
    return {
        "task": task_name,
        "stick": stick,
        "method": key,
        "seeds": rows,
        "steps": steps,
        "batch": spec.batch,
        "net": spec.net,
        "lr": spec.lr,
        "clip": spec.clip,
        "dynamics_lr": spec.dynamics_lr,
        "dynamics_clip": spec.dynamics_clip,
        "tv": curve[str(steps)],
        "tv_curve": curve,
        **end,
        "dynamics_tv": fit.kernel_tv.tolist(),
        **extra,
        "floor_tv": floor.floor_tv,
        "floor_kind": floor.kind,
        "naive_tv": floor.naive_tv,
        "limit_tv": limit_tv(key, floor),
        "oracle_calls": int(trainer.oracle_calls),
        "seconds": round(seconds, 2),
        "ms_per_step": round(1000 * seconds / steps, 3),
    }


def hardware(device: str) -> dict[str, Any]:
    import numpy
    import scipy
    import torch

    import stochflow

    name = (
        torch.cuda.get_device_name()
        if device == "cuda"
        else f"{platform.machine()} CPU, {torch.get_num_threads()} threads"
    )
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "scipy": scipy.__version__,
    }
    return {"device": name, "versions": {"stochflow": stochflow.__version__, **versions}}


def study(args: argparse.Namespace) -> None:
    out = Path(args.out)
    found: dict[str, Any] = (
        json.loads(out.read_text())
        if out.exists()
        else {"study": "kl", "gamma": GAMMA, "weight": args.weight, "runs": []}
    )
    found |= hardware(args.device)
    done = {(r["task"], r["stick"], r["method"]) for r in found["runs"]}
    yardsticks: dict[tuple[str, float], Any] = {}
    for task_name in args.tasks:
        for stick in args.sticks:
            for key in args.methods:
                if (task_name, stick, key) in done:
                    continue
                steps = args.steps or STEPS[task_name]
                run = run_one(task_name, stick, key, args.seeds, steps, args.weight, args.device, yardsticks)
                found["runs"].append(run)
                out.parent.mkdir(parents=True, exist_ok=True)
                part = out.with_suffix(".part")
                part.write_text(json.dumps(found, indent=1) + "\n")
                os.replace(part, out)
                middle = sorted(run["tv"])[len(run["tv"]) // 2]
                print(
                    f"{task_name} stick {stick} {key}: median TV {middle:.4f}, {run['seconds']:.1f} s",
                    file=sys.stderr,
                    flush=True,
                )


# the page -----------------------------------------------------------------------------------------------------------


def cell(values: list[float], shift: float = 0.0) -> str:
    """Median with its bootstrap interval over seeds."""
    from stochflow.law.metrics import interval

    i = interval([v - shift for v in values])
    return f"{i.median:.4f} [{i.low:.4f}, {i.high:.4f}]"


def number(x: float | None) -> str:
    return "-" if x is None else f"{x:.4f}"


def better(runs: dict[str, dict[str, Any]], with_kl: str, without: str) -> str:
    """In how many of the paired seeds the KL term lowered the TV, and the median change."""
    a, b = runs[with_kl]["tv"], runs[without]["tv"]
    change = [x - y for x, y in zip(a, b, strict=True)]
    wins = sum(c < 0 for c in change)
    return f"{cell(change)} | {wins} of {len(change)}"


PAIRS = (
    ("sgfn-kl", "sdb", "SGFN-KL against SGFN-DB"),
    ("sgfn-kl-published", "sdb-published", "the same over the published form"),
)


def in_short(groups: dict[tuple[str, float], dict[str, dict[str, Any]]], names: dict[str, str]) -> list[str]:
    """One line a task: where the KL term helped, where it hurt, where the seeds do not say."""
    from stochflow.law.metrics import interval

    lines = []
    for task, name in names.items():
        said: dict[str, list[str]] = {"helps": [], "hurts": [], "makes no difference that these seeds show": []}
        best: dict[float, str] = {}
        for (t, stick), runs in groups.items():
            if t != task:
                continue
            for with_kl, without, label in PAIRS:
                if with_kl in runs and without in runs:
                    i = interval([a - b for a, b in zip(runs[with_kl]["tv"], runs[without]["tv"], strict=True)])
                    word = (
                        "helps" if i.high < 0 else "hurts" if i.low > 0 else "makes no difference that these seeds show"
                    )
                    said[word].append(f"{label} at {stick} ({i.median:+.4f})")
            least = min(runs, key=lambda k: interval(runs[k]["tv"]).median)
            best[stick] = f"{METHODS[least]} at {stick} ({interval(runs[least]['tv']).median:.4f})"
        if best:
            told = "; ".join(f"the KL term {word}: {', '.join(where)}" for word, where in said.items() if where)
            lines.append(f"* {name}: {told}. Least median TV: {', '.join(best.values())}.")
    return lines


def choice(groups: dict[tuple[str, float], dict[str, dict[str, Any]]]) -> str:
    """What a reader should choose, with the figures that say so."""
    from stochflow.law.metrics import interval

    lost = []
    for (task, stick), runs in groups.items():
        if "sdb" in runs and "sdb-published" in runs:
            published, sound = (interval(runs[key]["tv"]).median for key in ("sdb-published", "sdb"))
            lost.append((published - sound, f"{published:.3f} against {sound:.3f} on {task} at stick {stick}"))
    worse = sum(gap > 0 for gap, _ in lost)
    least: dict[str, list[str]] = {}
    for (task, stick), runs in groups.items():
        sound = {k: r for k, r in runs.items() if not k.endswith("-published")}
        best = min(sound, key=lambda k: interval(sound[k]["tv"]).median)
        least.setdefault(best, []).append(f"{task} at {stick}")
    words = "Choose `db` (`sdb` is another word for it) and never the published joint form"
    if lost:
        words += f", whose law is further from the target in {worse} of {len(lost)} worlds (TV {max(lost)[1]})"
    wins = "; ".join(f"`{key}` has the least TV on {', '.join(where)}" for key, where in sorted(least.items()))
    head = [
        interval(r["sdb-head"]["tv"]).median - interval(r["sdb"]["tv"]).median
        for r in groups.values()
        if "sdb-head" in r
    ]
    slow = (
        f" A posterior learned by likelihood has the same limit and is far from it after so few steps (TV higher by {min(head):.3f} to {max(head):.3f}):"
        " it is for actions that cannot be listed."
        if head
        else ""
    )
    return f"**What to choose.** {words}. Among the sound objectives, after equal steps, {wins}.{slow}"


def render(found: dict[str, Any]) -> str:
    """The page that a results file makes: everything in it is read from the file."""
    names = {"tfbind8": "TFBind8 (beta 3, look-up trunk)", "grid": "Grid 8 x 8 (corners, MLP)"}
    v = found["versions"]
    groups: dict[tuple[str, float], dict[str, dict[str, Any]]] = {}
    for run in found["runs"]:
        groups.setdefault((run["task"], run["stick"]), {})[run["method"]] = run
    lines = [
        "# Does the KL / entropy-ratio term help?",
        "",
        "<!-- Rendered by benchmarks/kl_study.py from benchmarks/results/kl_study.json; edit neither by hand. -->",
        "",
        choice(groups),
        "",
        *SETTING.format(gamma=found["gamma"], weight=found["weight"]).strip().splitlines(),
        "",
        f"Measured on {found['device']} with stochflow {v['stochflow']}, torch {v['torch']}, Python {v['python']}.",
    ]
    lines += [
        "",
        "## In short",
        "",
        "Changes of the median TV; the term counts as helping or hurting where the interval of the paired change leaves out 0.",
        "",
    ]
    lines += in_short(groups, names)
    for task in names:
        mine = {stick: runs for (t, stick), runs in groups.items() if t == task}
        if not mine:
            continue
        first = next(iter(next(iter(mine.values())).values()))
        lines += ["", f"## {names[task]}", ""]
        lines += [
            f"{len(first['seeds'])} seeds, {first['steps']} steps of {first['batch']} trajectories, learning rate {first['lr']}."
        ]
        for stick, runs in mine.items():
            any_run = next(iter(runs.values()))
            head = f"best achievable TV {number(any_run['floor_tv'])} ({any_run['floor_kind']}), naive {number(any_run['naive_tv'])}"
            lines += ["", f"### stick {stick}: {head}", ""]
            lines += [
                "| objective | exact TV | excess over the floor | limit | oracle calls per seed | ms per step |",
                "|---|---|---|---|---|---|",
            ]
            for key, label in METHODS.items():
                if key not in runs:
                    continue
                r = runs[key]
                calls = f"{r['oracle_calls'] / len(r['seeds']) / 1e3:.0f}k"
                row = [
                    label,
                    cell(r["tv"]),
                    cell(r["tv"], r["floor_tv"] or 0.0),
                    number(r["limit_tv"]),
                    calls,
                    f"{r['ms_per_step']:.1f}",
                ]
                lines.append("| " + " | ".join(row) + " |")
        lines += ["", "Change of TV when the KL term is added (negative is better), the same seeds paired:", ""]
        lines += ["| stick | objective | change of TV | seeds that gained |", "|---|---|---|---|"]
        for stick, runs in mine.items():
            for with_kl, without, label in PAIRS:
                if with_kl in runs and without in runs:
                    lines.append(f"| {stick} | {label} | {better(runs, with_kl, without)} |")
        ratios = [(stick, runs["sgfn-kl"]) for stick, runs in mine.items() if "sgfn-kl" in runs]
        if ratios:
            lines += [
                "",
                "The entropy band at the end of SGFN-KL (fractions of the largest entropy) and the ratio:",
                "",
            ]
            lines += ["| stick | entropy_high | entropy_low | r_gamma |", "|---|---|---|---|"]
            lines += [
                f"| {stick} | {cell(r['entropy_high'])} | {cell(r['entropy_low'])} | {cell(r['r_gamma'])} |"
                for stick, r in ratios
            ]
    return "\n".join([*lines, ""])


SETTING = """
Eight objectives on the same tasks with the same seeds, batch, learning rate, exploration and learned (neural) dynamics:

* **GFN-DB** takes its own intention for what happened (intended labels), or what happened for its own intention (realised
  labels). Neither models the noise.
* **SGFN-DB** is stochastic detailed balance: with the policy's exact posterior of the action, which makes it marginal detailed balance;
  with a posterior learned by likelihood (measured with one pair of action and move drawn for it at each state; now up to eight are); and as published, with a posterior learned through the residual ([why that is unsound](method.md#joint)).
* **flow KL** is the state-level KL + flow gap alone. **SGFN-KL** = SGFN-DB + {weight} x r_gamma x (flow KL + flow gap) with
  gamma = {gamma}, over the sound and over the published form.

Each figure is the median over seeds of the exact TV between the law of the averaged weights, executed through the true noise, and
the target, with a 95 % bootstrap interval of the median in brackets. The floor is the best law that any policy can have
(forward-KL projection on trees, least L1 on the grid), so an excess can fall slightly below 0 on trees. *Limit* is the law at which
the objective ends on-policy, where that is known. The flow KL asks the oracle about every finished child of a visited state, and
about every visited state that may stop: the column *oracle calls* counts them, and equal steps are therefore not equal cost.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", default="benchmarks/results/kl_study.json")
    parser.add_argument("--steps", type=int, default=0, help="for both tasks; 0: each task's own")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--weight", type=float, default=1.0, help="of the KL term")
    parser.add_argument("--tasks", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--sticks", nargs="+", type=float, default=list(STICKS))
    parser.add_argument("--methods", nargs="+", default=list(METHODS), choices=list(METHODS))
    parser.add_argument("--render", metavar="JSON", help="print the page of a results file instead")
    args = parser.parse_args()
    if args.render:
        sys.stdout.write(render(json.loads(Path(args.render).read_text())))
    else:
        study(args)


if __name__ == "__main__":
    main()
