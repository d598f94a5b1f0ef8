"""The manual's pictures: `python scripts/pictures.py [NAME]` writes docs/img/*.svg. One CPU core, about a minute.

Every number in them is computed here. Colours are of middle lightness and the ground is clear, so that they can be read on light and dark.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch

OUT = Path(__file__).parents[1] / "docs" / "img"
GREY, BLUE, ORANGE, GREEN = "#8a929c", "#4a8fe0", "#e0803a", "#3aa56b"


def figure(width: float, height: float, columns: int = 1, rows: int = 1) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    made = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasSVG(made)
    made.patch.set_alpha(0)
    axes = list(np.atleast_1d(made.subplots(rows, columns)).flat)
    for ax in axes:
        ax.patch.set_alpha(0)
        ax.tick_params(colors=GREY, labelsize=9)
        for name, spine in ax.spines.items():
            spine.set_color(GREY)
            spine.set_visible(name in ("left", "bottom"))
        for label in (ax.xaxis.label, ax.yaxis.label, ax.title):
            label.set_color(GREY)
    return made, axes


def write(made: Any, name: str, title: str) -> None:
    out = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        made.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = out.getvalue()
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    text = re.sub(
        r"font-family: [^;\"]*|font: ([\d.]+)px [^;\"]*", lambda m: f"font-size: {m[1]}px" if m[1] else "", text
    )
    text = text.replace("<svg ", f'<svg role="img" aria-label="{title}" style="font-family: system-ui, sans-serif" ', 1)
    (OUT / f"{name}.svg").write_text(text[text.index("<svg") :])
    print(OUT / f"{name}.svg")


# what is meant, what happens ------------------------------------------------------------------------------------


def flow() -> None:
    """A tree of two letters, step by step: where an ordinary GFlowNet means the flow to go, and where one letter in four is random."""
    rewards = {"AA": 4.0, "AB": 1.0, "BA": 2.0, "BB": 1.0}
    slip, total = 0.25, sum(rewards.values())
    meant = {"": 1.0, **{k: v / total for k, v in rewards.items()}}
    meant |= {letter: meant[letter + "A"] + meant[letter + "B"] for letter in "AB"}
    happens = {"": 1.0}
    for word in ("A", "B", *rewards):
        intended = meant[word] / meant[word[:-1]]
        happens[word] = happens[word[:-1]] * ((1 - slip) * intended + slip / 2)
    place = {"": (0, 1.5), "A": (1, 2.6), "B": (1, 0.4), "AA": (2, 3.2), "AB": (2, 2.0), "BA": (2, 1.0), "BB": (2, -0.2)}
    made, axes = figure(6.2, 4.9, 3, 2)
    titles = ("start", "after one letter", "after two letters")
    for i, ax in enumerate(axes):
        law, colour, words = ((meant, BLUE, "meant"), (happens, ORANGE, "what happens"))[i // 3]
        step = i % 3
        ax.axis("off")
        ax.set_title(titles[step] if i < 3 else "", fontsize=10, color=GREY)
        ax.set_xlim(-0.3, 2.9)
        ax.set_ylim(-0.7, 3.7)
        if step == 0:
            ax.text(-0.2, 3.3, words, fontsize=11, color=colour, fontweight="bold")
        for word, (x, y) in place.items():
            reached = len(word) <= step
            if word:
                from_x, from_y = place[word[:-1]]
                shown = {"color": colour, "linewidth": 14 * law[word], "alpha": 0.5} if reached else {"color": GREY, "alpha": 0.3}
                ax.plot([from_x, x], [from_y, y], solid_capstyle="round", zorder=1, **shown)
            edge = colour if reached else GREY
            ax.plot([x], [y], "o", markersize=15, color="#ffffff", markeredgecolor=edge, zorder=2)
            ax.text(x, y, word, fontsize=8, color="#333333", ha="center", va="center", zorder=3)
            if len(word) == step:
                ax.text(x + 0.24, y, f"{law[word]:.3f}", fontsize=9.5, color=colour, va="center")
    write(made, "flow", "A small tree of strings, step by step: what a policy means, and what happens under noise")


# floors ---------------------------------------------------------------------------------------------------------


def floors() -> None:
    """Best achievable TV and that of a perfect sampler that ignores the noise, by the strength of the noise."""
    from stochflow.runs.config import configure
    from stochflow.runs.experiment import floor_of

    made, axes = figure(6.2, 3.0, 2)
    worlds = (
        ("grid", {"side": 8}, "8 x 8 grid", [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]),
        ("tfbind8", {}, "TFBind8, exponent 3", [0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7]),
    )
    for ax, (name, settings, title, sticks) in zip(axes, worlds, strict=True):
        found = [floor_of(configure(name, stick=s, **settings)) for s in sticks]
        ax.plot(
            sticks,
            [f["naive_tv"] for f in found],
            "o-",
            color=ORANGE,
            label="perfect, but ignores the noise",
            markersize=4,
        )
        ax.plot(
            sticks, [f["floor_tv"] for f in found], "o-", color=GREEN, label="the best any policy can do", markersize=4
        )
        ax.set_title(title, fontsize=10, color=GREY)
        ax.set_xlabel("stick: probability of a random move")
        ax.set_ylim(bottom=-0.005)
    axes[0].set_ylabel("total variation to the target")
    legend = made.legend(*axes[0].get_legend_handles_labels(), frameon=False, fontsize=9, ncols=2, loc="outside upper center")
    for text in legend.get_texts():
        text.set_color(GREY)
    write(made, "floors", "Total variation against the strength of the noise: ignoring it, and the best achievable")


# how samples approach the law -----------------------------------------------------------------------------------


def approach() -> None:
    """The exact law of the learned policy on a 12 x 12 grid under noise, as training goes on."""
    from stochflow.law.exact import Graph, exact_law, target_law
    from stochflow.runs.build import Experiment
    from stochflow.runs.config import configure

    side, moments = 12, (0, 50, 150, 400, 1500)
    experiment = Experiment(configure("grid", side=side, stick=0.25, batch=64, engine="eager"))
    env, channel = experiment.task.env, experiment.task.channel
    graph = Graph(env)
    target = target_law(graph, experiment.task).target.view(side, side)
    made, axes = figure(5.4, 4.1, 3, 2)
    for ax, moment in zip(axes[:-1], moments, strict=True):
        experiment.trainer.train(moment, every=10**9)
        with experiment.trainer.averaged(), torch.no_grad():
            law = exact_law(graph, channel, experiment.policy)[0].view(side, side)
        tv = 0.5 * float((law - target).abs().sum())
        _cells(ax, law, target, f"step {moment}\nTV {tv:.3f}")
    _cells(axes[-1], target, target, "target")
    write(made, "approach", "The learned law of a grid at several steps of training, beside the target")


def _cells(ax: Any, law: Any, target: Any, title: str) -> None:
    ax.set_title(title, fontsize=9, color=GREY)
    ax.set_xticks([])
    ax.set_yticks([])
    for spine in ax.spines.values():
        spine.set_visible(True)
    top = float(target.max())
    side = law.shape[0]
    for i in range(side):
        for j in range(side):
            share = min(float(law[i, j]) / top, 1.0)
            ax.add_patch(mpl.patches.Rectangle((i, j), 1, 1, facecolor=BLUE, alpha=share, linewidth=0))
    ax.set_xlim(0, side)
    ax.set_ylim(0, side)
    ax.set_aspect("equal")


PICTURES = {"flow": flow, "floors": floors, "approach": approach}

if __name__ == "__main__":
    import matplotlib.patches

    torch.set_num_threads(1)
    for name in sys.argv[1:] or PICTURES:
        PICTURES[name]()
