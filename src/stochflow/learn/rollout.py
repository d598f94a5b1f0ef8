"""Acting in the world: forward rollouts through the channel, and backward rollouts from finished objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stochflow.errors import UserError, need_kind, need_whole, one_line
from stochflow.files.progress import counted
from stochflow.nets.policy import Policy
from stochflow.ops import ALL_AT_ONCE, NEG, always, gumbel_argmax, keep, log_exponential, masked_log_softmax, zeros
from stochflow.types import Explore, Fading, Task, Trajectories
from stochflow.worlds.env import Env


@torch.no_grad()
def rollout(
    task: Task,
    policy: Policy,
    batch: int,
    *,
    row: Tensor | None = None,
    explore: Explore = None,
    temper: Tensor | float | None = None,
    steps: Steps | None = None,
) -> Trajectories:
    """`batch` trajectories per seed, without scores (`score` is zero until the oracle is asked).

    `row` [S, B] = context rows, random ones by default; `explore` = probability of a uniform legal action; `temper` flattens
    the policy, pi^(1/temper). Both are for training; samples for use take neither. `steps`: the parts of a step, where they
    are compiled.
    """
    need_kind("task", task, Task, "a Task, as strings_task or grid_task make one")
    if not hasattr(policy, "num_seeds"):
        raise UserError(f"policy is {one_line(repr(policy), 80)}, but it must be a Policy")
    need_whole("batch", batch, 1)
    env, seeds, device = task.env, policy.num_seeds, policy.device
    if isinstance(explore, Fading):
        explore = explore.now()
    if row is None:  # a random context each, so that samples cover all of them
        count = 1 if env.contexts is None else len(env.contexts)
        row = (
            torch.randint(count, (seeds, batch), device=device)
            if count > 1
            else torch.zeros(seeds, batch, dtype=torch.long, device=device)
        )
    state = env.initial((seeds, batch), row)
    steps = Steps(_turn, policy.begin, policy.advance) if steps is None else steps
    logits, cache = steps.begin(state, policy.context(state))
    memory = task.channel.begin(state)
    noise, own = _noise(env, logits), _coins(env, logits, explore)
    # How many steps are walked must not show in later random numbers, or one seed's trajectories would touch another's.
    drawn = task.channel.exact and type(policy) is Policy and env.horizon * logits.numel() <= ALL_AT_ONCE
    after = int(torch.randint(2**62, ())) if device.type == "cpu" and not (drawn or env.free) else None
    stopped = torch.zeros(seeds, batch, dtype=torch.bool, device=device)
    states, actions, moves, alives = [state], list[Tensor](), list[Tensor](), list[Tensor]()
    for t in counted(range(env.horizon), "decisions of a batch", env.horizon):
        before = state
        state, action, move, alive, stopped, memory = steps.turn(
            task, state, logits, stopped, memory, noise(t), own(t), temper
        )
        if device.type == "cpu" and not bool(alive.any()):  # all have finished; a GPU would have to be waited for
            left = env.horizon - t
            actions, moves, alives = actions + left * [action], moves + left * [move], alives + left * [alive]
            states += left * [before]
            break
        states.append(state)
        actions.append(action)
        moves.append(move)
        alives.append(alive)
        if t + 1 < env.horizon:
            logits, cache = steps.advance(cache, state, move, t)
    if after is not None:
        torch.default_generator.manual_seed(after)
    return _fresh(torch.stack(states), torch.stack(actions), torch.stack(moves), torch.stack(alives))


class Steps(NamedTuple):
    """The parts of a rollout's step."""

    turn: Callable[..., Any]
    begin: Callable[..., Any]
    advance: Callable[..., Any]


def compiled_steps(policy: Policy) -> Steps:
    """By `torch.compile`, once or twice whatever the horizon; a transformer's `advance` stays as it is: its shapes grow from step to step."""
    advance = policy.advance if policy.trunk.grows else torch.compile(policy.advance)
    return Steps(torch.compile(_turn, dynamic=False), policy.begin, advance)


