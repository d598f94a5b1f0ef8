"""From a stream of samples to a shortlist a laboratory can order: different, far apart, the best, and what noise makes of each.

Rows come as they are drawn (`Experiment.sample`) and are never all in memory: what is kept is the best `POOL` different ones.
"""

from __future__ import annotations

import hashlib
import heapq
import importlib.util
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from stochflow.errors import UserError
from stochflow.law.modes import Metric, families, find_modes, nearest, shared_metric

if TYPE_CHECKING:
    from pathlib import Path

    from stochflow.types import Task

Row = dict[str, Any]
POOL = 100_000  # different objects kept; about 50 MB
BLOCK = 1_000  # rows held against the known modes at once
FAMILY = 2  # letters in which two modes differ at least, where no distance is asked for
log = logging.getLogger("stochflow")


def shortlist(
    rows: Iterable[Row], unique: bool = False, min_distance: int = 0, top: int = 0, known: KnownModes | None = None
) -> Iterator[Row]:
    """The rows asked for; with no wish they pass through as they come, each with the nearest of the modes that are `known`.

    `unique` drops repeats; `top` keeps the best by score; `min_distance` takes the best first and leaves out what differs in fewer
    letters from one already taken, so its rows are all different. A shortlist is sorted and numbered anew; `count` says how often an
    object was drawn, `mode` which of the shortlist's modes it belongs to, best first.
    """
    if min_distance < 0 or top < 0:
        raise UserError(
            f"--min-distance {min_distance} and --top {top} must not be negative: leave out what is not wanted"
        )
    if top > POOL:
        raise UserError(f"--top {top} is more than the {POOL} objects a shortlist is chosen from: ask for fewer")
    if not min_distance and not top:
        passed = _different(rows) if unique else iter(rows)
        return passed if known is None else known.assign(passed)
    if not unique and not min_distance:
        best = heapq.nsmallest(top, rows, key=_order)
        return _numbered(_with_modes(best, FAMILY))
    return _numbered(_chosen(rows, min_distance, top))


def _order(row: Row) -> tuple[float, str]:
    """Best first, ties in the order of the alphabet: the same whatever the order of drawing."""
    if row["score"] is None:
        raise UserError("--top and --min-distance take the best by score, and these objects have none: leave them out")
    return (-float(row["score"]), str(_object(row)))


def _object(row: Row) -> Any:
    return row["sequence"] if "sequence" in row else row["state"]


def _different(rows: Iterable[Row]) -> Iterator[Row]:
    """Each object once, as it comes; a digest of eight bytes stands for it, so a million cost about 70 MB."""
    seen: set[int] = set()
    for row in rows:
        mark = int.from_bytes(hashlib.blake2b(str(_object(row)).encode(), digest_size=8).digest(), "little")
        if mark not in seen:
            seen.add(mark)
            yield row


def _chosen(rows: Iterable[Row], min_distance: int, top: int) -> list[Row]:
    pool, overflowed = _pool(rows)
    if not min_distance:
        return _with_modes(pool[:top] if top else pool, FAMILY)
    if overflowed and not top:
        raise UserError(f"more than {POOL} different objects were drawn: say how many of them are wanted with --top")
    heads = _heads(pool, min_distance)
    if overflowed and len(heads) < top:
        log.warning(
            "only %d of the %d best objects are %d apart, so the shortlist is shorter than --top",
            len(heads),
            POOL,
            min_distance,
        )
    chosen = [pool[i] for i in (heads[:top] if top else heads)]
    return [row | {"mode": i} for i, row in enumerate(chosen, 1)]


def _pool(rows: Iterable[Row]) -> tuple[list[Row], bool]:
    """The best POOL different objects, best first, each with how often it was drawn; and whether there were more."""
    kept: dict[str, Row] = {}
    worst: tuple[float, str] | None = None  # what is no better than this was let go once, and stays out
    for row in rows:
        key = str(_object(row))
        if key in kept:
            kept[key]["count"] += 1
        elif worst is None or _order(row) < worst:
            kept[key] = row | {"count": 1}
            if len(kept) >= 2 * POOL:
                best = heapq.nsmallest(POOL, kept.values(), key=_order)
                worst = _order(best[-1])
                kept = {str(_object(r)): r for r in best}
    ordered = sorted(kept.values(), key=_order)
    return ordered[:POOL], worst is not None or len(ordered) > POOL


