"""Trajectories to given objects, so that what a search proposes can be learned from."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stochflow.learn.rollout import backward_rollout
from stochflow.nets.policy import Policy
from stochflow.ops import NEG, gumbel_argmax
from stochflow.training.search.variation import Letters, uniform
from stochflow.types import Task, Trajectories
from stochflow.worlds.rules.env import RuledStrings
from stochflow.worlds.strings import Strings


def ways_to(task: Task, policy: Policy, final: Tensor) -> Trajectories:
    """Trajectories to the finished objects [S, B, D], without scores and not `real`; on a tree no network is asked."""
    return backward_rollout(task, policy, final)


@torch.no_grad()
def legal_letters(env: Any, letters: Tensor) -> Tensor:
    """Objects [..., L] of a string environment as near to `letters` (padded) as its masks allow, letter by letter.

    Where a letter is illegal, a uniform legal one is taken; where the end is illegal, the string goes on.
    """
    state = env.initial(tuple(letters.shape[:-1]))
    ended = torch.zeros(letters.shape[:-1], dtype=torch.bool)
    for t in range(env.horizon):
        mask = env.moves(state)
        going = env.real_moves(mask).any(-1) & ~ended
        wanted = letters[..., t].clamp(max=env.num_moves - 1)  # padding is STOP, where there is one
        allowed = mask.gather(-1, wanted.unsqueeze(-1)).squeeze(-1) & (letters[..., t] < env.num_moves)
        other = gumbel_argmax(torch.where(mask, 0.0, NEG))
        move = torch.where(allowed, wanted, other)
        if env.stop is not None:
            ended = ended | (going & (move == env.stop))
        state = torch.where((going & ~ended).unsqueeze(-1), env.step(state, move), state)
    return state


def free_letters(env: Any) -> bool:
    """Whether every string of an allowed length can be built; a subclass may forbid some."""
    return all(getattr(type(env), name) is getattr(Strings, name) for name in ("initial", "moves", "step"))


@torch.no_grad()
def random_strings(env: Strings, letters: Letters, n: int) -> Tensor:
    """[n, L] random strings of an environment: uniform ones under compiled rules, else of uniform lengths and letters.

    Where another environment forbids letters, they are changed from the left until the string is legal.
    """
    if not isinstance(env, RuledStrings):
        made = uniform(letters, n)
        return made if free_letters(env) else legal_letters(env, made)
    state, ended = env.initial((n,)), torch.zeros(n, dtype=torch.bool)
    for _ in range(env.horizon):
        logs = env.log_counts(state)
        going = env.moves(state).any(-1) & ~ended
        move = gumbel_argmax(logs.clamp(min=NEG))
        if env.stop is not None:
            ended = ended | (going & (move == env.stop))
        state = torch.where((going & ~ended).unsqueeze(-1), env.step(state, move), state)
    return state


def code(states: Tensor) -> Tensor:
    """A 64-bit number [...] for each state [..., D]: equal states have equal numbers."""
    place = torch.arange(1, states.shape[-1] + 1, device=states.device, dtype=torch.long)
    factor = (place * 6364136223846793005 + 1442695040888963407) * (place * 2862933555777941757 + 3037000493) | 1
    mixed = (states + 1) * factor
    return (mixed ^ (mixed >> 29)).mul(-4658895280553007687).sum(-1)
