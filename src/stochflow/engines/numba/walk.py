"""A rollout on the CPU in compiled loops (`cpu_loops`), where an operator would cost more than its sum.

The counterpart of walk.cu: grids and strings, MLPs with or without a look-up table. It draws the random numbers that `rollout` draws, in the
same order, and so, but for rounding, the same trajectories; everything that does not fit walks there, step by step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from stochflow.engines.numba.compiled import floats, in_parts, loops
from stochflow.errors import UserError
from stochflow.nets.lookup import _LookupTrunk, inner_mlp
from stochflow.nets.mlp import _MLPTrunk
from stochflow.nets.policy import Policy
from stochflow.ops import ALL_AT_ONCE, always, pick, zeros
from stochflow.types import Fading, Task, Trajectories
from stochflow.worlds.channels import Exact, Slip
from stochflow.worlds.env import numbers
from stochflow.worlds.grid import Grid
from stochflow.worlds.strings import Strings

MOST = 1 << 20  # hidden numbers of a seed's step
MOST_KEPT = (
    1 << 28
)  # and of all layers, steps and seeds, should all of them be reached: who learns from them keeps them
WORTH_A_THREAD = 1 << 16  # random numbers
WORTH_PARTS = 1 << 24  # products of rows and weights at one seed's step: beyond, threads share the rows


def fits(task: Task, policy: Any, batch: int) -> bool:
    """Whether it knows this environment and this network, and there is room."""
    env: Any = task.env
    trunk: Any = getattr(policy, "trunk", None)
    if type(policy) is not Policy or type(trunk) not in (_MLPTrunk, _LookupTrunk) or policy.encoder is not None:
        return False
    return (
        (type(env) is Strings or (type(env) is Grid and numbers(env)))
        and (policy.env is env or repr(policy.env) == repr(env))
        and env.contexts is None
        and policy.head.weight.dtype == torch.float32
        and batch * trunk.width <= MOST
        and policy.num_seeds * batch * (env.horizon + 1) * trunk.width * len(inner_mlp(trunk).layers) <= MOST_KEPT
        and policy.num_seeds * batch * env.horizon * env.num_moves <= ALL_AT_ONCE
        and task.channel.begin(env.initial((1, 1))) is None  # a channel that remembers asks for more
        and loops() is not None
    )


class Room:
    """A policy's weights and the memory that a walk needs, for one batch after the other; `gradient` keeps its own here too."""

    def __init__(self, policy: Any, batch: int, keeps: bool):
        compiled = loops()
        self.policy, self.batch = policy, batch
        columns = sum(policy.sizes) if keeps else policy.env.num_moves  # who only walks asks about nothing else
        self.world = world = _world(policy, keeps, columns)
        mlp, trunk, seeds = inner_mlp(policy.trunk), policy.trunk, policy.num_seeds
        first, *more = [layer.weight.detach().numpy() for layer in mlp.layers]
        first_bias, *biases = [layer.bias.detach().numpy() for layer in mlp.layers]
        head = [x.detach().numpy()[..., :columns] for x in (policy.head.weight, policy.head.bias)]
        table = (
            trunk.table.weight.detach().numpy()
            if type(trunk) is _LookupTrunk
            else np.empty((seeds, 0, 0), dtype=np.float32)
        )
        outs = columns if world.few else -(-columns // compiled.WIDE) * compiled.WIDE
        heads = [
            floats(seeds, outs, wide) if world.few else floats(seeds, wide, outs)
            for wide in (mlp.width, table.shape[2])
        ]
        copies = (*heads, floats(seeds, 1, outs))
        for copy in copies:
            copy.fill(0)
        self.net = compiled.Net(first, first_bias, (*more, *heads), (*biases, copies[-1]), table)
        self.rows = _rows(
            world,
            policy.env,
            (seeds, _most(world, batch)),
            (*[mlp.width] * len(mlp.layers), table.shape[2]),
            outs,
            batch,
        )
        self.size = sum(stage[0].size for stage in self.net.stages)  # numbers of a seed
        self.copies = self.head_parts(head, copies)
        self.shape, device = (seeds, batch), policy.device
        self.even, self.none, self.real = (
            np.ones(self.shape, dtype=np.float32),
            zeros(self.shape, device),
            always(self.shape, device),
        )
        self.kept: Any = None
        self._where = policy.head.weight.data_ptr()

    def head_parts(self, head: list[np.ndarray], copies: tuple[np.ndarray, ...]) -> list[tuple[np.ndarray, np.ndarray]]:
        """A head [S, H + W, O] and its bias, of which loops have other forms: each part beside its copy."""
        (weight, bias), (*same, last), wide = head, copies, self.rows.inputs[0].shape[2]
        same = [x.transpose(0, 2, 1) if self.world.few else x[..., : weight.shape[2]] for x in same]
        parts = [(weight[:, :wide], same[0]), (weight[:, wide:], same[1]), (bias, last[..., : weight.shape[2]])]
        return [(part, copy) for part, copy in parts if part.size > 0]

    def serves(self, policy: Any, batch: int) -> bool:
        """Whether it is this policy's, and its weights are where they were."""
        return self.policy is policy and self.batch == batch and policy.head.weight.data_ptr() == self._where


class Trace(NamedTuple):
    """What the network made of each state on the way, for whoever learns before the weights change."""

    room: Room
    way: Any
    finals: Tensor  # [S, B] the last states' numbers


def walk(
    task: Task, policy: Any, batch: int, explore: Tensor | float | None, temper: Tensor | float | None
) -> Trajectories:
    """`rollout` for what `fits`."""
    return _walk(task, Room(policy, batch, False), explore, temper)[0]


def traced_walk(
    task: Task, policy: Any, batch: int, explore: Fading | float | None, last: Trace | None
) -> tuple[Trajectories, Trace]:
    """The same, and what the network made of each state; in the memory of the `last` trace, if there is one, which then is no more."""
    chance = explore.on_cpu() if isinstance(explore, Fading) else explore
    room = last.room if last is not None and last.room.serves(policy, batch) else Room(policy, batch, True)
    return _walk(task, room, chance, None)


def _walk(task: Task, room: Room, explore: float | Tensor | None, temper: Any) -> tuple[Trajectories, Trace]:
    world, (seeds, batch) = room.world, room.shape
    chance, after = draw(task, room, None if explore is None else [float(explore)], temper=temper)
    way, walk = new_way(task.env, seeds, batch), loops().walk
    for part, copy in room.copies:
        np.copyto(copy, part)
    given = (0, world, room.net, room.rows, way, chance)
    if not known_ahead(task.channel):
        _ask_at_every_step(task, seeds, given)
    elif seeds == 1:
        _one_seed(WORTH_PARTS // room.size if torch.get_num_threads() > 1 else batch, given)
    else:
        in_parts(lambda s, e: walk(s, e, 0, world.asked, _ALL, True, True, batch, *given), seeds)
    if after is not None:
        torch.default_generator.manual_seed(after)
    found = [torch.from_numpy(x) for x in way[:4]]
    return Trajectories(found[0], found[1], found[2], found[3], room.none, room.real), Trace(
        room, way, torch.from_numpy(way.final)
    )


_ALL, _NOBODY = (0, 100), (0, 0)


def _one_seed(most: int, given: tuple[Any, ...]) -> None:
    """Of steps that have more than so many states, threads share them."""
    end, walk = given[1].asked, loops().walk
    t = walk(0, 1, 0, end, _ALL, True, True, most, *given)
    while t < end:
        in_parts(lambda a, b: walk(0, 1, t, t + 1, (a, b), False, False, 1 << 62, *given), 100)  # noqa: B023 - it is over before t is another
        walk(0, 1, t, t + 1, _NOBODY, True, True, most, *given)
        t = walk(0, 1, t + 1, end, _ALL, True, True, most, *given)


@torch.no_grad()
def _ask_at_every_step(task: Task, seeds: int, given: tuple[Any, ...]) -> None:
    """Where a channel of any other kind has to be asked what comes of an action."""
    env, (_, world, _, _, way, _), walk, most = task.env, given, loops().walk, 1 << 62
    for t in range(world.asked):
        in_parts(lambda s, e: walk(s, e, t, t + 1, _ALL, True, False, most, *given), seeds)  # noqa: B023 - it is over before t is another
        if t == env.horizon:
            break
        state, meant = torch.from_numpy(way.states[t]), torch.from_numpy(way.actions[t])
        legal, acted = env.real_moves(env.moves(state)), way.alive[t] & (way.actions[t] != world.stop)
        came = task.channel.sample(state, legal, meant)
        if not bool(pick(legal, came)[torch.from_numpy(acted)].all()):
            raise UserError(
                f"{task.channel!r} made a move that is not legal in its state: `sample` may answer with legal moves alone"
            )
        np.copyto(way.moves[t], came.numpy(), where=acted)
        in_parts(lambda s, e: walk(s, e, t, t + 1, _NOBODY, False, True, most, *given), seeds)  # noqa: B023


def _world(policy: Any, keep: bool, columns: int) -> Any:
    compiled, env = loops(), policy.env
    string, back = isinstance(env, Strings), policy.sizes[1] > 0
    side, stop = env.tokens if string else env.side, -1 if env.stop is None else env.stop
    least, asked = env.min_length or 0 if string else 0, env.horizon + int(keep and not env.tree)
    few, blank = columns <= compiled.FEW, env.pad if string else 0
    return compiled.World(
        string, side, stop, least, env.num_moves, asked, keep, back, sum(policy.sizes[:2]), few, blank
    )


def known_ahead(channel: Any) -> bool:
    """Whether what comes of an action is a matter of random numbers that are drawn before the walk: else the channel has to be asked on the way."""
    return channel.exact or type(channel) is Slip


def draw(
    task: Task, room: Room, explore: list[float] | None, many: int = 1, temper: Any = None
) -> tuple[Any, int | None]:
    """The random numbers of so many walks, each with its chance to `explore`, and from where to go on drawing after the last; None: from where it stands.

    How long walks are must not show in that, so wherever a channel might be asked on the way, the stream begins anew after each of them.
    """
    channel: Any = task.channel
    env, each = task.env, room.shape[0] * room.shape[1] * task.env.horizon
    noise, coins = each * env.num_moves, each if explore is not None else 0
    slips = each * (env.num_moves + 1) if type(channel) is Slip and not channel.exact else 0
    after = None
    if env.free or type(channel) is Exact:
        drawn = torch.rand(many, noise + coins + slips)
    else:
        drawn = torch.empty(many, noise + coins + slips)
        for row in drawn:
            if after is not None:
                torch.default_generator.manual_seed(after)
            torch.rand(noise + coins, out=row[: noise + coins])
            after = int(torch.randint(2**62, ()))
            torch.rand(slips, out=row[noise + coins :])
    found = drawn.numpy()
    in_parts(lambda a, b: _log_exponential(found[:, a:b]), noise, 1 + many * noise // WORTH_A_THREAD)
    chances = np.array([0.0] * many if explore is None else explore, dtype=np.float32)
    tempers = room.even
    if temper is not None:
        tempers = np.array(np.broadcast_to(np.asarray(temper, dtype=np.float32), (*room.shape, 1))[..., 0], order="C")
    slip = np.float32(channel.alpha if slips else 0)
    return loops().Chance(found, noise if coins else -1, chances, noise + coins if slips else -1, slip, tempers), after


def _log_exponential(x: np.ndarray) -> None:
    """As `ops.log_exponential` makes it of uniform numbers, but without threads of torch, which go on looking for work when there is none."""
    np.maximum(x, np.float32(2**-25), out=x)
    np.log(x, out=x)
    np.negative(x, out=x)
    np.log(x, out=x)


def _rows(world: Any, env: Any, shape: tuple[int, int], widths: tuple[int, ...], outs: int, batch: int) -> Any:
    """Room for the states [S, R] that a batch may meet, of which the first one is known."""
    numbers = np.zeros((3, *shape), dtype=np.int64)
    *inputs, out = [floats(*shape, wide) for wide in (*widths, outs)]
    slots = np.empty((shape[0], 1 << (2 * batch - 1).bit_length()), dtype=np.int64)
    begin = np.zeros((shape[0], env.horizon + 2), dtype=np.int64)
    begin[:, 1] = 1
    place = np.zeros((*shape, 0 if world.string else env.state_dim), dtype=np.int64)
    return loops().Rows(begin, *numbers, place, tuple(inputs), out, slots)


def _most(world: Any, batch: int) -> int:
    """Rows of a seed."""
    if not world.keeps:
        return 2 * batch
    return sum(min(batch, world.side ** min(t, 62)) if world.string else batch for t in range(world.asked))


def new_way(env: Any, seeds: int, batch: int) -> Any:
    shape, whole = (env.horizon, seeds, batch), (env.horizon + 1, seeds, batch)
    states, row, final = (np.empty(x, dtype=np.int64) for x in ((*whole, env.state_dim), whole, (seeds, batch)))
    actions, moves = np.empty((2, *shape), dtype=np.int64)
    return loops().Way(states, actions, moves, np.empty(shape, dtype=bool), row, final)
