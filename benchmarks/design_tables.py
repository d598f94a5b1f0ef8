"""Writes the tables and the plot of docs/design-search.md from the committed results: `python benchmarks/design_tables.py`."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGE = ROOT / "docs" / "design-search.md"
FILES = ("design_search", "design_parts")
ORDER = ("random", "mcmc", "plain", "replay by rank", "local search", "population", "ga", "default")
T95 = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776}  # Student's t of a 95 % interval of so many seeds

Cells = dict[tuple[str, str], list[dict[str, Any]]]


def cells() -> Cells:
    found: Cells = defaultdict(list)
    for name in FILES:
        path = RESULTS / f"{name}.json"
        for cell in json.loads(path.read_text())["cells"] if path.exists() else []:
            found[cell["task"], cell["arm"]].append(cell)
    return found


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


def half(values: list[float]) -> float:
    """Half of the 95 % interval of the mean."""
    n, m = len(values), mean(values)
    return T95[n] * math.sqrt(sum((v - m) ** 2 for v in values) / (n - 1) / n) if n > 1 else math.nan


def shown(values: list[float]) -> str:
    return f"{mean(values):.3f} ± {half(values):.3f}"


def main_table(found: Cells) -> str:
    lines = [
        "| problem | arm | seeds | best | mean of the 100 best | of the 100 best at a distance | distance in the 100 | novelty | mean of the policy's draws | CPU s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for task in dict.fromkeys(t for t, _ in found):
        for arm in ORDER:
            row = found.get((task, arm))
            if not row or len(row) < 2:
                continue
            new = [c["novelty"] for c in row if c["novelty"] is not None]
            drawn = [c["policy"]["sample_score"] for c in row if c.get("policy")]
            lines.append(
                f"| {task} | {arm} | {len(row)} | {mean([c['best'] for c in row]):.3f} | {shown([c['top'] for c in row])} | "
                f"{shown([c['apart'] for c in row])} | {mean([c['diversity'] for c in row]):.1f} | {f'{mean(new):.1f}' if new else ''} | "
                f"{f'{mean(drawn):.3f}' if len(drawn) == len(row) else ''} | {mean([c['cpu_s'] for c in row]):.0f} |"
            )
    return "\n".join(lines)


def goals(found: Cells) -> str:
    """Beside the genetic algorithm: the two means, and whether the goal is met."""
    lines = [
        "| problem | arm | 100 best over the GA's | within the GA's interval or above | 100 best at a distance over the GA's | 1.3 times, or .97 of the ceiling |",
        "|---|---|---|---|---|---|",
    ]
    bounds = json.loads((RESULTS / "design_ceilings.json").read_text())
    # of the 100 best at a distance; 1 where strings of the highest score are many and far apart, None where it is not known
    ceilings = {"contacts": None, "peptide": 16.118, "tfbind8, lower half": 0.970}
    ceilings |= {task: mean(bounds[task]) for task in ("promoter", "template")}  # of the same seeds
    for task in dict.fromkeys(t for t, _ in found):
        ga = found.get((task, "ga"), [])
        for arm in ("default",):
            own = found.get((task, arm), [])
            if len(own) < 2 or len(ga) < 2:
                continue
            top, rival = mean([c["top"] for c in own]), [c["top"] for c in ga]
            apart, other = mean([c["apart"] for c in own]), mean([c["apart"] for c in ga])
            ceiling = ceilings.get(task, 1.0)
            good = top >= mean(rival) - half(rival)
            far = apart >= 1.3 * other or (ceiling is not None and apart >= 0.97 * ceiling)
            lines.append(
                f"| {task} | {arm} | {top / mean(rival):.2f} | {'yes' if good else 'no'} | {apart / other:.2f} | {'yes' if far else 'no'} |"
            )
    return "\n".join(lines)


def calls(found: Cells) -> str:
    """Calls until the first object at a share of the way from the lowest score to the highest: the median of the seeds."""
    lines = ["| problem | arm | .25 | .5 | .75 | .9 |", "|---|---|---|---|---|---|"]
    for task in dict.fromkeys(t for t, _ in found):
        for arm in ("random", "ga", "default"):
            row = found.get((task, arm))
            if not row or len(row) < 2:
                continue
            marks = []
            for mark in ("0.25", "0.5", "0.75", "0.9"):
                each = sorted(math.inf if c["calls_until"][mark] is None else c["calls_until"][mark] for c in row)
                middle = each[len(each) // 2]
                marks.append("never" if middle == math.inf else f"{middle:.0f}")
            lines.append(f"| {task} | {arm} | {' | '.join(marks)} |")
    return "\n".join(lines)


def tuning() -> str:
    result = json.loads((RESULTS / "design_tune.json").read_text())
    means: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for cell in result["cells"]:
        means[cell["variant"], cell["task"]].append(cell)
    tasks = list(dict.fromkeys(c["task"] for c in result["cells"]))
    lines = [f"| variant | {' | '.join(tasks)} | figure |", f"|{'---|' * (len(tasks) + 2)}"]
    for name in ("ga", *result["rated"]):
        each = [f"{mean([c['apart'] for c in means[name, task]]):.2f}" for task in tasks]
        rate = result["rated"].get(name)
        lines.append(f"| {name} | {' | '.join(each)} | {'' if rate is None else f'{rate:+.3f}'} |")
    return "\n".join(lines)


def plot(found: Cells, out: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    tasks = [t for t in dict.fromkeys(t for t, _ in found) if (t, "ga") in found]
    figure, axes = plt.subplots(1, 2, figsize=(10, 0.42 * len(tasks) + 1.4), sharey=True)
    for ax, key, title in zip(axes, ("top", "apart"), ("mean of the 100 best", "of the 100 best at a distance"), strict=True):
        for arm, mark in (("random", "x"), ("mcmc", "+"), ("plain", "s"), ("default", "D")):
            points = [
                (mean([c[key] for c in found[t, arm]]) / max(1e-9, mean([c[key] for c in found[t, "ga"]])), i)
                for i, t in enumerate(tasks)
                if len(found.get((t, arm), [])) > 1
            ]
            if points:
                ax.plot([max(0.02, min(30, x)) for x, _ in points], [y for _, y in points], mark, label=arm, fillstyle="none")
        ax.axvline(1, color="black", linewidth=0.8)
        ax.set_xscale("log")
        ax.set_title(f"{title}, over the GA's", fontsize=10)
        ax.set_yticks(range(len(tasks)), tasks)
    axes[0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(out, dpi=110, metadata={"Software": None})


def rendered(page: str) -> str:
    """The page with its tables as the results say them."""
    found = cells()
    for name, text in (("goals", goals(found)), ("figures", main_table(found)), ("calls", calls(found)), ("tuning", tuning())):
        begin, end = f"<!-- {name}: benchmarks/design_tables.py -->", f"<!-- end of {name} -->"
        before, rest = page.split(begin)
        page = f"{before}{begin}\n{text}\n{end}{rest.split(end)[1]}"
    return page


if __name__ == "__main__":
    PAGE.write_text(rendered(PAGE.read_text()))
    plot(cells(), ROOT / "docs" / "img" / "design-search.png")
