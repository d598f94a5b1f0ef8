"""Runs side by side: the same figures, paired by seed, with bootstrap intervals and a verdict in plain words.

Runs that differ in nothing but their seeds are one *arm*; the first arm is what the others are held against. The more arms are
held against it, the likelier one of them differs by luck: intervals are widened (Bonferroni) so that of one figure all hold at once.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from stochflow.errors import UserError, one_line
from stochflow.files.reading import shown
from stochflow.law.verdict import number
from stochflow.look.labels import COMPARED, LABELS
from stochflow.look.report.files import RunFiles, values
from stochflow.runs.atomic import write_text

MAIN = ("excess_tv", "tv", "elbo", "top_asked", "top_score")  # the verdict is about the first that every arm has
AT_EQUAL_BETA = ("elbo",)  # figures of the target law, where that is found while training
ENOUGH = 5  # seeds: with fewer, differences of one sign come about by luck too often to call them one
LEVEL = 0.95
NOT_THE_ARM = ("seed", "seeds", "device", "threads", "log_every", "save_every")  # settings that do not make another arm


@dataclass(frozen=True)
class Arm:
    """Runs that are one experiment over several seeds."""

    label: str
    runs: list[RunFiles]
    figures: Mapping[str, Mapping[int, float]]  # metric -> seed -> value

    @property
    def seeds(self) -> list[int]:
        return sorted(s for r in self.runs for s in r.seeds)

    def middle(self, key: str) -> float | None:
        found = list(self.figures.get(key, {}).values())
        return float(np.median(found)) if found else None


@dataclass(frozen=True)
class Difference:
    """An arm minus the first arm, on the seeds they share."""

    key: str
    seeds: int
    mean: float | None
    low: float | None
    high: float | None
    among: int = 1  # comparisons of this figure, for which the interval is widened

    @property
    def beyond_noise(self) -> bool:
        return (
            self.low is not None and self.high is not None and self.seeds >= ENOUGH and (self.low > 0 or self.high < 0)
        )

    @property
    def better(self) -> bool:
        return self.beyond_noise and self.mean is not None and self.mean * LABELS[self.key].better > 0

    def words(self) -> str:
        """The verdict in plain words."""
        if self.mean is None:
            return "no seed in common"
        if self.seeds == 1:
            return f"{number(self.mean, '+')} on the one seed in common: one seed cannot tell a difference from noise"
        if self.low == self.high == self.mean == 0:
            return "exactly the same"
        if self.seeds < ENOUGH:
            return f"{number(self.mean, '+')} on average of {self.seeds} seeds: too few to tell a difference from noise ({ENOUGH} are needed)"
        wide = f", widened for {self.among} comparisons" if self.among > 1 else ""
        span = f"{number(self.mean, '+')}, {LEVEL:.0%} interval {number(self.low, '+')} to {number(self.high, '+')}{wide}, {self.seeds} seeds"
        if not self.beyond_noise:
            return f"no difference beyond noise ({span})"
        return f"{'better' if self.better else 'worse'} ({span})"


@dataclass(frozen=True)
class Comparison:
    """What there is to say about the arms; `differences[i][key]` is arm i + 1 against arm 0."""

    arms: list[Arm]
    metrics: list[str]
    differences: list[dict[str, Difference]]
    warnings: list[str]

    @property
    def main(self) -> str | None:
        return next((k for k in MAIN if k in self.metrics and all(k in a.figures for a in self.arms)), None)

    def sentences(self) -> list[str]:
        """One a later arm: how it does on the main figure."""
        key = self.main
        if key is None:
            return ["These runs share no figure that could be compared."]
        first = self.arms[0].label
        return [
            f"{arm.label} against {first}, {LABELS[key].words}: {d[key].words()}."
            for arm, d in zip(self.arms[1:], self.differences, strict=True)
        ]

    def caution(self) -> str:
        """What the intervals promise, and what they do not."""
        count = len(self.differences)
        arms = f"The intervals of a figure hold for all {count} comparisons at once. " if count > 1 else ""
        return arms + f"Each of the {len(self.metrics)} figures is compared by itself: of many, one may differ by luck."

    def to_json(self) -> dict[str, Any]:
        return {
            "arms": [
                {
                    "label": a.label,
                    "runs": [str(r.path) for r in a.runs],
                    "figures": {k: dict(v) for k, v in a.figures.items()},
                }
                for a in self.arms
            ],
            "differences": [
                {
                    k: {
                        "seeds": x.seeds,
                        "mean": x.mean,
                        "low": x.low,
                        "high": x.high,
                        "among": x.among,
                        "verdict": x.words(),
                    }
                    for k, x in d.items()
                }
                for d in self.differences
            ],
            "warnings": self.warnings,
            "verdict": self.sentences(),
            "caution": self.caution(),
        }


def compare(paths: Sequence[str | os.PathLike[str]]) -> Comparison:
    """Compare run folders; at least two, and the first is what the others are held against."""
    if len(paths) < 2:
        raise UserError(
            f"a comparison needs at least two runs, but {len(paths)} was given: stochflow compare RUN RUN ..."
        )
    runs = [RunFiles.read(p) for p in paths]
    for run in runs:
        if not run.last:
            raise UserError(f"{run.path} has no figures yet: go on with `stochflow resume {run.path}`")
    arms = _arms(runs)
    if len(arms) < 2:
        raise UserError(
            "these runs differ in nothing but their seeds, so there is one arm and nothing to compare it with: give another run"
        )
    apart = () if len(_betas(arms)) == 1 else AT_EQUAL_BETA
    metrics = [k for k in COMPARED if k not in apart and any(k in a.figures for a in arms)]
    differences = [{k: difference(arms[0], arm, k, len(arms) - 1) for k in metrics} for arm in arms[1:]]
    return Comparison(arms, metrics, differences, _warnings(arms))


def difference(first: Arm, other: Arm, key: str, among: int = 1) -> Difference:
    """Mean over the shared seeds of (other - first), with its bootstrap interval, one of `among` that are to hold at once."""
    a, b = first.figures.get(key, {}), other.figures.get(key, {})
    gap = np.array([b[s] - a[s] for s in sorted(a.keys() & b.keys())])
    if not len(gap):
        return Difference(key, 0, None, None, None, among)
    low, high = paired_interval(gap, 1 - (1 - LEVEL) / among)
    return Difference(key, len(gap), float(gap.mean()), low, high, among)


def paired_interval(gap: np.ndarray, level: float = LEVEL) -> tuple[float, float]:
    """Percentile-bootstrap interval of the mean, but never narrower than Student's: of five equals' differences plain percentiles
    exclude zero one time in six, because they resample no value beyond those seen."""
    from scipy.stats import bootstrap, t

    count = len(gap)
    if count == 1 or np.ptp(gap) <= 1e-12 * np.abs(gap).max():
        return float(gap[0]), float(gap[0])
    drawn: Any = bootstrap(
        (gap,),
        np.mean,
        confidence_level=level,
        n_resamples=9999,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(0),
    ).confidence_interval
    reach = float(t.isf((1 - level) / 2, count - 1) * gap.std(ddof=1) / np.sqrt(count))
    return min(float(drawn.low), float(gap.mean()) - reach), max(float(drawn.high), float(gap.mean()) + reach)


# arms -----------------------------------------------------------------------------------------------------------


def _arms(runs: Sequence[RunFiles]) -> list[Arm]:
    """Group runs that differ in their seeds alone; a run that repeats a seed of its group stands for itself."""
    groups: list[tuple[dict[str, Any], list[RunFiles]]] = []
    for run in runs:
        key = _identity(run)
        home = next((g for k, g in groups if k == key and not {s for r in g for s in r.seeds} & set(run.seeds)), None)
        if home is None:
            groups.append((key, [run]))
        else:
            home.append(run)
    labels = _labels([k for k, _ in groups], [g[0].name for _, g in groups])
    return [Arm(label, group, figures_of(group)) for label, (_, group) in zip(labels, groups, strict=True)]


def _identity(run: RunFiles) -> dict[str, Any]:
    data = run.config.to_dict()
    task = {("task" if k == "name" else k): v for k, v in data["task"].items()}
    return task | {k: v for k, v in run.training.items() if k not in NOT_THE_ARM}


def _labels(keys: list[dict[str, Any]], names: list[str]) -> list[str]:
    """What tells the arms apart: the settings in which they differ, or else the folder's name."""
    every = dict.fromkeys(k for key in keys for k in key)
    differing = [k for k in every if any(key.get(k) != keys[0].get(k) for key in keys)]
    labels = [
        ", ".join(f"{k.replace('_', ' ')} {key[k]}" for k in differing if key.get(k) not in (None, "")) or name
        for key, name in zip(keys, names, strict=True)
    ]
    labels = [label if len(label) <= 60 else name for label, name in zip(labels, names, strict=True)]
    labels = [label if labels.count(label) == 1 else name for label, name in zip(labels, names, strict=True)]
    return [label if labels.count(label) == 1 else f"{label} ({i})" for i, label in enumerate(labels, 1)]


