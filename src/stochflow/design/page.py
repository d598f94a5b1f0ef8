"""The page a biologist reads: designs first, then the batch, what the model knows, progress; how it was drawn comes last, folded."""

from __future__ import annotations

import difflib
import html
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from stochflow.design import page_figures as figures
from stochflow.design.campaign import Campaign, by_design
from stochflow.design.objectives import hypervolume, pareto
from stochflow.design.page_template import PAGE, ROWS, STYLE
from stochflow.design.store import FAILED, OK, Row, read_json
from stochflow.design.validation import IDENTITY
from stochflow.errors import UserError
from stochflow.files.reading import shown
from stochflow.look.report.drawing import Panel, owned
from stochflow.look.report.template import FIGURE
from stochflow.look.report.template import STYLE as COMMON

FIRST = 24  # designs shown before the fold
LONG = 30  # letters from which a sequence takes a wide cell and a logo the whole row
PLATES = {"random": "a random plate", "genetic algorithm": "one that a genetic algorithm makes of the best measured"}
GROUP = 10  # letters between two gaps of a sequence


@dataclass
class Value:
    mean: str
    low: str = ""
    high: str = ""


@dataclass
class Design:
    """One row of the table."""

    well: str
    id: str
    sequence: str  # HTML
    role: str
    far: bool
    values: list[Value]
    exact: str
    low: str  # 10 % quantile of what is made
    gc: str
    distance: str
    measured: str


@dataclass
class Page:
    """Everything the template shows."""

    name: str
    folder: str
    about: str
    verdict: str
    tiles: list[tuple[str, str]]
    columns: list[str]
    long: bool
    settings: list[tuple[str, str]]
    round: int = 0
    marks: str = ""
    rules: str = ""
    notes: list[str] = field(default_factory=list)
    designs: list[Design] = field(default_factory=list)
    more: list[Design] = field(default_factory=list)
    shows: dict[str, bool] = field(default_factory=dict)
    batch: list[Panel] = field(default_factory=list)
    batch_words: str = ""
    models: list[dict[str, Any]] = field(default_factory=list)
    knows: list[str] = field(default_factory=list)
    knowledge: list[Panel] = field(default_factory=list)
    coverage: list[dict[str, str]] = field(default_factory=list)
    reach: list[dict[str, str]] = field(default_factory=list)
    progress: list[Panel] = field(default_factory=list)
    front_words: list[str] = field(default_factory=list)
    law: list[str] = field(default_factory=list)


def write_page(campaign: Campaign, out: Path | None = None) -> Path:
    """One self-contained HTML file; report.html of the campaign unless told otherwise."""
    from jinja2 import DictLoader, Environment

    from stochflow.runs.atomic import write_text

    try:
        page = collect(campaign)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"the rounds of {shown(campaign.path)} cannot be read ({type(error).__name__}: {shown(str(error))}): restore them from a copy"
        ) from error
    loader = DictLoader({"page": PAGE, "rows": ROWS, "figure": FIGURE, "style": COMMON, "own": STYLE})
    text = Environment(loader=loader, autoescape=True, trim_blocks=True).get_template("page").render(page=page)
    return write_text(out or campaign.path / "report.html", text)


def collect(campaign: Campaign) -> Page:
    """Read the folder into what the page shows."""
    s = campaign.settings
    history, best, measured = campaign.history(), campaign.best(), campaign.measured()
    rounds = campaign.store.rounds()
    said = [f"{c.describe()}: best measured {best[c.name]['value']:.4g}" for c in s.columns]
    kind = {"ACGT": "DNA", "ACGU": "RNA", "ACDEFGHIKLMNPQRSTVWY": "protein"}.get(s.alphabet, f"letters {s.alphabet}")
    size = f"{s.min_length}" if s.min_length == s.max_length else f"{s.min_length} to {s.max_length}"
    page = Page(
        name=campaign.path.name,
        folder=str(campaign.path.name),
        about=f"{kind}, {size} letters · {len(measured.sequences)} sequences measured · {len(rounds)} round{'s' if len(rounds) != 1 else ''} proposed",
        verdict="; ".join(said) + ".",
        tiles=_tiles(campaign, history),
        columns=[c.name if len(s.columns) > 1 else f"predicted {c.name}" for c in s.columns],
        long=s.max_length > LONG,
        settings=_settings(campaign),
    )
    if rounds:
        _batch(page, campaign, rounds[-1])
        _knowledge(page, campaign, history)
    _progress(page, campaign, history)
    for name in ("batch", "knowledge", "progress"):
        setattr(page, name, [owned(p, name) for p in getattr(page, name)])
    return page


