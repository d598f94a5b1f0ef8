"""Checks at the door: what is used in a world, its channel and its oracle, is proved sound on random walks.

Each failure is a `UserError` that names the state and the remedy, as in `check`.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import torch
from torch import Tensor

from stochflow.errors import UserError, need_kind, need_whole
from stochflow.ops import NEG, masked_log_softmax
from stochflow.types import Task
from stochflow.worlds.check import ROOM, random_walks, shown_state
from stochflow.worlds.env import Channel, Env, need_env

EXACT = 1e-5  # tolerance of float32 probabilities
log = logging.getLogger("stochflow")


@torch.no_grad()
def check_channel(channel: Channel, env: Env, samples: int = 64, seed: int = 0) -> None:
    """Proves that P(move | state, action) is a law on the legal moves and that each of them can happen.

    `sample`, `marginal`, `arrivals` and `exact` must agree with it.
    """
    need_kind("channel", channel, Channel, "a channel, such as Slip(0.1)")
    need_env(env)
    need_whole("samples", samples, 1)
    need_whole("seed", seed, 0)
    channel = env.applied(channel)
    dice = torch.Generator().manual_seed(seed)
    state = random_walks(env, samples, seed).flatten(0, 1).unique(dim=0)
    state = state[~env.complete(state)]
    most = min(4096, max(1, ROOM // env.num_moves**2))
    state = state[torch.randperm(len(state), generator=dice)[:most]].unsqueeze(0)  # [1, n, D]: one seed
    mask = env.moves(state)
    legal = env.real_moves(mask)
    memory = channel.begin(state)
    best = torch.full(legal.shape, -math.inf)
    for a in range(env.num_moves):
        if a == env.stop:
            continue
        action = torch.full(state.shape[:-1], a)
        log_p = channel.log_probs(state, legal, action, memory)
        if log_p.shape != legal.shape:
            raise UserError(
                f"log_probs() of {channel!r} gives shape {tuple(log_p.shape)}, but {tuple(legal.shape)} is needed: "
                "one entry per move"
            )
        p = log_p.double().exp()
        meant = legal[..., a]  # only legal actions are ever taken

        def fail(bad: Tensor, words: str, remedy: str, a: int = a) -> None:
            if bool(bad.any()):
                raise UserError(f"{channel!r}, action {a} at {shown_state(env, state[bad][0])}: {words} {remedy}")

        nan = meant & (p.isnan() | (p == math.inf)).any(-1)
        fail(nan, "a probability is not a number,", "so give log-probabilities (NEG where impossible)")
        stray = torch.where(legal, 0, p).sum(-1)
        worst = float(torch.where(meant, stray, 0).max())
        fail(
            meant & (stray > EXACT),
            f"mass {worst:.3g} falls on moves that are illegal there,",
            "so restrict it to `legal` and renormalise",
        )
        total = torch.where(legal, p, 0).sum(-1)
        off = torch.where(meant, (total - 1).abs(), 0)
        if bool((off > EXACT).any()):
            i = int(off.flatten().argmax())
            raise UserError(
                f"{channel!r}, action {a} at {shown_state(env, state[0, i])}: "
                f"the probabilities of the moves sum to {float(total.flatten()[i]):.6g}, "
                "not to 1: normalise them over `legal`"
            )
        if channel.exact:
            other = meant & (p[..., a] < 1 - EXACT)
            fail(other, "`exact` is True, but something else may happen,", "so set exact = False")
        best = torch.where(meant.unsqueeze(-1), torch.maximum(best, log_p.to(best)), best)
        drawn = channel.sample(state, legal, action, memory)
        chance = p.gather(-1, drawn.clamp(0, env.num_moves - 1).unsqueeze(-1)).squeeze(-1)
        fail(
            meant & (chance <= 0),
            "sample() draws a move of probability zero,",
            "so draw from the law that log_probs() states",
        )
    never = legal & (best < NEG / 2)
    if bool(never.any()):
        _, i, move = never.nonzero()[0].tolist()
        raise UserError(
            f"{channel!r}: no action brings about move {move} at {shown_state(env, state[0, i])}, "
            "so what lies behind it is out of reach: "
            "give the move a positive probability under some action, or make it illegal in the environment"
        )
    log_pi = masked_log_softmax(torch.randn(legal.shape, generator=dice), mask)
    found = torch.where(legal, channel.marginal(state, legal, log_pi, memory).exp(), 0)
    wanted = torch.where(legal, Channel.marginal(channel, state, legal, log_pi, memory).exp(), 0)
    gap = (found - wanted).abs().amax(-1)
    if not bool((gap <= EXACT).all()):
        i = int(gap.nan_to_num(math.inf).argmax())
        raise UserError(
            f"marginal() of {channel!r} is off by {float(gap[0, i]):.3g} from the sum of log_probs() over actions at "
            f"{shown_state(env, state[0, i])}: "
            "correct it, or leave it out and the sum is taken for you"
        )
    for move in range(env.num_moves):
        happened = torch.full(state.shape[:-1], move)
        may = legal & legal[..., move : move + 1]
        found = channel.arrivals(state, legal, happened, memory)
        wanted = Channel.arrivals(channel, state, legal, happened, memory)
        if found.shape != legal.shape:
            raise UserError(
                f"arrivals() of {channel!r} gives shape {tuple(found.shape)}, but {tuple(legal.shape)} is needed: "
                "one entry per action"
            )
        gap = torch.where(may, (found.exp() - wanted.exp()).abs(), 0).amax(-1)
        if not bool((gap <= EXACT).all()):
            i = int(gap.nan_to_num(math.inf).argmax())
            raise UserError(
                f"arrivals() of {channel!r} is off by {float(gap[0, i]):.3g} from log_probs() for move {move} at "
                f"{shown_state(env, state[0, i])}: "
                "correct it, or derive from a channel that does not define it: log_probs() is then called for you"
            )


@torch.no_grad()
def check_oracle(task: Task, samples: int = 16, seed: int = 0) -> None:
    """Scores a few finished objects and proves that each has one finite score and one finite log-reward."""
    need_kind("task", task, Task, "a Task, as strings_task or grid_task make one")
    need_whole("samples", samples, 1)
    need_whole("seed", seed, 0)
    env = task.env
    walks = random_walks(env, samples, seed)
    final = walks[:, -1]
    if env.stop is not None:  # objects may also end on the way
        on_way = walks.flatten(0, 1)
        final = torch.cat([final, on_way[env.moves(on_way)[:, env.stop]]])
    final = final.unique(dim=0)
    dice = torch.Generator().manual_seed(seed)
    check_scores(task, final[torch.randperm(len(final), generator=dice)[:samples]])


@torch.no_grad()
def check_scores(task: Task, finished: Tensor) -> None:
    """The same of these finished objects [n, D]."""
    env, state = task.env, finished.unsqueeze(0)  # [1, n, D]
    try:
        score = task.oracle(state)
    except UserError:
        raise
    except Exception as problem:
        raise UserError(
            f"the oracle failed on {shown_state(env, state[0, 0])} and {state.shape[1] - 1} more: {type(problem).__name__}: "
            f"{problem}; "
            "it must score every object that can be built"
        ) from problem
    shape = "give one number for each state of a batch [..., D]"
    if getattr(task.oracle, "on_nan", "stop") == "skip":  # what has no score is left out of what is learned
        some = score[0].isfinite()
        state, score = state[:, some], score[:, some]
    _scores(env, state, score, "the oracle", shape, "it must give a finite score to every object")
    say_negative(task, int((score < 0).sum()), score.numel(), "random objects")
    finite = "the log-reward must be finite (a floor above 0 keeps the log of it so)"
    _scores(env, state, task.reward(score, state, None), "the reward", "give one log-reward per score", finite)


def say_negative(task: Task, below: int, count: int, what: str) -> None:
    """Say how many of so many scores are below zero, where the reward takes them all for its floor."""
    floor = getattr(task.reward, "floor", None)
    if floor is not None and below:
        log.warning(
            "%d of %d scores of %s are negative, and the reward takes them for its floor of %g: "
            "for scores such as energies give reward=Linear(), whose reward is e^score",
            below, count, what, floor,
        )  # fmt: skip


def _scores(env: Env, state: Tensor, value: Any, who: str, shape_remedy: str, remedy: str) -> None:
    """One finite number for each state [1, n, D]."""
    if not isinstance(value, Tensor) or value.shape != state.shape[:-1]:
        got = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else repr(value)[:60]
        raise UserError(
            f"{who} gives {got} for {tuple(state.shape[:-1])} states, one of them {shown_state(env, state[0, 0])}: "
            f"{shape_remedy}"
        )
    bad = ~value.isfinite()
    if bool(bad.any()):
        i = int(bad[0].nonzero()[0])
        raise UserError(f"{who} gives {float(value[0, i])} for sample {i}, {shown_state(env, state[0, i])}: {remedy}")
