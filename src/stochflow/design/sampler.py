"""The GFlowNet of a campaign: one policy that draws strings in proportion to a sharpened acquisition, or to several by context.

R goals (rows of the context table), N texts. Half of each batch is replayed from the best that a search inside the acquisition found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stochflow.design.generate import DEEP, Candidates, Effort, Score, sharpness
from stochflow.engines.base import Request
from stochflow.engines.choose import walk
from stochflow.learn.buffer import Buffer
from stochflow.learn.objectives import LogVariance, Objective, TrajectoryBalance
from stochflow.learn.rollout import backward_rollout
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.noise.dynamics import Known
from stochflow.scores.rewards import Linear
from stochflow.training.sources import Mixed, OnPolicy
from stochflow.training.trainer import Trainer
from stochflow.types import Task
from stochflow.worlds.channels import Exact
from stochflow.worlds.conditioned import Conditioned
from stochflow.worlds.strings import Strings

BUFFER = 1024  # trajectories replayed
DRAWS = 20  # strings drawn for each design
BROKEN = 10.0  # nats by which a string that breaks a rule lies below the best one that breaks none


@dataclass
class Goal:
    """An acquisition, what a search found for it, and how many designs it is to have; a goal without designs is learned alone."""

    score: Score
    found: Candidates | None
    count: int


class Acquisitions:
    """beta x (acquisition - its best known value) of every goal, as an oracle over states; each text is scored once a goal.

    What lies `DEEP` below would never be drawn, but log EI of a sure model falls with the square of the gap: a random string may have
    -10^12 nats, and a policy that is trained on such numbers collapses to one string. There -x becomes DEEP (1 + log(x / DEEP)).
    Texts that break a rule of which the masks know nothing are held below the best by `BROKEN`, or they would be drawn in vain.
    """

    on_device = False

    def __init__(self, strings: Strings, accepts: Callable[[str], bool], goals: Sequence[Goal], conditioned: bool):
        self.strings, self.accepts, self.goals, self.conditioned, self.calls = strings, accepts, goals, conditioned, 0
        best = max(
            (g.found for g in goals if g.found is not None and g.found.texts), key=lambda f: len(f.texts), default=None
        )
        texts = best.texts[:1000] if best is not None else []
        self.beta, self.shift, self.known = [], [], []
        for goal in goals:
            own = goal.found if goal.found is not None and goal.found.texts else None
            value = own.value if own is not None else goal.score(texts) if texts else np.zeros(1)
            self.beta.append(sharpness(value, max(goal.count, 8)))
            self.shift.append(float(value.max()))
            self.known.append(dict(zip(own.texts, value.tolist(), strict=True)) if own is not None else {})

    def values(self, texts: Sequence[str], row: int) -> list[float]:
        """The plain acquisition of one goal."""
        known = self.known[row]
        new = [t for t in dict.fromkeys(texts) if t not in known]
        if new:
            self.calls += len(new)
            known.update(zip(new, self.goals[row].score(new).tolist(), strict=True))
        return [known[t] for t in texts]

    def __call__(self, state: Tensor) -> Tensor:
        rows = state[..., 0].flatten().tolist() if self.conditioned else [0] * state[..., 0].numel()
        texts = self.strings.decode(state[..., 1:] if self.conditioned else state)
        out = np.zeros(len(texts))
        for row in set(rows):
            mine = [i for i, r in enumerate(rows) if r == row]
            plain = np.array(self.values([texts[i] for i in mine], row))
            out[mine] = _lifted(self.beta[row] * (plain - self.shift[row]))
        broken = [i for i, text in enumerate(texts) if not self.accepts(text)]
        out[broken] = np.minimum(out[broken], 0.0) - BROKEN
        return torch.tensor(out, dtype=torch.float32).reshape(state.shape[:-1])


def _lifted(nats: np.ndarray) -> np.ndarray:
    """The same order, without the numbers that no network can be trained on."""
    return np.where(nats < -DEEP, -DEEP * (1 + np.log(np.maximum(-nats, DEEP) / DEEP)), nats)


def trained(
    strings: Strings,
    accepts: Callable[[str], bool],
    goals: Sequence[Goal],
    contexts: np.ndarray | None,
    effort: Effort,
    seed: int,
) -> list[Candidates]:
    """Candidates of every goal with designs: what the policy draws, and the best that search found beside it."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        trainer = learned(strings, accepts, goals, contexts, effort, seed)
        with trainer.averaged(), torch.no_grad():
            made = [_drawn(trainer, goal, row, accepts, effort) for row, goal in enumerate(goals) if goal.count]
    drawn = sum(c.source.count("drawn") for c in made)
    broke = sum(c.broke for c in made)
    lost = f" (and {broke} that break a rule which is checked after drawing)" if broke else ""
    shared = f" for {len(goals)} goals at once" if contexts is not None else ""
    made[0].notes.append(
        f"a GFlowNet was trained for {effort.steps} steps{shared} to draw strings in proportion to their sharpened acquisition: "
        f"{drawn} different string{'s were' if drawn != 1 else ' was'} drawn{lost}, and {sum(len(c.texts) for c in made) - drawn} more found by genetic search"
        + (
            "; most that were drawn are far below the best, as the policy is not trained enough for this space: give more --steps"
            if _missed(made)
            else ""
        )
    )
    return made


