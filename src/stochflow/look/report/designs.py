"""The best designs: their table, with distances and families, and their sequence logos."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np

from stochflow.law.modes import families, family_distance
from stochflow.law.verdict import number
from stochflow.look.report.drawing import RULE, Panel, axes, svg
from stochflow.look.report.files import RunFiles

SHOWN = 25  # rows of the table
FAMILIES = 24  # logos of modes: a page stays below a megabyte
LETTERS = {
    "A": "#2f9e61",
    "C": "#3f86f0",
    "G": "#d99a00",
    "T": "#e2574c",
    "U": "#e2574c",
}  # readable on white and on black
OTHERS = ("#2f9e61", "#3f86f0", "#d99a00", "#e2574c", "#8a63d2", "#2aa198", "#c9579b", "#7f8c3a")


@dataclass(frozen=True)
class Design:
    """One row of the table."""

    rank: int
    what: str
    score: str
    log_reward: str
    log_pf: str
    distance: int | None  # to the nearest better design
    family: int | None  # the mode it belongs to, from 1
    exact: str = ""  # of an order: the chance that it is made as it is written,
    low: str = ""  # and the 10 % quantile of the score of what is made
    origin: str = ""  # whether it was asked about while training or drawn from the final policy


@dataclass(frozen=True)
class Designs:
    """What the page shows of `samples.csv`."""

    rows: list[Design]
    logos: list[Panel]
    total: int
    note: str  # why there are no logos, or which modes have none
    apart: int  # distance between two families
    modes: int  # how many families there are
    makings: int = 0  # of orders: how many were simulated for each; 0: their figures are exact

    @property
    def orders(self) -> bool:
        """Whether the designs are orders, whose score is what is expected of what is made."""
        return any(r.exact for r in self.rows)

    @property
    def origins(self) -> bool:
        return any(r.origin for r in self.rows)

    @property
    def sequences(self) -> bool:
        return any(r.family is not None for r in self.rows)


def read_designs(run: RunFiles) -> Designs | None:
    """None where the run has written no designs yet."""
    rows = run.designs
    if not rows:
        return None
    texts = [r.get("sequence", "") for r in rows]
    if not all(texts):
        return Designs(
            [_row(i, r, r.get("state", ""), None, None) for i, r in enumerate(rows[:SHOWN], 1)], [], len(rows), "", 0, 0
        )
    heads, distance = families(texts, [float(r["score"]) for r in rows])
    family = [int(distance[i, heads].argmin()) + 1 for i in range(len(texts))]
    nearest = [None if i == 0 else int(distance[i, :i].min()) for i in range(len(texts))]
    shown = [_row(i + 1, rows[i], texts[i], nearest[i], family[i]) for i in range(min(SHOWN, len(rows)))]
    logos, note = _logos(texts, family, heads)
    makings = rows[0].get("makings", "0")
    return Designs(
        shown, logos, len(rows), note, family_distance(texts), len(heads), int(makings) if makings.isdigit() else 0
    )


def _row(rank: int, row: dict[str, str], what: str, distance: int | None, family: int | None) -> Design:
    def short(key: str) -> str:
        try:
            return number(float(row.get(key, "")))
        except ValueError:
            return "-"

    made = (short("made_exact"), short("made_low")) if row.get("made_exact") else ("", "")
    origin = row.get("origin", "") if row.get("origin") in ("asked", "draw") else ""
    return Design(rank, what, short("score"), short("log_reward"), short("log_pf"), distance, family, *made, origin)


def _logos(texts: list[str], family: list[int], heads: list[int]) -> tuple[list[Panel], str]:
    """Panels, and what they leave out: the logo of a single design would be its letters, so such modes are named instead."""
    try:
        import logomaker  # noqa: F401
    except ImportError:
        return [], "Sequence logos need the package logomaker: pip install 'stochflow[bio]'."
    if len({len(t) for t in texts}) > 1:
        return [], "The designs have different lengths, so they are not stacked into a logo."
    if len(texts[0]) > 60:
        return [], "The designs are too long for a readable logo."
    best = texts[:SHOWN]
    panels = [
        Panel(
            "logo",
            f"The {len(best)} best designs",
            _logo(best, "Logo of the best designs"),
            "Letters stacked by how much they are agreed upon.",
        )
    ]
    members = {n: [t for t, f in zip(texts, family, strict=True) if f == n] for n in range(1, len(heads) + 1)}
    several = [n for n in members if len(members[n]) > 1]
    for n in several[:FAMILIES]:
        caption = f"{len(members[n])} designs around {texts[heads[n - 1]]}."
        panels.append(Panel(f"logo-{n}", f"Mode {n}", _logo(members[n], f"Logo of mode {n}"), caption))
    return panels, _left_out(len(heads), several, {n: texts[heads[n - 1]] for n in members if n not in several})


def _left_out(modes: int, several: list[int], single: dict[int, str]) -> str:
    """Which of the modes have no logo, so that nobody takes those shown for all there are."""
    said = ""
    if len(several) > FAMILIES:
        said = f"Logos of the {FAMILIES} best of the {len(several)} modes with more than one design."
    if single:
        named = ", ".join(f"{text} (mode {n})" for n, text in list(single.items())[:FAMILIES])
        named += f" and {len(single) - FAMILIES} more" if len(single) > FAMILIES else ""
        said += f" {len(single)} of the {modes} modes {'are a single design' if len(single) > 1 else 'is a single design'}: {named}."
    return said.strip() or f"These are all {modes} modes."


def _logo(texts: list[str], title: str) -> str:
    import logomaker

    figure, ax = axes(height=1.5, x="position", y="bits", grid=False)
    letters = sorted(set("".join(texts)) | (set("ACGT") if set("".join(texts)) <= set("ACGT") else set()))
    counts = logomaker.alignment_to_matrix(texts, to_type="counts", characters_to_ignore="")
    counts = counts.reindex(columns=letters, fill_value=0.0)
    bits = logomaker.transform_matrix(counts, from_type="counts", to_type="information", pseudocount=0.0)
    colours = {
        c: LETTERS[c] if set(letters) <= set(LETTERS) else OTHERS[i % len(OTHERS)] for i, c in enumerate(letters)
    }
    with (
        warnings.catch_warnings()
    ):  # designs that agree in nothing make a logo of no height, which is what it should say
        warnings.simplefilter("ignore")
        logomaker.Logo(bits, ax=ax, color_scheme=colours, show_spines=False, baseline_width=0)
    for line in list(ax.lines):  # the baseline, in a fixed black
        line.remove()
    ax.set_xticks(range(len(texts[0])) if len(texts[0]) <= 20 else range(0, len(texts[0]), 5))
    ax.set_xticklabels([str(int(t) + 1) for t in ax.get_xticks()])
    ax.set_ylim(0, max(np.log2(len(letters)), 1))
    ax.spines["left"].set_visible(True)
    ax.spines["left"].set_color(RULE)
    ax.set_ylabel("bits")
    ax.set_xlabel("position")
    return svg(figure, title)
