"""One batch: from a fitted model to designs in wells, each with its figures and its reason."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from stochflow.design import batch as batches
from stochflow.design.acquisition import ExpectedImprovement, Thompson, acquisition, on_its_scale
from stochflow.design.data import Measured
from stochflow.design.features import distances, nearest
from stochflow.design.generate import Candidates, Effort, Near
from stochflow.design.model import Model
from stochflow.design.objectives import Scale, chance_met, combined, preferences, utility
from stochflow.design.offers import candidates_for
from stochflow.design.plain import CHOICES
from stochflow.design.settings import Ask, Settings
from stochflow.design.space import Believed, Space
from stochflow.errors import UserError, did_you_mean

PLANS = 8  # draws or preferences that a batch is divided over
MORE = 16  # preferences that the policy learns from beside these
COMPARED = 96  # designs of a plate that this one is compared with
CONTROLS = ("wild-type", "best")
Row = dict[str, Any]


@dataclass(frozen=True)
class Known:
    """What a batch is chosen from and kept away from."""

    measured: Measured
    pending: list[str]  # ordered, and not measured yet
    failed: list[str]


@dataclass(frozen=True)
class Plan:
    """A part of the batch: under which preference and which drawn function."""

    preference: np.ndarray
    draw: int
    count: int


def propose(
    settings: Settings, space: Space, known: Known, model: Model, ask: Ask, seed: int
) -> tuple[list[Row], dict[str, Any]]:
    """Rows of the batch, in the order of the wells, and what was done, as JSON."""
    believed = Believed(model, space, settings, seed)
    scale = Scale.of(settings.columns, known.measured.values)
    order = _by_utility(settings, scale, known.measured)
    fixed = _controls(settings, known.measured, order, ask)
    wanted = ask.batch - len(fixed)
    excluded = {*known.measured.sequences, *known.pending, *known.failed, settings.wild_type}
    start = [known.measured.sequences[i] for i in order[:256]]
    taken: list[str] = []
    made: list[tuple[str, Plan, str, float]] = []
    notes = [
        f"the {role.replace(': ', ' ')} {text[:30]} does not meet the rules ({', '.join(space.broken(text))}), but is ordered as it is"
        for text, role in fixed
        if space.broken(text)
    ]
    if believed.simulated:
        notes.append(f"what is expected of an order is the mean over {believed.simulated} simulated makings")
    distances: list[int] = []
    plans = _plans(settings, ask, wanted, seed)
    every, contexts = _goals(settings, plans, ask, seed)
    scores = [_scorer(settings, scale, believed, plan, ask, known.measured) for plan in every]
    limit = max(2, model.reach) if ask.max_distance is None else ask.max_distance
    scores = [_near(score, known.measured.sequences, limit, settings.aligned) for score in scores]

    def near(texts: Sequence[str]) -> np.ndarray:
        return nearest(texts, known.measured.sequences, aligned=settings.aligned)[1] <= limit

    effort = Effort(steps=ask.steps, sampler=ask.sampler)
    counts = [p.count for p in plans]
    offers = candidates_for(space, scores, contexts, start, counts, effort, seed, near)
    for plan, part in zip(plans, offers, strict=True):
        part = _within(part, near)
        chosen = batches.spread(part.texts, part.value, plan.count, ask.min_distance, excluded | set(taken), taken)
        chosen.lost[f"are more than {limit} letters from every measured sequence"] = part.far
        chosen.lost["break a rule"] = part.broke
        notes += part.notes
        if chosen.short:
            left = f"; {space.summary}" if space.rules is not None else ""
            notes.append(chosen.sentence(len(part.texts) + part.far + part.broke) + left)
        distances.append(chosen.distance)
        for i in chosen.chosen:
            made.append((part.texts[i], plan, part.source[i], float(part.value[i])))
            taken.append(part.texts[i])
    if not made:
        raise UserError(
            f"no new design was found: {notes[-1] if notes else 'there are no candidates'}; lower --min-distance, loosen the rules or allow more lengths"
        )
    rows = _described(settings, space, known, model, believed, made, ask)
    rows = [*fixed_rows(fixed, believed, settings, set(known.measured.sequences)), *rows]
    for row, well in zip(rows, batches.wells(len(rows)), strict=True):
        row["well"] = well
    done = {
        "designs": len(made),
        "asked": ask.batch,
        "controls": len(fixed),
        "min_distance": min(distances),
        "max_distance": limit,
        "orders_exact": believed.exact,
        "makings": believed.simulated,
        "space": space.summary,
        "expected": _expected(settings, space, known, believed, [text for text, *_ in made], seed),
        "notes": list(dict.fromkeys(notes)),
    }
    return rows, done


def _expected(
    settings: Settings, space: Space, known: Known, believed: Believed, texts: Sequence[str], seed: int
) -> dict[str, dict[str, float]]:
    """By column, the mean that the model predicts of this plate and of plates chosen without it (of several columns by their
    own weights, from what has all of them measured)."""
    z = Scale.of(settings.columns, known.measured.values).values(settings.columns, known.measured.values)
    worth = utility(z.T, preferences(settings.columns, 1, 0)[0]) if len(settings.columns) > 1 else z[:, 0]
    values = {t: v for t, v in zip(known.measured.sequences, worth.tolist(), strict=True) if v == v}
    count = min(len(texts), COMPARED)
    plates = {name: choose(space, values, 1.0, count, seed) for name, choose in CHOICES.items() if values}
    found: dict[str, dict[str, float]] = {c.name: {} for c in settings.columns}
    for name, plate in {"this plate": texts, **plates}.items():
        for column, p in zip(settings.columns, believed.predict(plate) if plate else (), strict=False):
            found[column.name][name] = float(p.mean.mean())
    return found


def _near(score: Any, known: Sequence[str], limit: int, aligned: bool) -> Any:
    """The acquisition, falling by e^-2 (or two units) with every letter beyond `limit` from the nearest measured sequence."""

    def limited(texts: Sequence[str]) -> np.ndarray:
        value: np.ndarray = score(texts)
        return value - 2.0 * np.maximum(nearest(texts, known, aligned=aligned)[1] - limit, 0)

    return limited


def _within(part: Candidates, near: Near) -> Candidates:
    """The candidates that are near; the others are counted."""
    at = np.flatnonzero(near(part.texts))
    texts, source = [part.texts[i] for i in at], [part.source[i] for i in at]
    return replace(part, texts=texts, value=part.value[at], source=source, far=part.far + len(part.texts) - len(texts))


def _goals(settings: Settings, plans: Sequence[Plan], ask: Ask, seed: int) -> tuple[list[Plan], np.ndarray]:
    """The plans and, with several columns, preferences between them that the policy also learns from; contexts [R, C]."""
    if len(settings.columns) == 1 or ask.preference is not None:
        return list(plans), np.eye(len(plans))
    more = preferences(settings.columns, MORE + 1, seed + 1)[1:]
    every = [*plans, *[Plan(w, 0, 0) for w in more]]
    return every, np.stack([p.preference for p in every])


def _plans(settings: Settings, ask: Ask, wanted: int, seed: int) -> list[Plan]:
    """Thompson sampling divides the batch over drawn functions, several columns over preferences; else it is one part."""
    single = len(settings.columns) == 1 or ask.preference is not None
    parts = min(PLANS, wanted) if ask.acquisition == "thompson" or not single else 1
    wishes = preferences(settings.columns, parts, seed)
    if ask.preference is not None:
        wishes = np.tile(_preferred(settings, ask.preference), (parts, 1))
    sizes = [wanted // parts + (i < wanted % parts) for i in range(parts)]
    return [Plan(w, i, n) for i, (w, n) in enumerate(zip(wishes, sizes, strict=True))]


def _preferred(settings: Settings, asked: Mapping[str, float]) -> np.ndarray:
    """[C] the preference that is asked for, with sum 1; columns that it does not name do not count."""
    names = [c.name for c in settings.columns]
    for name in asked:
        if name not in names:
            raise UserError(
                f"the preference names the column {name!r}{did_you_mean(name, names)}, but there are {', '.join(names)}"
            )
    found = np.array([float(asked.get(name, 0.0)) for name in names])
    return found / found.sum()


def _by_utility(settings: Settings, scale: Scale, measured: Measured) -> np.ndarray:
    """Positions of the measured sequences, best first under the columns' own weights; rows with a gap come last."""
    z = scale.values(settings.columns, measured.values)
    w = preferences(settings.columns, 1, 0)[0]
    u = z[:, 0] if len(settings.columns) == 1 else utility(z.T, w)
    return np.argsort(-np.where(np.isnan(u), -np.inf, u), kind="stable")


