"""Replay: actions, moves and scores in small integers; states are rebuilt by `env.step`.

Memory is linear in length. Scores are kept and log-rewards recomputed, so they stay right while the exponent ramps.
All shapes are static and no value is read on the host, so a captured iteration can hold it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stochflow.errors import UserError, need_number, need_whole
from stochflow.types import Trajectories
from stochflow.worlds.env import Env, need_env


class Buffer(nn.Module):
    """A ring of `capacity` trajectories per seed. `priority` = fraction of draws from the best tenth by score."""

    TOP = 0.1

    def __init__(self, env: Env, capacity: int, seeds: int = 1, priority: float = 0.0):
        super().__init__()
        need_env(env)
        need_whole("capacity of a replay buffer", capacity, -(2**63))
        need_whole("seeds of a replay buffer", seeds, 1)
        need_number("priority of a replay buffer", priority)
        if capacity < 1:
            raise UserError(f"a replay buffer of {capacity} trajectories holds nothing: give a size of at least 1")
        self.env, self.capacity, self.priority = env, capacity, priority
        shape = (env.horizon, seeds, capacity)
        self.actions: Tensor
        self.moves: Tensor
        self.length: Tensor
        self.score: Tensor
        self.real: Tensor
        self.row: Tensor
        self.written: Tensor
        self.register_buffer("actions", torch.full(shape, -1, dtype=torch.int16))
        self.register_buffer("moves", torch.zeros(shape, dtype=torch.int16))
        self.register_buffer("length", torch.zeros(shape[1:], dtype=torch.int32))
        self.register_buffer("score", torch.full(shape[1:], -torch.inf))
        self.register_buffer("real", torch.zeros(shape[1:], dtype=torch.bool))
        self.register_buffer("row", torch.zeros(shape[1:], dtype=torch.int32))
        self.register_buffer("written", torch.zeros((), dtype=torch.long))

    def add(self, traj: Trajectories) -> None:
        """Store a batch in place of the oldest trajectories."""
        batch = traj.moves.shape[-1]
        if batch > self.capacity:
            raise UserError(
                f"a batch of {batch} trajectories does not fit a replay buffer of {self.capacity}: "
                "make the buffer larger"
            )
        place = (self.written + torch.arange(batch, device=self.written.device)) % self.capacity
        self.actions.index_copy_(2, place, traj.actions.to(torch.int16))
        self.moves.index_copy_(2, place, traj.moves.to(torch.int16))
        self.length.index_copy_(1, place, traj.alive.sum(0).to(torch.int32))
        self.score.index_copy_(1, place, traj.score.to(self.score))
        self.real.index_copy_(1, place, traj.real)
        if self.env.contexts is not None:
            self.row.index_copy_(1, place, traj.states[0, ..., 0].to(torch.int32))
        self.written += batch

    def sample(self, batch: int) -> Trajectories:
        """`batch` trajectories per seed, drawn with replacement."""
        seeds = self.score.shape[0]
        count = self.written.clamp(max=self.capacity)
        uniform = torch.rand(seeds, batch, device=self.score.device)
        chosen = (uniform * count).long().clamp(max=self.capacity - 1)
        if self.priority > 0:
            order = self.score.argsort(stable=True, dim=1, descending=True)
            best = order.gather(1, (uniform * (count * self.TOP).ceil()).long())
            chosen = torch.where(torch.rand_like(uniform) < self.priority, best, chosen)
        return self.rebuild(chosen)

    def rebuild(self, chosen: Tensor) -> Trajectories:
        """The trajectories at positions [S, n]."""
        wide = chosen.expand(self.env.horizon, *chosen.shape)
        actions = self.actions.gather(2, wide).long()
        moves = self.moves.gather(2, wide).long()
        length = self.length.gather(1, chosen)
        time = torch.arange(self.env.horizon, device=chosen.device)[:, None, None]
        alive = time < length
        row = self.row.gather(1, chosen).long()
        state = self.env.initial(tuple(chosen.shape), row)
        states = [state]
        for t in range(self.env.horizon):
            state = torch.where(alive[t].unsqueeze(-1), self.env.step(state, moves[t]), state)
            states.append(state)
        return Trajectories(
            torch.stack(states), actions, moves, alive, self.score.gather(1, chosen), self.real.gather(1, chosen)
        )


def join(first: Trajectories, second: Trajectories) -> Trajectories:
    """Two batches as one, side by side along the batch dimension."""
    return Trajectories(
        torch.cat([first.states, second.states], 2),
        torch.cat([first.actions, second.actions], 2),
        torch.cat([first.moves, second.moves], 2),
        torch.cat([first.alive, second.alive], 2),
        torch.cat([first.score, second.score], 1),
        torch.cat([first.real, second.real], 1),
    )


def taken(traj: Trajectories, places: Tensor) -> Trajectories:
    """The trajectories at `places` [n] of a batch, the same ones of every seed."""
    along = (2, 2, 2, 2, 1, 1)
    return Trajectories(*(x.index_select(dim, places) for x, dim in zip(traj, along, strict=True)))


def with_scores(traj: Trajectories, score: Tensor) -> Trajectories:
    """The batch with its scores [S, B]; one without a score (NaN) gives its place to another, random one of its seed."""
    blank = score.isnan()
    if not bool(blank.any()):
        return traj._replace(score=score.to(traj.score))
    if bool(blank.all(1).any()):
        raise UserError("no object of a whole batch has a score: mend the oracle, or take --on-nan floor")
    good = torch.multinomial((~blank).float(), score.shape[1], replacement=True)
    place = torch.where(blank, good, torch.arange(score.shape[1], device=score.device))

    def replaced(x: Tensor) -> Tensor:  # [T, S, B, ...]
        index = place.view(1, *place.shape, *[1] * (x.dim() - 3)).expand_as(x)
        return x.gather(2, index)

    return Trajectories(
        replaced(traj.states),
        replaced(traj.actions),
        replaced(traj.moves),
        replaced(traj.alive),
        score.gather(1, place).to(traj.score),
        traj.real.gather(1, place),
    )
