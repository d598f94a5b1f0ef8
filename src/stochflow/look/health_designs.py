"""Diagnostics of runs whose space is too large to list: all they have are samples and what the oracle was asked about.

Each looks at the last evaluation and answers with a `Finding` of `health` or with None.
"""

from __future__ import annotations

import math
from typing import Any

REPEATS = 0.1  # share of different objects in a sample below which the sampler has collapsed onto a few
ENOUGH = 200  # objects of a sample from which its figures are taken seriously
FEW_EFFECTIVE = 3.0  # draws on which an estimate of log Z rests, below which it is one draw's
ONE_SIDED = 5.0  # nats between the two estimates of log Z that bound it from below
SEEN = 0.5  # share of the way from the first scores to the best asked that the best draws should have gone
MATURE = 1000  # steps before which a run may still begin to learn; the last look is checked all the same
BARELY = 0.02  # share of that way that tells a sampler from one that never learned


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _ended(row: dict[str, Any]) -> bool:
    return "objective" in row or row.get("step", 0) >= MATURE  # only a final look names the objective


def _listed(row: dict[str, Any]) -> bool:
    return _number(row.get("tv"))


def repeated_draws(log: Any) -> Any:
    """Most of a sample is a handful of objects."""
    row = log.look
    distinct, samples = row.get("distinct"), row.get("samples")
    if _listed(row) or not _number(distinct) or not _number(samples) or samples < ENOUGH or distinct >= REPEATS:
        return None
    return log.find(
        "repeated_draws",
        "serious",
        f"only {distinct:.1%} of {samples} draws are different objects",
        "The probability lies on a handful of objects, whatever else is worth having.",
        "--search population or --replay-rank, more exploration (--explore 0.3 --explore-tau 1000), or a smaller reward exponent",
    )


def far_below_the_best(log: Any) -> Any:
    """The best objects asked about are far better than anything the policy draws."""
    row, first = log.look, _first(log)
    best, drawn = row.get("top_asked"), row.get("top_score")
    if not _ended(row) or _listed(row) or first is None or not _number(best) or not _number(drawn):
        return None
    way = best - first
    if way <= 0 or drawn - first >= SEEN * way:
        return None
    return log.find(
        "far_below_the_best",
        "warning",
        f"the 100 best asked about score {best:.4g} on average, and the 100 best draws {drawn:.4g}",
        "The best were found by the search and stand in samples.csv as asked; the policy itself has not come near its target, "
        "so that its draws and its log Z say little.",
        "more steps between questions (--ask-every 16 with a larger --steps), a wider net (--hidden 256), or --net transformer",
    )


def no_better_than_uniform(log: Any) -> Any:
    """What is drawn scores as random objects did at the start."""
    row, first = log.look, _first(log)
    top, mean = row.get("top_score"), row.get("sample_score")
    if not _ended(row) or _listed(row) or first is None or not _number(top) or not _number(mean):
        return None
    best = max(x for x in (top, row.get("best_asked")) if _number(x))
    if best <= first or mean - first > BARELY * (best - first):
        return None
    return log.find(
        "no_better_than_uniform",
        "warning",
        f"the draws score {mean:.4g} on average, and those of the untrained policy scored {first:.4g}",
        "The 100 best of the draws are what random objects would give: nothing was learned that shows in a score.",
        "a sharper reward (--beta auto, or a larger exponent), more --steps, or --search population",
    )


def one_sided_log_z(log: Any) -> Any:
    """Both estimates of log Z are bounds from below here, and they are far apart."""
    row = log.look
    low, high, share, samples = (row.get(k) for k in ("elbo", "log_z_estimate", "ess", "samples"))
    if (
        not _ended(row)
        or _listed(row)
        or _number(row.get("eubo"))
        or not all(map(_number, (low, high, share, samples)))
    ):
        return None
    if samples < ENOUGH or share * samples >= FEW_EFFECTIVE or high - low <= ONE_SIDED:
        return None
    return log.find(
        "one_sided_log_z",
        "warning",
        f"log Z is at least {high:.2f}, an estimate that rests on about {max(share * samples, 1):.0f} of {samples} draws; their mean is {low:.2f}",
        "Objects that were never drawn may hold most of the mass: the gap between the two says nothing about what lies above.",
        "more --steps, or a smaller reward exponent; do not compare this log Z with another run's",
    )


def _first(log: Any) -> float | None:
    """The mean score of the first logged batch, when the policy had hardly begun."""
    return next((r["mean_score"] for r in log.rows if _number(r.get("mean_score"))), None)


CHECKS = {
    "repeated_draws": repeated_draws,
    "far_below_the_best": far_below_the_best,
    "no_better_than_uniform": no_better_than_uniform,
    "one_sided_log_z": one_sided_log_z,
}
TITLES = {
    "repeated_draws": "the same draws again and again",
    "far_below_the_best": "draws far below the best asked",
    "no_better_than_uniform": "no better than uniform draws",
    "one_sided_log_z": "log Z bounded from one side alone",
}
