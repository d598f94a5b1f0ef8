"""Diagnostics of runs whose space is too large to list: all they have are samples and what the oracle was asked about.

Each looks at the last evaluation and answers with a `Finding` of `health` or with None.
"""

from __future__ import annotations

import math
from typing import Any

REPEATS = 0.1  # share of different objects in a sample below which the sampler has collapsed onto a few,
COMMONEST = 0.3  # and share of the most frequent one above which it has
TOP = 100  # objects of which the mean of the best is taken
ENOUGH = 100  # objects of a sample from which such shares are taken seriously,
FEW = 30  # and from which figures of their scores are,
WEIGHED = 10  # and from which their weights are: 5 nats of 10 draws take weights about as wide as 5 nats of 2,000
FEW_EFFECTIVE = 3.0  # draws on which an estimate of log Z rests, below which it is one draw's
ONE_SIDED = 5.0  # nats between the two estimates of log Z that bound it from below,
OF_RANGE = 0.15  # and share of the nats that a reward found while training puts between random objects and the best
SEEN = 0.5  # share of the way from random objects to the best asked that the best draws should have gone
MATURE = 1000  # steps before which a run may still begin to learn; its end is looked at all the same
BARELY = 0.02  # share of that way that tells a sampler from one that never learned,
LITTLE = 0.1  # share of it by which an untrained policy may be above random objects
ERRORS = 2.0  # and standard errors of the random objects' mean, where it is known


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _ended(row: dict[str, Any]) -> bool:
    return "objective" in row or row.get("step", 0) >= MATURE  # only a final look names the objective


def _listed(row: dict[str, Any]) -> bool:
    return _number(row.get("tv"))


def repeated_draws(log: Any) -> Any:
    """Most of a sample is a handful of objects; where the law is listed, one object that the target does not ask for."""
    row = log.ended
    distinct, most, samples = row.get("distinct"), row.get("commonest"), row.get("drawn", row.get("samples"))
    if not _number(distinct) or (_number(samples) and samples < ENOUGH):
        return None
    alone = _number(most) and most > COMMONEST
    if _listed(row):  # a small space repeats itself, and a target may lie on one object
        wrong = row["excess_tv"] if _number(row.get("excess_tv")) else row["tv"]
        if not log.look or not alone or wrong <= most / 2:  # before the warm-up a policy is anywhere
            return None
    elif distinct >= REPEATS and not alone:
        return None
    one = f", and {most:.0%} are one and the same" if alone else ""
    return log.find(
        "repeated_draws",
        "serious",
        f"only {distinct:.1%} of {samples if _number(samples) else 'the'} draws are different objects{one}",
        "The probability lies on a handful of objects, whatever else is worth having.",
        "--search population or --replay-rank, more exploration (--explore 0.3 --explore-tau 1000), or a smaller reward exponent",
    )


def far_below_the_best(log: Any) -> Any:
    """The best objects asked about are far better than anything the policy draws."""
    row = log.ended
    if row.get("unscored") is True:
        return log.find(
            "far_below_the_best",
            "warning",
            "no object that was drawn at the end has a score",
            "The policy draws objects that the oracle has no score for; what the search found stands in samples.csv as asked.",
            f"{_longer(log)}, rules that leave such objects out, or a larger --look",
        )
    first, best = _first(log, row), row.get("top_asked")
    drawn, words = row.get("top_score"), "the 100 best draws"
    if _number(row.get("samples")) and row["samples"] < 2 * TOP:  # too few draws to have a best part
        drawn, words = row.get("sample_score"), "the draws"
    if not _ended(row) or _listed(row) or first is None or not _number(best) or not _number(drawn):
        return None
    way = best - first
    if way <= 0 or drawn - first >= SEEN * way:
        return None
    return log.find(
        "far_below_the_best",
        "warning",
        f"the 100 best asked about score {best:.4g} on average, and {words} {drawn:.4g}",
        "The best were found by the search and stand in samples.csv as asked; the policy itself has not come near its target, "
        "so that its draws and its log Z say little.",
        f"more steps between questions (a larger --ask-every and --steps), or {_larger_net(log)}",
    )