def _scorer(settings: Settings, scale: Scale, believed: Believed, plan: Plan, ask: Ask, measured: Measured) -> Any:
    """Texts to the acquisition on the scale that candidates are drawn by."""
    kind = acquisition(ask.acquisition, ask.kappa, ask.batch)
    kind = replace(kind, draw=plan.draw) if isinstance(kind, Thompson) else kind
    z = scale.values(settings.columns, measured.values)
    whole = z[~np.isnan(z).any(1)]
    seen = whole[:, 0] if len(settings.columns) == 1 else utility(whole.T, plan.preference)
    ranked = np.sort(seen)[::-1]
    rank = kind.rank if isinstance(kind, ExpectedImprovement) else 1
    best = float(ranked[min(rank, max(len(ranked) // 4, 1)) - 1]) if len(ranked) else 0.0
    limits = any(c.threshold is not None for c in settings.columns)

    def score(texts: Sequence[str]) -> np.ndarray:
        found = believed.predict(texts)
        value = on_its_scale(kind, combined(settings.columns, scale, found, plan.preference), best)
        if limits:
            widths = [
                part.best.calibration.width(p.sd / max(part.best.calibration.stretch, 1e-12))
                for part, p in zip(believed.model.parts, found, strict=True)
            ]
            value = value + np.log(np.maximum(chance_met(settings.columns, found, widths), 1e-6))
        return value

    return score


# controls -------------------------------------------------------------------------------------------------------


def _controls(settings: Settings, measured: Measured, order: np.ndarray, ask: Ask) -> list[tuple[str, str]]:
    """(sequence, role) of the wells that hold known sequences."""
    found: list[tuple[str, str]] = []
    for name in ask.controls:
        if name not in CONTROLS:
            raise UserError(
                f"there is no control {name!r}{did_you_mean(name, CONTROLS)}: take wild-type, best or both (wild-type,best)"
            )
        if name == "wild-type" and not settings.wild_type:
            raise UserError(
                "this campaign has no wild type to use as a control: make it with --wild-type, or take --controls best"
            )
        found.append((settings.wild_type if name == "wild-type" else measured.sequences[order[0]], f"control: {name}"))
    again = [measured.sequences[i] for i in order[: ask.replicate]]
    return found + [(t, "repeat") for t in again]


def fixed_rows(
    fixed: Sequence[tuple[str, str]], believed: Believed, settings: Settings, measured: set[str]
) -> list[Row]:
    """Wells with given sequences: no acquisition, but a prediction to compare the measurement with."""
    if not fixed:
        return []
    texts = [t for t, _ in fixed]
    rows = [{"sequence": t, "role": role} for t, role in fixed]
    _add_predictions(rows, texts, believed, settings)
    _add_facts(rows, texts, believed, settings)
    for row in rows:
        before = "measured before, so rounds" if row["sequence"] in measured else "not measured so far; later rounds"
        row["reason"] = f"{row['role']}: {before} can be compared"
    return rows


# what is said of a design ---------------------------------------------------------------------------------------


def _add_predictions(rows: list[Row], texts: Sequence[str], believed: Believed, settings: Settings) -> None:
    """Predicted mean of every column, with the interval at each level that there are groups enough for.

    An interval is for one measurement of one making: where the data are means of repeats, its width grows by what these hide,
    and where orders come out wrong, by the spread of what is made.
    """
    single = len(settings.columns) == 1
    made = believed.makings(texts) if believed.synthesis is not None else None
    for c, (column, part, p) in enumerate(
        zip(settings.columns, believed.model.parts, believed.predict(texts), strict=True)
    ):
        suffix = "" if single else f"_{column.name}"
        calibration = part.best.calibration
        spread = part.single_noise if made is None else np.hypot(part.single_noise, made[c][1])
        own = np.hypot(p.sd, spread) / max(calibration.stretch, 1e-12)  # `width` stretches it
        ends = {level: calibration.interval(p.mean, own, level) for level in calibration.quantiles}
        for i, row in enumerate(rows):
            row[f"predicted{suffix}"] = float(p.mean[i])
            row[f"sd{suffix}"] = float(p.sd[i])
            if made is not None:
                row[f"made_low{suffix}"] = float(made[c][0][i])
            for level, found in ends.items():
                if found is not None:
                    row[f"low{round(100 * level)}{suffix}"] = float(found[0][i])
                    row[f"high{round(100 * level)}{suffix}"] = float(found[1][i])


def _described(
    settings: Settings,
    space: Space,
    known: Known,
    model: Model,
    believed: Believed,
    made: Sequence[tuple[str, Plan, str, float]],
    ask: Ask,
) -> list[Row]:
    texts = [m[0] for m in made]
    rows: list[Row] = [{"sequence": t, "role": "design"} for t in texts]
    _add_predictions(rows, texts, believed, settings)
    at, far = nearest(texts, known.measured.sequences, aligned=settings.aligned)
    value = np.array([m[3] for m in made])
    groups = batches.clusters(texts, value)
    for i, (row, (_, plan, source, worth)) in enumerate(zip(rows, made, strict=True)):
        row["acquisition"] = worth
        row["source"] = source
        row["cluster"] = int(groups[i])
        row["nearest_measured"] = known.measured.sequences[at[i]]
        row["distance"] = int(far[i])
        row["extrapolates"] = bool(far[i] > model.reach)
        if len(settings.columns) > 1:
            row["preference"] = " ".join(f"{w:.3f}" for w in plan.preference)
        row["reason"] = _reason(row, settings, ask)
    _add_facts(rows, texts, believed, settings)
    return rows


def _add_facts(rows: list[Row], texts: Sequence[str], believed: Believed, settings: Settings) -> None:
    """What holds of a sequence whatever the model says."""
    chances = believed.synthesis.chance_exact(list(texts)).tolist() if believed.synthesis is not None else None
    nucleic = set(settings.alphabet) <= set("ACGTU")
    for i, (row, text) in enumerate(zip(rows, texts, strict=True)):
        if nucleic:
            row["gc"] = round(sum(c in "GC" for c in text) / max(len(text), 1), 4)
        if settings.wild_type:
            row["edits"] = edits(settings.wild_type, text, settings.aligned)
        if chances is not None:
            row["chance_exact"] = round(float(chances[i]), 6)


def _reason(row: Row, settings: Settings, ask: Ask) -> str:
    """One sentence that a person at the bench can read."""
    single = len(settings.columns) == 1
    named = [(c.name, "predicted" if single else f"predicted_{c.name}") for c in settings.columns]
    said = ["predicted " + ", ".join(f"{name} {row[key]:.3g}" for name, key in named)]
    if single and "low80" in row:
        said.append(f"80 % interval {row['low80']:.3g} to {row['high80']:.3g}")
    far = row["distance"]
    said.append(f"{far} letter{'s' if far != 1 else ''} from the nearest measured sequence")
    if row["extrapolates"]:
        said.append("farther from the data than the model was tested")
    how = {
        "gain": "high expected gain",
        "ucb": "high upper bound",
        "ei": "high expected improvement",
        "thompson": "best under a drawn model",
        "greedy": "high prediction",
    }
    return f"{how[ask.acquisition]}: " + ", ".join(said)


def edits(wild_type: str, text: str, aligned: bool = False) -> str:
    """Differences to a wild type as A12G, 1-based; the number of edits where lengths differ, or shifted letters make it fewer."""
    pairs = enumerate(zip(wild_type, text, strict=False), 1)
    found = [f"{a}{i}{b}" for i, (a, b) in pairs if a != b]
    if aligned or len(wild_type) != len(text):
        count = int(distances([wild_type], [text], True)[0, 0])
        if len(wild_type) != len(text) or count < len(found):
            return f"{count} edit{'' if count == 1 else 's'}"
    return " ".join(found)
