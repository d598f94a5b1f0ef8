"""The learned law against the target: heat maps of grids, the histogram of scores, log-probability against log-reward."""

from __future__ import annotations

from typing import Any

import numpy as np

from stochflow.look.report.drawing import FAINT, INK, RULE, SERIES, Panel, axes, legend, svg
from stochflow.look.report.files import RunFiles

VECTOR = 24  # cells along a side up to which a heat map is drawn cell by cell, and as a picture beyond
POINTS = 600  # of the scatter


def law_panels(run: RunFiles) -> list[Panel]:
    """What `law.npz` lets us draw; nothing where a run has not finished yet."""
    law = run.law
    if not law:
        return []
    made = [*_maps(run, law), _scores(run, law), _scatter(run, law)]
    return [panel for panel in made if panel is not None]


def _maps(run: RunFiles, law: dict[str, np.ndarray]) -> list[Panel]:
    if "grid_law" not in law or "grid_target" not in law:
        return []
    learned, wanted = np.median(law["grid_law"], axis=0), law["grid_target"]
    seeds = f", median of {len(law['grid_law'])} seeds" if len(law["grid_law"]) > 1 else ""
    if wanted.shape[1] == 1:
        return [_line(learned[:, 0], wanted[:, 0], seeds)]
    top = float(max(learned.max(), wanted.max()))
    more = " The other coordinates are summed out." if getattr(run.config.task, "ndim", 2) > 2 else ""
    return [
        Panel(
            "law",
            "Learned law",
            _map(learned, top, "Learned law on the grid"),
            f"How often each cell is drawn{seeds}.{more}",
        ),
        Panel(
            "target",
            "Target",
            _map(wanted, top, "Target on the grid"),
            f"How often each cell should be drawn, on the same colours.{more}",
        ),
    ]


def _line(learned: np.ndarray, wanted: np.ndarray, seeds: str) -> Panel:
    figure, ax = axes(x="coordinate", y="probability")
    edges = np.arange(len(wanted) + 1) - 0.5
    ax.stairs(wanted, edges, fill=True, color=FAINT, alpha=0.35, label="target")
    ax.stairs(learned, edges, color=SERIES[0], linewidth=1.5, label="learned law")
    legend(ax)
    return Panel(
        "law",
        "Learned law",
        svg(figure, "Learned law and target"),
        f"How often each cell is drawn{seeds}, and how often it should be.",
    )


def _map(mass: np.ndarray, top: float, title: str) -> str:
    from matplotlib.ticker import MaxNLocator

    figure, ax = axes(height=3.4, x="first coordinate", y="second coordinate", grid=False)
    picture = mass.T  # the first coordinate goes to the right, the second upwards
    if max(mass.shape) <= VECTOR:
        along = [np.arange(n + 1) - 0.5 for n in mass.shape]
        drawn: Any = ax.pcolormesh(along[0], along[1], picture, cmap="viridis", vmin=0, vmax=top)
    else:
        drawn = ax.imshow(picture, origin="lower", cmap="viridis", vmin=0, vmax=top, interpolation="nearest")
    ax.set_aspect("equal")
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(8, integer=True))
    bar = figure.colorbar(drawn, ax=ax, fraction=0.05, pad=0.03)
    bar.set_label("probability", color=INK, fontsize=10)
    bar.ax.tick_params(colors=FAINT, labelsize=9, width=0.6)
    bar.outline.set_edgecolor(RULE)
    return svg(figure, title)


def _scores(run: RunFiles, law: dict[str, np.ndarray]) -> Panel | None:
    if "score_law" not in law or "score_edges" not in law:
        return None
    edges, each = law["score_edges"], law["score_law"]
    figure, ax = axes(x="score", y="probability")
    exact = "score_target" in law
    if exact:
        ax.stairs(law["score_target"], edges, fill=True, color=FAINT, alpha=0.35, label="target")
    ax.stairs(
        np.median(each, axis=0), edges, color=SERIES[0], linewidth=1.5, label="learned law" if exact else "samples"
    )
    if len(each) > 1:
        low, high = each.min(axis=0), each.max(axis=0)
        ax.fill_between(
            edges,
            np.append(low, low[-1]),
            np.append(high, high[-1]),
            step="post",
            color=SERIES[0],
            alpha=0.2,
            linewidth=0,
        )
    ax.set_ylim(bottom=0)
    legend(ax)
    caption = (
        "How the probability is spread over scores: the learned law against the target, both exact."
        if exact
        else "Scores of the last sample."
    )
    caption += f" Median of {len(each)} seeds; the band is their range." if len(each) > 1 else ""
    return Panel("scores", "Histogram of scores", svg(figure, "Histogram of scores"), caption)


def _scatter(run: RunFiles, law: dict[str, np.ndarray]) -> Panel | None:
    if "log_prob" not in law or "log_reward" not in law:
        return None
    x, y = law["log_reward"], np.median(law["log_prob"], axis=0)
    shown = np.isfinite(x) & np.isfinite(y)
    x, y = x[shown], y[shown]
    if not len(x):
        return None
    step = max(1, len(x) // POINTS)
    x, y = x[::step], y[::step]
    figure, ax = axes(x="log-reward", y="log-probability")
    size, opacity = (5.0, 0.7) if len(x) <= 100 else (2.4, 0.6)
    ax.plot(
        x,
        y,
        linestyle="none",
        marker="o",
        markersize=size,
        markeredgewidth=0,
        color=SERIES[0],
        alpha=opacity,
        label="objects",
        zorder=3,
    )
    log_z = law.get("log_z")
    if log_z is not None:
        ends = np.array([x.min(), x.max()])
        ax.plot(ends, ends - float(log_z), color=INK, linestyle="--", linewidth=1.2, label="target: log R - log Z")
    legend(ax)
    lost = int((~shown).sum())
    caption = "Each dot is an object; on the dashed line it is drawn exactly as often as it should be."
    if log_z is None:
        caption = "Each dot is a sample: the log-probability of the way it was built against its log-reward. A perfect sampler has slope 1 where there is one way."
    caption += f" {lost} objects that are never drawn are not shown." if lost and log_z is not None else ""
    return Panel("scatter", "Probability against reward", svg(figure, "Log-probability against log-reward"), caption)