def no_better_than_uniform(log: Any) -> Any:
    """What is drawn scores as random objects did at the start."""
    row = log.ended
    first = _first(log, row)
    top, mean, error = row.get("top_score"), row.get("sample_score"), row.get("random_error", 0.0)
    if not _ended(row) or _listed(row) or first is None or not _number(top) or not _number(mean):
        return None
    best = max(x for x in (top, row.get("best_asked")) if _number(x))
    if best <= first and _number(row.get("random_score")) and _number(row.get("best_asked")):
        return log.find(
            "no_better_than_uniform",
            "warning",
            f"every object asked about scores {best:.4g}",
            "Where all scores are equal, random objects are as good as any: there is nothing to learn from.",
            "an oracle that tells objects apart sooner, known sequences to begin from (--start), or rules that leave out what is worthless",
        )
    near = max(BARELY * (best - first), ERRORS * error if _number(error) else 0.0)
    if best <= first or mean - first > near:
        return None
    return log.find(
        "no_better_than_uniform",
        "warning",
        f"the draws score {mean:.4g} on average, and random objects {first:.4g}",
        "The draws are worse than random objects: what was learned so far leads away from the target."
        if first - mean > near
        else "The 100 best of the draws are what random objects would give: nothing was learned that shows in a score.",
        _to_learn(log, row),
    )


def _larger_net(log: Any) -> str:
    hidden = log.train.get("hidden")
    wider = f"a wider net (--hidden {2 * hidden if isinstance(hidden, int) else 256})"
    return wider if log.train.get("net") == "transformer" else f"{wider} or --net transformer"


def _longer(log: Any) -> str:
    return "more --oracle-calls" if log.train.get("oracle_calls") else "more --steps"


def _to_learn(log: Any, row: dict[str, Any]) -> str:
    """What a sampler that stayed uniform lacks: of the usual remedies those that the run has not taken yet."""
    found = [] if _number(row.get("beta")) else ["a sharper reward (--beta auto, or a larger exponent)"]
    found += ["--search population"] if log.train.get("search", "none") == "none" else []
    found += [_longer(log), _larger_net(log)]
    return f"{', '.join(found[:-1])}, or {found[-1]}"


def one_sided_log_z(log: Any) -> Any:
    """Both estimates of log Z are bounds from below here, and they are far apart."""
    row = log.ended
    low, high, share, samples = (row.get(k) for k in ("elbo", "log_z_estimate", "ess", "samples"))
    if (
        not _ended(row)
        or _listed(row)
        or _number(row.get("eubo"))
        or not all(map(_number, (low, high, share, samples)))
    ):
        return None
    if (
        samples < WEIGHED
        or share * samples >= FEW_EFFECTIVE
        or high - low <= max(ONE_SIDED, OF_RANGE * _range(log, row))
    ):
        return None
    return log.find(
        "one_sided_log_z",
        "warning",
        f"log Z is at least about {high:.2f}, an estimate that rests on about {max(share * samples, 1):.0f} of {samples} draws; their mean is {low:.2f}",
        "Objects that were never drawn may hold most of the mass: the gap between the two says nothing about what lies above.",
        f"{_longer(log)}, or {'a larger --look' if _number(row.get('beta')) else 'a smaller reward exponent'}; "
        "do not compare this log Z with another run's",
    )


def _range(log: Any, row: dict[str, Any]) -> float:
    """Nats between random objects and the best asked, where the reward is found while training; else 0."""
    beta, best, first = row.get("beta"), row.get("top_asked"), _first(log, row)
    return beta * (best - first) if _number(beta) and _number(best) and first is not None else 0.0  # type: ignore[operator]


def _first(log: Any, row: dict[str, Any]) -> float | None:
    """The mean score of random objects: the first ones asked about or, where all batches are the policy's own, its first.

    Where both are known an untrained policy need not be uniform: it may be above the random ones by a little.
    """
    known: Any = row.get("random_score")
    best: Any = row.get("best_asked")
    plain = not log.train.get("replay") and log.train.get("search", "none") == "none"
    own = next((r["mean_score"] for r in log.rows if _number(r.get("mean_score"))), None) if plain else None
    if not _number(known):
        return own
    if own is None or not _number(best):
        return known
    return max(known, min(own, known + LITTLE * (best - known)))


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