def _missed(made: Sequence[Candidates]) -> bool:
    """Whether most strings that were drawn would practically never be, were the law what it is trained towards."""
    nats = [c.beta * (c.value[np.array(c.source) == "drawn"] - c.value.max()) for c in made if len(c.value)]
    below = np.concatenate(nats) if nats else np.zeros(0)
    return bool(len(below)) and float(np.median(below)) < -DEEP


def learned(
    strings: Strings,
    accepts: Callable[[str], bool],
    goals: Sequence[Goal],
    contexts: np.ndarray | None,
    effort: Effort,
    seed: int,
) -> Trainer:
    """A policy trained off-policy towards exp(beta x acquisition) of every goal; it draws from torch's generator."""
    env: Any = strings if contexts is None else Conditioned(strings, torch.from_numpy(contexts).float())
    task = Task(env, Exact(), Acquisitions(strings, accepts, goals, contexts is not None), Linear(1.0))
    # log Z is a function of the context, which the variance over a batch of many contexts cannot stand for
    objective: Objective = LogVariance() if contexts is None else TrajectoryBalance()
    policy = Policy(env, MLP(), seeds=(seed,))
    buffer = Buffer(env, BUFFER, priority=0.5)
    _replay(buffer, task, policy, strings, goals, contexts is not None)
    half = effort.batch // 2 if int(buffer.written) else 0
    fresh = OnPolicy(task, policy, effort.batch - half, explore=0.05)
    source = Mixed(fresh, buffer, half) if half else fresh
    trainer = Trainer(task, policy, Known(env, task.channel), objective, source, lr=2e-3)
    trainer.train(effort.steps, every=effort.steps)
    return trainer


def _replay(
    buffer: Buffer, task: Task, policy: Policy, strings: Strings, goals: Sequence[Goal], conditioned: bool
) -> None:
    """The best strings of every goal enter the buffer, the way to each being its only one."""
    each = BUFFER // max(1, sum(g.found is not None for g in goals))
    for row, goal in enumerate(goals):
        if goal.found is None or not goal.found.texts:
            continue
        state = strings.encode(goal.found.texts[:each])
        if conditioned:
            state = torch.cat([torch.full((len(state), 1), row), state], 1)
        ways = backward_rollout(task, policy, state.unsqueeze(0))
        buffer.add(ways._replace(score=task.oracle(state).unsqueeze(0)))


def _drawn(trainer: Trainer, goal: Goal, row: int, accepts: Callable[[str], bool], effort: Effort) -> Candidates:
    task, oracle = trainer.task, trainer.task.oracle
    assert isinstance(oracle, Acquisitions)
    size = DRAWS * goal.count
    rows = torch.full((1, size), row) if oracle.conditioned else None
    final = walk(Request(task, trainer.policy, size, row=rows), "auto").trajectories.states[-1][0]
    drawn = oracle.strings.decode(final[..., 1:] if oracle.conditioned else final)
    different = list(dict.fromkeys(drawn))
    texts = [t for t in different if accepts(t)]
    seen, found = set(texts), goal.found.texts[:size] if goal.found is not None else []
    beside = [t for t in found if t not in seen]
    every = [*texts, *beside]
    value = np.array(oracle.values(every, row))
    source = ["drawn"] * len(texts) + ["search"] * len(beside)
    return Candidates(every, value, source, [], oracle.beta[row], len(different) - len(texts))
