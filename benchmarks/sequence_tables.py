"""Put the tables of docs/sequence-models.md in their places, from the committed results.

    python benchmarks/sequence_tables.py            # rewrite the page
    python benchmarks/sequence_tables.py --check    # say whether it is up to date

A table stands between `<!-- NAME -->` and `<!-- end -->`; NAME.json under benchmarks/results holds its figures.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "sequence-models.md"
RESULTS = ROOT / "benchmarks" / "results"


def figure(x: dict[str, Any], digits: int = 4) -> str:
    """Median and interval."""
    return f"{x['median']:.{digits}f} ({x['low']:.{digits}f}-{x['high']:.{digits}f})"


def lines(head: list[str], rows: list[list[str]]) -> str:
    table = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in table)


def measured(found: dict[str, Any]) -> str:
    """Where the figures come from."""
    settings = ", ".join(f"{k} {v}" for k, v in found["settings"].items())
    versions = ", ".join(f"{k} {v}" for k, v in found["versions"].items())
    return f"*{found['hardware']}; {versions}; {settings}.*"


def prediction(found: dict[str, Any]) -> str:
    rows = []
    for world, here in found["worlds"].items():
        for model, row in here["prediction"].items():
            rows.append([world, model, figure(row["nll"]), figure(row["kernel_tv"])])
        true = next(iter(here["prediction"].values()))["nll_true"]["median"]
        rows.append([world, "(a perfect model)", f"{true:.4f}", "0"])
    return lines(["world", "model of the noise", "held-out NLL", "kernel TV"], rows) + "\n\n" + measured(found)


def law(found: dict[str, Any]) -> str:
    rows = []
    for world, here in found["worlds"].items():
        rows.append([world, "(a perfect kernel of states)", "any", f"{here['state_fixed_point']['tv']:.4f}", "", ""])
        for label, row in here["law"].items():
            model, objective = label.rsplit(", ", 1)
            if objective.endswith("(longer)"):
                objective = f"{objective.split()[0]}, {row['steps']:,} steps at {row['lr']:g}"
            kernel = figure(row["kernel_tv_on_policy"]) if "kernel_tv_on_policy" in row else ""
            rows.append([world, model, objective, figure(row["tv"]), f"{row['loss']['median']:.4f}", kernel])
    return lines(
        ["world", "model of the noise", "objective", "exact TV to the target", "last loss", "kernel TV on-policy"], rows
    )


def trunks(found: dict[str, Any]) -> str:
    budgets = list(next(iter(found["nets"].values()))["tv"])
    head = ["trunk", "parameters", "rate", *[f"TV at {int(b):,} samples" for b in budgets], "seconds"]
    rows = []
    for name, row in found["nets"].items():
        rows.append(
            [
                name,
                f"{row['parameters']:,}",
                f"{row['lr']:g}",
                *[figure(row["tv"][b]) for b in budgets],
                f"{row['seconds']:.0f}",
            ]
        )
    best = [f"{closest(found['nets'], b)} at {int(b):,}" for b in budgets]
    said = (
        f"Closest: {'; '.join(best)} samples. The best achievable law (least forward KL) has {found['floor_tv']:.4f}. "
    )
    return lines(head, rows) + "\n\n" + said + measured(found)


def closest(nets: dict[str, Any], budget: str) -> str:
    """The trunk with the smallest median, and those whose intervals meet its own."""
    first = min(nets, key=lambda name: nets[name]["tv"][budget]["median"])
    near = [n for n in nets if n != first and nets[n]["tv"][budget]["low"] <= nets[first]["tv"][budget]["high"]]
    return first + (f" (and, within the intervals, {', '.join(near)})" if near else "")


def decoding(found: dict[str, Any]) -> str:
    rows = []
    for r in found["cases"]:
        net = re.sub(r"[A-Za-z]+\(width=(\d+), heads=(\d+), layers=(\d+)\)", r"\1 wide, \3 layers", r["net"])
        times = [f"{1000 * r[k + '_seconds']:,.1f} ms" for k in ("cache", "repeat")]
        shares = (
            " / ".join(f"{100 * r['shares'][k]:.0f}" for k in ("weights", "attention", "rest"))
            if r["shares"]
            else "not measured"
        )
        rows.append(
            [
                net,
                f"{r['batch']:,}",
                str(r["length"]),
                *times,
                f"**{r['ratio']:.1f}**",
                f"{r['operations_ratio']:.1f}",
                shares,
            ]
        )
    head = [
        "net",
        "batch",
        "length",
        "with cache",
        "prefix again",
        "factor",
        "factor in operations",
        "% of the cached time in weights / attention / rest",
    ]
    return lines(head, rows) + "\n\n" + measured(found)


def memory(found: dict[str, Any]) -> str:
    rows = []
    for name, net in found["nets"].items():
        for length, row in net["lengths"].items():
            peak = [f"{row['peak_kb']:,.0f} kB", f"{row['peak_kb'] / int(length):.1f} kB"] if "peak_kb" in row else []
            rows.append(
                [
                    name,
                    length,
                    f"{row['autograd_kb']:,.0f} kB",
                    f"{row['trajectory_kb']:.1f} kB",
                    f"{row['replay_kb']:.2f} kB",
                    *peak,
                ]
            )
    head = ["trunk", "length", "kept for the gradient", "trajectory", "in replay"]
    head += ["peak of an iteration", "peak a letter"] if len(rows[0]) > len(head) else []
    return lines(head, rows) + "\n\n" + measured(found)


TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "prediction": ("thought_study", prediction),
    "law": ("thought_study", law),
    "trunks": ("trunk_study", trunks),
    "decoding": ("decode", decoding),
    "decoding-gpu": ("decode_h200", decoding),
    "memory": ("length_memory", memory),
    "memory-gpu": ("length_memory_h200", memory),
}


def render(page: str) -> str:
    """The page with every table made again."""

    def fill(match: re.Match[str]) -> str:
        name = match.group(1)
        source, make = TABLES[name]
        file = RESULTS / f"{source}.json"
        body = (
            make(json.loads(file.read_text()))
            if file.exists()
            else f"*benchmarks/results/{file.name} is not there: its benchmark says how it is made.*"
        )
        return f"<!-- {name} -->\n{body}\n<!-- end -->"

    return re.sub(r"<!-- ([a-z-]+) -->\n.*?<!-- end -->", fill, page, flags=re.S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    page = PAGE.read_text()
    made = render(page)
    if args.check:
        sys.exit(
            0 if made == page else f"{PAGE.name} is not what the results say: run python benchmarks/sequence_tables.py"
        )
    PAGE.write_text(made)


if __name__ == "__main__":
    main()