def _tiles(campaign: Campaign, history: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    tiles = []
    for column in campaign.settings.columns:
        begun = history[0]["columns"][column.name]["values"]
        first = max(begun, key=lambda v: column.sign * v) if begun else float("nan")
        now = campaign.best()[column.name]
        tiles.append((f"{now['value']:.4g}", f"best {column.name} so far; {first:.4g} in the first data"))
    tiles.append((str(len(campaign.pending())), "designs ordered and not measured yet"))
    if campaign.failed():
        tiles.append((str(len(campaign.failed())), "failed wells"))
    return tiles


# the designs ----------------------------------------------------------------------------------------------------


def _batch(page: Page, campaign: Campaign, folder: Path) -> None:
    s = campaign.settings
    rows, done = campaign.store.proposal(folder), read_json(folder / "done.json")
    page.round = int(folder.name)
    values = _measured_by_id(campaign)
    reference = "the wild type" if s.wild_type else "the nearest measured sequence"
    page.marks = f"Underlined letters differ from {reference}. Distance: letters to the nearest measured sequence. Intervals hold 80 % of held-out groups."
    if s.noise:
        page.marks += f" Exact: the chance that the order comes out as written; predictions are expected values of what is made{_how_expected(done)}, and below the chance stands their 10 % quantile."
    page.rules = f"All new designs meet the rules: {done.get('space')}." if s.rules else ""
    page.notes = [n for n in done.get("notes", []) if "of the" in n and "designs asked for" in n]
    page.law = [n for n in done.get("notes", []) if n not in page.notes]
    made = [_design(row, campaign, values) for row in rows]
    page.designs, page.more = made[:FIRST], made[FIRST:]
    page.shows = {
        "exact": any(d.exact for d in made),
        "gc": any(d.gc for d in made),
        "measured": any(d.measured for d in made),
    }
    designs = [r for r in rows if r["role"] == "design"]
    texts = [r["sequence"] for r in designs]
    clusters = [int(r["cluster"]) for r in designs]
    measured = campaign.measured()
    order = np.argsort(-s.columns[0].sign * np.nan_to_num(measured.values[:, 0], nan=-np.inf), kind="stable")
    known = [measured.sequences[i] for i in order[: figures.ON_MAP]]
    page.batch = [p for p in (figures.logo(texts), figures.design_map(texts, clusters, known)) if p]
    gap = figures.distances(texts, texts)
    apart = gap[np.triu_indices(len(texts), 1)]
    if len(apart):
        groups, least = len(set(clusters)), int(apart.min())
        page.batch_words = f"{len(texts)} new designs in {groups} cluster{'s' if groups > 1 else ''}; any two differ in at least {least} letter{'s' if least > 1 else ''}, on average in {apart.mean():.1f}."
    page.batch_words += expected_words(done, [c.name for c in s.columns])


def expected_words(done: dict[str, Any], names: Sequence[str]) -> str:
    """The plate beside others of the same size, by the model's own word; empty where nothing was compared."""
    said = ""
    for name in names:
        found = expected_of(done, name)
        others = " and ".join(f"{value:.3g} of {PLATES[kind]}" for kind, value in found.items() if kind in PLATES)
        if others and "this plate" in found:
            said += f" The model expects a mean {name} of {found['this plate']:.3g} of these designs, {others}."
    return said


def expected_of(done: dict[str, Any], name: str) -> dict[str, float]:
    """What a round's model expected of plates in one column; older rounds have it of their only column."""
    found = dict(done.get("expected") or {})
    own = found.get(name, found)
    return {kind: value for kind, value in dict(own).items() if isinstance(value, float)}


def _how_expected(done: dict[str, Any]) -> str:
    makings = done.get("makings")
    return f" (the mean of {makings} simulated makings)" if makings else ""


def _measured_by_id(campaign: Campaign) -> dict[str, Row]:
    """The last value of each design; a failure only where there is no value."""
    recorded = by_design(campaign.store.measured())
    return {name: sorted(rows, key=lambda r: r["status"] == OK)[-1] for name, rows in recorded.items()}


def _design(row: Row, campaign: Campaign, measured: dict[str, Row]) -> Design:
    s = campaign.settings
    single = len(s.columns) == 1
    reference = s.wild_type or row.get("nearest_measured") or row["sequence"]
    values = []
    for column in s.columns:
        suffix = "" if single else f"_{column.name}"
        low, high = row.get(f"low80{suffix}"), row.get(f"high80{suffix}")
        values.append(Value(_number(row.get(f"predicted{suffix}")), _number(low), _number(high)))
    found = measured.get(row["id"])
    told = ""
    if found is not None:
        told = "failed" if found["status"] == FAILED else ", ".join(_number(found[c.name]) for c in s.columns)
    share = row.get("chance_exact")
    return Design(
        well=row["well"],
        id=row["id"],
        sequence=marked(row["sequence"], reference),
        role="" if row["role"] == "design" else row["role"],
        far=row.get("extrapolates") is True,
        values=values,
        exact="" if not isinstance(share, float) else f"{share:.0%}" if share >= 0.01 else f"{share:.1g}",
        low=", ".join(_number(row[k]) for k in row if k.startswith("made_low")),
        gc="" if not isinstance(row.get("gc"), float) else f"{row['gc']:.0%}",
        distance="" if not isinstance(row.get("distance"), float) else f"{row['distance']:.0f}",
        measured=told,
    )


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) else ""


