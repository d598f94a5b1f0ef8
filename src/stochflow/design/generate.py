"""Candidates for a plate: strings drawn in proportion to the sharpened acquisition, and the best that search inside it finds.

A space is a `Strings` environment, with or without design rules. Where its finished strings can be listed, the law is exact and
needs no network; elsewhere a GFlowNet is trained on the acquisition, and a genetic search runs beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from stochflow.worlds.strings import Strings

LISTED = 1 << 17  # finished strings that are listed
BUFFER = 1024  # trajectories replayed
Score = Callable[[Sequence[str]], np.ndarray]  # texts -> the acquisition, larger is better


@dataclass
class Candidates:
    """Different texts, their acquisition, where each came from, and how they were made."""

    texts: list[str]
    value: np.ndarray
    source: list[str]
    notes: list[str] = field(default_factory=list)
    beta: float = 1.0


@dataclass(frozen=True)
class Effort:
    """How hard to look. `steps` of training; `rounds` of genetic search with `population` parents."""

    steps: int = 300
    batch: int = 64
    rounds: int = 40
    population: int = 256
    sampler: str = "auto"  # auto | exact | gflownet | search


def candidates(
    env: Strings,
    accepts: Callable[[str], bool],
    score: Score,
    start: Sequence[str],
    count: int,
    effort: Effort,
    seed: int,
) -> Candidates:
    """At least a few times `count` candidates where the space has so many; `start` = good known strings."""
    if effort.sampler in ("auto", "exact") and finished_count(env) <= LISTED:
        return _listed(env, accepts, score, count, seed)
    found = _search(env, accepts, score, start, effort, seed)
    if effort.sampler == "search":
        return found
    return _trained(env, accepts, score, found, count, effort, seed)


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


def _listed(env: Strings, accepts: Callable[[str], bool], score: Score, count: int, seed: int) -> Candidates:
    texts = [t for t in all_texts(env) if accepts(t)]
    value = score(texts)
    beta = sharpness(value, count)
    noise = -np.log(-np.log(np.random.default_rng(seed).random(len(texts)).clip(1e-300)))
    drawn = np.argsort(-(beta * value + noise), kind="stable")[: 20 * count]  # without replacement, by Gumbel's trick
    note = f"all {len(texts)} strings were listed, and {len(drawn)} drawn exactly in proportion to exp({beta:.3g} x acquisition)"
    return Candidates([texts[i] for i in drawn], value[drawn], ["drawn"] * len(drawn), [note], beta)


# search ---------------------------------------------------------------------------------------------------------


def _search(
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


# the GFlowNet ---------------------------------------------------------------------------------------------------


class _Acquisition:
    """The acquisition as an oracle over states; every text is scored once."""

    on_device = False

    def __init__(self, env: Strings, score: Score, known: dict[str, float]):
        self.env, self.score, self.known, self.calls = env, score, known, 0

    def __call__(self, state: Tensor) -> Tensor:
        texts = self.env.decode(state)
        new = [t for t in dict.fromkeys(texts) if t not in self.known]
        if new:
            self.calls += len(new)
            self.known.update(zip(new, self.score(new).tolist(), strict=True))
        found = torch.tensor([self.known[t] for t in texts], dtype=torch.float32)
        return found.reshape(state.shape[:-1])


def _trained(
    env: Strings, accepts: Callable[[str], bool], score: Score, found: Candidates, count: int, effort: Effort, seed: int
) -> Candidates:
    """A policy trained off-policy towards exp(beta x acquisition), half of each batch replayed from the best that search found."""
    from stochflow.engines.base import Request
    from stochflow.engines.choose import walk
    from stochflow.learn.buffer import Buffer
    from stochflow.learn.objectives import LogVariance
    from stochflow.learn.rollout import backward_rollout
    from stochflow.nets.mlp import MLP
    from stochflow.nets.policy import Policy
    from stochflow.noise.dynamics import Known
    from stochflow.scores.rewards import Linear
    from stochflow.training.sources import Mixed, OnPolicy
    from stochflow.training.trainer import Trainer
    from stochflow.types import Task
    from stochflow.worlds.channels import Exact

    beta = sharpness(found.value, count) if len(found.texts) else 1.0
    shift = float(found.value.max()) if len(found.texts) else 0.0
    known = {t: v - shift for t, v in zip(found.texts, found.value.tolist(), strict=True)}
    oracle = _Acquisition(env, lambda texts: score(texts) - shift, known)
    task = Task(env, Exact(), oracle, Linear(beta))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        policy = Policy(env, MLP(), seeds=(seed,))
        elite = found.texts[:BUFFER]
        buffer = Buffer(env, BUFFER, priority=0.5)
        if elite:
            ways = backward_rollout(task, policy, env.encode(elite).unsqueeze(0))
            buffer.add(ways._replace(score=torch.tensor([[known[t] for t in elite]], dtype=torch.float32)))
        half = effort.batch // 2
        fresh = OnPolicy(task, policy, effort.batch - half, explore=0.05)
        source = Mixed(fresh, buffer, half)
        trainer = Trainer(task, policy, Known(env, task.channel), LogVariance(), source, lr=2e-3)
        trainer.train(effort.steps, every=effort.steps)
        with trainer.averaged(), torch.no_grad():
            drawn = walk(Request(task, policy, 20 * count), "auto").trajectories
            texts = [t for t in dict.fromkeys(env.decode(drawn.states[-1][0])) if accepts(t)]
    drawn_value = np.array([known.get(t, np.nan) for t in texts])
    missing = [i for i, t in enumerate(texts) if t not in known]
    if missing:
        drawn_value[missing] = score([texts[i] for i in missing]) - shift
    beside = [i for i, t in enumerate(found.texts[: 20 * count]) if t not in set(texts)]
    note = (
        f"a GFlowNet was trained for {effort.steps} steps towards exp({beta:.3g} x acquisition) and {len(texts)} different strings drawn; "
        f"genetic search on the acquisition adds {len(beside)}"
    )
    every = [*texts, *[found.texts[i] for i in beside]]
    value = np.concatenate([drawn_value + shift, found.value[beside]])
    return Candidates(every, value, ["drawn"] * len(texts) + ["search"] * len(beside), [note], beta)
