"""The price of having no feedback, on TFBind8: a sampler that steers every letter against one that orders whole strings.

    python benchmarks/open_loop.py                     the exact figures, in seconds
    python benchmarks/open_loop.py --train 2000        and both samplers trained, three seeds each

Writes benchmarks/results/open_loop.json and, from it, the tables of docs/orders.md.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
from pathlib import Path
from statistics import median
from typing import Any

import torch

from stochflow import __version__, floor, train
from stochflow.law.exact import Graph, target_law
from stochflow.runs.tasks import tfbind8_task
from stochflow.worlds.synthesis import Synthesis

OUT = Path(__file__).parent / "results" / "open_loop.json"
PAGE = Path(__file__).parents[1] / "docs" / "orders.md"
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


def entropy(law: torch.Tensor) -> float:
    return float(-(law * law.clamp(min=1e-300).log()).sum())


def as_diverse(expected: torch.Tensor, nats: float) -> tuple[float, torch.Tensor]:
    """The exponent at which the law of orders has this entropy, and that law."""
    low, high = 0.0, 1e4
    for _ in range(80):
        middle = (low + high) / 2
        law = (middle * expected.log()).softmax(0)
        low, high = (middle, high) if entropy(law) > nats else (low, middle)
    return middle, law


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
    even_beta, even_law = as_diverse(expected, entropy(wanted))
    assert abs(float(made @ y) - float(order_law @ expected)) < 1e-6
    return {
        "stick": stick,
        "beta": beta,
        "closed_floor": float((best - wanted).abs().sum()) / 2,
        "open_floor": float(floor(opened).floor_tv or 0.0),
        "closed_mean": float(best @ y),
        "open_mean": float(made @ y),
        "even_mean": float(even_law @ expected),
        "even_beta": even_beta,
        "naive_mean": float(wanted @ expected),
        "naive_best": float(expected[y.argmax()]),
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


def tables(result: dict[str, Any]) -> dict[str, str]:
    """The tables of docs/orders.md, by name."""
    exact, trained = result["exact"], result["trained"]
    found = {
        "mean": table(
            [
                "error rate a letter",
                "exponent",
                "steered letter by letter",
                "ordered, E[y]^exponent",
                "ordered as if nothing erred, y^exponent",
                "ordered, as diverse as that (exponent)",
            ],
            [
                [
                    f"{r['stick'] * 3 / 4:.3g}",
                    f"{r['beta']:g}",
                    *(f"{r[k]:.3f}" for k in ("closed_mean", "open_mean", "naive_mean")),
                    f"{r['even_mean']:.3f} ({r['even_beta']:.1f})",
                ]
                for r in exact
            ],
        ),
        "best": table(
            [
                "error rate a letter",
                "an order of 8 comes out exact",
                "best steering",
                "best order",
                "the string of highest score, ordered",
            ],
            [
                [
                    f"{r['stick'] * 3 / 4:.3g}",
                    *(f"{r[k]:.3f}" for k in ("exact", "closed_best", "open_best", "naive_best")),
                ]
                for r in exact
                if r["beta"] == BETAS[0]
            ],
        ),
        "floor": table(
            [
                "error rate a letter",
                "exponent",
                "floor, closed loop",
                "floor, open loop",
                "what is made of the orders, from y^exponent",
            ],
            [
                [
                    f"{r['stick'] * 3 / 4:.3g}",
                    f"{r['beta']:g}",
                    *(f"{abs(r[k]):.4f}" for k in ("closed_floor", "open_floor", "made_tv")),
                ]
                for r in exact
            ],
        ),
    }
    if trained:
        found["trained"] = table(
            [
                "error rate a letter",
                "loop",
                "TV to its target (three seeds: median, range)",
                "floor",
                "mean score of what is made",
            ],
            [
                [
                    f"{r['stick'] * 3 / 4:.3g}",
                    "open" if r["open_loop"] else "closed",
                    f"{median(r['tv']):.4f} ({min(r['tv']):.4f} to {max(r['tv']):.4f})",
                    f"{abs(r['floor_tv']):.4f}",
                    f"{median(r['sample_score']):.3f}",
                ]
                for r in trained
            ],
        )
    return found


def table(head: list[str], rows: list[list[str]]) -> str:
    return "\n".join(["| " + " | ".join(r) + " |" for r in [head, ["---"] * len(head), *rows]]) + "\n"


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
    shown = tables(made)
    PAGE.write_text(re.sub(r"<!-- (\w+) -->\n(\|.*\n)*", lambda m: f"<!-- {m[1]} -->\n{shown[m[1]]}", PAGE.read_text()))


if __name__ == "__main__":
    main()
