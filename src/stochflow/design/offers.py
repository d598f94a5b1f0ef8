"""Which way candidates are made: listed and drawn exactly, or drawn by a GFlowNet with a genetic search beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from stochflow.design.generate import LISTED, Candidates, Effort, Near, Score, listed, listed_texts, search
from stochflow.design.sampler import Goal, trained
from stochflow.design.space import Space
from stochflow.errors import UserError
from stochflow.worlds.strings import Strings


def candidates(
    env: Strings,
    accepts: Callable[[str], bool],
    score: Score,
    start: Sequence[str],
    count: int,
    effort: Effort,
    seed: int,
    near: Near | None = None,
) -> Candidates:
    """At least a few times `count` candidates where the space has so many; `start` = good known strings.

    Where strings are listed, only those that are `near` are drawn from; elsewhere the score has to see to it.
    """
    if effort.sampler in ("auto", "exact"):
        texts = listed_texts(env, accepts)
        if texts is not None:
            kept = _kept(texts, near)
            return replace(listed(kept, score, count, seed), far=len(texts) - len(kept))
        if effort.sampler == "exact":
            raise UserError(
                f"--sampler exact lists every string, but there are more than {LISTED} here: take --sampler auto"
            )
    found = search(env, accepts, score, start, effort, seed)
    if effort.sampler == "search":
        return found
    return trained(env, accepts, [Goal(score, found, count)], None, effort, seed)[0]


def candidates_for(
    space: Space,
    scores: Sequence[Score],
    contexts: np.ndarray,
    start: Sequence[str],
    counts: Sequence[int],
    effort: Effort,
    seed: int,
    near: Near | None = None,
) -> list[Candidates]:
    """Candidates under several acquisitions, `counts` of the first ones; one policy serves all, conditioned on `contexts` [R, C].

    Scores beyond the counts only help to learn how the law changes with its context.
    """
    env, accepts = space.env, space.accepts
    if len(counts) == 1:
        return [candidates(env, accepts, scores[0], start, counts[0], effort, seed, near)]
    texts = listed_texts(env, accepts) if effort.sampler in ("auto", "exact") else None
    if texts is not None:
        kept = _kept(texts, near)
        made = [listed(kept, score, n, seed + i) for i, (score, n) in enumerate(zip(scores, counts, strict=False))]
        return [replace(m, far=len(texts) - len(kept)) for m in made]
    less = replace(effort, rounds=max(10, 2 * effort.rounds // len(counts)))
    found = [search(env, accepts, score, start, less, seed + i) for i, score in enumerate(scores[: len(counts)])]
    if effort.sampler == "search":
        return found
    goals = [Goal(s, f, n) for s, f, n in zip(scores, found, counts, strict=False)]
    goals += [Goal(s, None, 0) for s in scores[len(counts) :]]
    return trained(env, accepts, goals, contexts, effort, seed)


def _kept(texts: list[str], near: Near | None) -> list[str]:
    return texts if near is None else [t for t, ok in zip(texts, near(texts).tolist(), strict=True) if ok]