def _heads(pool: list[Row], distance: int) -> list[int]:
    """Positions of the modes, best first."""
    if not pool:
        return []
    score = [float(r["score"]) for r in pool]
    if "sequence" not in pool[0]:
        return find_modes(np.array([r["state"] for r in pool]), score, min_distance=distance).tolist()
    texts = [r["sequence"] for r in pool]
    return find_modes(texts, score, min_distance=distance, metric=shared_metric(texts)).tolist()


def _with_modes(rows: list[Row], distance: int) -> list[Row]:
    """Each with the number of the nearest mode among them."""
    if not rows or "sequence" not in rows[0]:  # coordinates have no letters to differ in
        return rows
    texts = [r["sequence"] for r in rows]
    at = nearest(texts, [texts[h] for h in _heads(rows, distance)], shared_metric(texts))
    return [row | {"mode": 1 + int(i)} for row, i in zip(rows, at, strict=True)]


def _numbered(rows: list[Row]) -> Iterator[Row]:
    width = max(4, len(str(len(rows))))
    for i, row in enumerate(rows, 1):
        yield row | {"id": f"design_{i:0{width}d}"}


# the modes of a run ---------------------------------------------------------------------------------------------


class KnownModes:
    """The modes of a run that has ended: what a row that is only passing through can be held against.

    Of sequences they are the modes of the report's logos (`families` of `samples.csv`), with the same numbers; of a grid, the bright
    regions. Rows are taken in blocks, so that a million of them need no more memory than a thousand.
    """

    def __init__(self, number: Callable[[list[Any]], list[int]]):
        self._number = number  # objects -> the number, from 1, of the mode nearest to each

    def assign(self, rows: Iterable[Row]) -> Iterator[Row]:
        """The rows, each with its `mode`."""
        rows = iter(rows)
        while block := list(itertools.islice(rows, BLOCK)):
            for row, mode in zip(block, self._number([_object(r) for r in block]), strict=True):
                yield row | {"mode": mode}


def known_modes(designs: list[dict[str, str]], task: Task) -> KnownModes | None:
    """From the rows of a run's `samples.csv` and its task; None, with a word, where no mode is known."""
    if hasattr(task.env, "decode"):
        texts = [r["sequence"] for r in designs if r.get("sequence")]
        if not texts:
            log.warning(
                "the run has not written its designs yet, so its modes are not known and there is no column for them"
            )
            return None
        heads = [texts[h] for h in families(texts, [float(r["score"]) for r in designs if r.get("sequence")])[0]]
        metric: Metric = "hamming" if task.env.stop is None else "edit"  # strings that may stop have different lengths
        if metric == "edit" and importlib.util.find_spec("rapidfuzz") is None:
            log.warning(
                "there is no column for modes: strings of different lengths need rapidfuzz for it, pip install 'stochflow[bio]'"
            )
            return None
        return KnownModes(lambda objects: (nearest(objects, heads, metric) + 1).tolist())
    return _bright_regions(task)


def _bright_regions(task: Task) -> KnownModes | None:
    from stochflow.law.measure import LISTED
    from stochflow.law.task_modes import mode_regions, task_modes
    from stochflow.worlds.env import Enumerable

    if not isinstance(task.env, Enumerable) or task.env.count() > LISTED:
        return None
    at = task_modes(task)
    region = mode_regions(task)
    if at is None or region is None or not len(at):
        return None
    cells, numbers = task.env.all_states()[at].numpy(), region.numpy() + 1

    def number(objects: list[Any]) -> list[int]:  # by the number of steps along the axes
        found = np.array(objects)
        far = np.zeros((len(found), len(cells)), dtype=np.int64)
        for axis in range(cells.shape[1]):
            far += np.abs(found[:, axis, None] - cells[None, :, axis])
        return numbers[far.argmin(1)].tolist()

    return KnownModes(number)


