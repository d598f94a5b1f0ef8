"""How close training comes to the best that is possible, at three noises: TFBind8 (two factors) and the 8x8 grid.

    PYTHONPATH=src python benchmarks/stochastic_results.py --device cuda --seconds 9.9 --rows db,known --out a.json
    PYTHONPATH=src python benchmarks/stochastic_results.py --device cuda --seconds 28 --rows flow-kl,second,mlp,transformer --out b.json
    PYTHONPATH=src python benchmarks/stochastic_results.py --merge a.json b.json --out benchmarks/results/stochastic_gpu.json
    PYTHONPATH=src python benchmarks/stochastic_results.py --seconds 100 --seeds 1 --rows db --out benchmarks/results/stochastic_cpu.json
    PYTHONPATH=src python benchmarks/stochastic_results.py --seconds 60 --rows grid --out benchmarks/results/stochastic_grid.json
    PYTHONPATH=src python benchmarks/stochastic_results.py --device cuda --seconds 9.9 --rows db --sticks 0.25 --out benchmarks/results/stochastic_ten_seconds.json
    PYTHONPATH=src python benchmarks/stochastic_results.py --render > docs/results.md

Every row trains its seeds stacked for the given seconds and is measured by the exact law of its averaged weights. The seconds are all
of training: the first step and, on a GPU, warm-up and recording are inside, as is every wait for the device; making the task and measuring the law at
the end are outside. Training stops before the next few steps would go beyond them. Each row carries its own record (day, code,
versions, hardware, seeds), so that rows from several calls can stand in one file; a row that is measured again takes its old one's place.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SOURCE = HERE.parent / "src" / "stochflow"
STICKS = (0.1, 0.25, 0.5)
SECOND = "ARX_REF_R1"  # the alphabetically first complete *_REF_R1 table of the wheel: chosen before looking
KEY = ("task", "table", "objective", "dynamics", "net", "stick")  # what makes a row this row
TICK = 0.25  # seconds between two looks at the clock, each of which waits for the device


def groups() -> dict[str, list[dict[str, Any]]]:
    """What can be run, by the names that --rows takes; most telling first."""

    def bind(sticks: tuple[float, ...] = STICKS, **fixed: Any) -> list[dict[str, Any]]:
        return [
            {"task": "tfbind8", "objective": "db", "dynamics": "neural", "net": "lookup", **fixed, "stick": s}
            for s in sticks
        ]

    grid = [
        {"task": "grid", "objective": "db", "dynamics": d, "net": "mlp", "stick": s}
        for d in ("neural", "known")
        for s in (0.25, 0.5)
    ]
    return {
        "db": bind(),
        "known": bind(dynamics="known"),
        "flow-kl": bind(objective="flow-kl"),
        "second": bind(table=SECOND),
        "mlp": bind((0.25,), net="mlp"),
        "transformer": bind((0.25,), net="transformer"),
        "grid": grid,
    }


def wanted(names: str) -> list[dict[str, Any]]:
    """The rows of a comma-separated list of groups."""
    known = groups()
    asked = names.split(",")
    foreign = [n for n in asked if n not in known]
    if foreign:
        raise SystemExit(f"--rows has no group {foreign[0]!r}: it takes {', '.join(known)}")
    return [row for name in asked for row in known[name]]


def settings_of(row: dict[str, Any], device: str) -> dict[str, Any]:
    """What differs from the task's defaults. A wide network takes smaller batches, or it sees too few of them in its seconds."""
    chosen = {k: v for k, v in row.items() if k != "task"}
    if row["task"] != "tfbind8":
        return chosen
    if row["net"] == "lookup":
        chosen["batch"] = 4096 if device == "cuda" else 1024
        return chosen | ({"lr": 3e-3} if row["objective"] == "flow-kl" else {})
    wide = {
        "mlp": {"hidden": 512, "layers": 3, "lr": 1.5e-3},
        "transformer": {"hidden": 128, "layers": 2, "heads": 4, "lr": 2e-3},
    }
    return chosen | wide[row["net"]] | {"batch": 1024}


def train(trainer: Any, seconds: float) -> tuple[float, float]:
    """Train for at most `seconds`; how long the first four iterations took (they record), and how long all did."""
    begun = time.perf_counter()

    def spent() -> float:
        float(trainer.raw_stats[0, 0])  # wait for the device
        return time.perf_counter() - begun

    trainer.train(
        trainer.steps_done + 4
    )  # the first by itself, then with and without figures to note, each recorded once
    first = now = spent()
    steps, each = 1, 0.0  # steps until the next look at the clock, seconds per step
    while now + 1.2 * steps * each < seconds:  # they still fit, even if they are a little slower than the last
        trainer.train(trainer.steps_done + steps)
        before, now = now, spent()
        each = (now - before) / steps
        steps = max(1, int(TICK / each))
    return first, now


