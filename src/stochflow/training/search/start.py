"""Beginning from objects that are known: they are asked about first, and everything that learns by score sees them."""

from __future__ import annotations

import torch
from torch import Tensor

from stochflow.errors import UserError
from stochflow.learn.buffer import join
from stochflow.nets.policy import Policy
from stochflow.training.search.paths import ways_to
from stochflow.training.sources import Source
from stochflow.types import Task

AT_ONCE = 64  # known objects in one batch


class Start(Source):
    """Another source's batch with the known objects [N, D] beside it in the first iterations, until all have been given."""

    static = False

    def __init__(self, source: Source, task: Task, policy: Policy, known: Tensor):
        super().__init__()
        if known.ndim != 2 or not len(known):
            raise UserError("there is no known object to start from: give at least one")
        self.source, self.task, self.known = source, task, known
        self._policy = [policy]
        self.given: Tensor
        self.register_buffer("given", torch.zeros((), dtype=torch.long))

    def act(self, step):
        own = self.source.act(step)
        done = int(self.given)
        part = self.known[done : done + AT_ONCE].to(own.score.device)
        if not len(part):
            return own
        policy = self._policy[0]
        return join(own, ways_to(self.task, policy, part.expand(policy.num_seeds, -1, -1)))

    def use(self, engine, word, trace):
        self.source.use(engine, word, None)

    def why_plain(self, task, policy):
        return "known objects join the first batches"

    def mix(self, traj):
        self.given.fill_(min(int(self.given) + AT_ONCE, len(self.known)))
        return self.source.mix(traj)
