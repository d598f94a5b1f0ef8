"""Acting in the world: forward rollouts through the channel, and backward rollouts from finished objects."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stochflow.ops import NEG, gumbel_argmax, masked_log_softmax
from stochflow.types import Task, Trajectories


@torch.no_grad()
def rollout(
    task: Task,
    policy: Any,
    batch: int,
    *,
    row: Tensor | None = None,
    explore: Tensor | float | None = None,
    temper: Tensor | float | None = None,
) -> Trajectories:
    """`batch` trajectories a seed, without scores (`score` is zero: the oracle speaks next).

    `row` [S, B] = context rows; `explore` = probability of a uniform legal action; `temper` flattens the policy,
    pi^(1/temper). Both are for training; samples for use take neither.
    """
    env, seeds, device = task.env, policy.num_seeds, policy.device
    if row is None:  # a random context each, so that whoever looks or samples sees them all
        count = 1 if env.contexts is None else len(env.contexts)
        row = (
            torch.randint(count, (seeds, batch), device=device) if count > 1 else torch.zeros(seeds, batch, dtype=torch.long, device=device)
        )
    state = env.initial((seeds, batch), row)
    out, cache = policy.begin(state, policy.context(state))
    memory = task.channel.begin(state)
    stopped = torch.zeros(seeds, batch, dtype=torch.bool, device=device)
    states, actions, moves, alives = [state], [], [], []
    for t in range(env.horizon):
        mask = env.moves(state)
        legal = env.real_moves(mask)
        alive = legal.any(-1) & ~stopped
        logits = out.forward if temper is None else out.forward / temper
        action = gumbel_argmax(explored(logits, mask, explore))
        move = task.channel.sample(state, legal, action, memory)
        if env.stop is not None:
            meant = action == env.stop
            move = torch.where(meant, action, move)
            stopped = stopped | meant
        memory = task.channel.remember(memory, state, action, move)
        state = torch.where(alive.unsqueeze(-1), env.step(state, move), state)
        states.append(state)
        actions.append(action)
        moves.append(move)
        alives.append(alive)
        if t + 1 < env.horizon:
            out, cache = policy.advance(cache, state, move, t)
    score = torch.zeros(seeds, batch, device=device)
    real = torch.ones(seeds, batch, dtype=torch.bool, device=device)
    return Trajectories(torch.stack(states), torch.stack(actions), torch.stack(moves), torch.stack(alives), score, real)


def explored(logits: Tensor, mask: Tensor, explore: Tensor | float | None) -> Tensor:
    """Unnormalised log-probabilities [..., M] of the policy, or, with probability `explore`, of a uniform legal action."""
    if explore is not None:
        coin = torch.rand(logits.shape[:-1], device=logits.device) < explore
        logits = torch.where(coin.unsqueeze(-1), 0.0, logits)
    return torch.where(mask, logits, NEG)


@torch.no_grad()
def backward_rollout(task: Task, policy: Any, final: Tensor) -> Trajectories:
    """Ways that lead to the given finished objects [S, B, D], drawn from the backward policy.

    They carry no actions (-1) and are not `real`: nobody executed them.
    """
    env = task.env
    context = policy.context(final)
    ends = ~env.complete(final) if env.stop is not None else torch.zeros_like(final[..., 0], dtype=torch.bool)
    back_states, back_moves, going = [final], [], []
    state = final
    for _ in range(env.horizon):
        parents = env.parents(state)
        go = parents.any(-1)
        move = gumbel_argmax(masked_log_softmax(policy(state, context).backward, parents))
        state = torch.where(go.unsqueeze(-1), env.unstep(state, move), state)
        back_states.append(state)
        back_moves.append(move)
        going.append(go)
    return _reversed(env, torch.stack(back_states), torch.stack(back_moves), torch.stack(going), ends)


def _reversed(env: Any, states: Tensor, moves: Tensor, going: Tensor, ends: Tensor) -> Trajectories:
    """Time-reverse ragged backward walks: each row's walk of n steps fills forward times 0..n-1, then STOP if it needs one."""
    horizon = moves.shape[0]
    steps = going.sum(0)  # [S, B]
    t = torch.arange(horizon, device=moves.device)[:, None, None]
    source = (steps - 1 - t).clamp(min=0)
    forward = moves.gather(0, source)
    alive = t < steps + ends.long()
    if env.stop is not None:
        forward = torch.where((t == steps) & ends, env.stop, forward)
    t1 = torch.arange(horizon + 1, device=moves.device)[:, None, None]
    place = (steps - t1).clamp(min=0).unsqueeze(-1).expand(-1, -1, -1, states.shape[-1])
    score = torch.zeros(steps.shape, device=moves.device)
    return Trajectories(states.gather(0, place), torch.full_like(forward, -1), forward, alive, score, torch.zeros_like(ends))
