"""The cells of a sweep compared: best first, each held against the best by the seeds they share, and what each setting does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stochflow.errors import one_line
from stochflow.law.verdict import number
from stochflow.look.compare import Arm, Difference, difference, figures_of
from stochflow.look.labels import LABELS
from stochflow.look.report.files import RunFiles
from stochflow.runs.atomic import write_text
from stochflow.runs.sweep import Cell, Range, Sweep, read_sweep

SHOWN = 12  # lines drawn boldly enough to be followed


@dataclass(frozen=True)
class Row:
    """A cell of the report."""

    cell: Cell
    arm: Arm
    against: Difference | None  # the best cell; None for the best itself

    @property
    def words(self) -> str:
        return "best" if self.against is None else self.against.words()


def rows_of(sweep: Sweep) -> list[Row]:
    """Finished cells, best first. Intervals hold for all comparisons with the best at once."""
    found = [c for c in sweep.best_first() if c.value is not None]
    arms = []
    for cell in found:
        run = RunFiles.read(sweep.path / cell.folder)
        arms.append(Arm(label(cell), [run], figures_of([run])))
    rows = [Row(c, a, None) for c, a in zip(found[:1], arms[:1], strict=True)]
    for cell, arm in zip(found[1:], arms[1:], strict=True):
        rows.append(Row(cell, arm, difference(arms[0], arm, sweep.by, len(arms) - 1)))
    return rows


def label(cell: Cell) -> str:
    """The cell's settings in a line."""
    return ", ".join(f"{k.replace('_', ' ')} {_short(v)}" for k, v in cell.settings.items())


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def table(sweep: Sweep, rows: list[Row]) -> Any:
    """A rich table, best first."""
    from rich.table import Table
    from rich.text import Text

    def plain(text: str) -> Text:
        return Text(one_line(text))  # a setting may hold what rich takes for markup

    made = Table(box=None, pad_edge=False, header_style="bold")
    for name in sweep.grid:
        made.add_column(plain(name.replace("_", " ")), justify="right")
    made.add_column(LABELS[sweep.by].words if sweep.by in LABELS else plain(sweep.by), justify="right")
    made.add_column("against the best")
    for row in rows:
        made.add_row(*[plain(_short(row.cell.settings[k])) for k in sweep.grid], number(row.cell.value), row.words)
    return made


def write_sweep(path: str | Path) -> Path:
    """sweep.html in the sweep's folder: one page that needs nothing else."""
    from stochflow.look.report.drawing import owned
    from stochflow.look.report.pages import render

    sweep = read_sweep(path)
    rows = rows_of(sweep)
    words = LABELS[sweep.by].words if sweep.by in LABELS else "value"
    panels = [*_one_by_one(sweep, rows, words), *_together(sweep, rows, words)] if rows else []
    text = render(
        "sweep",
        title=sweep.path.resolve().name,
        task=sweep.base.task.name,
        seeds=sweep.base.train.seeds,
        names=[k.replace("_", " ") for k in sweep.grid],
        words=words,
        better="lower" if sweep.lower else "higher",
        rows=[
            {
                "settings": [_short(row.cell.settings[k]) for k in sweep.grid],
                "value": number(row.cell.value),
                "verdict": row.words,
                "kind": "" if row.against is None or not row.against.beyond_noise else "ill",
                "folder": row.cell.folder,
                "steps": row.arm.runs[0].step,
                "seconds": _seconds(row.arm.runs[0].summary.get("seconds")),
            }
            for row in rows
        ],
        failed=[
            {"settings": label(c), "why": c.failed or "no figure"} for c in sweep.cells if c.done and c.value is None
        ],
        waiting=sum(not c.done for c in sweep.cells),
        ranged=any(isinstance(v, Range) for v in sweep.grid.values()),
        panels=[owned(p, "sweep") for p in panels],
    )
    return write_text(sweep.path / "sweep.html", text)


