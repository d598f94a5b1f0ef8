"""How close training comes to the best that is possible, at three noises: TFBind8 (two factors) and the 8x8 grid.

    PYTHONPATH=src python benchmarks/stochastic_results.py --device cuda --seconds 20 --out benchmarks/results/stochastic_gpu.json
    PYTHONPATH=src python benchmarks/stochastic_results.py --seconds 300 --seeds 1 --only strings --out benchmarks/results/stochastic_cpu.json
    PYTHONPATH=src python benchmarks/stochastic_results.py --seconds 60 --only grid --out benchmarks/results/stochastic_grid.json
    PYTHONPATH=src python benchmarks/stochastic_results.py --render > docs/results.md

Every row trains five seeds stacked for the given seconds (capture and the first step included) and is measured by the
exact law of its averaged weights. Rows already in --out are not repeated.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
STICKS = (0.1, 0.25, 0.5)
SECOND = "ARX_REF_R1"  # the alphabetically first complete *_REF_R1 table of the wheel: chosen before looking


def rows() -> list[dict[str, Any]]:
    """What is run, most telling first."""
    bind = [
        {"task": "tfbind8", "objective": o, "dynamics": d, "net": "lookup", "stick": s}
        for o, d in (("db", "neural"), ("db", "known"), ("flow-kl", "neural"))
        for s in STICKS
    ]
    second = [{"task": "tfbind8", "table": SECOND, "objective": "db", "dynamics": "neural", "net": "lookup", "stick": s} for s in STICKS]
    nets = [{"task": "tfbind8", "objective": "db", "dynamics": "neural", "net": n, "stick": 0.25} for n in ("mlp",)]
    grid = [{"task": "grid", "objective": "db", "dynamics": d, "net": "mlp", "stick": s} for d in ("neural", "known") for s in (0.25, 0.5)]
    return bind + second + nets + grid


def run(row: dict[str, Any], device: str, seconds: float, seeds: int) -> dict[str, Any]:
    from stochflow.config import configure
    from stochflow.experiment import Experiment

    settings = {k: v for k, v in row.items() if k != "task"}
    if row["task"] == "tfbind8":
        settings["batch"] = 4096 if device == "cuda" else 1024
        if row["net"] == "mlp":
            settings |= {"hidden": 1024, "layers": 3, "lr": 1e-3}
        elif row["objective"] == "flow-kl":
            settings["lr"] = 3e-3
    made = Experiment(configure(row["task"], seeds=seeds, device=device, **settings))
    begun = time.perf_counter()
    while time.perf_counter() - begun < seconds:
        made.trainer.train(made.trainer.steps_done + 50)
        float(made.trainer.raw_stats[0, 0])  # wait for the device
    spent = time.perf_counter() - begun
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
    parameters = sum(p.numel() for p in made.policy.parameters()) // seeds
    return {
        **row,
        "batch": made.config.train.batch,
        "seconds": round(spent, 1),
        "steps": made.trainer.steps_done,
        "parameters": parameters,
        **found,
    }


def measure(device: str, seconds: float, seeds: int, out: Path, wanted: list[dict[str, Any]]) -> None:
    from common import header

    done = json.loads(out.read_text())["rows"] if out.exists() else []
    keys = [tuple(sorted(r.items())) for r in wanted]
    have = {tuple(sorted((k, v) for k, v in d.items() if k in ("task", "table", "objective", "dynamics", "net", "stick"))) for d in done}
    out.parent.mkdir(parents=True, exist_ok=True)
    for key, row in zip(keys, wanted, strict=True):
        if key in have:
            continue
        done.append(run(row, device, seconds, seeds))
        out.write_text(json.dumps({**header(device, seconds=seconds, seeds=seeds), "rows": done}, indent=1) + "\n")
        last = done[-1]
        print(
            {k: last[k] for k in ("task", "stick", "objective", "dynamics", "net", "steps", "tv", "limit_tv", "floor_tv", "l1")}, flush=True
        )


def figure(row: dict[str, Any], key: str) -> str:
    value, low, high = row[key], row.get(f"{key}_low"), row.get(f"{key}_high")
    if value is None:
        return "–"
    return f"{value:.4f}" if low is None else f"{value:.4f} [{low:.4f}, {high:.4f}]"


def table(result: dict[str, Any]) -> str:
    lines = [
        "| task | stick | objective | dynamics | net | steps | seconds | TV, median [95 %] | its limit | floor | naive | kernel TV |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for r in result["rows"]:
        name = r["task"] + (f" ({r['table']})" if "table" in r else "")
        numbers = " | ".join("–" if r[k] is None else f"{r[k]:.4f}" for k in ("limit_tv", "floor_tv", "naive_tv", "dynamics_tv"))
        lines.append(
            f"| {name} | {r['stick']} | {r['objective']} | {r['dynamics']} | {r['net']} | {r['steps']:,} | {r['seconds']:.0f} | {figure(r, 'tv')} | {numbers} |"
        )
    return "\n".join(lines)


def render() -> str:
    parts = [(HERE / "results_page.md").read_text().rstrip()]
    for file, title in (
        ("stochastic_gpu.json", "TFBind8 on one GPU"),
        ("stochastic_cpu.json", "TFBind8 on the CPU"),
        ("stochastic_grid.json", "The 8 x 8 grid on the CPU"),
    ):
        path = HERE / "results" / file
        if path.exists():
            result = json.loads(path.read_text())
            s = result["settings"]
            parts.append(
                f"## {title}\n\n{result['hardware']}, torch {result['versions']['torch']}; {s['seeds']} seed{'s stacked' if s['seeds'] > 1 else ''}; "
                f"the seconds are those of all of them together.\n\n{table(result)}"
            )
    return "\n\n".join(parts) + "\n"


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    a.add_argument("--seconds", type=float, default=20.0)
    a.add_argument("--seeds", type=int, default=5)
    a.add_argument("--only", choices=("all", "strings", "grid"), default="all")
    a.add_argument("--out", type=Path, default=HERE / "results" / "stochastic_gpu.json")
    a.add_argument("--render", action="store_true")
    given = a.parse_args()
    if given.render:
        print(render(), end="")
        return
    wanted = rows()
    if given.only == "grid":
        wanted = [r for r in wanted if r["task"] == "grid"]
    elif given.only == "strings":
        wanted = [r for r in wanted[:3] if r["task"] == "tfbind8"]
    measure(given.device, given.seconds, given.seeds, given.out, wanted)


if __name__ == "__main__":
    main()