def _turn(
    task: Task,
    state: Tensor,
    logits: Tensor,
    stopped: Tensor,
    memory: Tensor | None,
    noise: Tensor,
    own: Tensor | None,
    temper: Tensor | float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """One decision and what comes of it: (next state, action, move, alive, stopped, memory)."""
    env = task.env
    mask = env.moves(state)
    legal = env.real_moves(mask)
    alive = legal.any(-1) & ~stopped
    action = (explored(logits, mask, own, temper) - noise).argmax(-1)
    move = task.channel.sample(state, legal, action, memory)
    if env.stop is not None:
        meant = action == env.stop
        move = move if task.channel.exact else torch.where(meant, action, move)
        stopped = stopped | meant
    memory = task.channel.remember(memory, state, action, move)
    state = torch.where(alive.unsqueeze(-1), env.step(state, move), state)
    return state, action, move, alive, stopped, memory


def _fresh(states: Tensor, actions: Tensor, moves: Tensor, alive: Tensor) -> Trajectories:
    """Trajectories that were really walked and wait for the oracle."""
    shape = moves.shape[1:]
    return Trajectories(states, actions, moves, alive, zeros(shape, moves.device), always(shape, moves.device))


def _noise(env: Env, logits: Tensor) -> Callable[[int], Tensor]:
    """The noise of each step's choice: drawn for all steps at once where that is not too much."""
    if env.horizon * logits.numel() > ALL_AT_ONCE:
        return lambda t: log_exponential(logits)
    drawn = log_exponential(logits.expand(env.horizon, *logits.shape))
    return lambda t: drawn[t]


def _coins(env: Env, logits: Tensor, explore: Tensor | float | None) -> Callable[[int], Tensor | None]:
    """At each step [S, B], whether the policy chooses, and not uniform chance."""
    if explore is None:
        return lambda t: None
    drawn = torch.rand(env.horizon, *logits.shape[:-1], device=logits.device) >= explore
    return lambda t: drawn[t]


def explored(logits: Tensor, mask: Tensor | None, own: Tensor | None, temper: Tensor | float | None = None) -> Tensor:
    """Unnormalised log-probabilities [..., M] of the (flattened) policy where it chooses itself (`own` [...]; None: everywhere), else of a
    uniform legal action."""
    if temper is not None:
        logits = logits / temper
    if own is not None:
        logits = keep(own.unsqueeze(-1), logits, 0.0)
    return logits if mask is None else keep(mask, logits, NEG)


@torch.no_grad()
def backward_rollout(task: Task, policy: Policy, final: Tensor) -> Trajectories:
    """Ways that lead to the given finished objects [S, B, D], drawn from the backward policy.

    They carry no actions (-1) and are not `real`: they were not executed.
    """
    env = task.env
    context = None if env.tree else policy.context(final)
    ends = ~env.complete(final) if env.stop is not None else torch.zeros_like(final[..., 0], dtype=torch.bool)
    back_states, back_moves, going = [final], [], []
    state = final
    for _ in range(env.horizon):
        parents = env.parents(state)
        go = parents.any(-1)
        if env.tree:  # one parent each: no network is asked
            move = parents.long().argmax(-1)
        else:
            move = gumbel_argmax(masked_log_softmax(policy(state, context).backward, parents))
        state = torch.where(go.unsqueeze(-1), env.unstep(state, move), state)
        back_states.append(state)
        back_moves.append(move)
        going.append(go)
    return _reversed(env, torch.stack(back_states), torch.stack(back_moves), torch.stack(going), ends)


def _reversed(env: Env, states: Tensor, moves: Tensor, going: Tensor, ends: Tensor) -> Trajectories:
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
    return Trajectories(
        states.gather(0, place), torch.full_like(forward, -1), forward, alive, score, torch.zeros_like(ends)
    )
