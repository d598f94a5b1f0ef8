"""Put the tables of docs/speed.md in their places, from the committed results.

    python benchmarks/speed_tables.py            # rewrite the page
    python benchmarks/speed_tables.py --check    # say whether it is up to date

A table stands between `<!-- NAME -->` and `<!-- end -->`; its figures are in benchmarks/results, in the file that TABLES names.
Ratios are those of medians taken within one run.
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
PAGE = ROOT / "docs" / "speed.md"
RESULTS = ROOT / "benchmarks" / "results"
LIBRARIES = ("stochflow", "torchgfn", "gfnx")
TITLES = {
    "grid2": "grid 2-D, side 8",
    "grid4": "grid 4-D, side 20",
    "tfbind8": "TFBind8",
    "bits": "bit sequences, 120 bits in words of 8",
}
Found = dict[str, Any]


def lines(head: list[str], rows: list[list[str]]) -> str:
    table = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in table)


def number(x: float) -> str:
    """Three figures, and no more than four places."""
    return (
        f"{x:,.0f}"
        if x >= 100
        else f"{x:.1f}"
        if x >= 10
        else f"{x:.2f}"
        if x >= 1
        else f"{x:.3f}"
        if x >= 0.1
        else f"{x:.4f}"
    )


def cell(row: Found, library: str, key: str, scale: float = 1.0) -> str:
    found = row.get(library, {})
    return number(found[key] * scale) if found.get(key) is not None else "–"


def ratio(row: Found, library: str, key: str = "ms") -> str:
    """How many times what stochflow takes."""
    theirs, ours = row.get(library, {}).get(key), row["stochflow"].get(key)
    return f"{theirs / ours:.1f}" if theirs and ours else "–"


def measured(found: Found) -> str:
    """Where the figures come from."""
    versions = "; ".join(", ".join(f"{k} {v}" for k, v in each.items()) for each in found["versions"].values())
    settings = found["settings"]
    own = ", ".join(f"{k} {v}" for k, v in settings["stochflow"].items())
    net = f"{settings['objective']}, {settings['hidden']} x {settings['layers']} MLP, Adam {settings['lr']:g}, {settings['precision']}"
    made = f"{found['date']}, commit {found['commit']}" if found.get("commit") else found["date"]
    return f"*{found['hardware']}; {versions}; {net}{', stochflow with ' + own if own else ''}; median of {settings['windows']} windows; {made}.*"


def failed(rows: list[Found]) -> str:
    """What could not be measured, and why."""
    why: dict[str, list[str]] = {}
    for r in rows:
        for name in LIBRARIES:
            if "error" in r.get(name, {}):
                why.setdefault(r[name]["error"], []).append(f"{name} on {TITLES[r['task']]}, batch {r['batch']}")
    return "".join(f"\n\nNot measured ({reason}): {'; '.join(what)}." for reason, what in why.items())


def answered(rows: list[Found]) -> list[Found]:
    """The rows in which somebody was measured."""
    return [r for r in rows if any("ms" in r.get(name, {}) for name in LIBRARIES)]


def peers(found: Found) -> str:
    head = [
        "task",
        "batch",
        *(f"{name}, ms" for name in LIBRARIES),
        "torchgfn / stochflow",
        "gfnx / stochflow",
        "stochflow, trajectories a second",
    ]
    rows = []
    for r in answered(found["speed"]):
        speed = r["stochflow"].get("trajectories_a_second")
        times = [cell(r, name, "ms") for name in LIBRARIES]
        rows.append(
            [
                TITLES[r["task"]],
                str(r["batch"]),
                *times,
                ratio(r, "torchgfn"),
                ratio(r, "gfnx"),
                f"{speed:,}" if speed else "–",
            ]
        )
    return lines(head, rows) + failed(found["speed"]) + "\n\n" + measured(found)


def processor(found: Found) -> str:
    head = [
        "task",
        "batch",
        *(f"{name}, processor ms" for name in LIBRARIES),
        "torchgfn / stochflow",
        "gfnx / stochflow",
    ]
    rows = []
    for r in found["speed"]:
        times = [cell(r, name, "processor_ms") for name in LIBRARIES]
        rows.append(
            [
                TITLES[r["task"]],
                str(r["batch"]),
                *times,
                ratio(r, "torchgfn", "processor_ms"),
                ratio(r, "gfnx", "processor_ms"),
            ]
        )
    return lines(head, rows)


def noise(found: Found) -> str:
    """Beside the same task without noise, which is what the peers can do."""
    plain = {r["batch"]: r for r in found["speed"] if r["task"] == "tfbind8"}
    rows = []
    for r in answered(found["noise"]):
        same = plain.get(r["batch"], {"stochflow": {}})
        rows.append(
            [
                str(r["batch"]),
                cell(same, "stochflow", "ms"),
                cell(r, "stochflow", "ms"),
                cell(same, "gfnx", "ms"),
                cell(same, "torchgfn", "ms"),
            ]
        )
    head = [
        "batch",
        "stochflow, no noise, ms",
        "stochflow, stick 0.25 and a learned model of it, ms",
        "gfnx, no noise, ms",
        "torchgfn, no noise, ms",
    ]
    return lines(head, rows)


def memory(found: Found) -> str:
    rows = [
        [TITLES[r["task"]], str(r["batch"]), *(cell(r, name, "memory", 2**-20) for name in LIBRARIES)]
        for r in answered(found["speed"])
    ]
    kind = "peak of the device" if found["device"] == "cuda" else "peak beyond imports"
    return lines(["task", "batch", *(f"{name}, MiB" for name in LIBRARIES)], rows) + f"\n\n*MiB: {kind}.*"


def learns(found: Found) -> str:
    head = ["task", "batch", *(f"{name}: parameters, iterations, mean length, loss" for name in LIBRARIES)]
    rows = []
    for r in answered(found["speed"]):
        told = []
        for name in LIBRARIES:
            x = r.get(name, {})
            told.append(
                f"{x['parameters']:,}, {x['iterations']:,}, {x['length']:.1f}, {x['loss_first']:.3g} → {x['loss_last']:.3g}"
                if "loss_last" in x
                else "–"
            )
        rows.append([TITLES[r["task"]], str(r["batch"]), *told])
    return lines(head, rows)


def seeds(found: Found) -> str:
    one = {
        (r["task"], r["batch"]): r["stochflow"].get("ms")
        for r in (*found["speed"], *(r for r in found["seeds"] if r["seeds"] == 1))
    }
    rows = []
    for r in answered([r for r in found["seeds"] if r["seeds"] > 1]):
        single, many = one.get((r["task"], r["batch"])), r["stochflow"].get("ms")
        times = f"{many / single:.2f}" if single and many else "–"
        rows.append(
            [
                TITLES[r["task"]],
                str(r["batch"]),
                str(r["seeds"]),
                number(single) if single else "–",
                number(many) if many else "–",
                times,
            ]
        )
    return lines(["task", "batch", "seeds", "one seed, ms", "all seeds, ms", "ratio"], rows)


def arrival(found: Found) -> str:
    head = ["task", "batch", "exact TV", *(f"{name}: seconds (iterations; seeds that arrived)" for name in LIBRARIES)]
    rows = []
    for r in found["tv"]:
        told = []
        for name in LIBRARIES:
            x = r.get(name, {})
            if "reached" not in x:
                told.append("–")
                continue
            arrived = f"{x['reached']} of {len(x['runs'])}"
            if x["seconds"] is None:
                told.append(f"not in {r['most']:g} ({arrived})")
            else:
                told.append(f"{number(x['seconds'])} ({x['iterations']:,}; {arrived})")
        rows.append([TITLES[r["task"]], str(r["batch"]), f"{r['tv']:g}", *told])
    return lines(head, rows) + failed(found["tv"])


def profiled(after: Found) -> str:
    """Operators and milliseconds an iteration, beside those of an earlier checkout."""
    before = {r["task"]: r for r in json.loads((RESULTS / "profile_cpu_before.json").read_text())["rows"]}
    rows = []
    for r in after["rows"]:
        old = before[r["task"]]
        rows.append([r["task"], f"{old['operators']:,}", f"{r['operators']:,}", number(old["ms"]), number(r["ms"])])
    head = ["task, batch 16, one seed", "operators before", "operators now", "processor ms before", "processor ms now"]
    return lines(head, rows) + "\n\n" + where(after)


def profiled_gpu(found: Found) -> str:
    """Kernels and milliseconds an iteration, with torch's operators alone and with the kernels of the house."""
    made = {(r["task"], r["kernel"]): r for r in found["rows"] if not r["compiled"]}
    rows = []
    for task in dict.fromkeys(r["task"] for r in found["rows"]):
        plain, own = made[task, False], made[task, True]
        ours = [
            f"`{name}` {us:.0f}" for name, us in own["longest_us"].items() if "::" not in name and len(name) < 20
        ]  # torch's have long names
        longest = ", ".join(ours[:3])
        rows.append([task, str(plain["kernels"]), str(own["kernels"]), number(plain["ms"]), number(own["ms"]), longest])
    head = [
        "task, batch 16, one seed",
        "kernels, operators alone",
        "kernels now",
        "ms, operators alone",
        "ms now",
        "the longest of ours, microseconds",
    ]
    return lines(head, rows) + "\n\n" + where(found)


