"""From run folders to the text of a page. The live view uses the same parts."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from stochflow.law.verdict import REACHED, number, remarks, verdict
from stochflow.look import health
from stochflow.look.labels import LABELS, tiles
from stochflow.look.report.curves import curves
from stochflow.look.report.designs import read_designs
from stochflow.look.report.drawing import owned
from stochflow.look.report.files import RunFiles
from stochflow.look.report.law import law_panels
from stochflow.look.report.noise import noise_panels
from stochflow.runs.config import UserTask


def page(runs: Sequence[RunFiles], live: int = 0, version: str = "") -> str:
    """One HTML page about these runs. `live`: it asks that often (seconds) whether `version` has changed; 0 for a page that is kept."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    return (
        _template("page")
        .render(title=title, runs=[section(r, i) for i, r in enumerate(runs, 1)], live=live, version=version)
        .lstrip()
    )


def section(run: RunFiles, number: int = 1) -> dict[str, Any]:
    """All that the page says about one run."""
    found, train = run.last, run.config.train
    name, designs = f"run-{number}", read_designs(run)
    findings = run.health()
    return {
        "id": name,
        "name": run.name,
        "state": _state(run),
        "verdict": verdict(found, advise=False),
        "remarks": remarks(found),
        "gaps": [*run.gaps[:5], *([f"and {len(run.gaps) - 5} more such"] if len(run.gaps) > 5 else [])],
        "task": run.config.task.name,
        "objective": run.training["objective"],
        "seeds": train.seeds,
        "tiles": [_tile(found, key, train.seeds) for key in tiles(found)],
        "health": health.verdict(findings, run.step),
        "findings": findings,
        "early": run.step < health.WARM_UP,
        "checks": [health.TITLES[k] for k in health.CHECKS if k not in {f.name for f in findings}],
        "law": [owned(p, name) for p in (*law_panels(run), *noise_panels(run))],
        "curves": [owned(p, name) for p in curves(run)],
        "designs": designs,
        "logos": [owned(p, name) for p in designs.logos] if designs else [],
        "behind": _behind(run),
        "command": run.command(),
        "settings": _settings(run),
        "environment": _environment(run),
    }


def _number(value: Any) -> str:
    return number(value, ",").replace(",", "\u2009")  # a thin space between groups


def _tile(found: dict[str, Any], key: str, seeds: int) -> dict[str, str]:
    low, high = found.get(f"{key}_low"), found.get(f"{key}_high")
    note = f"{_number(low)} to {_number(high)}" if low is not None and high is not None and low != high else ""
    note = note.replace("-", "\u2212")  # a minus does not break over the line, a hyphen does
    if key == "modes" and found.get("modes_all"):
        note = f"of {_number(found['modes_all'])}, in {_number(found.get('samples'))} samples" + (
            f"; {note}" if note else ""
        )
    value = found[key]
    if key == "oracle_calls" and seeds > 1:
        note = f"of all {seeds} seeds together"
    if key == "floor_tv":
        note = str(found.get("floor_kind") or "")
        value = 0 if value < REACHED else value
    return {"words": LABELS[key].words, "value": _number(value), "note": note}


def _state(run: RunFiles) -> str:
    total = run.config.train.steps
    if run.done:
        seconds = run.summary.get("seconds")
        words = f"{_number(run.summary.get('step'))} steps" + ("" if seconds is None else f" in {_duration(seconds)}")
        return words + (
            f", until its {_number(run.config.train.oracle_calls)} oracle calls were spent" if run.spent else ""
        )
    return f"step {_number(run.step)} of {_number(total)}"


def _behind(run: RunFiles) -> str:
    if run.behind is None:
        return ""
    return f"As it was at step {_number(run.behind)}, where the run had ended before; written anew when it ends again."


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return (
        f"{seconds:.1f} s"
        if seconds < 60
        else f"{minutes} min {rest} s"
        if minutes < 60
        else f"{minutes // 60} h {minutes % 60} min"
    )


def _settings(run: RunFiles) -> list[tuple[str, str]]:
    data = run.config.to_dict()
    task = {k: v for k, v in data["task"].items() if k != "name" and v != ""}
    prefix = "" if not isinstance(run.config.task, UserTask) else "task: "
    return [(f"{prefix}{k.replace('_', ' ')}", str(v)) for k, v in task.items()] + [
        (k.replace("_", " "), str(v)) for k, v in run.training.items()
    ]


def _environment(run: RunFiles) -> str:
    e = run.environment
    if not e:
        return ""
    versions = ", ".join(f"{k} {v}" for k, v in (e.get("versions") or {}).items())
    parts = [
        f"stochflow {e.get('stochflow')}",
        f"commit {e['commit']}" if e.get("commit") else "",
        f"Python {e.get('python')}",
        versions,
    ]
    threads = f"{e.get('threads')} thread{'' if e.get('threads') == 1 else 's'}"
    parts += [f"{e.get('device')}, {e.get('cores')} cores, {threads}" if e.get("device") else ""]
    return "; ".join(p for p in parts if p) + "."


@lru_cache
def _template(name: str) -> Any:
    import jinja2

    from stochflow.look.report import template

    made = jinja2.Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined)
    pages = {"page": template.PAGE, "compare": template.COMPARE, "sweep": template.SWEEP, "trouble": template.TROUBLE}
    made.loader = jinja2.DictLoader(pages | {"style": template.STYLE, "figure": template.FIGURE})
    return made.get_template(name)


def render(name: str, **what: Any) -> str:
    """A page of the same house style; see template.py."""
    return _template(name).render(**what).lstrip()
