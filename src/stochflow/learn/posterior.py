"""The backward law of the action given the move from a learned head, and the likelihood by which such a head is trained.

The exact posterior, log pi(a | s) + log P(m | s, a) - log p(m | s), is worked out in `evaluate`; docs/method.md, section 6.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stochflow.noise.dynamics import remembered
from stochflow.ops import NEG, arange, gumbel_argmax, keep, masked_log_softmax, masked_mean, pick
from stochflow.types import World
from stochflow.worlds.env import Channel

PAIRS, NUMBERS = 8, 1 << 24  # drawn at each state for the head, which costs no oracle call; numbers its output may have
POSSIBLE = -9.0  # log P(move | action) below which a pair counts as impossible (a softmax never reaches zero)


def exact_law_of_action(
    dynamics: Channel, here: Tensor, legal: Tensor, moves: Tensor, log_pi: Tensor, memory: Tensor | None
) -> Tensor:
    """log pi_B(. | realised move) [..., M], proportional to pi(a | s) P(move | s, a) over the legal actions."""
    arrive = dynamics.arrivals(here, legal, moves, memory)
    joint = torch.where(legal, (log_pi + arrive).clamp(min=NEG), NEG)
    return torch.where(legal, joint.log_softmax(-1), NEG)


def head_law(
    dynamics: Channel,
    here: Tensor,
    legal: Tensor,
    head: Tensor,
    actions: Tensor,
    moves: Tensor,
    memory: Tensor | None,
) -> Tensor:
    """log pi_B(. | realised move) [T, S, B, M] from a learned head [T, S, B, M, M], over the pairs that can happen.

    Mass on an impossible pair would give zero loss and a wrong law (docs/method.md, T1).
    """
    with torch.no_grad():
        arrive = dynamics.arrivals(here, legal, moves, memory)  # [T, S, B, M]
    happened = arange(legal.shape[-1], legal.device) == actions.unsqueeze(-1)
    possible = legal & ((arrive > POSSIBLE) | happened)  # the observed pair counts even where a new model denies it
    row = moves.clamp(min=0)[..., None, None].expand(*head.shape[:-2], 1, head.shape[-1])
    logits = head.gather(-2, row).squeeze(-2)
    return masked_log_softmax(logits, possible)


def head_likelihood(world: World) -> Tensor:
    """[S]: minus the mean log-likelihood of the head, on pairs of the current policy at the states of the batch.

    At each visited state actions are drawn from the policy as it is and moves from the model of the noise, so that
    exploration, replay and logs choose the states and nothing else: the head's optimum is the posterior under pi and P,
    wherever the batch comes from.
    """
    env, policy, dynamics, traj = world.task.env, world.policy, world.dynamics, world.trajectories
    here = traj.states[:-1]

    def flat(x: Tensor) -> Tensor:  # [T, S, B, D] -> [S, T * B, D]
        return x.transpose(0, 1).flatten(1, 2)

    def timed(x: Tensor) -> Tensor:  # and back
        return x.unflatten(1, (here.shape[0], -1)).transpose(0, 1)

    pairs = max(1, min(PAIRS, NUMBERS // (here[..., 0].numel() * env.num_moves**2)))

    def each(x: Tensor) -> Tensor:  # [T, S, B, ...] -> [T, S, pairs * B, ...]
        return torch.cat([x] * pairs, 2)

    with torch.no_grad():
        logits = each(timed(policy(flat(here)).forward))
        memory = remembered(dynamics, traj)
        memory = None if memory is None else each(memory)
        here, alive = each(here), each(traj.alive)
        mask = env.moves(here)
        legal = env.real_moves(mask)
        action = gumbel_argmax(keep(mask, logits, NEG))
        move = gumbel_argmax(keep(legal, dynamics.log_probs(here, legal, action, memory), NEG))
        noisy = alive & legal.any(-1)
        if env.stop is not None:  # STOP is exact and needs no posterior
            noisy = noisy & (action != env.stop)
        child = torch.where(noisy.unsqueeze(-1), env.step(here, move), here)
    head = timed(policy(flat(child)).back_action)
    law = head_law(dynamics, here, legal, head, action, move, memory)
    return masked_mean(-pick(law, action), noisy, (0, 2))
