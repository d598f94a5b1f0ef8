"""Does it help to know what the agent meant? Prediction and law, in two worlds whose noise has a memory.

    PYTHONPATH=src python benchmarks/thought_study.py --out benchmarks/results/thought_study.json
    PYTHONPATH=src python benchmarks/thought_study.py --arms "known + thought_state, db (longer)" --out benchmarks/results/thought_study.json

(a) prediction: held-out NLL and kernel TV of a table, a network of the state, and readers of the history, on the same data;
(b) the law, exactly: each of them inside marginal balance with pi(a|s), and the reader of histories where thoughts belong to the
state of flow, policy and backward policy (`augment`). Detailed balance throughout; trajectory balance beside it, because in the
augmented world detailed balance has twice as many steps to pass the reward back through, and once more with a higher rate and four times the steps (`longer`),
to see whether it gets there. Seeds are stacked; figures are medians over them with intervals. With --arms the named rows join what --out
already holds from the same settings, versions and hardware.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import header, spread, write

from stochflow.engines.flat import FlatParameters
from stochflow.law import metrics
from stochflow.law.exact import Graph, exact_law, flows, invert, target_law
from stochflow.law.exact_memory import Averaged, memory_law
from stochflow.learn.objectives import DetailedBalance, Objective, TrajectoryBalance
from stochflow.learn.rollout import rollout
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.noise.dynamics import Dynamics, Known, Neural, Tabular
from stochflow.noise.thought_state import Augmented, augment
from stochflow.noise.thoughts import Attention, Flat, ThoughtDynamics
from stochflow.scores.oracles import Table
from stochflow.scores.rewards import Linear
from stochflow.training.sources import OnPolicy
from stochflow.training.trainer import NoiseTraining, Trainer
from stochflow.types import PolicyOut, Task
from stochflow.worlds.channels import Slip
from stochflow.worlds.env import Channel
from stochflow.worlds.memory import Fatigue, Regime
from stochflow.worlds.strings import Strings

Maker = Callable[[Strings, list[int]], Dynamics]
OBJECTIVES: dict[str, Objective] = {"db": DetailedBalance(), "tb": TrajectoryBalance()}
LONGER = {"steps": 4, "lr": 2e-2}  # times the steps, and the rate; else 1 and RATE
RATE = 3e-3
ARMS = (  # model, thoughts in the state?, objective; "(longer)": with the budget and the rate of LONGER
    ("table", False, "db"),
    ("state", False, "db"),
    ("thought", False, "db"),
    ("known", False, "db"),
    ("thought", True, "db"),
    ("state", False, "tb"),
    ("thought", False, "tb"),
    ("thought", True, "tb"),
    ("known", True, "tb"),
    ("thought", True, "db (longer)"),
    ("known", True, "db (longer)"),
)


def landscape(env: Strings, spread: float) -> Table:
    """A fixed landscape: log R is a sum over letters and over neighbouring pairs, plus a little of its own for each string."""
    gen = torch.Generator().manual_seed(0)
    k = env.tokens
    single = torch.randn(env.length, k, generator=gen, dtype=torch.float64)
    pair = torch.randn(k, k, generator=gen, dtype=torch.float64)
    x = env.all_states()[-(k**env.length) :]
    score = single[torch.arange(env.length), x].sum(1) + pair[x[:, :-1], x[:, 1:]].sum(1)
    score = score + torch.randn(len(score), generator=gen, dtype=torch.float64)
    return Table(env, spread * (score - score.mean()) / score.std())


class Crossed(Channel):
    """Crossed wires: every action is read as the next one, and then may slip."""

    def __init__(self, alpha: float):
        self.slip = Slip(alpha)

    def log_probs(self, state, legal, action, memory=None):
        return self.slip.log_probs(state, legal, (action + 1) % legal.shape[-1])

    def __repr__(self) -> str:
        return f"Crossed({self.slip.alpha})"


def worlds(letters: int, length: int) -> dict[str, Task]:
    """A world that tires when the agent is overruled, and one whose wires are crossed now and then."""
    env = Strings("ABCDE"[:letters], length)
    regime = Regime(env, [Slip(0.1), Crossed(0.1)], stay=0.95, start=[0.65, 0.35])
    return {
        "fatigue": Task(env, Fatigue(alpha=0.3, growth=0.7, limit=1.0), landscape(env, 0.4), Linear()),
        "regime": Task(env, regime, landscape(env, 0.35), Linear()),
    }


def makers(task: Task) -> dict[str, Maker]:
    """The models of the noise, from the simplest to the one that reads everything; `known` is the true law of histories."""
    return {
        "table": lambda env, seeds: Tabular(env, seeds),
        "state": lambda env, seeds: Neural(env, seeds),
        "history MLP": lambda env, seeds: ThoughtDynamics(env, seeds, Flat(hidden=64, layers=1)),
        "thought": lambda env, seeds: ThoughtDynamics(env, seeds, Attention(width=16, heads=2, layers=2)),
        "known": lambda env, seeds: Known(env, task.channel),
    }


class Uniform:
    """The behaviour that makes the data of (a)."""

    def __init__(self, env: Strings, seeds: int, device: str):
        self.env, self.num_seeds, self.device = env, seeds, torch.device(device)

    def context(self, state):
        return None

    def begin(self, state, context):
        return torch.zeros(*state.shape[:-1], self.env.num_moves, device=state.device), None

    def advance(self, cache, state, move, t):
        return self.begin(state, None)


def predict(task: Task, make: Maker, seeds: list[int], steps: int, batch: int, device: str) -> dict[str, torch.Tensor]:
    """Train a model on uniform behaviour and look at behaviour it has not seen."""
    torch.manual_seed(1)
    dynamics = make(task.env, seeds).to(device)
    agent = Uniform(task.env, len(seeds), device)
    step = torch.zeros((), dtype=torch.float64, device=device)
    flat = FlatParameters(dynamics, 2e-3, 10.0) if any(True for _ in dynamics.parameters()) else None
    for _ in range(steps if not isinstance(dynamics, Known) else 0):
        traj = rollout(task, agent, batch)
        dynamics.observe(traj)
        if flat is not None:
            flat.differentiate(dynamics.loss(traj))
            flat.update(step)
        step += 1
    if flat is not None:
        flat.swap()
    torch.manual_seed(2)
    found = metrics.dynamics_report(task.env, dynamics, task.channel, rollout(task, agent, 20_000))
    return {"nll": found.nll, "nll_true": found.nll_true, "kernel_tv": found.kernel_tv}


def learn(
    task: Task,
    make: Maker,
    objective: Objective,
    thought_state: bool,
    seeds: list[int],
    steps: int,
    lr: float,
    batch: int,
    device: str,
) -> dict[str, torch.Tensor]:
    """Train by a marginal balance, and compare the exact law with the target."""
    torch.manual_seed(0)
    dynamics = make(task.env, seeds).to(device)
    world = augment(task) if thought_state else task
    if thought_state:
        dynamics = Augmented(world.env, dynamics).to(device)
    policy = Policy(world.env, MLP(64, 2), seeds=seeds).to(device)
    source = OnPolicy(
        world, policy, batch
    )  # no exploration: a kernel of states is right for the behaviour it was learned from
    trainer = Trainer(world, policy, dynamics, objective, source, lr=lr, noise=NoiseTraining(2e-3))
    trainer.train(steps)
    graph = Graph(world.env, device=device)
    wanted = target_law(graph, world).target
    with trainer.averaged(), torch.no_grad():
        if thought_state:
            law = exact_law(graph, world.channel, policy)
            fit = None
        else:
            law = memory_law(graph, task.channel, policy).law
            fit = metrics.dynamics_report(task.env, dynamics, task.channel, rollout(task, policy, 5000))
    out = {"tv": metrics.tv(law, wanted), "loss": trainer.stats["loss"]}
    if fit is not None:
        out |= {"nll_on_policy": fit.nll, "kernel_tv_on_policy": fit.kernel_tv}
    return out


def fixed_point(task: Task, rounds: int = 200) -> dict[str, float]:
    """Where a perfect on-policy kernel of states leads: a policy that realises the wanted moves through its own averaged noise."""
    graph = Graph(task.env)
    target = target_law(graph, task)
    log_q = flows(graph, target.log_reward)[1]
    log_pi = log_q

    def policy(state: torch.Tensor) -> PolicyOut:
        chosen = log_pi[graph.env.index(state)]
        return PolicyOut(chosen, chosen, None, chosen[..., 0])

    for _ in range(rounds):
        found = memory_law(graph, task.channel, policy, seeds=1)
        log_pi, feasible = invert(graph, Averaged(graph, found.kernel), log_q)
    return {"tv": float(metrics.tv(found.law, target.target)), "infeasible_states": int((~feasible).sum())}


def spreads(found: dict[str, torch.Tensor]) -> dict[str, Any]:
    return {key: spread(values) for key, values in found.items()}


def kept(out: Path | None, head: dict[str, Any]) -> dict[str, Any]:
    """The worlds that a file holds already, if they were measured in the same way."""
    if out is None or not out.exists():
        return {}
    old = json.loads(out.read_text())
    if {k: v for k, v in old.items() if k != "worlds"} != json.loads(json.dumps(head)):
        raise SystemExit(
            f"{out} holds rows that were measured with other settings, versions or hardware: take another --out"
        )
    return old["worlds"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--letters", type=int, default=3)
    parser.add_argument("--length", type=int, default=3)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("--predict-steps", type=int, default=600)
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--worlds", nargs="*")
    parser.add_argument("--arms", nargs="*")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    seeds = list(range(args.seeds))
    settings = {k: v for k, v in vars(args).items() if k not in ("out", "worlds", "arms", "device")}
    result = header(args.device, **settings)
    result["worlds"] = kept(args.out, result) if args.arms else {}
    for name, task in worlds(args.letters, args.length).items():
        if args.worlds and name not in args.worlds:
            continue
        if name not in result["worlds"]:
            result["worlds"][name] = {
                "channel": repr(task.channel),
                "state_fixed_point": fixed_point(task),
                "prediction": {},
                "law": {},
            }
        here = result["worlds"][name]
        print(name, here["state_fixed_point"], flush=True)
        for model, make in makers(task).items():
            if model in here["prediction"]:
                continue
            here["prediction"][model] = spreads(predict(task, make, seeds, args.predict_steps, args.batch, args.device))
            print(name, model, {k: round(v["median"], 4) for k, v in here["prediction"][model].items()}, flush=True)
        for model, thought_state, words in ARMS:
            label = f"{model}{' + thought_state' if thought_state else ''}, {words}"
            if args.arms and label not in args.arms:
                continue
            begun = time.perf_counter()
            objective, longer = words.split()[0], words.endswith("(longer)")
            steps, lr = (args.steps * LONGER["steps"], LONGER["lr"]) if longer else (args.steps, RATE)
            make = makers(task)[model]
            found = learn(
                task, make, OBJECTIVES[objective], thought_state, seeds, int(steps), lr, args.batch, args.device
            )
            here["law"][label] = spreads(found) | {
                "seconds": round(time.perf_counter() - begun, 1),
                "steps": int(steps),
                "lr": lr,
            }
            shown = {k: round(v["median"], 4) for k, v in here["law"][label].items() if isinstance(v, dict)}
            print(name, label, shown, here["law"][label]["seconds"], "s", flush=True)
            write(result, args.out)
        write(result, args.out)


if __name__ == "__main__":
    main()
