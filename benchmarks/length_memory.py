"""How training memory grows with length: what autograd keeps, what a batch of trajectories takes, what a replay buffer takes.

    PYTHONPATH=src python benchmarks/length_memory.py --out benchmarks/results/length_memory.json
    PYTHONPATH=src python benchmarks/length_memory.py --device cuda --batch 256 --lengths 15 30 60 120 240 --out benchmarks/results/length_memory_h200.json

On a GPU the peak of a whole iteration (rollout, loss, gradient) is measured as well, by the allocator's own count, above what lay there
before it. An iteration comes first that is not measured: it is then that libraries take the work space they keep.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from common import header, write

from stochflow.learn.buffer import Buffer
from stochflow.learn.evaluate import evaluate
from stochflow.learn.objectives import TrajectoryBalance
from stochflow.learn.rollout import rollout
from stochflow.nets.layers import Net
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.nets.transformer import Transformer
from stochflow.noise.dynamics import Known
from stochflow.scores.rewards import Linear
from stochflow.types import Task, Trajectories, World
from stochflow.worlds.channels import Slip
from stochflow.worlds.strings import Strings

NETS: dict[str, Net] = {"mlp": MLP(128, 2), "transformer": Transformer(64, 4, 2)}


def kept_by_autograd(fn: Any) -> tuple[Any, int]:
    """What `fn` returns and the bytes of different memory that its graph holds for the way back, parameters apart."""
    seen: dict[int, int] = {}

    def note(x: torch.Tensor) -> torch.Tensor:
        if not isinstance(x, torch.nn.Parameter):
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        out = fn()
    return out, sum(seen.values())


def measure(net: Net, length: int, batch: int, device: str) -> dict[str, float]:
    """Kilobytes a trajectory."""
    env = Strings("ACGT", length)
    task = Task(env, Slip(0.1), lambda s: s[..., 0], Linear())
    policy = Policy(env, net).to(device)
    dynamics = Known(env, task.channel)
    objective = TrajectoryBalance()

    def iteration() -> tuple[Trajectories, int]:
        traj = rollout(task, policy, batch)

        def loss() -> torch.Tensor:
            terms = evaluate(task, policy, dynamics, traj, None, objective.needs)
            return objective.loss(terms, World(task, policy, dynamics, traj, None, lambda s, w: None)).sum()

        value, kept = kept_by_autograd(loss)
        value.backward()
        return traj, kept

    if device == "cuda":
        iteration()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
    traj, kept = iteration()
    buffer = Buffer(env, batch)
    bytes_of = sum(b.numel() * b.element_size() for b in buffer.buffers())
    row = {
        "autograd_kb": kept / batch / 1024,
        "trajectory_kb": sum(x.numel() * x.element_size() for x in traj) / batch / 1024,
        "replay_kb": bytes_of / batch / 1024,
    }
    if device == "cuda":
        row["peak_kb"] = (torch.cuda.max_memory_allocated() - before) / batch / 1024
    return {k: round(v, 3) for k, v in row.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[15, 30, 60, 120])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = header(args.device, batch=args.batch, letters=4) | {"nets": {}}
    for name, net in NETS.items():
        rows = {str(n): measure(net, n, args.batch, args.device) for n in args.lengths}
        result["nets"][name] = {"net": repr(net), "lengths": rows}
        for n, row in rows.items():
            print(name, n, row, flush=True)
    write(result, args.out)


if __name__ == "__main__":
    main()
