"""Futures in proportion to P(future) exp(beta score(future)), and probabilities of rare events.

P is the law of a fitted forecaster, known step by step in bins. A flow network is trained against it by relative trajectory balance,
(log Q - log P - beta score - its mean)^2, on its own futures and the forecaster's; its logits start as the forecaster's own. Every figure is an importance-
weighted mean over draws of all stages and of the forecaster itself (a defensive mixture), with the exact ratio P / mixture as weight: the
learned log Z is used nowhere, so a network that has learned badly costs precision and not truth.

    N draws    L horizon    M bins    S networks of the forecaster    J proposals of the mixture
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stochflow.errors import UserError
from stochflow.learn.objectives import LogVariance
from stochflow.learn.rollout import rollout
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.nets.windows import WindowMLP
from stochflow.noise.dynamics import Known
from stochflow.training.sources import Source
from stochflow.training.trainer import Trainer
from stochflow.types import PolicyOut, Task, Trajectories
from stochflow.worlds.channels import Exact
from stochflow.worlds.series import Series

Values = Callable[[Tensor], np.ndarray]  # finished states [N, D] -> futures [N, L]
Score = Callable[[np.ndarray], np.ndarray]  # futures [N, L] -> scores [N]
LR = 5e-3
SHARE = 0.25  # of the final draws that are the forecaster's own
KEEP = 0.35  # effective share of a stage's draws under the next one: how far a stage goes
STAGES = 30  # most stages
ELITE = 0.15  # share of a stage's draws that reach the next level of an event
SHARP = 4.0  # how strongly draws below a level are held off it, in standard deviations of the scores
WAVES = 24  # smooth directions in which the logits are learned fastest
UNIFORM = 1e-4  # of a proposal's steps: what it could not reach would be missing from the mean


class Prior:
    """The forecaster's law of one window, step by step: the mean over its networks, weighted by how likely each found the steps so far."""

    def __init__(self, policy: Policy):
        self.policy = policy

    def begin(self, state: Tensor) -> Any:
        """A cache, of first states [1, N, D]."""
        each = state.expand(self.policy.num_seeds, -1, -1)
        logits, cache = self.policy.begin(each, self.policy.context(each))
        return logits.log_softmax(-1), cache, torch.zeros_like(logits[..., 0])

    def law(self, cache: Any) -> Tensor:
        """Log-probabilities [1, N, M] of the next bin."""
        logs, _, weight = cache
        return (logs + weight.log_softmax(0).unsqueeze(-1)).logsumexp(0, keepdim=True)

    def advance(self, cache: Any, state: Tensor, move: Tensor, t: int) -> Any:
        logs, inner, weight = cache
        seeds = self.policy.num_seeds
        chosen = move.expand(seeds, -1)
        weight = weight + logs.gather(-1, chosen.unsqueeze(-1)).squeeze(-1)
        logits, inner = self.policy.advance(inner, state.expand(seeds, -1, -1), chosen, t)
        return logits.log_softmax(-1), inner, weight

    @torch.no_grad()
    def along(self, states: Tensor, moves: Tensor) -> Tensor:
        """Log-probabilities [T, 1, N, M] of every step of paths; states [T, 1, N, D]."""
        cache = self.begin(states[0])
        made = []
        for t, move in enumerate(moves):
            made.append(self.law(cache))
            if t + 1 < len(moves):
                cache = self.advance(cache, states[t + 1], move, t)
        return torch.stack(made)


class TiltSeries(Series):
    """The window of a forecast, with features of the path so far: its bins, its values, their sum and extremes."""

    def features(self, state: Tensor) -> Tensor:
        chosen = state[..., 1:]
        known = chosen < self.num_moves
        z = torch.where(known, self.bins.centre(chosen.float()), 0)
        factor = (
            torch.eye(self.horizon)
            if self.paths is None
            else self.paths.factor[int(self.windows.series[0].clamp(max=len(self.paths.factor) - 1))]
        )
        factor = factor.to(z)
        e = torch.where(known, z @ (factor / factor.diagonal().mean()).T, 0)
        total = e.sum(-1, keepdim=True) / self.horizon**0.5
        size = known.sum(-1, keepdim=True)
        step = (size == torch.arange(self.horizon, device=state.device)).float()
        last = torch.where(size > 0, e.gather(-1, (size - 1).clamp(min=0)), 0)
        high, low = e.cummax(-1).values[..., -1:], e.cummin(-1).values[..., -1:]
        return torch.cat([step, z / 2, e / 4, total / 2, last / 4, high / 4, low / 4], -1)