def figures_of(runs: Sequence[RunFiles]) -> dict[str, dict[int, float]]:
    """Each seed's final figures: key -> seed -> value."""
    found: dict[str, dict[int, float]] = {}
    for run in runs:
        last = run.last
        for key in COMPARED:
            each = last.get("seeds", {}).get(key) or ([last[key]] if len(run.seeds) == 1 and key in last else [])
            for seed, value in zip(run.seeds, each, strict=False):
                if isinstance(value, (int, float)) and np.isfinite(value):
                    found.setdefault(key, {})[seed] = float(value)
    return found


def _warnings(arms: Sequence[Arm]) -> list[str]:
    found = []
    runs = [r for a in arms for r in a.runs]
    targets = {str(_target(r.config.to_dict()["task"])) for r in runs}
    if len(targets) > 1:
        found.append("These runs have different targets: their figures answer different questions.")
    betas = _betas(arms)
    if len(betas) > 1:
        found.append(
            f"Their rewards are not equally sharp (beta {', '.join(map(number, betas))}): ELBO and log Z are figures of "
            "different laws and are not compared."
        )
    calls = _different([r for r in runs if r.last.get("top_asked") is not None], "oracle_calls")
    if len(calls) > 1:
        found.append(
            f"They asked the oracle about {', '.join(map(number, calls))} different objects: the more, the better the best are."
        )
    few = {r.name: r.last["apart_count"] for r in runs if _is_few(r.last.get("apart_count"))}
    if few:
        each = ", ".join(f"{name} ({count})" for name, count in few.items())
        found.append(f"Fewer than 100 of what was asked are at a distance, and the mean is of these alone: {each}.")
    going = [r.name for r in runs if not r.done]
    if going:
        found.append(f"Not finished, so compared by its last look: {', '.join(going)}.")
    return found + [f"Left out: {gap}." for r in runs for gap in r.gaps[:3]]