def _one_by_one(sweep: Sweep, rows: list[Row], words: str) -> list[Any]:
    """One panel per setting: every cell's seeds at its value, their medians joined where all else is equal."""
    from stochflow.look.report.drawing import FAINT, INK, SERIES, Panel, axes, svg, told

    panels = []
    ranged = any(isinstance(v, Range) for v in sweep.grid.values())
    for name, values in sweep.grid.items():
        if len({row.cell.settings[name] for row in rows}) < 2:
            continue
        figure, ax = axes(x=name.replace("_", " "), y=words)
        places = _places(values, [row.cell.settings[name] for row in rows])
        groups: dict[str, list[tuple[float, float]]] = {}
        for row in rows:
            x = places[row.cell.settings[name]]
            each = list(row.arm.figures.get(sweep.by, {}).values())
            ax.plot([x] * len(each), each, "o", markersize=4, markeredgewidth=0, alpha=0.45, color=SERIES[0])
            others = str({k: v for k, v in row.cell.settings.items() if k != name})
            groups.setdefault(others, []).append((x, float(np.median(each))))
        if not ranged:
            for points in groups.values():
                ax.plot(*zip(*sorted(points), strict=True), "-", linewidth=1, color=FAINT, zorder=1)
        best = rows[0]
        ax.plot([places[best.cell.settings[name]]], [best.cell.value], "D", markersize=7, color=SERIES[1], zorder=3)
        if not _numeric(values):
            ax.set_xticks(list(places.values()), [told(str(v)) for v in places])
            ax.set_xlim(-0.5, len(places) - 0.5)
        else:
            if min(places) > 0 and max(places) / min(places) >= 5:
                ax.set_xscale("log")
            if len(places) <= 5:
                ax.set_xticks(list(places.values()), [_short(v) for v in places])
                ax.set_xticks([], minor=True)
        _value_axis(ax, rows, sweep)
        ax.tick_params(axis="x", labelcolor=INK)
        title = name.replace("_", " ")
        joined = "" if ranged else "lines join the medians of cells that differ in this setting alone; "
        caption = f"A dot is a seed; {joined}the diamond is the best cell."
        panels.append(Panel(name, title[0].upper() + title[1:], svg(figure, f"{words} by {title}"), caption))
    return panels


def _together(sweep: Sweep, rows: list[Row], words: str) -> list[Any]:
    """Parallel coordinates: a line per cell through all its settings to its figure."""
    from stochflow.look.report.drawing import FAINT, INK, SERIES, Panel, axes, svg, told

    if len(sweep.grid) < 2 or len(rows) < 3:
        return []
    figure, ax = axes(grid=False)
    names = [*sweep.grid, sweep.by]
    heights = []
    for name in sweep.grid:
        column = [row.cell.settings[name] for row in rows]
        places = _places(sweep.grid[name], column)
        spots = np.array([places[v] for v in column], dtype=float)
        if _numeric(sweep.grid[name]) and spots.min() > 0 and spots.max() / spots.min() >= 10:
            spots = np.log(spots)
        heights.append(_unit(spots))
        few = not isinstance(sweep.grid[name], Range) and len(places) <= 6
        for value in dict.fromkeys(column) if few else (min(column), max(column)):
            at = float(heights[-1][column.index(value)])
            ax.annotate(
                told(_short(value)),
                (len(heights) - 1, at),
                (5, 0),
                "data",
                "offset points",
                fontsize=8,
                color=INK,
                va="center",
            )
    result = _unit(np.array([row.cell.value for row in rows], dtype=float))
    heights.append(1 - result if sweep.lower else result)
    for rank in reversed(range(len(rows))):
        line = [h[rank] for h in heights]
        best = rank == 0
        ax.plot(
            range(len(names)),
            line,
            "-",
            linewidth=2.4 if best else 1,
            color=SERIES[1] if best else SERIES[0],
            alpha=1 if best else 0.35,
        )
    for x in range(len(names)):
        ax.axvline(x, color=FAINT, linewidth=0.6)
    ax.set_xticks(range(len(names)), [*[told(n.replace("_", " ")) for n in sweep.grid], "result"])
    ax.set_yticks([0, 1], ["", ""])
    ax.set_xlim(-0.15, len(names) - 0.6)
    caption = f"A line is a cell; on the last axis the best {words} is on top. The thick line is the best cell."
    return [Panel("together", "All settings at once", svg(figure, "parallel coordinates"), caption)]


def _seconds(value: Any) -> str:
    return f"{value:.1f}" if isinstance(value, (int, float)) else ""


def _numeric(values: Any) -> bool:
    return isinstance(values, Range) or all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in values)


def _places(values: Any, seen: list[Any]) -> dict[Any, float]:
    """Where each value stands on its axis."""
    if _numeric(values):
        return {v: v for v in seen}
    return {v: float(i) for i, v in enumerate(values)}


def _unit(x: np.ndarray) -> np.ndarray:
    span = np.ptp(x)
    return np.full(len(x), 0.5) if span == 0 else (x - x.min()) / span


def _value_axis(ax: Any, rows: list[Row], sweep: Sweep) -> None:
    each = [v for row in rows for v in row.arm.figures.get(sweep.by, {}).values()]
    if min(each) > 0 and max(each) / min(each) >= 10:
        ax.set_yscale("log")