def run(row: dict[str, Any], device: str, seconds: float, seeds: int) -> dict[str, Any]:
    from stochflow.runs.config import configure
    from stochflow.runs.experiment import Experiment

    chosen = settings_of(row, device)
    made = Experiment(configure(row["task"], seeds=seeds, device=device, **chosen))
    first, spent = train(made.trainer, seconds)
    figures = made.measure(final=True)
    kept = (
        "tv",
        "l1",
        "floor_tv",
        "floor_kind",
        "floor_tv_reverse_kl",
        "limit_tv",
        "naive_tv",
        "excess_tv",
        "dynamics_tv",
        "dynamics_nll",
        "dynamics_nll_true",
        "log_z_error",
        "oracle_calls",
    )
    found: dict[str, Any] = {k: figures.get(k) for k in kept}
    for k in ("tv", "l1", "excess_tv"):
        found |= {f"{k}_low": figures.get(f"{k}_low"), f"{k}_high": figures.get(f"{k}_high")}
    t = made.config.train
    return {
        **row,
        "batch": t.batch,
        "lr": t.lr,
        "hidden": t.hidden,
        "layers": t.layers,
        "seconds": round(spent, 1),
        "first_seconds": round(first, 1),
        "steps": made.trainer.steps_done,
        "parameters": sum(p.numel() for p in made.policy.parameters()) // seeds,
        **found,
    }


# where a row comes from ---------------------------------------------------------------------------------------------------


