"""The README's one table of figures, rendered from the committed results.

PYTHONPATH=src python benchmarks/readme_table.py          # rewrites the table in README.md
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
BEGIN, END = "<!-- results: benchmarks/readme_table.py -->", "<!-- end of results -->"
SHOWN = {  # file -> which of its rows: the defaults, and nothing else
    "stochastic_gpu.json": {"task": "tfbind8", "objective": "db", "dynamics": "neural", "net": "lookup"},
    "stochastic_cpu.json": {"task": "tfbind8", "objective": "db", "dynamics": "neural", "net": "lookup"},
    "stochastic_grid.json": {"task": "grid", "objective": "db", "dynamics": "neural"},
}
WORLDS = {"tfbind8": "TFBind8", "grid": "grid 8 x 8"}


def table(results: dict[str, dict[str, Any]]) -> str:
    """Markdown of the results by file name."""
    lines = [
        "| world | stick | **stochflow** (learned noise) | best possible | perfect, but ignores the noise | where, for how long |",
        "|---|---|---|---|---|---|",
    ]
    for name, want in SHOWN.items():
        result = results.get(name)
        if result is None:
            continue
        for row in result["rows"]:
            if "table" in row or any(row.get(k) != v for k, v in want.items()):
                continue
            figures = [_figure(row.get(k)) for k in ("tv", "floor_tv", "naive_tv")]
            measured = row.get("measured", result)  # a row's own record, or that of a file from before rows had one
            seeds = measured["settings"]["seeds"]
            where = f"{measured['hardware']}, {seeds} seed{'s' if seeds > 1 else ''} at once, {row['seconds']:.0f} s"
            lines.append(
                f"| {WORLDS[row['task']]} | {row['stick']} | **{figures[0]}** | {figures[1]} | {figures[2]} | {where} |"
            )
    return "\n".join(lines)


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def rendered(page: str) -> str:
    """The page with its table as the results say it."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    results = {name: json.loads((RESULTS / name).read_text()) for name in SHOWN if (RESULTS / name).exists()}
    return f"{before}{BEGIN}\n{table(results)}\n{END}{after}"


if __name__ == "__main__":
    readme = ROOT / "README.md"
    readme.write_text(rendered(readme.read_text()))