# the noise of making it -----------------------------------------------------------------------------------------


def synthesised(task: Task, rows: Iterable[Row], draws: int = 256, seed: int = 0) -> list[Row]:
    """What the world's noise makes of each design when it is ordered letter by letter, `draws` times.

    Adds `made_score` (mean score of what comes out), `made_low` (its 10 % quantile) and `made_exact` (the fraction that came out as
    ordered), sorts by `made_score` and numbers anew. Unlike a sample's own way through the noise, an order does not react to what happened before.
    """
    import torch

    from stochflow.law.measure import forked
    from stochflow.scores.orders import look_ahead, open_loop_of

    rows = list(rows)
    if draws < 1:
        raise UserError(f"--simulate {draws} must be at least 1: a few hundred give a mean to about a hundredth")
    if not rows or "sequence" not in rows[0]:
        raise UserError("--simulate makes sequences letter by letter, and this task builds none: leave it out")
    if task.env.contexts is not None:
        raise UserError("--simulate makes orders without a condition, and this task has conditions: leave it out")
    loop = open_loop_of(task.oracle)
    if loop is not None:
        seen = look_ahead(loop._replace(makings=draws, seed=seed), [str(r["sequence"]) for r in rows])
        made = zip(seen.expected.tolist(), seen.low.tolist(), seen.exact.tolist(), strict=True)
        named = [dict(zip(("made_score", "made_low", "made_exact"), map(_six, m), strict=True)) for m in made]
        return _by_made_score([r | m for r, m in zip(rows, named, strict=True)])
    env, device = task.env, torch.device("cpu")
    wanted = env.encode([r["sequence"] for r in rows]).to(device)  # type: ignore[attr-defined]
    found = []
    with forked(seed, device), torch.no_grad():
        for row, target in zip(rows, wanted, strict=True):
            made = _make(task, target.expand(1, draws, -1))
            score = task.oracle(made).double().flatten()
            exact = (made == target).all(-1).double().mean()
            low = score.quantile(0.1)
            found.append(
                row
                | {
                    "made_score": round(float(score.mean()), 6),
                    "made_low": round(float(low), 6),
                    "made_exact": round(float(exact), 4),
                }
            )
    return _by_made_score(found)


def _six(value: float) -> float:
    return round(value, 6)


def _by_made_score(rows: list[Row]) -> list[Row]:
    return list(_numbered(sorted(rows, key=lambda r: (-r["made_score"], str(r["sequence"])))))


def _make(task: Task, wanted: Any) -> Any:
    """[1, B, D] what comes out when `wanted` [1, B, D] is ordered."""
    import torch

    env, channel = task.env, task.channel
    row = torch.zeros(wanted.shape[:-1], dtype=torch.long)
    state = env.initial(tuple(wanted.shape[:-1]), row)
    memory = channel.begin(state)
    for t in range(env.horizon):
        action = wanted[..., t]
        go = action != env.pad  # type: ignore[attr-defined]
        legal = env.real_moves(env.moves(state))
        action = torch.where(go, action, 0)
        move = channel.sample(state, legal, action, memory)
        memory = channel.remember(memory, state, action, move)
        state = torch.where(go.unsqueeze(-1), env.step(state, move), state)
    return state


def sample_run(path: str | Path, n: int, seed: int = 0, task: Task | None = None) -> Iterator[dict[str, Any]]:
    """Rows of `n` objects from a trained run, each with its mode where the run knows of modes."""
    from pathlib import Path

    from stochflow.runs.experiment import open_run
    from stochflow.runs.export import read_rows

    opened = open_run(path, task)
    return shortlist(opened.sample(n, seed), known=known_modes(read_rows(Path(path) / "samples.csv"), opened.task))
