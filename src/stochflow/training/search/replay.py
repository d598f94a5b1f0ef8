"""Replay by rank: the best objects are kept for ever, and the better ones are drawn more often.

Between two questions the policy's own latest draws are replayed beside them. A batch of the best alone says in what
proportion to draw these, and nothing of how much the policy draws elsewhere: what it last drew, and is known to be
worse, is what the best are weighed against.
"""

from __future__ import annotations

import torch

from stochflow.errors import UserError
from stochflow.learn.buffer import Buffer, join, taken
from stochflow.training.search.paths import code
from stochflow.training.sources import Source
from stochflow.types import Trajectories


class RankBuffer(Buffer):
    """The best `capacity` different objects of each seed; a draw takes rank r with weight 1 / (flat * count + r)."""

    def __init__(self, env, capacity: int, seeds: int = 1, flat: float = 0.01):
        super().__init__(env, capacity, seeds)
        if not flat > 0:
            raise UserError(f"flat = {flat} must be above 0: it is how evenly a replay draws from all ranks")
        self.flat = flat
        self.number: torch.Tensor
        self.register_buffer("number", torch.zeros(seeds, capacity, dtype=torch.long))

    def add(self, traj: Trajectories) -> None:
        """Keep the best of what is kept and this batch, each object once (its first way)."""
        new = {
            "actions": traj.actions.to(torch.int16),
            "moves": traj.moves.to(torch.int16),
            "length": traj.alive.sum(0).to(torch.int32),
            "score": traj.score.to(self.score),
            "real": traj.real,
            "row": traj.states[0, ..., 0].to(torch.int32),
            "number": code(traj.states[-1]),
        }
        number = torch.cat([self.number, new["number"]], 1)
        score = torch.cat([self.score, new["score"]], 1)
        kept = torch.cat([self.score > -torch.inf, torch.ones_like(traj.real)], 1)
        key = torch.where(kept, number, torch.arange(number.shape[1], device=number.device))
        ordered, where = key.sort(dim=1, stable=True)
        twice = torch.zeros_like(kept)
        twice[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
        twice = torch.zeros_like(kept).scatter_(1, where, twice) & kept
        score = torch.where(twice, -torch.inf, score)
        best = score.argsort(dim=1, descending=True, stable=True)[:, : self.capacity]
        for name, value in new.items():
            if name == "row" and self.env.contexts is None:
                continue
            old = getattr(self, name)
            both = torch.cat([old, value.to(old)], -1)
            old.copy_(both.gather(-1, best.expand(*both.shape[:-1], -1)))
        self.score.copy_(score.gather(1, best))
        self.written.fill_(int((self.score > -torch.inf).sum(1).min()))

    def sample(self, batch: int) -> Trajectories:
        """`batch` trajectories per seed by rank, with replacement."""
        count = self.written.clamp(min=1)
        rank = torch.arange(self.capacity, device=self.score.device)
        weight = torch.where(rank < count, 1 / (self.flat * count + rank + 1), 0.0)
        chosen = torch.multinomial(weight.expand(len(self.score), -1), batch, replacement=True)
        return self.rebuild(chosen)


class RankReplay(Source):
    """Another source's batch with `replay` of the best trajectories beside it.

    With `every` above 1 the oracle is asked in one iteration of so many; the others learn from replay alone, of the best
    and of the latest trajectories that were `real` (the policy's own, not found by a search), half as many.
    """

    static = False

    def __init__(self, source: Source, buffer: RankBuffer, replay: int, every: int = 1):
        super().__init__()
        if every < 1 or replay < 1:
            raise UserError(f"replay = {replay} and every = {every} must be at least 1")
        self.source, self.buffer, self.replay, self.every = source, buffer, replay, every
        self.latest = Buffer(buffer.env, max(1, replay // 2), len(buffer.score)).to(buffer.score.device)
        self.scored, self.asks, self.fresh = source.scored, source.asks, True

    def act(self, step):
        self.fresh = int(step) % self.every == 0
        self.scored = self.source.scored or not self.fresh
        self.asks = self.source.asks and self.fresh
        if self.fresh:
            return self.source.act(step)
        # chosen by what came out, so a model of the noise must not learn from it
        again = self.buffer.sample(self.replay)
        held = min(int(self.latest.written), self.latest.capacity)
        if held:
            every = torch.arange(held, device=again.score.device)
            again = join(again, self.latest.rebuild(every.expand(len(again.score), -1)))
        return again._replace(real=torch.zeros_like(again.real))

    def use(self, engine, word, trace):
        self.source.use(engine, word, None)

    def why_plain(self, task, policy):
        return "replayed trajectories join the batch"

    def mix(self, traj):
        if not self.fresh:
            return traj
        traj = self.source.mix(traj)
        self.buffer.add(traj)
        own = traj.real.all(0).nonzero().squeeze(1)[-self.latest.capacity :]
        if len(own):
            self.latest.add(taken(traj, own))
        return join(traj, self.buffer.sample(self.replay))

    def _load_from_state_dict(self, state, prefix, *rest):
        for name, start in self.latest.state_dict().items():  # an earlier version kept none
            state.setdefault(f"{prefix}latest.{name}", start)
        super()._load_from_state_dict(state, prefix, *rest)