def _betas(arms: Sequence[Arm]) -> list[float | None]:
    """The sharpness of each run's reward, different ones alone; None where it is a setting of the task."""
    return _different([r for a in arms for r in a.runs], "beta")


def _is_few(count: Any) -> bool:
    return isinstance(count, int) and count < 100


def _different(runs: Sequence[RunFiles], key: str) -> list[float | None]:
    each = [r.last.get(key) for r in runs]
    found = {x if isinstance(x, (int, float)) and np.isfinite(x) else None for x in each}
    return sorted(found, key=lambda x: (x is not None, x or 0.0))


def _target(task: dict[str, Any]) -> dict[str, Any]:
    """The settings that the target depends on: the noise changes that of orders alone."""
    noise = () if task.get("open_loop") else ("stick", "noise", "confusion")
    return {k: v for k, v in task.items() if k not in noise}


# what is shown --------------------------------------------------------------------------------------------------


def table(found: Comparison) -> Any:
    """A rich table: one row per figure, one column per arm; what differs beyond noise is marked."""
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, header_style="bold")
    made.add_column("")
    for arm in found.arms:  # as text: a label may hold what rich takes for markup
        made.add_column(Text(one_line(arm.label)), justify="right", overflow="fold")
    for key in found.metrics:
        cells = [number(found.arms[0].middle(key))]
        for arm, gaps in zip(found.arms[1:], found.differences, strict=True):
            mark = " +" if gaps[key].better else " -" if gaps[key].beyond_noise else ""
            cells.append(number(arm.middle(key)) + mark)
        made.add_row(LABELS[key].words, *cells)
    made.add_row("seeds", *[str(len(a.seeds)) for a in found.arms])
    return made


