"""The README's picture: target, a perfect GFlowNet that ignores the noise, and what stochflow learns, each an exact law.

    python examples/picture.py --out docs/img/demo.png

A 16 x 16 grid where one intended step in four is replaced by a random one. Under half a minute on one core.
"""

import argparse
from typing import Any

import torch
from torch import Tensor

from stochflow import exact_law
from stochflow.law.metrics import tv
from stochflow.runs.config import configure
from stochflow.runs.experiment import Experiment

INK, QUIET = "#1d2330", "#6b7280"


def laws(side: int, stick: float, steps: int) -> dict[str, Tensor]:
    """The three laws [N], by the words that stand above them."""
    experiment = Experiment(configure("grid", side=side, stick=stick, device="cpu"))
    experiment.trainer.train(steps)
    known = experiment.yardstick
    with experiment.trainer.averaged():
        learned = exact_law(known.graph, experiment.task.channel, experiment.policy)[0]
    return {
        "the target": known.target.target,
        "a GFlowNet that ignores the noise": known.floor.laws["naive"],
        "stochflow": learned,
    }


def draw(found: dict[str, Tensor], side: int, stick: float, out: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.colors import PowerNorm

    wanted = next(iter(found.values()))
    shared = PowerNorm(
        0.5, 0.0, float(torch.stack(list(found.values())).max())
    )  # a root, so that faint cells are seen too
    figure, axes = plt.subplots(1, 3, figsize=(10.4, 4.0))
    figure.subplots_adjust(left=0.015, right=0.905, top=0.83, bottom=0.09, wspace=0.05)
    for axis, (name, law) in zip(axes, found.items(), strict=True):
        image: Any = axis.imshow(law.view(side, side).numpy(), cmap="magma", norm=shared, origin="upper")
        far = (
            "drawn in proportion to reward" if law is wanted else f"exact total variation {float(tv(law, wanted)):.3f}"
        )
        axis.set_title(name, fontsize=12, color=INK, pad=24, fontweight="bold")
        axis.text(0.5, 1.03, far, transform=axis.transAxes, ha="center", va="bottom", fontsize=11, color=QUIET)
        axis.set(xticks=[], yticks=[])
        for edge in axis.spines.values():
            edge.set_visible(False)
    place = axes[-1].get_position()
    bar = figure.colorbar(image, cax=figure.add_axes((0.918, place.y0, 0.011, place.height)))
    bar.outline.set_visible(False)  # type: ignore[operator]
    bar.ax.tick_params(labelsize=9, color=QUIET, labelcolor=QUIET, length=0)
    bar.set_label("probability of the cell", fontsize=10, color=QUIET)
    words = f"{side} x {side} cells; walks begin at the top left, go down or right, and {stick:.0%} of their steps are replaced by a random one"
    figure.text(0.46, 0.03, words, ha="center", fontsize=10, color=QUIET)
    figure.savefig(out, dpi=150)


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--out", default="docs/img/demo.png")
    a.add_argument("--side", type=int, default=16)
    a.add_argument("--stick", type=float, default=0.25)
    a.add_argument("--steps", type=int, default=1000)
    given = a.parse_args()
    found = laws(given.side, given.stick, given.steps)
    draw(found, given.side, given.stick, given.out)
    wanted = found["the target"]
    print(
        ", ".join(f"{name} {float(tv(law, wanted)):.4f}" for name, law in found.items() if law is not wanted),
        "->",
        given.out,
    )


if __name__ == "__main__":
    main()