def start(found: Found) -> str:
    first = next(r for r in found["speed"] if all("first_s" in r.get(n, {}) for n in found["import_s"]))
    rows = []
    for name, imported in found["import_s"].items():
        begun = first[name]["first_s"]
        rows.append([name, f"{imported:.1f}", f"{begun:.1f}", f"{imported + begun:.1f}"])
    title = f"the first iteration of {TITLES[first['task']]}, batch {first['batch']}, s"
    return lines(["library", "import, s", title, "together, s"], rows)


def own(found: Found) -> str:
    rows = []
    for r in found["rows"]:
        more = [
            number(r["eager_ms"]) if "eager_ms" in r else "–",
            f"{r['operators']:,}" if "operators" in r else "–",
            str(r.get("peak_mib", "–")),
        ]
        rows.append([r["task"], str(r["batch"]), str(r["seeds"]), number(r["ms"]), *more])
    return lines(["task", "batch", "seeds", "ms", "eager, ms", "operators", "peak, MiB"], rows) + "\n\n" + where(found)


def where(found: Found) -> str:
    return f"*{found['hardware']}; " + ", ".join(f"{k} {v}" for k, v in found["versions"].items()) + ".*"


def growth(found: Found) -> str:
    rows = []
    for what in ("horizon", "batch", "alphabet", "seeds"):
        for r in found.get(what, []):
            if "error" in r:
                rows.append([what, "", r["error"], "", ""])
                continue
            value = {"horizon": r["horizon"], "batch": r["batch"], "alphabet": r["moves"], "seeds": r.get("seeds", 1)}[
                what
            ]
            fixed = {"horizon": f"alphabet {r['moves']}", "alphabet": f"horizon {r['horizon']}"}.get(
                what, f"TFBind8, stick {r.get('stick', 0):g}"
            )
            held = fixed if what == "batch" else f"{fixed}, batch {r['batch']}"
            rows.append([what, held, f"{value:,}", number(r["ms"]), number(r["peak_mib"])])
    return lines(["what grows", "what stays", "value", "ms per iteration", "peak, MiB"], rows) + "\n\n" + where(found)