def write_comparison(found: Comparison, out: str | os.PathLike[str]) -> Path:
    """The same as one self-contained page."""
    from stochflow.look.report.drawing import owned
    from stochflow.look.report.pages import render

    rows = [
        {
            "words": LABELS[key].words,
            "better": "lower" if LABELS[key].better < 0 else "higher",
            "first": number(found.arms[0].middle(key)),
            "others": [
                {
                    "value": number(arm.middle(key)),
                    "verdict": gaps[key].words(),
                    "kind": "well" if gaps[key].better else "ill" if gaps[key].beyond_noise else "",
                }
                for arm, gaps in zip(found.arms[1:], found.differences, strict=True)
            ],
        }
        for key in found.metrics
    ]
    text = render(
        "compare",
        arms=found.arms,
        rows=rows,
        sentences=found.sentences(),
        warnings=found.warnings,
        panels=[owned(p, "compare") for p in _panels(found)],
        level=f"{LEVEL:.0%}",
        caution=found.caution(),
    )
    return write_text(out, text)


def _panels(found: Comparison) -> list[Any]:
    from stochflow.look.report.curves import draw
    from stochflow.look.report.drawing import SERIES, Panel, axes, legend, svg, told

    panels = []
    if found.main is not None:
        panels.append(_seeds_panel(found, found.main))
    if len(found.arms) <= 8 and all(len(values(r.rows, "tv")) > 1 for a in found.arms for r in a.runs[:1]):
        figure, ax = axes(x="training step", y="total variation")
        for i, arm in enumerate(found.arms):
            draw(
                ax,
                arm.runs[0].rows,
                "tv",
                SERIES[i % len(SERIES)],
                told(arm.label),
                marker="o",
                dashed=i >= len(SERIES),
            )
        ax.set_yscale("log")
        legend(ax, 1)
        panels.append(
            Panel(
                "tv",
                "Distance to the target",
                svg(figure, "Total variation of each arm"),
                "Of the first run of each arm.",
            )
        )
    return panels


def _seeds_panel(found: Comparison, key: str) -> Any:
    from stochflow.look.report.drawing import FAINT, INK, SERIES, Panel, axes, svg, told

    figure, ax = axes(height=1.1 + 0.32 * len(found.arms), x=LABELS[key].words, y="run")
    for i, arm in enumerate(found.arms):
        each = list(arm.figures[key].values())
        ax.plot(
            each,
            [i] * len(each),
            linestyle="none",
            marker="o",
            markersize=4,
            markeredgewidth=0,
            alpha=0.55,
            color=SERIES[0],
        )
        ax.plot([np.median(each)], [i], linestyle="none", marker="|", markersize=14, markeredgewidth=2, color=INK)
    ax.locator_params(axis="x", nbins=5)
    ax.ticklabel_format(
        axis="x", scilimits=(-2, 4)
    )  # small figures share one power of ten: written out they would overlap
    ax.xaxis.get_offset_text().set_color(FAINT)
    ax.set_yticks(
        range(len(found.arms)), [told(a.label if len(a.label) <= 34 else a.label[:33] + "…") for a in found.arms]
    )
    ax.set_ylim(len(found.arms) - 0.5, -0.5)
    better = "left" if LABELS[key].better < 0 else "right"
    return Panel(
        "seeds",
        f"{LABELS[key].words[0].upper()}{LABELS[key].words[1:]}, seed by seed",
        svg(figure, f"{key} by seed"),
        f"A dot is a seed, the bar their median; further {better} is better.",
    )


def compare_command(runs: Sequence[Path], out: Path = Path("compare.html"), as_json: bool = False) -> int:
    """`stochflow compare RUN RUN...`: a table, a verdict, and a page."""
    found = compare(runs)
    if as_json:
        import json

        print(json.dumps(found.to_json()))
        return 0
    from rich.console import Console

    console = Console(highlight=False, soft_wrap=False)
    console.print(table(found))
    console.print(
        f"\nMedians over the seeds; + better and - worse than {one_line(found.arms[0].label)} beyond noise.",
        markup=False,
    )
    for sentence in [*found.warnings, *found.sentences(), found.caution()]:
        console.print(one_line(sentence), markup=False, soft_wrap=True)
    print(shown(write_comparison(found, out)))
    return 0