class TiltPolicy(Policy):
    """Logits are the prior's log-probabilities plus a network's, which start at zero and are learned fastest in smooth directions."""

    def __init__(self, env: Series, prior: Prior, hidden: int = 64, seed: int = 0):
        super().__init__(env, MLP(hidden, 2), seeds=(seed,), encoder=WindowMLP(8, 1))
        self.prior = [prior]  # in a list: its parameters are not to be trained
        place = (torch.arange(env.num_moves) + 0.5) / env.num_moves
        wave = torch.arange(env.num_moves).float()
        basis = torch.cos(math.pi * place * wave.unsqueeze(1)) / (1 + wave.unsqueeze(1) / 4)
        basis[0] = 2 * place - 1
        self.basis: Tensor
        self.register_buffer("basis", 3 * basis)
        with torch.no_grad():
            self.head.weight[..., : env.num_moves] = 0
            self.head.bias[..., : env.num_moves] = 0

    def _mixed(self, law: Tensor, net: Tensor) -> Tensor:
        made = (law + net @ self.basis).log_softmax(-1)
        # what the forecaster can do stays possible
        return torch.logaddexp(made + math.log1p(-UNIFORM), law + math.log(UNIFORM))

    def forward(self, state, context=None, repeats=False):
        size = (state[..., 1:] < self.env.num_moves).sum(-1)
        out = super().forward(state, context, repeats)
        law = torch.zeros_like(out.forward)
        first = state.clone()
        first[..., 1:] = self.env.num_moves
        cache = self.prior[0].begin(first)
        for t in range(self.env.horizon):
            law = torch.where((size == t).unsqueeze(-1), self.prior[0].law(cache), law)
            if t + 1 < self.env.horizon:
                move = state[..., 1 + t].clamp(max=self.env.num_moves - 1)
                first[..., 1 + t] = move
                cache = self.prior[0].advance(cache, first, move, t)
        return PolicyOut(self._mixed(law, out.forward), *out[1:])

    def along(self, traj, context=None, flows=True):
        out = super().along(traj, context, flows)
        law = self.prior[0].along(traj.states[: len(traj.moves)], traj.moves)
        return PolicyOut(self._mixed(law, out.forward[: len(law)]), *out[1:])

    def begin(self, state, context=None):
        logits, cache = super().begin(state, context)
        known = self.prior[0].begin(state)
        return self._mixed(self.prior[0].law(known), logits), (cache, known)

    def advance(self, cache, state, move, t):
        inner, known = cache
        logits, inner = super().advance(inner, state, move, t)
        known = self.prior[0].advance(known, state, move, t)
        return self._mixed(self.prior[0].law(known), logits), (inner, known)


