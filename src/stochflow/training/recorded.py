"""An iteration as functions without arguments: itself, or CUDA graphs of it that are replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch

from stochflow.engines.base import Walk
from stochflow.engines.capture import WARM_UP, Captured, aside, recordable, recording
from stochflow.scores.rewards import Sharpening

if TYPE_CHECKING:
    from stochflow.training.trainer import Trainer


def recorded(trainer: Trainer, note: bool) -> list[Callable[[], object]]:
    """One CUDA graph, or two around an oracle on the host; the iteration as it is on a CPU."""

    def whole() -> None:
        trainer.learn(trainer.fresh(), note)

    device, source, calls = trainer.policy.device, trainer.source, trainer.calls
    still = source.static and not isinstance(trainer.task.reward, Sharpening)  # a recording holds their numbers
    if not recordable(device) or not trainer.iteration.capture or not still:
        return [whole]
    kept = trainer.state_dict()
    if source.scored or getattr(trainer.task.oracle, "on_device", False):
        aside(whole, device, WARM_UP)
        trainer.load_state_dict(kept)
        one = Captured(whole)
        calls.batch = 0
        trainer.pool = one.record(trainer.pool)
        each = calls.batch
        return [one, lambda: calls.add(each)]

    def walked() -> Walk:
        return source.walk(trainer.step)

    aside(
        lambda: trainer.learn(walked(), note), device, WARM_UP
    )  # unscored: an oracle on the host scores real batches only
    trainer.load_state_dict(kept)
    act = Captured(walked)
    trainer.pool = act.record(trainer.pool)
    fresh: Walk = act.result
    scores = torch.zeros_like(fresh.trajectories.score)
    scored = fresh._replace(trajectories=fresh.trajectories._replace(score=scores))
    learn = Captured(lambda: trainer.learn(scored, note))
    learn.record(trainer.pool)
    return [act, lambda: scores.copy_(trainer.score(fresh.trajectories).score), learn]


class OracleCalls:
    """How many objects the oracle has scored."""

    def __init__(self, device: torch.device):
        self.batch = 0  # objects of the last batch
        self._batches = 0  # of all batches
        self.beyond = torch.zeros((), dtype=torch.long, device=device)  # those, by an objective

    def count(self, score: torch.Tensor, ranks: int) -> None:
        """A batch with these scores on each of so many processes. (Recording a graph scores no object.)"""
        self.batch = score.numel() * ranks
        if not recording():
            self._batches += self.batch

    def add(self, objects: int) -> None:
        self._batches += objects

    def total(self) -> torch.Tensor:
        return self.beyond.cpu() + self._batches

    def load(self, total: torch.Tensor) -> None:
        self.beyond.copy_(total)
        self._batches = 0