def states(found: Found) -> str:
    rows = []
    for r in found["states"]:
        name = "TFBind8, stick 0.25" if r["task"] == "tfbind8" else f"grid {r['ndim']}-D, side {r['side']}"
        if "error" in r:
            rows.append([name, r["error"], "", "", "", ""])
        else:
            rows.append(
                [
                    name,
                    f"{r['states']:,}",
                    number(r["graph_s"]),
                    number(r["law_s"]),
                    number(r["peak_mib"]),
                    f"{r['bytes_a_state']:,}",
                ]
            )
    return (
        lines(["space", "states", "listing it, s", "law of a policy, s", "peak, MiB", "bytes per state"], rows)
        + "\n\n"
        + where(found)
    )


def floor(found: Found) -> str:
    """Beside what was measured, and what was hoped for: a third of gfnx's time, or three times one seed's."""
    told = json.loads((RESULTS / "speed_cpu2.json").read_text())
    one = {r["task"]: r for r in told["speed"] if r["batch"] == found["batch"]}
    many = {(r["task"], r["seeds"]): r["stochflow"]["ms"] for r in told["seeds"] if r["batch"] == found["batch"]}
    rows = []
    for r in found["rows"]:
        own = one[r["task"]]["stochflow"]["ms"]
        alone = many.get((r["task"], 1), own)
        hoped, ours = (
            (one[r["task"]]["gfnx"]["ms"] / 3, own) if r["seeds"] == 1 else (3 * alone, many[r["task"], r["seeds"]])
        )
        least = r["products_ms"] + r["update_ms"]
        figures = [number(x) for x in (r["products_ms"], r["update_ms"], least, ours, hoped)]
        some = ", ".join(f"{100 * x:.0f} %" for x in r["nonzero"])
        rows.append([r["title"], str(r["seeds"]), f"{r['states']:,}", some, *figures])
    head = [
        "task, batch 16",
        "seeds",
        "distinct states per seed",
        "nonzero activations of the two layers",
        "products, ms",
        "update, ms",
        "together",
    ]
    head += ["our iteration, ms", "hoped for, ms"]
    return lines(head, rows) + "\n\n" + where(found)


def first(found: Found) -> str:
    rows = [[r["title"], number(r["first_s"]), number(r["later_s"])] for r in found["rows"]]
    return lines(["task", "nothing was ever compiled, s", "it was, s"], rows) + "\n\n" + where(found)


TABLES: dict[str, tuple[str, Callable[[Found], str]]] = {}
for _where in ("gpu", "cpu", "cpu2"):
    for _name, _make in {
        "peers": peers,
        "processor": processor,
        "noise": noise,
        "memory": memory,
        "learns": learns,
        "seeds": seeds,
        "tv": arrival,
        "start": start,
    }.items():
        TABLES[f"{_name}-{_where}"] = (f"speed_{_where}", _make)
