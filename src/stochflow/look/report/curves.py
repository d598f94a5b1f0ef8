"""What happened during training, one small figure per question: medians over the seeds with their intervals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from stochflow.law.verdict import REACHED, number
from stochflow.look.report.drawing import FAINT, INK, SERIES, Panel, axes, legend, svg
from stochflow.look.report.files import Row, RunFiles, values

MOST = 400  # points a line is drawn with; a longer log is thinned to medians of neighbours
RESAMPLES = 500


def curves(run: RunFiles) -> list[Panel]:
    """Every curve for which there is something to draw."""
    made: list[Callable[[RunFiles], Panel | None]] = [loss, distance, log_z, modes, entropy, ratio, dynamics, score]
    return [panel for panel in (make(run) for make in made) if panel is not None]


def loss(run: RunFiles) -> Panel | None:
    if len(values(run.rows, "loss")) < 2:
        return None
    figure, ax = axes(x="training step", y="loss")
    draw(ax, run.rows, "loss", SERIES[0], "loss")
    _log_if_wide(ax, run.rows, ["loss"])
    noisy = (
        "In a noisy world its floor is above zero, so a small loss is not the goal: the distance to the target is."
        if _noisy(run)
        else ""
    )
    return Panel(
        "loss",
        "Loss",
        svg(figure, "Loss over training steps"),
        f"What is minimised ({run.training['objective']}). {noisy}".rstrip(),
    )


def distance(run: RunFiles) -> Panel | None:
    if len(values(run.rows, "tv")) < 1:
        return None
    figure, ax = axes(x="training step", y="total variation")
    draw(ax, run.rows, "tv", SERIES[0], "learned law", marker="o")
    last = run.last
    positive = [r["tv"] for r in values(run.rows, "tv") if r["tv"] > 0]
    lines = (
        ("floor_tv", "best achievable", INK, "--"),
        ("limit_tv", "this objective's limit", SERIES[1], ":"),
        ("naive_tv", "ignoring the noise", FAINT, "-."),
    )
    drawn: list[float] = []
    for key, words, colour, style in lines:
        value = last.get(key)
        if value is not None and value > REACHED and not any(abs(value - d) < 1e-9 for d in drawn):
            ax.axhline(value, color=colour, linestyle=style, linewidth=1.2, label=f"{words} ({number(value)})")
            drawn.append(value)
    if positive and max(positive + drawn) > 10 * min(positive + drawn):
        ax.set_yscale("log")
    legend(ax, 1 if len(drawn) > 1 else 2)
    floor = last.get("floor_tv")
    words = (
        "No floor is known here. "
        if floor is None
        else "Here the target can be reached exactly. "
        if floor < REACHED
        else "The dashed line is where the law of least forward KL lies; hardly any policy comes below it. "
        if last.get("floor_kind") == "forward-KL"
        else "Below the dashed line no policy can come. "
    )
    return Panel(
        "tv",
        "Distance to the target",
        svg(figure, "Total variation over training steps"),
        f"Exact total variation, 0 to 1. {words}".rstrip(),
    )


def log_z(run: RunFiles) -> Panel | None:
    if len(values(run.rows, "log_z_learned")) < 2 or run.training["objective"].lower().startswith("logvar"):
        return None
    figure, ax = axes(x="training step", y="log Z (nats)")
    draw(ax, run.rows, "log_z_learned", SERIES[0], "learned")
    for key, words, colour in (("elbo", "lower bound", SERIES[1]), ("eubo", "upper bound", SERIES[2])):
        if values(run.rows, key):
            draw(ax, run.rows, key, colour, words, marker="o")
    truth = run.last.get("log_z")
    if truth is not None:
        ax.axhline(truth, color=INK, linestyle="--", linewidth=1.2, label=f"truth ({number(truth)})")
    legend(ax)
    caption = "The normaliser of the target: what was learned, the bounds that the samples give" + (
        ", and the exact value." if truth is not None else "."
    )
    if len({r["beta"] for r in values(run.rows, "beta")}) > 1:
        caption += " The reward was sharpened meanwhile, and each sharpness has a log Z of its own."
    title = "log Z" if truth is None else "log Z against the truth"
    return Panel("log_z", title, svg(figure, "log Z over training steps"), caption)


def modes(run: RunFiles) -> Panel | None:
    rows = values(values(run.rows, "modes"), "oracle_calls")
    if not rows:
        return None
    figure, ax = axes(x="oracle calls", y="modes in the sample")
    draw(ax, rows, "modes", SERIES[0], "found", marker="o", x="oracle_calls")
    if values(rows, "expected_modes"):
        draw(ax, rows, "expected_modes", SERIES[1], "expected from the exact law", marker="o", x="oracle_calls")
    every = run.last.get("modes_all") or rows[-1].get("modes_all")
    top = max(float(r.get("modes_high") or r["modes"]) for r in rows)
    if every and every <= 3 * max(top, 1):
        ax.axhline(every, color=INK, linestyle="--", linewidth=1.2, label=f"all {every}")
    ax.set_ylim(0, 1.06 * ax.get_ylim()[1])
    _short_numbers(ax.xaxis)
    legend(ax)
    count = rows[-1].get("samples")
    caption = f"Different modes among {count} samples at each look, of {every} there are, against what training had asked of the oracle by then."
    return Panel("modes", "Modes over oracle calls", svg(figure, "Modes over oracle calls"), caption)


def entropy(run: RunFiles) -> Panel | None:
    """The band (quartiles over the batch's states) where it is logged, else the mean alone."""
    bands = values(values(run.rows, "band_low"), "band_high")
    if len(bands) >= 2:
        figure, ax = axes(x="training step", y="entropy / largest possible")
        x = [r["step"] for r in bands]
        ax.fill_between(
            x, [r["band_low"] for r in bands], [r["band_high"] for r in bands], color=SERIES[0], alpha=0.25, linewidth=0
        )
        ax.plot(
            x,
            [r["band_high"] for r in bands],
            color=SERIES[0],
            linewidth=1.4,
            label="exploring states (upper quartile)",
        )
        ax.plot(
            x, [r["band_low"] for r in bands], color=SERIES[1], linewidth=1.4, label="decided states (lower quartile)"
        )
        ax.set_ylim(0, 1.02)
        ax.set_xlim(left=0)
        legend(ax, 1)
        caption = "Quartiles, over the states of the batch, of the policy's entropy as a fraction of the largest possible one."
        return Panel("entropy", "Entropy band", svg(figure, "Entropy band over training steps"), caption)
    if len(values(run.rows, "entropy")) < 2:
        return None
    figure, ax = axes(x="training step", y="entropy (nats a step)")
    draw(ax, run.rows, "entropy", SERIES[0], "entropy")
    ax.set_ylim(bottom=0)
    caption = "How undecided the policy is, on average over the steps it takes. Near zero it repeats itself."
    return Panel("entropy", "Entropy of the policy", svg(figure, "Entropy over training steps"), caption)


def ratio(run: RunFiles) -> Panel | None:
    if len(values(run.rows, "entropy_ratio")) < 2:
        return None
    figure, ax = axes(x="training step", y="entropy ratio")
    draw(ax, run.rows, "entropy_ratio", SERIES[0], "ratio")
    caption = "Entropy of the exploring states against that of the decided ones; 1 where they do not differ."
    return Panel("entropy_ratio", "Entropy ratio", svg(figure, "Entropy ratio over training steps"), caption)


def dynamics(run: RunFiles) -> Panel | None:
    rows = [_with_gap(r) for r in values(values(run.rows, "dynamics_nll"), "dynamics_nll_true")]
    if not rows:
        return None
    figure, ax = axes(x="training step", y="error of the noise model")
    draw(ax, rows, "gap", SERIES[0], "cross-entropy above the channel's (nats)", marker="o")
    if values(rows, "dynamics_tv"):
        draw(ax, rows, "dynamics_tv", SERIES[1], "TV to the true kernel", marker="o")
    _log_if_wide(ax, rows, ["gap", "dynamics_tv"])
    legend(ax, 1)
    last = rows[-1]
    caption = "How well the world's noise is known: 0 is a perfect model. "
    caption += f"At the end its cross-entropy is {number(last['dynamics_nll'])} nats, and the channel's own entropy on the same sample {number(last['dynamics_nll_true'])}."
    return Panel(
        "dynamics", "Error of the dynamics", svg(figure, "Error of the noise model over training steps"), caption
    )


def _with_gap(row: Row) -> Row:
    """Model and truth are compared on the same sample, so what they share cancels; below a ten-thousandth it is rounding."""
    pairs = zip(
        row.get("seeds", {}).get("dynamics_nll", []), row.get("seeds", {}).get("dynamics_nll_true", []), strict=False
    )
    each = [max(a - b, 1e-4) for a, b in pairs if a is not None and b is not None]
    gap = float(np.median(each)) if each else max(row["dynamics_nll"] - row["dynamics_nll_true"], 1e-4)
    return row | {"gap": gap, "seeds": row.get("seeds", {}) | ({"gap": each} if each else {})}


def score(run: RunFiles) -> Panel | None:
    rows = values(values(run.rows, "sample_score"), "top_score")
    asked = values(values(run.rows, "top_asked"), "best_asked")
    if not rows and not asked:
        return None
    figure, ax = axes(x="oracle calls", y="score")
    if asked:  # a slow oracle is asked about a sample only at the end
        draw(ax, asked, "best_asked", SERIES[3], "best asked", x="oracle_calls")
        draw(ax, asked, "top_asked", SERIES[2], "mean of the 100 best asked", x="oracle_calls")
    if rows:
        draw(ax, rows, "top_score", SERIES[1], "mean of the 100 best draws", marker="o", x="oracle_calls")
        draw(ax, rows, "sample_score", SERIES[0], "mean of all draws", marker="o", x="oracle_calls")
    _short_numbers(ax.xaxis)
    legend(ax)
    return Panel(
        "score",
        "Scores over oracle calls",
        svg(figure, "Scores over oracle calls"),
        "The oracle's score of what is drawn"
        + (", and of the different objects that training had asked about by then." if asked else "."),
    )


# drawing --------------------------------------------------------------------------------------------------------


def draw(
    ax: Any,
    rows: Sequence[Row],
    key: str,
    colour: str,
    label: str,
    marker: str = "",
    x: str = "step",
    dashed: bool = False,
) -> None:
    """The median over the seeds, and its interval where there are several."""
    rows = _thinned(values(rows, key), key)
    at = [r.get(x, 0) for r in rows]
    middle = np.array([r[key] for r in rows], dtype=float)
    # a few looks get a dot each; many would be a smear
    dots: dict[str, Any] = (
        {"marker": marker, "markersize": 3}
        if marker and len(rows) <= 40
        else {"marker": "o", "markersize": 3}
        if len(rows) == 1
        else {}
    )
    ax.plot(at, middle, color=colour, linewidth=1.4, linestyle="--" if dashed else "-", label=label, **dots)
    ax.set_xlim(left=0)
    spread = intervals(rows, key)
    if spread is not None:
        ax.fill_between(at, spread[0], spread[1], color=colour, alpha=0.2, linewidth=0)


def intervals(rows: Sequence[Row], key: str) -> tuple[np.ndarray, np.ndarray] | None:
    """95 % bootstrap interval of the median over seeds: as logged, or from the seeds' own values."""
    if rows and all(
        isinstance(r.get(f"{key}_low"), (int, float)) and isinstance(r.get(f"{key}_high"), (int, float)) for r in rows
    ):
        return np.array([r[f"{key}_low"] for r in rows], dtype=float), np.array(
            [r[f"{key}_high"] for r in rows], dtype=float
        )
    each = [r.get("seeds", {}).get(key) for r in rows]
    if not each or any(not e or len(e) != len(each[0]) or len(e) < 2 for e in each):
        return None
    table = np.array(each, dtype=float)  # [R, S]; null becomes nan
    if not np.isfinite(table).all():
        return None
    chosen = np.random.default_rng(0).integers(table.shape[1], size=(RESAMPLES, table.shape[1]))
    low, high = np.quantile(np.median(table[:, chosen], axis=2), [0.025, 0.975], axis=1)
    return low, high


def _thinned(rows: list[Row], key: str) -> list[Row]:
    """A long log by the middle row of each group of neighbours (by value: a spike is no summary)."""
    if len(rows) <= MOST:
        return rows
    groups = np.array_split(np.arange(len(rows)), MOST)
    return [rows[sorted(g.tolist(), key=lambda i: rows[i][key])[len(g) // 2]] for g in groups]


def _log_if_wide(ax: Any, rows: Sequence[Row], keys: Sequence[str]) -> None:
    found = [r[k] for k in keys for r in values(rows, k)]
    if found and min(found) > 0 and max(found) > 10 * min(found):
        ax.set_yscale("log")


def _short_numbers(axis: Any) -> None:
    from matplotlib.ticker import EngFormatter, MaxNLocator

    axis.set_major_locator(MaxNLocator(5))
    axis.set_major_formatter(EngFormatter(sep=""))


def _noisy(run: RunFiles) -> bool:
    task = run.config.task
    if getattr(task, "open_loop", False):  # the noise comes after the order
        return False
    return bool(getattr(task, "stick", 0.0)) or getattr(task, "noise", "") == "confusion"
