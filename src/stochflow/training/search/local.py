"""Local search by backtracking: a good object is taken apart part of the way and finished again by the policy."""

from __future__ import annotations

import torch
from torch import Tensor

from stochflow.errors import UserError
from stochflow.learn.buffer import join
from stochflow.nets.policy import Policy
from stochflow.ops import gumbel_argmax, masked_log_softmax
from stochflow.training.search.paths import ways_to
from stochflow.training.search.replay import RankBuffer
from stochflow.training.sources import Source
from stochflow.types import Task


class LocalSearch(Source):
    """Another source's batch with `tries` neighbours of the best objects beside it.

    Each goes back from one of the best by 1 to `depth` of its steps, with the backward policy, and forward again with
    the policy. Works in every environment. What comes out is data off the policy and not `real`.
    """

    static = False

    def __init__(self, source: Source, task: Task, policy: Policy, tries: int, depth: float = 0.5, best: int = 100):
        super().__init__()
        if tries < 1 or not 0 < depth <= 1 or best < 1:
            raise UserError(
                f"tries = {tries}, depth = {depth} and best = {best} of a local search: give at least one try, a depth "
                "above 0 and at most 1, and at least one object to start from"
            )
        one = torch.zeros(1, dtype=torch.long, device=policy.device)
        if task.channel.begin(task.env.initial((1,), one)) is not None:
            raise UserError(
                f"the noise of {task.channel!r} remembers the way, which a local search leaves: use Population or no search"
            )
        self.source, self.task, self.tries, self.depth = source, task, tries, depth
        self._policy = [policy]
        self.buffer = RankBuffer(task.env, best, policy.num_seeds, flat=1.0)

    def act(self, step):
        own = self.source.act(step)
        if int(self.buffer.written) == 0:
            return own
        policy = self._policy[0]
        way = ways_to(self.task, policy, self.buffer.sample(self.tries).states[-1])
        final = redone(self.task, policy, way.states, way.alive, self.depth)
        return join(own, ways_to(self.task, self._policy[0], final))

    def use(self, engine, word, trace):
        self.source.use(engine, word, None)

    def why_plain(self, task, policy):
        return "neighbours of the best objects join the batch"

    def mix(self, traj):
        self.buffer.add(traj)
        return self.source.mix(traj)


@torch.no_grad()
def redone(task: Task, policy: Policy, states: Tensor, alive: Tensor, depth: float) -> Tensor:
    """Objects [S, B, D] that leave the ways `states` [T+1, S, B, D] at a random earlier state and are finished anew.

    `alive` [T, S, B] as in `Trajectories`; the ways are drawn from the backward policy.
    """
    env = task.env
    length = alive.sum(0)  # [S, B]
    back = 1 + (torch.rand(length.shape, device=length.device) * (depth * length)).long()
    keep = (length - back).clamp(min=0)
    state = states.gather(0, keep[None, ..., None].expand(1, *states.shape[1:])).squeeze(0)
    context = policy.context(state)
    stopped = torch.zeros_like(length, dtype=torch.bool)
    for _ in range(env.horizon):
        mask = env.moves(state)
        legal = env.real_moves(mask)
        going = legal.any(-1) & ~stopped
        if not bool(going.any()):
            break
        action = gumbel_argmax(masked_log_softmax(policy(state, context).forward, mask))
        move = task.channel.sample(state, legal, action)
        if env.stop is not None:
            meant = action == env.stop
            move = torch.where(meant, action, move)
            stopped = stopped | (meant & going)
        state = torch.where((going & ~stopped).unsqueeze(-1), env.step(state, move), state)
    return state