for _where in ("gpu", "cpu"):
    TABLES |= {
        f"own-{_where}": (f"speed_own_{_where}", own),
        f"growth-{_where}": (f"speed_growth_{_where}", growth),
        f"states-{_where}": (f"speed_growth_{_where}", states),
    }


def pieces(found: Found) -> str:
    """What is slower without each piece, the most telling row first; a piece that was not measured is left out."""
    rows = []
    for piece in found["pieces"]:
        ratios = {row: ms["without_ms"] / ms["ms"] for row, ms in piece["rows"].items()}
        best = sorted(ratios, key=lambda row: -ratios[row])
        if best:
            rows.append(
                [
                    piece["name"],
                    str(piece["lines"]),
                    *(f"{ratios[row]:.2f} ({row.replace('/', ', ')})" for row in (best[0], best[-1])),
                ]
            )
    rows.sort(key=lambda row: -float(row[2].split()[0]))
    made = f"*{found['hardware']}; torch {found['torch']}; {found['date']}.*"
    return lines(["piece", "lines", "slower without it, at most", "and at least"], rows) + "\n\n" + made


def rebuilt(found: Found) -> str:
    """The rows of the comparison measured again, stochflow alone; on the CPU by processor time."""
    key = "ms" if found["device"] == "cuda" else "processor_ms"
    old = json.loads((RESULTS / ("speed_gpu.json" if found["device"] == "cuda" else "speed_cpu.json")).read_text())
    before = {(kind, r["task"], r["batch"]): r["stochflow"][key] for kind in ("speed", "noise") for r in old[kind]}
    rows = []
    for kind in ("speed", "noise"):
        for r in found[kind]:
            was, now = before.get((kind, r["task"], r["batch"])), r["stochflow"].get(key)
            if was and now:
                name = TITLES[r["task"]] + (f", stick {r['stick']:g}, learned noise" if kind == "noise" else "")
                rows.append([name, str(r["batch"]), number(was), number(now), f"{now / was:.2f}"])
    made = f"*{found['hardware']}; torch {found['versions']['stochflow']['torch']}; {old['date']} and {found['date']}, commits {old['commit']} and {found['commit']}.*"
    return lines(["task", "batch", "before, ms", "now, ms", "ratio"], rows) + "\n\n" + made


def without_four(found: Found) -> str:
    """What four small optimisations win together: the same rows with and without them."""
    beside = {
        kind: json.loads((RESULTS / f"{name}.json").read_text())[kind]
        for kind, name in (("speed", "speed_rebuilt_gpu"), ("noise", "speed_rebuilt_gpu"), ("seeds", "speed_gpu"))
    }
    rows = []
    for kind, each in beside.items():
        with_them = {(r["task"], r["batch"], r.get("seeds", 1)): r["stochflow"]["ms"] for r in each}
        for r in found[kind]:
            seeds = r.get("seeds", 1)
            ratio = r["stochflow"]["ms"] / with_them[r["task"], r["batch"], seeds]
            if ratio >= 1.05 and (kind != "seeds" or seeds > 1):
                name = TITLES[r["task"]] + (", learned noise" if kind == "noise" else "")
                rows.append((ratio, [name, str(r["batch"]), str(seeds), f"{ratio:.2f}"]))
    rows.sort(key=lambda row: -row[0])
    return lines(["task", "batch", "seeds", "slower without the four"], [row for _, row in rows])


TABLES["four-gpu"] = ("speed_without_four_gpu", without_four)
TABLES["rebuilt-gpu"] = ("speed_rebuilt_gpu", rebuilt)
TABLES["pieces-cpu"] = ("pieces_cpu", pieces)
TABLES["pieces-gpu"] = ("pieces_gpu", pieces)
TABLES["floor-cpu2"] = ("cpu_floor", floor)
TABLES["first-cpu"] = ("first_step", first)
TABLES["profile-cpu"] = ("profile_cpu", profiled)
TABLES["profile-gpu"] = ("profile_gpu", profiled_gpu)


def render(page: str) -> str:
    """The page with every table made again."""

    def fill(match: re.Match[str]) -> str:
        source, make = TABLES[match.group(1)]
        return f"<!-- {match.group(1)} -->\n{make(json.loads((RESULTS / f'{source}.json').read_text()))}\n<!-- end -->"

    return re.sub(r"<!-- ([a-z0-9-]+) -->\n.*?<!-- end -->", fill, page, flags=re.S)


def main() -> None:
    a = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    a.add_argument("--check", action="store_true")
    given = a.parse_args()
    page = PAGE.read_text()
    made = render(page)
    if given.check:
        sys.exit(
            0 if made == page else "docs/speed.md is not what the results say: run python benchmarks/speed_tables.py"
        )
    PAGE.write_text(made)


if __name__ == "__main__":
    main()
