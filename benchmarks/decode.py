"""Decoding with keys and values kept, beside decoding without: the ratio of their times in one run, and the ratio of their arithmetic.

    PYTHONPATH=src python benchmarks/decode.py --cases 64,4,2:32 64,4,2:256 512,8,2:64 --out benchmarks/results/decode.json
    PYTHONPATH=src python benchmarks/decode.py --device cuda --cases 64,4,2:512 256,8,4:512 256,8,4:4096 --out benchmarks/results/decode_h200.json

A case is width,heads,layers:batch. Without a cache every step reads its prefix again, so that a string of n letters costs n (n + 1) / 2 positions
instead of n. The expected factor is the ratio of floating-point operations, counted (`operations`): products with weights, and
attention to all earlier positions, which the cache does not save. Beside it stands where the time of the cached rollout goes. On the CPU times are
seconds of the processor, which other work does not lengthen; on a GPU those of a recorded graph, so that it is the device that is timed
and not Python.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import header, write
from torch.profiler import ProfilerActivity, profile

from stochflow.engines.capture import WARM_UP, Captured, aside
from stochflow.learn.rollout import rollout
from stochflow.nets import layers as nets
from stochflow.nets import transformer
from stochflow.nets.policy import Policy
from stochflow.nets.transformer import Transformer
from stochflow.scores.rewards import Linear
from stochflow.types import Task
from stochflow.worlds.channels import Exact
from stochflow.worlds.strings import Strings

ATTENTION = "aten::_flash_attention_forward aten::_efficient_attention_forward aten::_scaled_dot_product_cudnn_attention".split()


class Repeat:
    """The same policy without a cache: each step reads the prefix from the start."""

    def __init__(self, policy: Policy):
        self.policy = policy
        self.num_seeds, self.device, self.context = policy.num_seeds, policy.device, policy.context

    def begin(self, state: torch.Tensor, context: Any) -> Any:
        return self._read(state, 0), None

    def advance(self, cache: Any, state: torch.Tensor, move: torch.Tensor, t: int) -> Any:
        return self._read(state, t + 1), None

    def _read(self, state: torch.Tensor, size: int) -> Any:
        trunk: Any = self.policy.trunk
        hidden = trunk._read(state[..., :size], None)[:, :, -1]
        return self.policy.head(hidden)[..., : self.policy.env.num_moves]


class Idle:
    """A policy that computes nothing: what is left is the world's share."""

    num_seeds = 1

    def __init__(self, policy: Policy):
        self.device, self.moves = policy.device, policy.env.num_moves

    def context(self, state: torch.Tensor) -> None:
        return None

    def begin(self, state: torch.Tensor, context: Any) -> Any:
        logits = torch.zeros(*state.shape[:-1], self.moves, device=state.device)
        return logits, logits

    def advance(self, cache: Any, state: torch.Tensor, move: torch.Tensor, t: int) -> Any:
        return cache, cache


def operations(net: Transformer, moves: int, length: int, cached: bool) -> int:
    """Multiplications and additions of one string's rollout: n positions with a cache, 1 + 2 + ... + n without.

    A position costs 24 d^2 a layer in products with weights, and 4 d a layer for each position it looks at (itself included); the heads are
    asked once per step either way.
    """
    d, n = net.width, length
    positions = n if cached else n * (n + 1) // 2
    looks = n * (n + 1) // 2 if cached else n * (n + 1) * (n + 2) // 6
    return net.layers * (24 * d * d * positions + 4 * d * looks) + n * 2 * d * (moves + 1)


def seconds(fn: Callable[[], Any], device: str, rounds: int) -> float:
    """The quickest of a few rounds."""
    if device == "cuda":
        aside(fn, torch.device(device), WARM_UP)
        recorded = Captured(fn)
        recorded.record()
        fn = recorded
    clock = time.perf_counter if device == "cuda" else time.process_time
    if device != "cuda" and rounds > 1:
        fn()
    times = []
    for _ in range(rounds):
        begun = clock()
        fn()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(clock() - begun)
    return min(times)


def shares(fn: Callable[[], Any], device: str) -> dict[str, float]:
    """Where the time of a rollout goes: products with weights, attention to what was kept, the rest (norms, activations, copies, the world)."""
    weights, attention, total = _kernels(fn) if device == "cuda" else _processor(fn)
    found = {"weights": weights / total, "attention": attention / total, "rest": 1 - (weights + attention) / total}
    return {k: round(v, 3) for k, v in found.items()}


def _processor(fn: Callable[[], Any]) -> tuple[float, float, float]:
    """Seconds of the processor inside products with weights, inside attention, and in all."""
    spent = {"weights": 0.0, "attention": 0.0}

    def counted(kind: str, inner: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            begun = time.process_time()
            out = inner(*given)
            spent[kind] += time.process_time() - begun
            return out

        return call

    fn()
    plain = nets.Linear.forward, transformer._attend
    nets.Linear.forward, transformer._attend = counted("weights", plain[0]), counted("attention", plain[1])  # type: ignore[method-assign]
    try:
        begun = time.process_time()
        fn()
        total = time.process_time() - begun
    finally:
        nets.Linear.forward, transformer._attend = plain  # type: ignore[method-assign]
    return spent["weights"], spent["attention"], total


def _kernels(fn: Callable[[], Any]) -> tuple[float, float, float]:
    """The same of the time in which kernels run."""
    fn()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        fn()
        torch.cuda.synchronize()
    spent = {e.key: e.self_device_time_total for e in seen.key_averages() if e.key.startswith("aten::")}
    return spent.get("aten::baddbmm", 0.0), sum(spent.get(name, 0.0) for name in ATTENTION), sum(spent.values())


def case(net: Transformer, batch: int, length: int, device: str, rounds: int) -> dict[str, Any]:
    env = Strings("ACGT", length)
    task = Task(env, Exact(), lambda s: s[..., 0], Linear())
    policy = Policy(env, net).to(device)

    def timed(agent: Any, times: int) -> float:
        return seconds(lambda: rollout(task, agent, batch), device, times)

    cache, repeat, world = timed(policy, rounds), timed(Repeat(policy), max(1, rounds - 2)), timed(Idle(policy), rounds)
    return {
        "cache_seconds": round(cache, 5),
        "repeat_seconds": round(repeat, 5),
        "world_seconds": round(world, 5),
        "ratio": round(repeat / cache, 2),
        "positions_ratio": (length + 1) / 2,
        "operations_ratio": round(
            operations(net, env.num_moves, length, False) / operations(net, env.num_moves, length, True), 2
        ),
        "shares": shares(lambda: rollout(task, policy, batch), device),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", default=["64,4,2:64"])
    parser.add_argument("--lengths", type=int, nargs="+", default=[50, 120])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    result = header(args.device, rounds=args.rounds) | {"cases": []}
    for words in args.cases:
        shape, batch = words.split(":")
        net = Transformer(*[int(x) for x in shape.split(",")])
        for length in args.lengths:
            row = {
                "net": repr(net),
                "batch": int(batch),
                "length": length,
                **case(net, int(batch), length, args.device, args.rounds),
            }
            result["cases"].append(row)
            print(row, flush=True)
            write(result, args.out)


if __name__ == "__main__":
    main()
