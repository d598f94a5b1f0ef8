"""The source documents' loop on TFBind8: roll out through the noise, ask the oracle, train; modes and curves at the end.

    python examples/generators_tfbind8.py --seconds 60

The strings are DNA 8-mers, the oracle their measured binding to SIX6, and the world ignores a quarter of the letters that the
policy means. All 65,536 strings can be listed, so that the distance of the law to its target is exact.
"""

from __future__ import annotations

import argparse
import time

import torch

from stochflow import tfbind8_task
from stochflow.generators import (
    GeneratorArgs,
    RolloutWorker,
    StochasticDBGFlowNetGenerator,
    StochasticKL2GFlowNetGenerator,
    Tokenizer,
)
from stochflow.law import metrics
from stochflow.law.exact import Graph, exact_law, expected_modes, target_law
from stochflow.law.task_modes import task_modes

GENERATORS = {"db": StochasticDBGFlowNetGenerator, "kl2": StochasticKL2GFlowNetGenerator}


def main(words: list[str] | None = None) -> dict[str, float]:
    """Train, print a curve and the figures of the end, and return these."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--generator", choices=list(GENERATORS), default="db")
    parser.add_argument("--seconds", type=float, default=60.0, help="of training")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="what the seconds are of")
    parser.add_argument("--steps", type=int, default=1_000_000, help="at most")
    parser.add_argument("--stick", type=float, default=0.25)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--picture", default="", help="a file for the curves, such as curves.svg")
    given = parser.parse_args(words)

    args = GeneratorArgs(stick=given.stick, seed=given.seed)  # max_len 8, exponent 3, batches of 1,024
    task = tfbind8_task(stick=given.stick)
    scores: dict[str, float] = {}

    def oracle(strings: list[str]) -> list[float]:
        new = [s for s in dict.fromkeys(strings) if s not in scores]
        scores.update(zip(new, task.oracle(task.env.encode(new)).tolist(), strict=True) if new else ())
        return [scores[s] for s in strings]

    torch.manual_seed(given.seed)
    tokenizer = Tokenizer("ACGT")
    worker = RolloutWorker(args, oracle, tokenizer)
    generator = GENERATORS[given.generator](args, tokenizer)

    graph, curves = Graph(task.env), []
    target, modes = target_law(graph, task), task_modes(task)
    spent, step, look = 0.0, 0, 0.0
    clock = time.perf_counter if given.clock == "wall" else time.process_time
    while spent < given.seconds and step < given.steps:
        begun = clock()
        batch = worker.execute_train_episode_batch(generator, step)
        loss, dynamics_loss = generator.train_step(batch)
        spent += clock() - begun
        step += 1
        if spent >= look:
            look = spent + given.seconds / 6
            with generator.trainer.averaged():
                law = exact_law(graph, task.channel, generator.model)
            tv = float(metrics.tv(law, target.target)[0])
            curves.append((step, spent, tv, loss, dynamics_loss))
            print(
                f"step {step:5d}  {spent:6.1f} s  TV {tv:.4f}  loss {loss:.3g}  noise {dynamics_loss:.4f}", flush=True
            )

    with generator.trainer.averaged():
        law = exact_law(graph, task.channel, generator.model)
    drawn = generator.sample_thoughts(2048, generator.world())
    found = {
        "steps": step,
        "tv": float(metrics.tv(law, target.target)[0]),
        "modes_expected": float(expected_modes(law, modes, 2048)),
        "distinct": len({s for s, _ in drawn}),
        "oracle_calls": len(scores),
    }
    print("  ".join(f"{name} {value:.4g}" for name, value in found.items()))
    if given.picture:
        draw(curves, given.picture)
    return found


def draw(curves: list[tuple[int, float, float, float, float]], path: str) -> None:
    """TV and losses over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3.2))
    steps = [row[0] for row in curves]
    axes[0].semilogy(steps, [row[2] for row in curves], label="TV to the target")
    axes[1].semilogy(steps, [row[3] for row in curves], label="flow loss")
    axes[1].semilogy(steps, [row[4] for row in curves], label="cross-entropy of the noise")
    for axis in axes:
        axis.set_xlabel("step")
        axis.legend()
    figure.tight_layout()
    figure.savefig(path)


if __name__ == "__main__":
    main()
