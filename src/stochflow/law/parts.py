"""The parts of a balance residual at a look, and the learned noise beside the true one: what the report draws of both."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from stochflow.learn.evaluate import evaluate
from stochflow.nets.policy import Policy
from stochflow.noise.dynamics import Dynamics, Known, remembered
from stochflow.noise.thought_state import Augmented
from stochflow.ops import masked_mean
from stochflow.types import Task, Trajectories
from stochflow.worlds.strings import Strings

PARTS = {  # key -> its sign in the residual
    "part_log_flow": +1,
    "part_log_pf": +1,
    "part_log_k": +1,
    "part_end_log_flow": -1,
    "part_log_pa": -1,
    "part_log_pb": -1,
}
CLASSES = 16  # of states, at most; later positions are left out
NOISE_MOVES = 24  # moves up to which a table of the noise can be read


@torch.no_grad()
def residual_parts(task: Task, policy: Policy, dynamics: Dynamics, traj: Trajectories) -> dict[str, Tensor]:
    """Means over the steps of a scored sample [S]: each part of ll_diff, and the root mean square of the whole (`ll_diff`).

    ll_diff = log F(s) + log pi + log P - log F(s') - log pi_B - log P_B of the detailed balance.
    """
    needs = frozenset({"log_pf", "log_k", "log_pa", "log_pb", "log_move", "log_flow"})
    t = evaluate(task, policy, dynamics, traj, None, needs)
    parts = dict(zip(PARTS, (t.log_flow[:-1], t.log_pf, t.log_k, t.log_flow[1:], t.log_pa, t.log_pb), strict=True))
    whole = sum(sign * parts[name] for name, sign in PARTS.items())
    found = {name: masked_mean(x, t.alive, (0, 2)) for name, x in parts.items()}
    return found | {"ll_diff": masked_mean(torch.as_tensor(whole).square(), t.alive, (0, 2)).sqrt()}


@torch.no_grad()
def noise_tables(task: Task, dynamics: Dynamics, traj: Trajectories) -> dict[str, np.ndarray]:
    """P(move | action) as it is and as it was learned, averaged over the visited states of a class.

    A class is the position in a string, elsewhere the number of legal moves. `noise_true` [C, A, M], `noise_learned` [S, C, A, M],
    `noise_class` [C]; {} where there is no noise, nothing is learned, or the tables are too large to read.
    """
    env: Any = task.env
    model: Any = dynamics
    channel: Any = task.channel
    if isinstance(model, Augmented) and isinstance(
        channel, Augmented
    ):  # thoughts in the state: the noise is that of the letters
        traj, env, model, channel = model.strings_only(traj), model.env.strings, model.inner, channel.inner
    if channel.exact or isinstance(model, Known) or env.num_moves > NOISE_MOVES or hasattr(env, "thoughts"):
        return {}
    inner = getattr(env, "inner", env)
    here = traj.states[:-1]
    legal = env.real_moves(env.moves(here))
    if isinstance(inner, Strings):
        of = torch.arange(len(here), device=here.device)[:, None, None].expand(traj.alive.shape)
    else:
        of = legal.sum(-1)
    deciding = traj.alive & legal.any(-1)
    kinds = of[deciding].unique()[:CLASSES]
    learned_past, true_past = remembered(model, traj), remembered(channel, traj)
    letters = env.num_moves - (env.stop is not None)
    shape = (len(kinds), letters, env.num_moves)
    true, learned = np.zeros(shape), np.zeros((traj.score.shape[0], *shape))
    for action in range(letters):
        every = torch.full_like(traj.actions, action)
        laws = (
            model.log_probs(here, legal, every, learned_past),
            channel.log_probs(here, legal, every, true_past),
        )
        for c, kind in enumerate(kinds):
            where = deciding & (of == kind) & legal[..., action]
            guess, fact = (masked_mean(law.exp(), where.unsqueeze(-1), (0, 2)) for law in laws)  # [S, M]
            seen = (where.sum((0, 2)) > 0).unsqueeze(-1)
            learned[:, c, action] = torch.where(seen, guess, 0).cpu().numpy()
            true[c, action] = (fact.sum(0) / seen.sum().clamp(min=1)).cpu().numpy()
    arrays = {
        "noise_true": true[..., :letters],
        "noise_learned": learned[..., :letters],
        "noise_class": kinds.cpu().numpy(),
    }
    return {k: v.astype(np.float32) for k, v in arrays.items()}
