"""What a run asked its oracle: the best objects with their scores, the figures of them, and the known objects it starts from."""

from __future__ import annotations

import io
import math
from typing import Any

import torch
from torch import Tensor

from stochflow.errors import UserError
from stochflow.files.reading import read_text
from stochflow.law.measure import forked
from stochflow.runs.config import Train
from stochflow.scores.oracles import Cached
from stochflow.training.search.paths import legal_letters, random_strings
from stochflow.training.search.pool import apart
from stochflow.training.search.population import default_distance
from stochflow.training.search.replay import RankReplay
from stochflow.training.search.variation import Letters
from stochflow.training.sources import Source
from stochflow.types import Task
from stochflow.worlds.strings import Strings

BEST = 100  # designs a person looks at
DOOR = 16  # random objects that a user's oracle is tried on before training
RANDOM = 10_000  # objects drawn at most to see what random ones score, where asking costs nothing,
LEAST = 500  # and at least
SEEN = 20  # of the best, from which their mean is taken as it is
AMONG = 5000  # of the best, among which those at a distance are looked for


def best_asked(task: Task, source: Source, most: int = BEST) -> tuple[Tensor, Tensor] | None:
    """The best different objects ever asked about [n, D] and their scores [n], the best first; None where they are not kept."""
    oracle = task.oracle
    if isinstance(oracle, Cached) and hasattr(task.env, "encode"):
        ordered = sorted(oracle.met.items(), key=lambda item: (-item[1], item[0]))[:most]
        if not ordered:
            return None
        return task.env.encode([t for t, _ in ordered]), torch.tensor([s for _, s in ordered])
    if isinstance(source, RankReplay):
        buffer = source.buffer
        count = int(buffer.written)
        kept = buffer.rebuild(torch.arange(count, device=buffer.score.device).expand(len(buffer.score), -1))
        states, scores = kept.states[-1].flatten(0, 1).cpu(), kept.score.flatten().cpu()
        order = scores.argsort(descending=True, stable=True)
        states, scores = states[order], scores[order]
        new = torch.ones(len(states), dtype=torch.bool)
        met: set[tuple[int, ...]] = set()
        for i, row in enumerate(states.tolist()):
            new[i] = tuple(row) not in met
            met.add(tuple(row))
        return states[new][:most], scores[new][:most]
    return None


def figures(task: Task, source: Source) -> dict[str, Any]:
    """Of the objects asked about: the best, the mean of the 100 best, and that of the 100 best at a fifth of the length apart."""
    found = best_asked(task, source, AMONG)
    return {} if found is None else figures_of(task.env, *found)


def random_figures(task: Task, train: Train, at_the_door: bool, calls: int) -> dict[str, float]:
    """Of random objects, as the first ones asked about were: the mean score, its standard error, and what random search finds.

    `random_top` estimates the mean of the 100 best of as many random objects as were paid for; {} where there are none.
    Those asked at the door come first, then the first batch: all of it, so that the order of several workers' answers
    does not matter. It is random where no known object is in it. An oracle that is a tensor function is asked about others,
    which are not counted.
    """
    oracle = task.oracle
    if not isinstance(oracle, Cached):
        return _random_of(task, calls)
    first = 0 if train.start else (train.batch - round(train.replay * train.batch)) * train.seeds
    count = (DOOR if at_the_door else 0) + first
    scores = torch.tensor(list(oracle.met.values())[:count], dtype=torch.float64).sort().values
    if len(scores) < DOOR // 2:
        return {}
    calls = len(oracle.met.keys() - oracle.free)  # `paid` is ahead after a resume
    return _as_figures(scores, calls, max(oracle.met.values()))


def _as_figures(scores: Tensor, calls: int, best: float) -> dict[str, float]:
    """`best` was seen: an estimate from a tail does not go beyond."""
    return {
        "random_score": float(scores.mean()),
        "random_error": float(scores.std() / len(scores) ** 0.5),
        "random_top": min(best_of_many(scores, calls), best),
        "random_count": len(scores),
    }


def _random_of(task: Task, calls: int) -> dict[str, float]:
    """The same of strings drawn for it, the same ones every time; {} where there are none to draw."""
    env = task.env
    if not isinstance(env, Strings) or env.contexts is not None or not getattr(task.oracle, "on_device", False):
        return {}
    letters = Letters(env.tokens, env.length, env.length if env.min_length is None else max(1, env.min_length))
    with forked(0, torch.device("cpu")):
        drawn = random_strings(env, letters, max(LEAST, min(calls, RANDOM)))
    scores = task.oracle(drawn).double().sort().values
    return _as_figures(scores, calls, float(scores[-1])) if bool(scores.isfinite().all()) else {}


def best_of_many(scores: Tensor, calls: int) -> float:
    """The mean of the 100 best of `calls` random objects, from a few of their scores [n]; an exponential tail beyond the best quarter."""
    share = min(1.0, BEST / max(1, calls))
    ordered = scores.sort(descending=True).values
    count = max(1, len(scores) // 4)
    if share * len(scores) >= min(count, SEEN):
        return float(ordered[: round(share * len(scores))].mean())
    start = float(ordered[count - 1])
    excess = float(ordered[:count].mean()) - start
    return start + excess * (1 + math.log(count / len(scores) / share))


def figures_of(env: Any, states: Tensor, scores: Tensor) -> dict[str, Any]:
    """The same of different objects [n, D] and their scores [n], the best first."""
    if not len(scores):
        return {}
    known: dict[str, Any] = {
        "best_asked": float(scores[0]),
        "top_asked": float(scores[:BEST].mean()),
        "asked_kept": min(BEST, len(scores)),
    }
    if isinstance(env, Strings):
        distance = default_distance(env.length)
        far = apart(states, distance, BEST)
        known |= {
            "apart_asked": float(scores[far].mean()),
            "apart_count": int(far.sum()),
            "apart_distance": distance,
            "diversity_asked": _diversity(states[:BEST]),
        }
    return known


def _diversity(states: Tensor) -> float:
    n = len(states)
    return float((states.unsqueeze(1) != states).sum()) / max(1, n * (n - 1))


def known_objects(path: str, env: Any) -> Tensor:
    """The sequences of a file as states [N, D], each once: FASTA, or one sequence a line."""
    if not hasattr(env, "encode"):
        raise UserError(f"--start {path} holds sequences, and {env!r} builds none: leave it out")
    text = read_text(path)
    texts = _of_fasta(text) if text.lstrip().startswith(">") else [line.strip() for line in text.splitlines()]
    texts = [t for t in dict.fromkeys(texts) if t]
    if not texts:
        raise UserError(f"--start {path} holds no sequence: give FASTA, or one sequence a line")
    try:
        known = env.encode(texts)
    except UserError as error:
        raise UserError(f"--start {path}: {error}") from error
    where = legal_letters(env, known) if isinstance(env, Strings) else known
    if not torch.equal(where, known):
        first = texts[int((where != known).any(1).nonzero()[0])]
        raise UserError(f"--start {path}: {first[:40]!r} cannot be built under the rules of {env!r}: leave it out")
    return known


def _of_fasta(text: str) -> list[str]:
    try:
        from Bio.SeqIO.FastaIO import SimpleFastaParser
    except ImportError as error:
        raise UserError(
            "reading FASTA needs Biopython, which is not installed: pip install 'stochflow[bio]', or give one sequence a line"
        ) from error
    return [str(sequence) for _, sequence in SimpleFastaParser(io.StringIO(text))]
