"""TFBind8 with the transformer, the MLP and the look-up trunk at equal sample budgets, exactly measured.

    PYTHONPATH=src python benchmarks/trunk_study.py --device cuda --out benchmarks/results/trunk_study.json

Every trunk sees the same number of trajectories and learns the noise itself. Its learning rate is the best of three on two other
seeds at a fifth of the budget; the figures are those of five seeds, by exact TV at several budgets. The seconds are those of training
all five, the first step and the recording included. Trunks that --out already holds from the same settings, versions and hardware stay, so that
--nets can take them in several calls.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import torch
from common import header, spread, write

from stochflow.law import floors, metrics
from stochflow.law.exact import Graph, exact_law, target_law
from stochflow.learn.objectives import DetailedBalance
from stochflow.nets.layers import Net
from stochflow.nets.lookup import Lookup
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.nets.transformer import Transformer, parameter_count
from stochflow.noise.dynamics import Neural
from stochflow.runs.tasks import tfbind8_task
from stochflow.training.sources import OnPolicy
from stochflow.training.trainer import NoiseTraining, Trainer

NETS: dict[str, Net] = {
    "lookup": Lookup(),
    "mlp": MLP(128, 2),
    "mlp, wide": MLP(512, 3),
    "transformer": Transformer(64, 4, 2),
    "transformer, wide": Transformer(128, 4, 3),
}
RATES = (5e-4, 1.5e-3, 5e-3)


class Bench:
    """TFBind8 under noise, listed once."""

    def __init__(self, stick: float, device: str, objective: Any):
        self.task, self.device, self.objective = tfbind8_task(stick=stick), device, objective
        self.graph = Graph(self.task.env, device=device)
        self.target = target_law(self.graph, self.task)

    def run(self, net: Net, seeds: list[int], lr: float, budgets: list[int], batch: int) -> dict[str, Any]:
        """TV of the averaged weights after each number of steps, [S] each."""
        torch.manual_seed(seeds[0])
        policy = Policy(self.task.env, net, seeds=seeds).to(self.device)
        dynamics = Neural(self.task.env, seeds).to(self.device)
        source = OnPolicy(self.task, policy, batch, 0.1, 100.0)
        trainer = Trainer(self.task, policy, dynamics, self.objective, source, lr=lr, noise=NoiseTraining(2e-3))
        found: dict[str, Any] = {"tv": {}, "parameters": parameter_count(policy)}
        trained = 0.0
        for steps in budgets:
            begun = time.perf_counter()
            trainer.train(steps)
            if self.device == "cuda":
                torch.cuda.synchronize()
            trained += time.perf_counter() - begun
            with trainer.averaged():
                found["tv"][steps * batch] = metrics.tv(
                    exact_law(self.graph, self.task.channel, policy), self.target.target
                )
        return found | {"seconds": round(trained, 1)}


def kept(out: Path | None, head: dict[str, Any]) -> dict[str, Any]:
    """The trunks that a file holds already, if they were measured in the same way."""
    if out is None or not out.exists():
        return {}
    old = json.loads(out.read_text())
    same = json.loads(json.dumps({k: v for k, v in head.items() if k != "nets"}))
    if {k: v for k, v in old.items() if k != "nets"} != same:
        raise SystemExit(
            f"{out} holds trunks that were measured with other settings, versions or hardware: take another --out"
        )
    return old["nets"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--stick", type=float, default=0.25)
    parser.add_argument("--steps", type=int, nargs="+", default=[150, 500, 1500, 3000])
    parser.add_argument("--batch", type=int, default=1024)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--nets", nargs="*", default=list(NETS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    bench = Bench(args.stick, args.device, DetailedBalance())
    floor = floors.floor(bench.task, bench.graph, bench.target)
    settings = {
        "stick": args.stick,
        "steps": args.steps,
        "batch": args.batch,
        "seeds": args.seeds,
        "objective": "db",
        "rates": RATES,
    }
    result = header(args.device, **settings) | {"floor_tv": floor.floor_tv, "nets": {}}
    result["nets"] = kept(args.out, result)
    for name in args.nets:
        begun = time.perf_counter()
        short = max(1, args.steps[-1] // 5)
        tried = {
            lr: float(next(iter(bench.run(NETS[name], [101, 102], lr, [short], args.batch)["tv"].values())).median())
            for lr in RATES
        }
        lr = min(tried, key=lambda rate: tried[rate] if math.isfinite(tried[rate]) else math.inf)
        found = bench.run(NETS[name], list(range(args.seeds)), lr, args.steps, args.batch)
        row = {
            "net": repr(NETS[name]),
            "parameters": found["parameters"],
            "lr": lr,
            "tried": {str(k): round(v, 5) for k, v in tried.items()},
            "seconds": found["seconds"],
            "tv": {str(k): spread(v) for k, v in found["tv"].items()},
        }
        result["nets"] = {n: row if n == name else result["nets"][n] for n in NETS if n == name or n in result["nets"]}
        print(
            name,
            row["parameters"],
            lr,
            {k: round(v["median"], 4) for k, v in row["tv"].items()},
            row["seconds"],
            "s",
            row["tried"],
            f"{time.perf_counter() - begun:.0f} s in all",
            flush=True,
        )
        write(result, args.out)


if __name__ == "__main__":
    main()
