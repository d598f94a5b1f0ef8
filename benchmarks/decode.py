"""Decoding with keys and values kept, beside decoding without: the ratio of their times in one run.

    PYTHONPATH=src python benchmarks/decode.py --device cuda --out benchmarks/results/decode_h200.json

Without a cache every step reads its prefix again, so a string of n letters costs n (n + 1) / 2 positions instead of n. `repeat` is
that; `pad` is the plain call of `policy(state)`, which reads the padding too (n (n + 1) positions).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import header, write

from stochflow.capture import Captured, warm_up
from stochflow.channels import Exact
from stochflow.envs import Strings
from stochflow.nets import Policy
from stochflow.rewards import Linear
from stochflow.rollout import rollout
from stochflow.transformer import Transformer
from stochflow.types import Task


class Repeat:
    """The same policy without a cache: each step reads the prefix (`pad`: the whole padded string) from the start."""

    def __init__(self, policy: Policy, pad: bool):
        self.policy, self.pad = policy, pad
        self.num_seeds, self.device, self.context = policy.num_seeds, policy.device, policy.context

    def begin(self, state: torch.Tensor, context: Any) -> Any:
        return self._read(state, 0), None

    def advance(self, cache: Any, state: torch.Tensor, move: torch.Tensor, t: int) -> Any:
        return self._read(state, t + 1), None

    def _read(self, state: torch.Tensor, size: int) -> Any:
        if self.pad:
            return self.policy(state)
        hidden = self.policy.trunk._read(state[..., :size], None)[:, :, -1]
        return self.policy._heads(hidden, self.policy.log_z(None))


def seconds(fn: Callable[[], Any], device: str, rounds: int) -> float:
    """The quickest of a few rounds; on a GPU of a recorded graph, so that it is the device that is timed and not Python."""
    if device == "cuda":
        warm_up(fn, torch.device(device))
        recorded = Captured(fn)
        recorded.record()
        fn = recorded
    else:
        fn()
    times = []
    for _ in range(rounds):
        begun = time.perf_counter()
        fn()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[50, 120])
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = header(args.device, batch=args.batch, rounds=args.rounds, net=repr(Transformer())) | {"lengths": {}}
    for length in args.lengths:
        env = Strings("ACGT", length)
        task = Task(env, Exact(), lambda s: s[..., 0], Linear())
        policy = Policy(env, Transformer()).to(args.device)
        agents = {"cache": policy, "repeat": Repeat(policy, pad=False), "pad": Repeat(policy, pad=True)}
        found = {
            name: seconds(lambda t=task, a=agent: rollout(t, a, args.batch), args.device, args.rounds) for name, agent in agents.items()
        }
        row = {f"{name}_seconds": round(s, 5) for name, s in found.items()}
        row |= {"ratio": round(found["repeat"] / found["cache"], 2), "ratio_pad": round(found["pad"] / found["cache"], 2)}
        row["positions_ratio"] = (length + 1) / 2
        result["lengths"][str(length)] = row
        print(length, row, flush=True)
    write(result, args.out)


if __name__ == "__main__":
    main()
