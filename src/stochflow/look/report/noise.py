"""The learned noise as a picture, the parts of the residual, and what the entropy ratio adds over training."""

from __future__ import annotations

from typing import Any

import numpy as np

from stochflow.look.report.drawing import FAINT, INK, SERIES, Panel, axes, legend, svg
from stochflow.look.report.files import RunFiles, values

SHOWN = 6  # tables side by side


def noise_panels(run: RunFiles) -> list[Panel]:
    """Those for which the folder holds something."""
    made = [tables(run), parts(run), contribution(run)]
    return [panel for panel in made if panel is not None]


def tables(run: RunFiles) -> Panel | None:
    """Confusion matrices, the true one beside the learned one, for each class of states."""
    law = run.law
    if not all(name in law for name in ("noise_true", "noise_learned", "noise_class")):
        return None
    from matplotlib.figure import Figure

    true, learned, kinds = law["noise_true"], np.median(law["noise_learned"], axis=0), law["noise_class"]
    chosen = np.unique(np.linspace(0, len(kinds) - 1, min(SHOWN, len(kinds))).round().astype(int))
    by_position = getattr(run.config.task, "name", "") != "grid"
    letters = _letters(run, true.shape[-1])
    figure = Figure(figsize=(1.35 * len(chosen) + 0.9, 3.1))
    grid = figure.subplots(2, len(chosen), squeeze=False)
    for column, c in enumerate(chosen):
        for row, (table, name) in enumerate(((true[c], "true"), (learned[c], "learned"))):
            ax: Any = grid[row][column]
            ax.imshow(table, cmap="viridis", vmin=0, vmax=1, interpolation="nearest")
            ax.set_xticks(range(len(letters)), letters, fontsize=7, color=FAINT)
            ax.set_yticks(range(len(letters)), letters, fontsize=7, color=FAINT)
            if row == 0:
                kind = int(kinds[c])
                ax.set_title(f"position {kind + 1}" if by_position else f"{kind} moves", fontsize=9, color=INK)
            if column == 0:
                ax.set_ylabel(f"{name}\nmeant", fontsize=9, color=INK)
            if row == 1:
                ax.set_xlabel("happened", fontsize=8, color=INK)
    figure.tight_layout()
    gap = np.abs(true - learned).sum(-1).max() / 2
    words = "positions of the string" if by_position else "numbers of legal moves"
    caption = (
        f"What happens (columns) when a move is meant (rows), by {words}: the world's own table above, the learned one below, averaged over "
        f"the states of the last sample. The largest distance of two rows is {gap:.3f} (TV)."
    )
    return Panel("noise", "The learned noise", svg(figure, "True and learned tables of the noise"), caption)


def _letters(run: RunFiles, count: int) -> list[str]:
    alphabet = {"tfbind8": "ACGT", "gc": "ACGT", "rna": "ACGU", "peptide": "ACDEFGHIKLMNPQRSTVWY"}.get(
        run.config.task.name, ""
    )
    return list(alphabet) if len(alphabet) == count else [str(i) for i in range(count)]


def parts(run: RunFiles) -> Panel | None:
    """Each part of ll_diff over training, signed as it stands in the residual."""
    from stochflow.look.report.curves import draw

    names = {
        "part_log_flow": ("log F(s)", 1),
        "part_log_pf": ("log pi", 1),
        "part_log_k": ("log P", 1),
        "part_end_log_flow": ("- log F(s')", -1),
        "part_log_pa": ("- log pi_B", -1),
        "part_log_pb": ("- log P_B", -1),
    }
    if len(values(run.rows, "part_log_flow")) < 2:
        return None
    figure, ax = axes(x="training step", y="nats a step")
    for (key, (words, sign)), colour in zip(names.items(), [*SERIES, FAINT, INK] * 2, strict=False):
        rows = [_signed(row, key, sign) for row in values(run.rows, key)]
        if rows and any(abs(row[key]) > 1e-6 for row in rows):
            draw(ax, rows, key, colour, words)
    if values(run.rows, "ll_diff"):
        draw(ax, run.rows, "ll_diff", INK, "root mean square of ll_diff", dashed=True)
    legend(ax, 2)
    caption = "Means over the steps of a sample of what detailed balance adds up; in balance they cancel, and the dashed line is zero."
    return Panel("parts", "Parts of the residual", svg(figure, "Parts of ll_diff over training steps"), caption)


def _signed(row: dict[str, Any], key: str, sign: int) -> dict[str, Any]:
    seeds = row.get("seeds", {})
    each = [None if v is None else sign * v for v in seeds.get(key, [])]
    bounds = {
        f"{key}{end}": None for end in ("_low", "_high")
    }  # a minus would exchange them: taken from the seeds instead
    return row | bounds | {key: sign * row[key], "seeds": seeds | ({key: each} if each else {})}


def contribution(run: RunFiles) -> Panel | None:
    """What the entropy-ratio term adds to the loss of SGFN-KL."""
    from stochflow.look.report.curves import draw

    if len(values(run.rows, "kl_part")) < 2:
        return None
    rows = [
        row | {"balance": max(row["loss"] - row["kl_part"], 1e-12)}
        for row in values(values(run.rows, "kl_part"), "loss")
    ]
    figure, ax = axes(x="training step", y="part of the loss")
    draw(ax, rows, "balance", SERIES[0], "balance")
    draw(ax, rows, "kl_part", SERIES[1], "kl_weight x r x (KL + flow gap)")
    ax.set_yscale("log")
    legend(ax, 1)
    last = rows[-1]
    share = last["kl_part"] / max(last["loss"], 1e-12)
    ratio = last.get("r_gamma")
    caption = f"At the end the term is {share:.0%} of the loss" + (
        f", with an entropy ratio of {ratio:.2f}." if ratio is not None else "."
    )
    return Panel("kl_part", "The entropy-ratio term", svg(figure, "Parts of the loss of SGFN-KL"), caption)