def marked(text: str, reference: str) -> str:
    """HTML of a sequence in groups of ten letters, those marked that differ from the reference (by alignment where lengths differ)."""
    if len(text) == len(reference):
        other = [a != b for a, b in zip(text, reference, strict=True)]
    else:
        other = [True] * len(text)
        for block in difflib.SequenceMatcher(None, reference, text, autojunk=False).get_matching_blocks():
            other[block.b : block.b + block.size] = [False] * block.size
    out = []
    for start in range(0, len(text), GROUP):
        letters = []
        for i in range(start, min(start + GROUP, len(text))):
            safe = html.escape(text[i])
            letters.append(f"<b>{safe}</b>" if other[i] else safe)
        out.append(f"<span>{''.join(letters)}</span>")
    return "<wbr>".join(out)


# the model ------------------------------------------------------------------------------------------------------


def _knowledge(page: Page, campaign: Campaign, history: Sequence[dict[str, Any]]) -> None:
    for part in campaign.model_figures() or []:
        name = part["column"]
        for m in part["considered"]:
            page.models.append(
                {
                    "column": name,
                    "name": m["model"],
                    "chosen": m["model"] == part["chosen"],
                    "rmse": _number(m["rmse"]),
                    "rank": _fixed(m["rank_correlation"]),
                    "r2": _fixed(m["r2"]),
                }
            )
        page.knows.append(_in_words(part))
        page.knowledge += [p for p in (figures.calibration(part), figures.importance(part)) if p]
        for c in part["coverage"]:
            held = (
                "too few groups for it"
                if c["q"] is None
                else "not tested"
                if c["covered"] is None
                else f"{c['covered']:.0%}"
            )
            page.coverage.append(
                {"column": name, "what": "held-out groups", "level": f"{c['level']:.0%}", "held": held}
            )
        for h in history[1:]:
            about = h["columns"][name]
            for level in (80, 95):
                if f"covered{level}" in about:
                    held = f"{about[f'covered{level}']:.0%} of {about[f'covered{level}_of']}"
                    page.coverage.append(
                        {"column": name, "what": f"designs of round {h['round']}", "level": f"{level}%", "held": held}
                    )
        for b in part["by_distance"]:
            away = f"{b['from']}" if b["from"] == b["to"] else f"{b['from']} to {b['to']}"
            page.reach.append({"column": name, "away": away, "rows": str(b["rows"]), "rmse": _number(float(b["rmse"]))})


def _fixed(value: Any) -> str:
    return "–" if not isinstance(value, (int, float)) else f"{value:.2f}"