class _Halves(Source):
    """Half of a batch from the policy, half from fixed futures of earlier stages and of the forecaster."""

    def __init__(self, task: Task, policy: Policy, batch: int):
        super().__init__()
        self.task, self.policy, self.batch = task, policy, batch
        self.kept: Trajectories | None = None

    def act(self, step):
        own = rollout(self.task, self.policy, self.batch // 2)
        assert self.kept is not None
        chosen = torch.randint(self.kept.moves.shape[2], (self.batch - self.batch // 2,))
        other = Trajectories(*[x[:, :, chosen] if x.dim() >= 3 else x[:, chosen] for x in self.kept])
        both = [torch.cat([a, b], 1 if a.dim() == 2 else 2) for a, b in zip(own, other, strict=True)]
        return Trajectories(*both)


class Draws(NamedTuple):
    """Futures of the mixture of all proposals, and how likely each is under every one of them."""

    states: Tensor  # [N, D] finished
    paths: np.ndarray  # [N, L] their values, drawn within the bins
    score: np.ndarray  # [N]
    log_p: np.ndarray  # [N] under the forecaster, in bins
    log_q: np.ndarray  # [J, N] under each proposal, the forecaster first
    made: np.ndarray  # [J] how many of the draws each proposal made

    @property
    def log_weight(self) -> np.ndarray:
        """[N] log of P over the mixture."""
        share = np.log(np.maximum(self.made, 1e-300) / self.made.sum())[:, None]
        return self.log_p - np.logaddexp.reduce(self.log_q + share, axis=0)


class Probability(NamedTuple):
    """P(event) under the forecaster."""

    value: float
    low: float
    high: float  # 95 % interval
    effective: float  # draws of the forecaster's own that would be as precise
    hits: int  # draws in which the event happened
    draws: int

    def __str__(self) -> str:
        return f"{self.value:.3g} (95 % interval {self.low:.3g} to {self.high:.3g}; {self.hits} of {self.draws} draws)"


def estimate(log_weight: np.ndarray, event: np.ndarray) -> Probability:
    """The weighted mean of an event [N], its interval on the logarithm's scale."""
    count = len(event)
    f = np.exp(log_weight) * event
    value = min(float(f.mean()), 1.0)  # the weights' mean is 1 but for chance
    hits = int((event > 0).sum())
    if value <= 0:
        return Probability(0.0, 0.0, float(min(1.0, 3.0 / count * np.exp(log_weight).max())), float(count), hits, count)
    error = float(f.std(ddof=1)) / math.sqrt(count)
    wide = 1.96 * error / value
    spread = max(error**2, 1e-300)
    effective = value * max(1 - value, 0) / spread
    return Probability(value, value * math.exp(-wide), min(1.0, value * math.exp(wide)), effective, hits, count)


class Tilting:
    """Training of proposals for one window: `to` a tilt, or `reach` a level of the score."""

    def __init__(
        self,
        env: Series,
        policy: Policy,
        values: Values,
        score: Score,
        *,
        hidden: int = 64,
        batch: int = 96,
        seed: int = 0,
    ):
        self.env = TiltSeries(env.windows, env.bins, env.sizes, env.static_sizes, env.paths)
        self.prior = Prior(policy)
        self.values, self.score, self.hidden, self.batch, self.seed = values, score, hidden, batch, seed
        self.proposals: list[TiltPolicy] = []
        self.target: Callable[[Tensor], Tensor] = lambda score: torch.zeros_like(score)

    # laws ---------------------------------------------------------------------------------------------------------

    def _oracle(self, state: Tensor) -> Tensor:
        """Scores [1, N] of finished states."""
        flat = state.flatten(0, -2)
        return torch.from_numpy(_scores(self.score, self.values(flat))).view(state.shape[:-1]).float()

    def _reward(self, score: Tensor, state: Tensor, step: Any) -> Tensor:
        """log P(path) + the tilt of its score, [1, N]."""
        return self.log_prior(state) + self.target(score)

    def _parts(self, final: Tensor) -> tuple[Tensor, Tensor]:
        """(states [T, 1, N, D] on the way to finished ones [1, N, D], moves [T, 1, N])."""
        moves = final[..., 1:].movedim(-1, 0)
        time = torch.arange(self.env.horizon)[:, None, None, None]
        place = torch.arange(self.env.horizon)
        so_far = torch.where(place < time, final[..., 1:], self.env.num_moves)
        return torch.cat([final[..., :1].expand(self.env.horizon, *final.shape[:-1], 1), so_far], -1), moves

    @torch.no_grad()
    def log_prior(self, final: Tensor) -> Tensor:
        states, moves = self._parts(final)
        return self.prior.along(states, moves).gather(-1, moves.unsqueeze(-1)).squeeze(-1).sum(0)

    @torch.no_grad()
    def log_prob(self, policy: TiltPolicy, final: Tensor) -> Tensor:
        """log Q of finished states [1, N, D]."""
        states, moves = self._parts(final)
        none = torch.zeros(final.shape[:-1])
        traj = Trajectories(states, moves, moves, torch.ones_like(moves, dtype=torch.bool), none, none > 0)
        logits = policy.along(traj, policy.context(states[0])).forward
        return logits.log_softmax(-1).gather(-1, moves.unsqueeze(-1)).squeeze(-1).sum(0)

    @torch.no_grad()
    def _own(self, count: int) -> Tensor:
        """Finished states [count, D] drawn from the forecaster."""
        row = torch.zeros(1, count, dtype=torch.long)
        state = self.env.initial((1, count), row)
        cache = self.prior.begin(state)
        for t in range(self.env.horizon):
            move = (self.prior.law(cache) - torch.empty_like(self.prior.law(cache)).exponential_().log()).argmax(-1)
            state = self.env.step(state, move)
            if t + 1 < self.env.horizon:
                cache = self.prior.advance(cache, state, move, t)
        return state[0]

    def draws(self, count: int, own: float = SHARE, last: int = 3) -> Draws:
        """`count` futures: a share of the forecaster's own, the others from the last proposals, more from the newest."""
        used = self.proposals[-last:]
        weights = (
            np.array([own, *((1 - own) * 2.0 ** np.arange(len(used)) / max(2.0 ** len(used) - 1, 1))])
            if used
            else np.ones(1)
        )
        made = np.maximum(np.round(weights / weights.sum() * count).astype(int), 1)
        parts = [self._own(int(made[0]))]
        task = Task(self.env, Exact(), self._oracle, self._reward)
        for policy, n in zip(used, made[1:], strict=True):
            parts.append(rollout(task, policy, int(n)).states[-1][0])
        states = torch.cat(parts)
        paths, log_p, log_q = [], [], []
        for part in states.split(20_000):
            paths.append(self.values(part))
            log_p.append(self.log_prior(part.unsqueeze(0))[0].double())
            log_q.append(torch.stack([log_p[-1], *[self.log_prob(p, part.unsqueeze(0))[0].double() for p in used]]))
        values = np.concatenate(paths)
        return Draws(
            states, values, _scores(self.score, values), torch.cat(log_p).numpy(), torch.cat(log_q, 1).numpy(), made
        )

    # training -----------------------------------------------------------------------------------------------------

    def _train(self, steps: int, kept: Tensor) -> None:
        """One more proposal, started from the last, on the present target."""
        policy = TiltPolicy(self.env, self.prior, self.hidden, self.seed)
        if self.proposals:
            policy.load_state_dict(self.proposals[-1].state_dict())
        task = Task(self.env, Exact(), self._oracle, self._reward)
        source = _Halves(task, policy, self.batch)
        states, moves = self._parts(kept.unsqueeze(0))
        finals = torch.cat([states, kept[None, None]])
        none = torch.zeros(1, len(kept))
        source.kept = Trajectories(finals, moves, moves, torch.ones_like(moves, dtype=torch.bool), none, none == 0)
        trainer = Trainer(task, policy, Known(self.env, task.channel), LogVariance(), source, lr=LR)
        trainer.train(steps)
        trainer.policy_flat.swap()
        policy.requires_grad_(False)
        self.proposals.append(policy)

    def to(self, beta: float, steps: int = 100, count: int = 2000) -> None:
        """Train proposals for P exp(beta score), raising beta as far at a time as draws of one stage still tell of the next."""
        reached = 0.0
        for _ in range(STAGES):
            drawn = self.draws(count, own=0.3, last=2)
            if beta:
                reached = _next_beta(drawn.score, drawn.log_weight + reached * drawn.score, reached, beta)
            self.target = lambda score, b=reached: b * score  # type: ignore[misc]
            self._train(steps, _picked(drawn, drawn.log_weight + reached * drawn.score))
            if abs(reached) >= abs(beta):
                break

    def reach(self, level: float, steps: int = 100, count: int = 2000) -> None:
        """Train proposals for futures whose score reaches a level, through levels that a share of each stage's draws reach."""
        reached = -math.inf
        for _ in range(STAGES):
            drawn = self.draws(count, own=0.1 if self.proposals else 1.0, last=1)
            newest = drawn.score[drawn.made[0] :] if self.proposals else drawn.score
            target = min(level, float(np.quantile(newest, 1 - ELITE)))
            if target <= reached:  # scores that come in few values: on to the next one that was seen
                higher = newest[newest > reached]
                target = min(level, float(higher.min())) if len(higher) else level
            reached = target
            size = float(np.std(newest)) or 1.0
            self.target = lambda score, g=target, s=size: SHARP * ((score - g) / s).clamp(max=0)  # type: ignore[misc]
            weight = drawn.log_weight + SHARP * np.minimum((drawn.score - target) / size, 0)
            self._train(steps, _picked(drawn, weight))
            if target >= level:
                break


def _scores(score: Score, paths: np.ndarray) -> np.ndarray:
    """[N] what a user's function says of futures [N, L]."""
    made = np.asarray(score(paths), dtype=np.float64)
    if made.shape != (len(paths),):
        raise UserError(
            f"the score of {len(paths)} futures must be {len(paths)} numbers, but has shape {made.shape}: take sums, means and extremes over the last axis"
        )
    if not np.isfinite(made).all():
        raise UserError("the score of a future is not finite: give finite numbers")
    return made


def _next_beta(score: np.ndarray, log_weight: np.ndarray, now: float, beta: float) -> float:
    """The farthest beta under which draws that have weights for `now` still keep an effective share."""

    def kept(b: float) -> float:
        w = log_weight + (b - now) * score
        w = np.exp(w - w.max())
        return float(w.sum() ** 2 / (w**2).sum() / len(w))

    base = kept(now)
    if kept(beta) >= KEEP * base:
        return beta
    near, far = now, beta
    for _ in range(30):
        middle = (near + far) / 2
        near, far = (middle, far) if kept(middle) >= KEEP * base else (near, middle)
    return near if abs(near - now) > 1e-3 * abs(beta - now) else (now + beta) / 2


def _picked(drawn: Draws, log_weight: np.ndarray, count: int = 1000) -> Tensor:
    """Draws resampled by weight: what the next stage's own futures should be like."""
    w = np.exp(log_weight - log_weight.max())
    chosen = torch.multinomial(torch.from_numpy(w / w.sum()).clamp(min=1e-30), count, replacement=True)
    return drawn.states[chosen]
