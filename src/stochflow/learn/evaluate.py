"""From trajectories to the `Terms` an objective reads, each computed once and correctly masked."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from stochflow.learn.posterior import head_law
from stochflow.nets.policy import Policy
from stochflow.noise.dynamics import remembered
from stochflow.ops import always, arange, keep, masked_log_softmax, pick
from stochflow.types import Task, Terms, Trajectories
from stochflow.worlds.env import Channel, Env


def move_law(
    env: Env, channel: Channel, state: Tensor, mask: Tensor, log_pi: Tensor, memory: Tensor | None = None
) -> Tensor:
    """log p(move | state) [..., M] of policy and channel together; STOP is exact: it happens only if intended."""
    if channel.exact:
        return log_pi
    law = channel.marginal(state, env.real_moves(mask), log_pi, memory)
    if env.stop is None:
        return law
    is_stop = arange(env.num_moves, mask.device) == env.stop
    return torch.where(is_stop, log_pi, law)


def evaluate(
    task: Task,
    policy: Policy,
    dynamics: Channel,
    traj: Trajectories,
    step: Tensor | None = None,
    needs: frozenset[str] = frozenset(Terms._fields),
) -> Terms:
    """The terms of a batch; `needs` names the fields to fill, the others are None."""
    env, alive = task.env, traj.alive
    horizon = len(alive)
    here = traj.states[:-1]  # [T, S, B, D]
    context = policy.context(traj.states[0])
    # of a tree the last state needs no forward pass: its flow is the reward, its parent is known
    last = not env.tree or ("log_pa" in needs and policy.back_action)
    asked = traj if last else traj._replace(states=here)
    out = policy.along(asked, context, "log_flow" in needs)  # [T or T+1, S, B, ...]
    mask = always((*alive.shape, env.num_moves), alive.device) if env.free else env.moves(here)
    log_pi = masked_log_softmax(out.forward[:horizon], None if env.free else mask)
    legal = env.real_moves(mask)
    noisy = alive & (traj.moves != env.stop) if env.stop is not None else alive  # where the channel acts
    memory = remembered(dynamics, traj)

    def living(x: Tensor) -> Tensor:
        return keep(alive, x, 0)

    filled: Any = None  # fields that are not needed stay None
    log_pf = log_pf_move = log_k = log_move = log_pb = log_pa = log_flow = entropy = choices = law = filled
    if "log_pf" in needs or "log_pa" in needs:
        log_pf = living(pick(log_pi, traj.actions))
    if "log_pf_move" in needs:
        log_pf_move = living(pick(log_pi, traj.moves))
    if "log_k" in needs or "log_pa" in needs:
        with torch.no_grad():
            log_k = keep(noisy, pick(dynamics.log_probs(here, legal, traj.actions.clamp(min=0), memory), traj.moves), 0)
    if not needs.isdisjoint({"log_move", "log_pa", "law"}):
        law = move_law(env, dynamics, here, mask, log_pi, memory)
        log_move = living(pick(law, traj.moves))
    if "log_pb" in needs:
        log_pb = torch.zeros_like(log_pi[..., 0])
        if not env.tree:
            back = masked_log_softmax(out.backward[1:], env.parents(traj.states[1:]))
            log_pb = keep(noisy, pick(back, traj.moves), 0)
    if "log_pa" in needs:
        if out.back_action is None:  # the exact posterior of the action given the move
            log_pa = keep(noisy, log_pf + log_k - log_move, 0)
        else:
            posterior = head_law(dynamics, here, legal, out.back_action[1:], traj.actions, traj.moves, memory)
            log_pa = keep(noisy, pick(posterior, traj.actions), 0)

    log_reward = task.reward(traj.score, traj.states[-1], step).to(log_pi)  # [S, B]
    if "log_flow" in needs:
        end = log_reward.unsqueeze(0)
        log_flow = torch.cat([out.log_flow[:1], torch.where(alive[1:], out.log_flow[1:horizon], end), end])
    if "entropy" in needs:
        entropy = living(-(log_pi.exp() * keep(mask, log_pi, 0)).sum(-1))
        choices = living(mask.sum(-1))
    return Terms(
        alive,
        log_pf,
        log_pf_move,
        log_k,
        log_move,
        log_pb,
        log_pa,
        log_flow,
        policy.log_z(context),
        log_reward,
        entropy,
        choices,
        law,
    )