def source_digest() -> str:
    """Of the package's code: a name for it that needs no version control, and that an uncommitted change changes too."""
    digest = hashlib.sha256()
    for file in sorted(SOURCE.rglob("*.py")):
        digest.update(file.relative_to(SOURCE).as_posix().encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def commit() -> str | None:
    """The commit, where there is a repository and the code is as it was committed."""

    def git(*words: str) -> str:
        return subprocess.run(
            ["git", "-C", str(HERE), *words], capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        return None if git("status", "--porcelain", "--", str(SOURCE)) else git("rev-parse", "--short=10", "HEAD")
    except (OSError, subprocess.CalledProcessError):
        return None


def record(device: str, seconds: float, seeds: int) -> dict[str, Any]:
    """What a row says of its own measurement."""
    from common import header

    head = header(device, seconds=seconds, seeds=seeds)
    day = datetime.now(UTC).strftime("%Y-%m-%d")
    return {
        "day": day,
        "source": source_digest(),
        "commit": commit(),
        **{k: head[k] for k in ("versions", "hardware", "settings")},
    }


def key(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row.get(k) for k in KEY)


def join(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All rows, the newer where both have one, in the order of `groups`."""
    rows = {key(r): r for r in old} | {key(r): r for r in new}
    order = [key(r) for group in groups().values() for r in group]
    return sorted(rows.values(), key=lambda r: order.index(key(r)))


def read(path: Path) -> list[dict[str, Any]]:
    """The rows of a file; a row without a record of its own is from before rows kept one, and says what its file said."""
    result = json.loads(path.read_text())
    head = {k: result.get(k) for k in ("versions", "hardware", "settings")}
    return [
        r if "measured" in r else {**r, "measured": {"day": None, "source": None, "commit": None, **head}}
        for r in result["rows"]
    ]


def with_commit(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Name the commit of rows that were measured where there was no repository, if their code is this checkout's."""
    here, at = source_digest(), commit()
    return [{**r, "measured": {**r["measured"], "commit": at}} if r["measured"]["source"] == here else r for r in rows]


def save(rows: list[dict[str, Any]], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps({"rows": rows}, indent=1) + "\n")


def measure(device: str, seconds: float, seeds: int, out: Path, rows: list[dict[str, Any]]) -> None:
    done = read(out) if out.exists() else []
    measured = record(device, seconds, seeds)  # now: the code on disk is the code that runs
    for row in rows:
        found = run(row, device, seconds, seeds)
        done = join(done, [{**found, "measured": measured}])
        save(done, out)  # at once: a call that is cut short loses no row
        shown = (
            "task",
            "stick",
            "objective",
            "dynamics",
            "net",
            "steps",
            "seconds",
            "first_seconds",
            "tv",
            "limit_tv",
            "floor_tv",
            "l1",
        )
        print({k: found[k] for k in shown}, flush=True)


# the page -----------------------------------------------------------------------------------------------------------------


def figure(row: dict[str, Any], name: str) -> str:
    value, low, high = row[name], row.get(f"{name}_low"), row.get(f"{name}_high")
    if value is None:
        return "–"
    return f"{value:.4f}" if low is None else f"{value:.4f} [{low:.4f}, {high:.4f}]"


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| task | stick | objective | dynamics | net | steps | seconds | TV, median [95 %] | its limit | above it | floor | naive | kernel TV |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in rows:
        name = r["task"] + (f" ({r['table']})" if "table" in r else "")
        above = None if r["limit_tv"] is None else r["tv"] - r["limit_tv"]
        values = (r["limit_tv"], above, r["floor_tv"], r["naive_tv"], r["dynamics_tv"])
        numbers = " | ".join("–" if v is None else f"{v:.4f}" for v in values)
        lines.append(
            f"| {name} | {r['stick']} | {r['objective']} | {r['dynamics']} | {r['net']} | {r['steps']:,} | {r['seconds']:.1f} | {figure(r, 'tv')} | {numbers} |"
        )
    return "\n".join(lines)


def origin(row: dict[str, Any]) -> str:
    """One row's record in words."""
    m = row["measured"]
    seeds = m["settings"]["seeds"]
    code = (
        f"code {m['source']}" + (f" (commit {m['commit']})" if m["commit"] else "")
        if m["source"]
        else "code not recorded, perhaps not one and the same"
    )
    when = f"{m['day']}, " if m["day"] else ""
    stacked = f"{seeds} seeds stacked, the seconds are those of all of them together" if seeds > 1 else "1 seed"
    return f"{when}{m['hardware']}, torch {m['versions']['torch']}, {code}; {stacked}"


def origins(rows: list[dict[str, Any]]) -> str:
    """Where the rows come from: one line a record, with the numbers of its rows where there are several."""
    found: dict[str, list[int]] = {}
    for number, row in enumerate(rows, 1):
        found.setdefault(origin(row), []).append(number)
    if len(found) == 1:
        return next(iter(found)) + "."
    return "\n".join(f"* rows {', '.join(map(str, numbers))}: {text}" for text, numbers in found.items())


def sizes(rows: list[dict[str, Any]]) -> str:
    """The settings of each trunk, as far as the rows kept them."""
    said = dict.fromkeys(
        f"`{r['net']}` {r['hidden']} wide, {r['layers']} layers, {r['parameters']:,} parameters, batch {r['batch']:,}, rate {r['lr']:g} ({r['objective']})"
        for r in rows
        if "hidden" in r and r["dynamics"] == "neural"
    )
    return f"\n\nTrunks: {'; '.join(said)}." if said else ""


def render() -> str:
    parts = [(HERE / "results_page.md").read_text().rstrip()]
    for file, title in (
        ("stochastic_gpu.json", "TFBind8 on one GPU"),
        ("stochastic_cpu.json", "TFBind8 on the CPU"),
        ("stochastic_grid.json", "The 8 x 8 grid on the CPU"),
    ):
        path = HERE / "results" / file
        if path.exists():
            rows = read(path)
            parts.append(f"## {title}\n\n{origins(rows)}\n\n{table(rows)}{sizes(rows)}")
    return "\n\n".join(parts) + "\n"


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    a.add_argument("--seconds", type=float, default=28.0)
    a.add_argument("--seeds", type=int, default=5)
    a.add_argument(
        "--rows", default=",".join(groups()), help="groups of rows, separated by commas: " + ", ".join(groups())
    )
    a.add_argument("--sticks", type=float, nargs="+", default=list(STICKS), help="only the rows of these noises")
    a.add_argument(
        "--merge",
        type=Path,
        nargs="+",
        help="join the rows of these files into --out and measure nothing; a later file wins",
    )
    a.add_argument("--out", type=Path, default=HERE / "results" / "stochastic_gpu.json")
    a.add_argument("--render", action="store_true", help="print docs/results.md and measure nothing")
    a.add_argument("--digest", action="store_true", help="print the name that rows give to this checkout's code")
    given = a.parse_args()
    if given.render:
        print(render(), end="")
    elif given.merge:
        rows: list[dict[str, Any]] = []
        for path in given.merge:
            rows = join(rows, read(path))
        save(with_commit(rows), given.out)
    elif given.digest:
        print(source_digest())
    else:
        rows = [row for row in wanted(given.rows) if row["stick"] in given.sticks]
        measure(given.device, given.seconds, given.seeds, given.out, rows)


if __name__ == "__main__":
    main()