def _in_words(part: dict[str, Any]) -> str:
    """How far the model can be trusted, in a sentence."""
    best = part["considered"][0]
    rank = best["rank_correlation"]
    if rank is None or rank < 0.2:
        how = "hardly orders sequences it has not seen: take this batch as exploration"
    elif rank < 0.5:
        how = "orders unseen sequences roughly"
    else:
        how = "orders unseen sequences well"
    size = "–" if rank is None else f"{rank:.2f}"
    missing = [f"{float(level):.0%}" for level, q in part["quantiles"].items() if q is None]
    short = (
        f" There are too few groups of sequences for {' and '.join(missing)} intervals, so none are given."
        if missing
        else ""
    )
    alike, noise = held_together(part), part.get("repeat_noise")
    said = f" {alike[0].upper()}{alike[1:]}." if alike else ""
    if noise is not None:
        said += f" One measurement has a standard deviation of {noise:.3g}, by those that were repeated."
    return f"{part['column']}: the model ({part['chosen']}, fitted to {part['rows']} sequences) {how} (rank correlation {size} on {best['groups']} held-out groups).{short}{said}"


def held_together(part: dict[str, Any]) -> str:
    """What was held out together where the sequences are more alike than usual; empty otherwise."""
    identity = part.get("identity", IDENTITY)
    if identity == IDENTITY:
        return ""
    if identity == 1:
        return "the sequences are too alike for groups, so each was held out by itself, and intervals are for sequences as near to known ones"
    return f"the sequences are alike, so only those equal in {identity:.0%} of their letters were held out together, and intervals are for sequences as near to known ones"


# progress -------------------------------------------------------------------------------------------------------


def _progress(page: Page, campaign: Campaign, history: Sequence[dict[str, Any]]) -> None:
    s = campaign.settings
    done = {int(f.name): read_json(f / "done.json") for f in campaign.store.rounds()}
    for c in s.columns:
        panel = figures.progress(history, c.name, c.sign, {n: expected_of(d, c.name) for n, d in done.items()})
        page.progress += [panel] if panel else []
    dry = campaign.path / "simulation.json"
    if dry.is_file():
        found = read_json(dry)
        panel = figures.dry_run(found["curves"], int(found["top"]), s.columns[0].name)
        page.progress += [panel] if panel else []
    if len(s.columns) < 2:
        return
    measured = campaign.measured()
    on = pareto(s.columns, measured.values)
    first = {r["sequence"] for r in campaign.store.measured() if str(r.get("round")) == "0" and r["status"] == OK}
    rounds = [0 if t in first else 1 for t in measured.sequences]
    panel = figures.front([c.name for c in s.columns], measured.values, on, rounds)
    page.progress += [panel] if panel else []
    said = front_words(campaign)
    page.front_words = [said] if said else []


def front_words(campaign: Campaign) -> str:
    """The hypervolume of everything measured against that of the first data, in words; empty for one column."""
    s, measured = campaign.settings, campaign.measured()
    if len(s.columns) < 2:
        return ""
    sign = np.array([c.sign for c in s.columns])
    whole = measured.values[~np.isnan(measured.values).any(1)]
    if not len(whole):
        return "No sequence has all columns measured, so there is no front yet."
    reference = (whole * sign).min(0) * sign
    now = hypervolume(s.columns, whole, reference)
    if now is None:
        return "The hypervolume needs the package moocore: pip install 'stochflow[design]'."
    first = {r["sequence"] for r in campaign.store.measured() if str(r.get("round")) == "0" and r["status"] == OK}
    then = hypervolume(s.columns, measured.values[[t in first for t in measured.sequences]], reference)
    return f"Pareto front of {int(pareto(s.columns, measured.values).sum())} sequences; hypervolume {now:.4g}, {then:.4g} in the first data (against the worst value of each column)."


def _settings(campaign: Campaign) -> list[tuple[str, str]]:
    s = campaign.settings
    found = [
        ("columns", "; ".join(c.describe() for c in s.columns)),
        ("letters", s.alphabet),
        ("length", f"{s.min_length} to {s.max_length}"),
    ]
    found += [("wild type", s.wild_type)] if s.wild_type else []
    found += [("synthesiser", s.noise.describe())] if s.noise else []
    found += [("design rules", "rules.toml")] if s.rules else []
    return [*found, ("repeats", s.replicates), ("seed", str(s.seed))]
