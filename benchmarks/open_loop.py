"""The price of having no feedback, on TFBind8: a sampler that steers every letter against one that orders whole strings.

    python benchmarks/open_loop.py                     the exact figures, in seconds
    python benchmarks/open_loop.py --train 2000        and both samplers trained, three seeds each

Writes benchmarks/results/open_loop.json, which docs/orders.md shows.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import torch

from stochflow import __version__, floor, train
from stochflow.law.exact import Graph, target_law
from stochflow.runs.tasks import tfbind8_task
from stochflow.worlds.synthesis import Synthesis

OUT = Path(__file__).parent / "results" / "open_loop.json"
STICKS, BETAS, SEEDS = (0.1, 0.25, 0.5), (3.0, 12.0), 3


def made_law(law: torch.Tensor, synthesis: Synthesis) -> torch.Tensor:
    """The law of what is made, [K^n], of a law of orders [K^n]: the channel applied position by position."""
    k = synthesis.letters
    length = round(torch.tensor(len(law)).log().item() / torch.tensor(k).log().item())
    made = law.reshape([k] * length)
    for place in range(length):
        made = torch.tensordot(made, synthesis.table, dims=([place], [0])).movedim(-1, place)
    return made.reshape(-1)


def best_control(score: torch.Tensor, table: torch.Tensor) -> float:
    """The highest expected score with feedback after every letter: backwards, the best action at each prefix."""
    k, value = len(table), score
    while len(value) > 1:
        value = (value.view(-1, k) @ table.T).amax(1)
    return float(value)


def exact_row(stick: float, beta: float) -> dict[str, float]:
    closed, opened = (tfbind8_task(stick=stick, beta=beta, open_loop=o) for o in (False, True))
    synthesis = Synthesis("ACGT", closed.channel)
    graph = Graph(closed.env)
    ends = graph.terminal
    y = closed.oracle(graph.states[ends]).double()
    wanted = target_law(graph, closed).target[ends]
    best = floor(closed, graph).laws["best"][ends]
    order_law = target_law(graph, opened).target[ends]
    expected = opened.oracle(graph.states[ends]).double()
    made = made_law(order_law, synthesis)
    assert abs(float(made @ y) - float(order_law @ expected)) < 1e-6
    return {
        "stick": stick,
        "beta": beta,
        "closed_floor": float((best - wanted).abs().sum()) / 2,
        "open_floor": float(floor(opened).floor_tv or 0.0),
        "closed_mean": float(best @ y),
        "open_mean": float(made @ y),
        "made_tv": float((made - wanted).abs().sum()) / 2,
        "closed_best": best_control(y, synthesis.table),
        "open_best": float(expected.max()),
        "exact": float(synthesis.chance_exact(["ACGTACGT"])[0]),
    }


def trained_row(stick: float, open_loop: bool, steps: int) -> dict[str, object]:
    done = train(
        "tfbind8", stick=stick, open_loop=open_loop, steps=steps, seeds=SEEDS, out=f"runs/open-loop-{stick}-{open_loop}"
    )
    keys = ("tv", "floor_tv", "sample_score")
    return {"stick": stick, "open_loop": open_loop, "steps": steps} | {
        k: done.summary["seeds"].get(k, done.summary.get(k)) for k in keys
    }


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__)
    asked.add_argument("--train", type=int, default=0, help="steps of training; 0 leaves the trained rows as they are")
    steps = asked.parse_args().train
    before = json.loads(OUT.read_text()) if OUT.exists() else {}
    made = {
        "command": "python benchmarks/open_loop.py --train 2000",
        "versions": {"stochflow": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "device": "cpu",
        "exact": [exact_row(stick, beta) for beta in BETAS for stick in STICKS],
        "trained": before.get("trained", []),
    }
    if steps:
        made["trained"] = [trained_row(stick, o, steps) for stick in STICKS[:2] for o in (False, True)]
    OUT.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    main()
