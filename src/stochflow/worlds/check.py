"""Checks at the door: an environment is proved sound before anything is trained on it (`check_task`: its channel and oracle).

Each failure is a `UserError` that names the state, the move and the remedy. Random walks draw from their own stream,
so looking never changes a run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stochflow.errors import UserError, need_whole
from stochflow.worlds.env import Enumerable, Env, need_env

log = logging.getLogger("stochflow")
WALKED = 1 << 24  # numbers of all walks together
ROOM = 1 << 22  # largest number of entries of an intermediate tensor


class Checked(NamedTuple):
    """What a successful `check_env` has covered."""

    states: int
    edges: int
    enumerated: bool  # every state, not only those that random walks met


@torch.no_grad()
def check_env(env: Env, samples: int = 64, largest: int = 1 << 17, seed: int = 0) -> Checked:
    """Proves that masks, `step`, `unstep`, `parents`, `features`, `horizon`, STOP and enumeration agree.

    `samples` random walks are followed to their ends; an enumerable environment of at most `largest` states is checked
    whole.
    """
    need_env(env)
    for name, value, least in (("samples", samples, 1), ("largest", largest, 1), ("seed", seed, 0)):
        need_whole(name, value, least)
    _attributes(env)
    samples = max(2, min(samples, WALKED // ((env.horizon + 1) * env.state_dim)))  # fewer where objects are long
    walks = random_walks(env, samples, seed)  # [W, T+1, D]
    met = walks.flatten(0, 1).unique(dim=0)
    _beginning(env, walks[:, 0])
    edges = _all_edges(env, met)  # before the horizon: a wrong mask also makes walks too long
    _batch_dims(env, met)
    _told_apart(env, met, seed)
    _freedom(env, walks)
    _ending(env, walks[:, -1])
    states = _list_states(env, walks, largest)
    if states is None or not isinstance(env, Enumerable):
        return Checked(len(met), edges, False)
    edges = _all_edges(env, states)
    _enumeration(env, states, met)
    return Checked(len(states), edges, True)


def _together(env: Env) -> int:
    """How many states are checked at once."""
    return max(1, ROOM // (env.num_moves * env.state_dim))


# walking ----------------------------------------------------------------------------------------------------------


def shown_state(env: Env, state: Tensor) -> str:
    """A state as a person reads it."""
    decode = getattr(env, "decode", None)
    text = f" ({decode(state.reshape(1, -1))[0]!r})" if decode is not None else ""
    return f"state {state.tolist()}{text}"


def _attributes(env: Env) -> None:
    for name in ("state_dim", "num_moves", "horizon"):
        value = getattr(env, name, None)
        if not isinstance(value, int) or value < 1:
            raise UserError(
                f"{name} of {env!r} is {value!r}, but it must be a whole number of at least 1: set it in __init__"
            )
    if env.stop is not None and not 0 <= env.stop < env.num_moves:
        raise UserError(
            f"stop of {env!r} is {env.stop}, but moves are numbered 0 to {env.num_moves - 1}: name one of them, or None"
        )


def _rows(env: Env, count: int) -> Tensor | None:
    """A context for each of `count` objects, in turn."""
    return None if env.contexts is None else torch.arange(count) % len(env.contexts)


def _expect(env: Env, name: str, value: Any, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    if not isinstance(value, Tensor) or tuple(value.shape) != shape or value.dtype != dtype:
        got = f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else repr(value)
        raise UserError(f"{name} of {env!r} gives {got}, but {shape} of {dtype} is needed: correct {name}")


def random_walks(env: Env, count: int, seed: int) -> Tensor:
    """Random walks that stop only where they must, [W, T+1, D]; checks the shapes of `initial`, `moves` and `step`."""
    dice = torch.Generator().manual_seed(seed)
    state = env.initial((count,), _rows(env, count))
    _expect(env, "initial()", state, (count, env.state_dim), torch.int64)
    path = [state]
    for _ in range(env.horizon):
        mask = env.moves(state)
        _expect(env, "moves()", mask, (count, env.num_moves), torch.bool)
        legal = env.real_moves(mask)
        luck = torch.rand(legal.shape, generator=dice)
        move = torch.where(legal, luck, -1.0).argmax(1)
        after = env.step(state, move)
        _expect(env, "step()", after, (count, env.state_dim), torch.int64)
        state = torch.where(legal.any(1, keepdim=True), after, state)
        path.append(state)
    return torch.stack(path, 1)


def _freedom(env: Env, walks: Tensor) -> None:
    """Checks what `free` and `switched` promise, along the walks: rollouts and losses rely on it."""
    if not env.free:
        return
    for t in range(env.horizon):
        here, after = walks[:, t], walks[:, t + 1]
        barred = ~env.moves(here).all(1)
        if bool(barred.any()):
            raise UserError(
                f"{env!r} is free (objects take exactly {env.horizon} moves, all always legal), "
                f"but at {shown_state(env, here[barred][0])} a move is illegal: set free = False"
            )
        move = after[:, env.state_dim - env.horizon + t]
        if not torch.equal(after, env.step(here, move)):
            raise UserError(
                f"{env!r} is free, but step {t}'s move does not become column {env.state_dim - env.horizon + t}: "
                "set free = False"
            )
        flag = env.switched(move, t)
        if flag is not None:
            change = env.features(after) - env.features(here)
            if not torch.equal(change, torch.nn.functional.one_hot(flag, change.shape[1]).to(change)):
                raise UserError(
                    f"switched() of {env!r} names one feature that step {t}'s move sets, but more changes: "
                    "let it return None"
                )


def _ending(env: Env, last: Tensor) -> None:
    going = ~env.complete(last)
    if bool(going.any()):
        raise UserError(
            f"after {env.horizon} moves {shown_state(env, last[going][0])} of {env!r} can still go on: "
            "set horizon to the longest number of moves, or let moves() end it"
        )
    short = env.unfinished(last)
    if short is not None and bool(short.any()):
        raise UserError(
            f"{shown_state(env, last[short][0])} of {env!r} is a dead end: nothing may follow, and it is unfinished; "
            "let moves() keep to what can still be completed"
        )


def _beginning(env: Env, first: Tensor) -> None:
    if bool(env.complete(first).any()):
        raise UserError(
            f"the initial {shown_state(env, first[0])} of {env!r} has nothing to decide: "
            "let moves() allow a move other than STOP"
        )
    came = env.parents(first)
    if bool(came.any()):
        row, move = came.nonzero()[0].tolist()
        raise UserError(
            f"parents() says that move {move} leads to the initial {shown_state(env, first[row])}: nothing may come before it"
        )


def _batch_dims(env: Env, states: Tensor) -> None:
    """Leading dimensions are batch: states [D], [6, D] and [2, 3, D] must be treated alike."""
    state = states[torch.arange(6) % len(states)]
    move = env.moves(state).to(torch.uint8).argmax(1)
    back = env.parents(state).to(torch.uint8).argmax(1)
    functions: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
        "moves()": lambda s, m, b: env.moves(s),
        "step()": lambda s, m, b: env.step(s, m),
        "parents()": lambda s, m, b: env.parents(s),
        "unstep()": lambda s, m, b: env.unstep(s, b),
        "features()": lambda s, m, b: env.features(s),
    }
    if isinstance(env, Enumerable):
        functions["index()"] = lambda s, m, b: env.index(s)
    for name, call in functions.items():
        row = call(state, move, back)
        try:
            block = call(state.view(2, 3, -1), move.view(2, 3), back.view(2, 3))
            one = call(state[0], move[0], back[0])
        except Exception as problem:
            raise UserError(
                f"{name} of {env!r} fails ({type(problem).__name__}: {problem}) "
                "on states [2, 3, D] or on one state [D], though not on [6, D]: "
                "treat all leading dimensions as batch"
            ) from problem
        if block.shape != (2, 3, *row.shape[1:]) or one.shape != row.shape[1:]:
            raise UserError(
                f"{name} of {env!r} gives shape {tuple(block.shape)} for states [2, 3, D] "
                f"and {tuple(one.shape)} for one state [D], "
                f"but {(2, 3, *row.shape[1:])} and {tuple(row.shape[1:])} are needed: "
                "treat all leading dimensions as batch"
            )
        if not (torch.equal(block.reshape(row.shape), row) and torch.equal(one, row[0])):
            raise UserError(
                f"{name} of {env!r} depends on how states are batched, or on chance: "
                "make it a function of each state alone"
            )
    for batch in ((), (2, 3)):
        rows = None if env.contexts is None else torch.zeros(batch, dtype=torch.long)
        _expect(env, f"initial({batch})", env.initial(batch, rows), (*batch, env.state_dim), torch.int64)


def _told_apart(env: Env, met: Tensor, seed: int) -> None:
    """Warns of two states with the same features and something left to decide: a trunk that reads features treats them alike."""
    width = env.features(met[:1]).shape[-1]
    weight = torch.rand(width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    rows, marks = [], []
    for part in met.split(_together(env)):
        part = part[~env.complete(part)]
        rows.append(part)
        marks.append((env.features(part).double() * weight).sum(-1))  # the same number for the same features
    state, mark = torch.cat(rows), torch.cat(marks)
    row = state[:, 0] if env.contexts is not None else torch.zeros_like(state[:, 0])  # contexts are read apart
    _, group = torch.stack([row.double(), mark], 1).unique(dim=0, return_inverse=True)
    double = group.bincount() > 1
    if not bool(double.any()):
        return
    alike = state[group == int(double.to(torch.uint8).argmax())][:2]
    seen = env.features(alike)
    if torch.equal(seen[0], seen[1]):
        log.warning(
            "features() of %r are the same for %s and %s, which differ: a network that reads features (mlp) cannot tell them apart; "
            "add what differs, or take a trunk that reads states",
            env, shown_state(env, alike[0]), shown_state(env, alike[1]),
        )  # fmt: skip


# geometry ---------------------------------------------------------------------------------------------------------


def _same(a: Tensor, b: Tensor) -> Tensor:
    return (a == b).all(-1)


def _all_edges(env: Env, states: Tensor) -> int:
    """The number of edges that leave these states, each checked."""
    width = env.features(states[:1]).shape[-1]
    return sum(_geometry(env, part, width) for part in states.split(_together(env)))


def _geometry(env: Env, state: Tensor, width: int) -> int:
    """Every edge that leaves or enters these states [n, D]; the number of edges that leave."""
    count = len(state)
    mask, came, seen = env.moves(state), env.parents(state), env.features(state)
    _expect(env, "moves()", mask, (count, env.num_moves), torch.bool)
    _expect(env, "parents()", came, (count, env.num_moves), torch.bool)
    if not seen.is_floating_point() or seen.shape != (count, width):
        raise UserError(
            f"features() of {env!r} gives {tuple(seen.shape)} of {seen.dtype}, "
            f"but ({count}, {width}) of floats is needed"
        )
    if not bool(seen.isfinite().all()):
        bad = state[(~seen.isfinite()).any(1)][0]
        raise UserError(
            f"features() of {shown_state(env, bad)} are not finite: scale or encode what is infinite or NaN"
        )
    for name, again, once in (("moves()", env.moves(state), mask), ("parents()", env.parents(state), came)):
        if not torch.equal(again, once):
            bad = state[(again != once).any(1)][0]
            raise UserError(
                f"{name} gives two answers for {shown_state(env, bad)}: chance belongs into a Channel, not into an Env"
            )

    if env.stop is not None:
        bad = came[:, env.stop].nonzero()
        if len(bad):
            raise UserError(
                f"parents() of {shown_state(env, state[int(bad[0])])} contains STOP (move {env.stop}): "
                "STOP leads nowhere, leave it out"
            )
        stopped = env.step(state, torch.full((count,), env.stop))
        moved = (mask[:, env.stop] & ~_same(stopped, state)).nonzero()
        if len(moved):
            i = int(moved[0])
            raise UserError(
                f"STOP (move {env.stop}) turns {shown_state(env, state[i])} into {stopped[i].tolist()}: "
                "STOP must leave the state as it is"
            )

    # forwards: every legal move leads somewhere new, and the way back is known
    here, move = env.real_moves(mask).nonzero(as_tuple=True)
    start = state[here]
    child, again = env.step(start, move), env.step(start, move)
    _expect(env, "step()", child, (len(move), env.state_dim), torch.int64)

    def fail(bad: Tensor, words: str, remedy: str, at: Tensor = start, by: Tensor = move, to: Tensor = child) -> None:
        if bool(bad.any()):
            i = int(bad.nonzero()[0])
            raise UserError(
                words.format(move=int(by[i]), state=shown_state(env, at[i]), to=shown_state(env, to[i])) + f": {remedy}"
            )

    fail(
        ~_same(child, again),
        "step() gives two answers for move {move} at {state}",
        "chance belongs into a Channel, not into an Env",
    )
    fail(
        _same(child, start),
        "moves() allows move {move} at {state}, but step() leaves the state as it is",
        "forbid the move in moves(), or let step() carry it out",
    )
    known = env.parents(child).gather(1, move.unsqueeze(1)).squeeze(1)
    fail(
        ~known,
        "move {move} leads from {state} to {to}, but parents() there does not list it",
        "add the move to parents()",
    )
    back = env.unstep(child, move)
    _expect(env, "unstep()", back, (len(move), env.state_dim), torch.int64)
    fail(
        ~_same(back, start),
        "move {move} leads from {state} to {to}, but unstep() does not lead back",
        "make unstep() the inverse of step()",
    )

    # backwards: every parent listed can really come here
    here, move_in = came.nonzero(as_tuple=True)
    to = state[here]
    origin = env.unstep(to, move_in)
    allowed = env.moves(origin).gather(1, move_in.unsqueeze(1)).squeeze(1)
    edge = (origin, move_in, to)
    claim = "parents() says that move {move} leads from {state} to {to}, "
    fail(~allowed, claim + "but moves() forbids it there", "drop it from parents(), or allow it in moves()", *edge)
    elsewhere = ~_same(env.step(origin, move_in), to)
    fail(elsewhere, claim + "but step() leads elsewhere", "drop it from parents(), or correct unstep()", *edge)
    if env.tree and bool((came.sum(1) > 1).any()):
        bad = state[came.sum(1) > 1][0]
        raise UserError(
            f"{shown_state(env, bad)} has {int(came.sum(1).max())} parents, but tree = True promises one: set tree = False"
        )
    return len(move)


# enumeration ------------------------------------------------------------------------------------------------------


def _list_states(env: Env, walks: Tensor, largest: int) -> Tensor | None:
    """All states of an enumerable environment (of its first context); None where they are too many to list.

    Their number is not known before they are listed, so it is estimated from `index` of the states on the walks, unless
    the walks have so few branches that there cannot be many.
    """
    if not isinstance(env, Enumerable):
        return None
    mine = walks if env.contexts is None else walks[_rows(env, len(walks)) == 0]
    place = env.index(mine.flatten(0, 1))
    branches = env.real_moves(env.moves(mine)).sum(-1).amax(0)  # [T+1] most choices met at each depth
    paths = float(branches.clamp(min=1).double().log().sum())
    if paths > math.log(largest) and bool(((place < 0) | (place >= largest)).any()):
        return None
    listed = env.all_states(None if env.contexts is None else 0)
    if listed.ndim != 2 or listed.shape[1] != env.state_dim or listed.dtype != torch.int64:
        raise UserError(
            f"all_states() of {env!r} gives {tuple(listed.shape)} of {listed.dtype}, "
            f"but [N, {env.state_dim}] of torch.int64 is needed"
        )
    return listed if len(listed) <= largest else None


def _enumeration(env: Enumerable, states: Tensor, met: Tensor) -> None:
    """Checks `all_states` and `index` against the states that legal moves reach."""
    count = len(states)
    _, twins = states.unique(dim=0, return_inverse=True)
    if bool((twins.bincount() > 1).any()):
        double = states[(twins.bincount() > 1)[twins]][0]
        raise UserError(f"all_states() lists {shown_state(env, double)} more than once: list each state once")
    first = env.initial((1,), None if env.contexts is None else torch.zeros(1, dtype=torch.long))
    if not torch.equal(states[:1], first):
        raise UserError(
            f"all_states() begins with {shown_state(env, states[0])}, but the initial {shown_state(env, first[0])} comes first"
        )
    place = env.index(states)
    wrong = (place != torch.arange(count)).nonzero()
    if len(wrong):
        i = int(wrong[0])
        raise UserError(
            f"index() puts {shown_state(env, states[i])} at {int(place[i])}, but all_states() lists it at {i}: "
            "make the two agree"
        )
    if env.contexts is None:
        _listed(env, states, met, "a walk of legal moves leads to it")
    entered = torch.zeros(count, dtype=torch.long)
    leaving = 0
    size = _together(env)
    for start in range(0, count, size):
        part = states[start : start + size]
        here, move = env.real_moves(env.moves(part)).nonzero(as_tuple=True)
        child = env.step(part[here], move)
        to = _listed(env, states, child, "a legal move leads to it")
        late = (to <= here + start).nonzero()
        if len(late):
            i = int(late[0])
            raise UserError(
                f"all_states() lists {shown_state(env, child[i])} before {shown_state(env, part[here[i]])}, "
                f"from which move {int(move[i])} leads to it: "
                "list parents before children"
            )
        entered += torch.bincount(to, minlength=count)
        leaving += len(move)
    lost = (entered[1:] == 0).nonzero()
    if len(lost):
        raise UserError(
            f"all_states() lists {shown_state(env, states[int(lost[0]) + 1])}, but no legal move leads to it: "
            "leave it out, or allow the move"
        )
    depth = _longest(env, states)
    if depth != env.horizon:
        raise UserError(
            f"horizon of {env!r} is {env.horizon}, but the longest way to a finished object takes {depth} moves: "
            f"set it to {depth}"
        )


def _listed(env: Enumerable, states: Tensor, wanted: Tensor, why: str) -> Tensor:
    """Positions of `wanted` in the list; a UserError names a state that is not there."""
    place = env.index(wanted)
    inside = (place >= 0) & (place < len(states))
    there = inside & _same(states[place.clamp(0, len(states) - 1)], wanted)
    if not bool(there.all()):
        bad = wanted[~there][0]
        raise UserError(
            f"{shown_state(env, bad)} is not where index() says ({int(place[~there][0])} of {len(states)}) in all_states(), "
            f"but {why}: list it"
        )
    return place


def _longest(env: Enumerable, states: Tensor) -> int:
    """The longest number of moves from the first state, layer by layer; the list is known to be acyclic here."""
    layer, steps = states[:1], 0
    while True:
        here, move = env.real_moves(env.moves(layer)).nonzero(as_tuple=True)
        if not len(move):
            return steps
        places = env.index(env.step(layer[here], move)).unique()
        layer, steps = states[places], steps + 1
