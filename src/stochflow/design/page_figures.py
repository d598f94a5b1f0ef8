"""Figures of a campaign's page: logos, the map, calibration, importance, progress, fronts. A figure with one point is not drawn."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np

from stochflow.design.features import distances
from stochflow.files.shield import plain_matplotlib
from stochflow.look.report.designs import LETTERS, OTHERS
from stochflow.look.report.drawing import FAINT, INK, RULE, SERIES, Panel, axes, legend, svg

PER_ROW = 50  # positions of a logo beside one another
ON_MAP = 120  # measured sequences on the map


def logo(texts: Sequence[str]) -> Panel | None:
    """The letters of the batch by position, in rows of `PER_ROW`; None for unequal lengths, one design, or without logomaker."""
    if len(texts) < 2 or len({len(t) for t in texts}) > 1:
        return None
    plain_matplotlib()
    try:
        import logomaker
    except ImportError:
        return None
    length = len(texts[0])
    rows = -(-length // PER_ROW)
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.2 if length > 20 else 4.4, 1.35 * rows + 0.2), layout="constrained")
    FigureCanvasSVG(figure)
    figure.patch.set_alpha(0)
    letters = sorted(set("".join(texts)) | (set("ACGT") if set("".join(texts)) <= set("ACGT") else set()))
    counts = logomaker.alignment_to_matrix(list(texts), to_type="counts", characters_to_ignore="")
    counts = counts.reindex(columns=letters, fill_value=0.0)
    bits = logomaker.transform_matrix(counts, from_type="counts", to_type="information", pseudocount=0.0)
    colours = {
        c: LETTERS[c] if set(letters) <= set(LETTERS) else OTHERS[i % len(OTHERS)] for i, c in enumerate(letters)
    }
    for r in range(rows):
        ax = figure.add_subplot(rows, 1, r + 1)
        ax.patch.set_alpha(0)
        part = bits.iloc[r * PER_ROW : (r + 1) * PER_ROW].reset_index(drop=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logomaker.Logo(part, ax=ax, color_scheme=colours, show_spines=False, baseline_width=0)
        for line in list(ax.lines):
            line.remove()
        step = 1 if length <= 20 else 5
        at = [i for i in range(len(part)) if (r * PER_ROW + i + 1) % step == 0 or (i == 0 and r == 0)]
        ax.set_xticks(at, [str(r * PER_ROW + i + 1) for i in at])
        ax.set_xlim(-0.5, min(PER_ROW, length) - 0.5)
        ax.set_ylim(0, max(np.log2(len(letters)), 1))
        ax.tick_params(colors=FAINT, labelsize=9, width=0.6, length=3)
        ax.set_ylabel("bits", color=INK, fontsize=10)
        for name, spine in ax.spines.items():
            spine.set_visible(name == "left")
            spine.set_color(RULE)
    ax.set_xlabel("position", color=INK, fontsize=10)
    return Panel(
        "logo",
        f"Letters of the {len(texts)} designs",
        svg(figure, "Logo of the batch"),
        "Letters stacked by how much the designs agree on them.",
    )


def plane(texts: Sequence[str]) -> np.ndarray | None:
    """[N, 2] coordinates whose distances are as near to the letters between the texts as a plane allows (classical scaling)."""
    if len(texts) < 3:
        return None
    gap = distances(texts, texts).astype(float)
    centre = np.eye(len(gap)) - 1 / len(gap)
    value, vector = np.linalg.eigh(-0.5 * centre @ gap**2 @ centre)
    found = vector[:, -2:] * np.sqrt(np.clip(value[-2:], 0, None))
    return found[:, ::-1]


def design_map(designs: Sequence[str], clusters: Sequence[int], measured: Sequence[str]) -> Panel | None:
    """Designs and the best measured sequences in a plane."""
    at = plane([*designs, *measured[:ON_MAP]])
    if at is None or len(designs) < 2:
        return None
    figure, ax = axes(x="", y="", grid=False)
    n = len(designs)
    ax.scatter(*at[n:].T, s=12, color=FAINT, alpha=0.6, linewidths=0, label="best measured")
    largest = [c for c, _ in sorted(_sizes(clusters).items(), key=lambda p: (-p[1], p[0]))[:3]]
    for i, c in enumerate(largest):
        mine = [j for j in range(n) if clusters[j] == c]
        ax.scatter(*at[mine].T, s=26, color=SERIES[i], linewidths=0, label=f"cluster {c}")
    rest = [j for j in range(n) if clusters[j] not in largest]
    if rest:
        ax.scatter(*at[rest].T, s=26, facecolors="none", edgecolors=INK, linewidths=0.8, label="other designs")
    ax.set_xticks([])
    ax.set_yticks([])
    ax.set_aspect("equal", adjustable="datalim")
    legend(ax, 2)
    return Panel(
        "map",
        "Where the designs lie",
        svg(figure, "Map of the batch"),
        "Near points differ in few letters; distances are as true as a plane allows.",
    )


def _sizes(clusters: Sequence[int]) -> dict[int, int]:
    return {c: list(clusters).count(c) for c in set(clusters)}


def calibration(figures: dict[str, Any]) -> Panel | None:
    """Held-out values against their predictions, with the 80 % interval."""
    rows = figures["held_out"]
    if len(rows) < 2:
        return None
    mean, y, s = (np.array([r[k] for r in rows], dtype=float) for k in ("mean", "y", "s"))
    q = figures["quantiles"].get("0.8")
    figure, ax = axes(x="predicted, by a model that had not seen it", y="measured")
    low, high = min(mean.min(), y.min()), max(mean.max(), y.max())
    ax.plot([low, high], [low, high], color=FAINT, linewidth=1)
    if q is not None:
        inside = np.abs(y - mean) <= q * s
        ax.scatter(
            mean[inside], y[inside], s=10, color=SERIES[0], linewidths=0, alpha=0.7, label="inside its 80 % interval"
        )
        ax.scatter(mean[~inside], y[~inside], s=10, color=SERIES[1], linewidths=0, alpha=0.9, label="outside")
        legend(ax, 2)
    else:
        ax.scatter(mean, y, s=10, color=SERIES[0], linewidths=0, alpha=0.7)
    return Panel(
        f"calibration-{figures['column']}",
        f"Held-out {figures['column']}",
        svg(figure, f"Calibration of {figures['column']}"),
        "On the line, the prediction was right. Near-identical sequences are held out together.",
    )


def importance(figures: dict[str, Any]) -> Panel | None:
    """How much each position matters to the model."""
    found = figures.get("importance") or []
    if len(found) < 2:
        return None
    figure, ax = axes(x="position", y="change")
    ax.bar(range(1, len(found) + 1), found, color=SERIES[0], width=0.8)
    if len(found) <= 20:
        ax.set_xticks(range(1, len(found) + 1))
    return Panel(
        f"importance-{figures['column']}",
        f"Positions that matter for {figures['column']}",
        svg(figure, f"Importance for {figures['column']}"),
        "Change of the prediction when the letters of a position are shuffled, in units of the predictions' spread.",
    )


def progress(
    history: Sequence[dict[str, Any]], name: str, sign: float, expected: dict[int, dict[str, float]]
) -> Panel | None:
    """Best value so far and the mean of each round, beside what the model expected of plates chosen without it, by round."""
    done = [h for h in history if h["columns"][name]["values"]]
    if len(done) < 2:
        return None
    rounds = [h["round"] for h in done]
    best: list[float] = []
    for h in done:
        top = max(h["columns"][name]["values"], key=lambda v: sign * v)
        best.append(top if not best or sign * top > sign * best[-1] else best[-1])
    figure, ax = axes(x="round (0 = the first data)", y=name)
    ax.plot(rounds, best, "o-", color=SERIES[0], linewidth=1.6, markersize=4, label="best so far")
    ax.plot(
        rounds,
        [float(np.mean(h["columns"][name]["values"])) for h in done],
        "s--",
        color=SERIES[1],
        linewidth=1.2,
        markersize=4,
        label="mean of the round",
    )
    said = "Measured values, controls and repeats included."
    for i, kind in enumerate(("random", "genetic algorithm"), start=2):
        others = {r: expected[r][kind] for r in rounds if kind in expected.get(r, {})}
        if others:
            label = f"{kind}, predicted"
            ax.plot(
                list(others), list(others.values()), "^:", color=SERIES[i], linewidth=1.2, markersize=4, label=label
            )
            said = "Measured values, controls and repeats included; predicted: the mean that the model expected of a random plate, and of one that a genetic algorithm makes of the best measured."
    ax.set_xticks(rounds)
    legend(ax, 2)
    return Panel(f"progress-{name}", f"{name} over the rounds", svg(figure, f"Progress of {name}"), said)


def dry_run(curves: dict[str, list[float]], top: int, name: str) -> Panel | None:
    """The curves of a simulation."""
    if not curves or min(len(c) for c in curves.values()) < 2:
        return None
    figure, ax = axes(x="round (0 = the first data)", y=f"mean of the {top} best")
    for i, (label, values) in enumerate(curves.items()):
        ax.plot(
            range(len(values)), values, "o-", color=SERIES[i % len(SERIES)], linewidth=1.6, markersize=4, label=label
        )
    ax.set_xticks(range(max(len(c) for c in curves.values())))
    legend(ax, 2)
    return Panel(
        "dry-run", f"Dry run: {name}", svg(figure, "Dry run"), "Values of the oracle of the dry run, not measurements."
    )


def front(names: Sequence[str], values: np.ndarray, on: np.ndarray, rounds: Sequence[int]) -> Panel | None:
    """The first two columns of everything measured, the Pareto front marked."""
    if len(values) < 2:
        return None
    figure, ax = axes(x=names[0], y=names[1])
    first = np.array(rounds) == 0
    ax.scatter(*values[~on & first, :2].T, s=10, color=FAINT, linewidths=0, alpha=0.6, label="first data")
    ax.scatter(*values[~on & ~first, :2].T, s=14, color=SERIES[0], linewidths=0, alpha=0.7, label="rounds")
    ax.scatter(*values[on, :2].T, s=30, facecolors="none", edgecolors=SERIES[1], linewidths=1.4, label="Pareto front")
    legend(ax, 3)
    return Panel(
        "front",
        "What cannot be bettered in one column without losing in another",
        svg(figure, "Pareto front"),
        f"{int(on.sum())} of {len(values)} measured sequences are on the front.",
    )
