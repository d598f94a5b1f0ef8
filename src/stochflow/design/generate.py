"""Candidates for a plate: strings drawn in proportion to the sharpened acquisition, and the best that search inside it finds.

A space is a `Strings` environment, with or without design rules. Where its finished strings can be listed, the law is exact and
needs no network; elsewhere a GFlowNet is trained on the acquisition, and a genetic search runs beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from stochflow.worlds.strings import Strings

LISTED = 1 << 17  # finished strings that are listed
DEEP = 20.0  # nats below the best of the sharpened acquisition from which a string would never be drawn
Score = Callable[[Sequence[str]], np.ndarray]  # texts -> the acquisition, larger is better
Near = Callable[[Sequence[str]], np.ndarray]  # texts -> bool: near enough to what is known


@dataclass
class Candidates:
    """Different texts, their acquisition, where each came from, and how they were made."""

    texts: list[str]
    value: np.ndarray
    source: list[str]
    notes: list[str] = field(default_factory=list)
    beta: float = 1.0
    broke: int = 0  # different texts that were drawn but break a rule
    far: int = 0  # texts that are too far from what is known


@dataclass(frozen=True)
class Effort:
    """How hard to look. `steps` of training; `rounds` of genetic search with `population` parents."""

    steps: int = 300
    batch: int = 64
    rounds: int = 40
    population: int = 256
    sampler: str = "auto"  # auto | exact | gflownet | search


def finished_count(env: Strings) -> int:
    """How many finished strings the alphabet and the lengths allow, rules aside."""
    shortest = env.length if env.min_length is None else env.min_length
    return sum(env.tokens**n for n in range(shortest, env.length + 1))


def all_texts(env: Strings) -> list[str]:
    """Every finished string, by length, then in the order of the alphabet."""
    shortest = env.length if env.min_length is None else env.min_length
    texts = []
    for size in range(shortest, env.length + 1):
        digits = np.arange(env.tokens**size)[:, None] // env.tokens ** np.arange(size - 1, -1, -1) % env.tokens
        letters = np.array(list(env.alphabet))[digits]
        texts += ["".join(row) for row in letters] if size else [""]
    return texts


def sharpness(value: np.ndarray, count: int) -> float:
    """beta, so that among the best candidates the one of rank 4 x count is e^3 times less likely than the best."""
    ranked = np.sort(value)[::-1]
    gap = float(ranked[0] - ranked[min(4 * count, len(ranked) - 1)])
    return 3.0 / gap if gap > 0 else 1.0


def listed_texts(env: Strings, accepts: Callable[[str], bool]) -> list[str] | None:
    """Every string that may be ordered; None where there are more than `LISTED`."""
    compiled = getattr(env, "compiled", None)
    if compiled is not None and compiled.exact:
        found: list[str] | None = compiled.texts(LISTED)
        return found
    return [t for t in all_texts(env) if accepts(t)] if finished_count(env) <= LISTED else None


def listed(texts: list[str], score: Score, count: int, seed: int) -> Candidates:
    if not texts:
        return Candidates([], np.zeros(0), [])
    value = score(texts)
    beta = sharpness(value, count)
    noise = -np.log(-np.log(np.random.default_rng(seed).random(len(texts)).clip(1e-300)))
    drawn = np.argsort(-(beta * value + noise), kind="stable")[: 20 * count]  # without replacement, by Gumbel's trick
    note = f"all {len(texts)} strings near enough to the data were listed, and {len(drawn)} drawn with chances in proportion to their sharpened acquisition (a draw of the best is e^3 times as likely as of rank 4 x batch; beta {beta:.3g})"
    return Candidates([texts[i] for i in drawn], value[drawn], ["drawn"] * len(drawn), [note], beta)


# search ---------------------------------------------------------------------------------------------------------


def search(
    env: Strings, accepts: Callable[[str], bool], score: Score, start: Sequence[str], effort: Effort, seed: int
) -> Candidates:
    """A genetic search on the acquisition: crossover and point mutations, insertions and deletions where lengths vary."""
    rng = np.random.default_rng(seed)
    first = [t for t in dict.fromkeys(start) if accepts(t)][: effort.population]
    first += [t for t in random_texts(env, effort.population, seed) if accepts(t)]
    known: dict[str, float] = {}

    def ask(texts: Sequence[str]) -> None:
        new = [t for t in dict.fromkeys(texts) if t not in known]
        if new:
            known.update(zip(new, score(new).tolist(), strict=True))

    ask(first)
    if not known:
        return Candidates([], np.zeros(0), [])
    for _ in range(effort.rounds):
        parents = sorted(known, key=lambda t: (-known[t], t))[: effort.population]
        ask([t for t in (child(env, parents, rng) for _ in range(effort.population)) if accepts(t)])
    texts = sorted(known, key=lambda t: (-known[t], t))
    return Candidates(texts, np.array([known[t] for t in texts]), ["search"] * len(texts))


def random_texts(env: Strings, count: int, seed: int) -> list[str]:
    """Uniform walks through the environment, so rules of its masks are kept."""
    gen = torch.Generator().manual_seed(seed)
    state = env.initial((count,))
    open_ = torch.ones(count, dtype=torch.bool)
    for _ in range(env.horizon):
        legal = env.moves(state)
        go = open_ & legal.any(-1)
        move = torch.where(legal, torch.rand(legal.shape, generator=gen), -1.0).argmax(-1)
        stopped = (move == env.stop) if env.stop is not None else torch.zeros_like(open_)
        state = torch.where((go & ~stopped).unsqueeze(-1), env.step(state, move), state)
        open_ = go & ~stopped
    return env.decode(state)


def child(env: Strings, parents: Sequence[str], rng: np.random.Generator) -> str:
    """Two parents, the better ones more often, crossed at one place; then one mutation on average, at least one."""

    def pick() -> str:
        return parents[int(len(parents) * rng.random() ** 2)]

    one, two = pick(), pick()
    text = one
    if rng.random() < 0.5 and min(len(one), len(two)) > 1:
        cut = int(rng.integers(1, min(len(one), len(two))))
        text = one[:cut] + two[cut:]
    letters = list(text)
    for _ in range(1 + rng.poisson(0.5)):
        kind = rng.random()
        place = int(rng.integers(0, max(len(letters), 1)))
        letter = env.alphabet[int(rng.integers(0, env.tokens))]
        if env.min_length is not None and kind < 0.15 and len(letters) < env.length:
            letters.insert(place, letter)
        elif env.min_length is not None and kind < 0.3 and len(letters) > max(env.min_length, 1):
            del letters[place]
        elif letters:
            letters[place] = letter
    return "".join(letters)
