"""Stacked layers, trunks, and the `Policy` that joins a trunk to its heads.

Every parameter is [S, ...]: S independent networks advance in one operator. Row i is initialised from seeds[i] alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, relu

from stochflow.env import Enumerable, Env
from stochflow.errors import UserError
from stochflow.ops import arange
from stochflow.types import PolicyOut, Trajectories

Generators = Sequence[torch.Generator]


class Linear(nn.Module):
    """[S, N, in] -> [S, N, out]."""

    def __init__(self, inputs: int, outputs: int, gens: Generators, gain: float = 1.0):
        super().__init__()
        bound = gain * math.sqrt(3.0 / inputs)  # variance gain^2 / inputs
        self.weight = nn.Parameter(torch.stack([torch.empty(inputs, outputs).uniform_(-bound, bound, generator=g) for g in gens]))
        self.bias = nn.Parameter(torch.zeros(len(gens), 1, outputs))

    def forward(self, x: Tensor) -> Tensor:
        if x.is_cuda and x.shape[1] >= 4 * _SPLIT:
            return _TallLinear.apply(x, self.weight, self.bias)
        return torch.baddbmm(self.bias, x, self.weight)


_SPLIT = 512


class _TallLinear(torch.autograd.Function):
    """A stacked linear layer for many rows on a GPU: its weight gradient is a long sum, and batched products do not
    split long sums over the chip. We split it ourselves: 8.6 ms an iteration became 2.4 at two seeds and 36,000 rows (one trial)."""

    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.save_for_backward(x, weight)
        return torch.baddbmm(bias, x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        seeds, rows, wide = x.shape
        whole = rows // _SPLIT * _SPLIT
        parts = (seeds, whole // _SPLIT, _SPLIT)
        left = x[:, :whole].reshape(*parts, wide).flatten(0, 1).transpose(1, 2)
        right = grad[:, :whole].reshape(*parts, grad.shape[-1]).flatten(0, 1)
        to_weight = torch.bmm(left, right).view(seeds, parts[1], wide, -1).sum(1)
        if whole < rows:
            to_weight = torch.baddbmm(to_weight, x[:, whole:].transpose(1, 2), grad[:, whole:])
        to_x = torch.bmm(grad, weight.transpose(1, 2)) if ctx.needs_input_grad[0] else None
        return to_x, to_weight, grad.sum(1, keepdim=True)


class Embedding(nn.Module):
    """Row numbers [S, ...] -> [S, ..., width], each seed in its own table."""

    def __init__(self, rows: int, width: int, gens: Generators, std: float = 0.02):
        super().__init__()
        self.weight = nn.Parameter(torch.stack([torch.empty(rows, width).normal_(0, std, generator=g) for g in gens]))

    def forward(self, index: Tensor) -> Tensor:
        return rows(self.weight, index)


def rows(weight: Tensor, index: Tensor) -> Tensor:
    """Rows [S, ...] of stacked tables [S, R, width], each seed from its own: [S, ..., width]."""
    seeds, many, width = weight.shape
    if seeds > 1:
        index = index + (arange(seeds, index.device) * many).view(-1, *[1] * (index.dim() - 1))
    table = weight.view(seeds * many, width)
    if index.is_cuda:  # its gradient adds by atomics; embedding's sorts first, which costs far more at these sizes
        return table.index_select(0, index.flatten()).view(*index.shape, width)
    return embedding(index, table)


class Trunk(nn.Module):
    """From states to hidden vectors. `advance` may keep what it needs of the past in its cache."""

    width: int
    grows: bool = False  # True: `advance` does more at later steps
    numbered: bool = False  # True: it reads each state for itself, and the environment numbers states

    def forward(self, state: Tensor, context: Tensor | None) -> Tensor:
        """[S, N, D] -> [S, N, H]."""
        raise TypeError(f"{type(self).__name__} must define forward(state, context)")

    def along(self, traj: Trajectories, context: Tensor | None) -> Tensor:
        """[n, S, B, H]: every state of a batch in one pass; of trees the last is not asked for, so n is T or T+1."""
        states = traj.states.transpose(0, 1)  # [S, T+1, B, D]
        seeds, steps, batch, _ = states.shape
        wide = None if context is None else context.unsqueeze(1).expand(-1, steps, -1, -1).reshape(seeds, steps * batch, -1)
        hidden = self.forward(states.reshape(seeds, steps * batch, -1), wide)
        return hidden.view(seeds, steps, batch, -1).transpose(0, 1)

    def begin(self, state: Tensor, context: Tensor | None) -> tuple[Tensor, Any]:
        return self.forward(state, context), context

    def advance(self, cache: Any, state: Tensor, move: Tensor, t: int) -> tuple[Tensor, Any]:
        return self.forward(state, cache), cache


class Net(Protocol):
    """The description of a trunk: a value such as `MLP(128, 2)`."""

    def build(self, env: Env, gens: Generators, context: int) -> Trunk: ...


@dataclass(frozen=True)
class MLP:
    """Fully connected layers on `env.features`."""

    hidden: int = 128
    layers: int = 2

    def build(self, env: Env, gens: Generators, context: int) -> Trunk:
        return _MLPTrunk(env, self.hidden, self.layers, gens, context)


class _MLPTrunk(Trunk):
    def __init__(self, env: Env, hidden: int, layers: int, gens: Generators, context: int):
        super().__init__()
        self.env, self.width, self.numbered = env, hidden, numbers(env)
        first = env.features(env.initial((1,)))
        self.blank = not bool(first.any())  # the initial state has no feature
        inputs = first.shape[-1] + context
        sizes = [inputs] + [hidden] * layers
        self.layers = nn.ModuleList(Linear(a, b, gens, gain=math.sqrt(2.0)) for a, b in pairwise(sizes))

    def forward(self, state, context):
        return self._rest(self._first(state, context))

    def _first(self, state: Tensor, context: Tensor | None) -> Tensor:
        """The first layer before its rectifier."""
        x = self.env.features(state)
        return self.layers[0](x if context is None else torch.cat([x, context], -1))

    def _rest(self, x: Tensor) -> Tensor:
        x = relu(x)
        for i in range(1, len(self.layers)):
            x = relu(self.layers[i](x))
        return x

    def along(self, traj, context):
        """Of long strings over large alphabets, whose flags outnumber the hidden units by far, the first layer is a running sum."""
        states, many = traj.states, self.layers[0].get_parameter("weight").shape[1]
        known = len(states) - 1
        column = self.env.state_dim - self.env.horizon
        flags = None
        if self.env.free and many >= 4 * self.width and known <= self.env.horizon:
            moves = states[-1, ..., column : column + known].movedim(-1, 1)  # [S, T, B]
            flags = self.env.switched(moves, arange(known, moves.device).unsqueeze(-1))
        if flags is None:
            return super().along(traj, context)
        if self.blank and context is None:  # the first layer has nothing to say yet, and no gradient
            begun = self.layers[0].get_parameter("bias").unsqueeze(1).expand(-1, -1, states.shape[2], -1)
        else:
            begun = self._first(states[0], context).unsqueeze(1)
        added = rows(self.layers[0].get_parameter("weight"), flags.clamp(max=many - 1))  # where nothing was ever written, padding
        sums = torch.cat([begun, begun + added.cumsum(1)], 1)
        return self._rest(sums.flatten(1, 2)).view(*sums.shape[:-1], self.width).transpose(0, 1)

    def begin(self, state, context):
        sums = self._first(state, context)
        return self._rest(sums), (context, sums)

    def advance(self, cache, state, move, t):
        """Where a move sets one flag, the first layer is a running sum of that flag's weights."""
        context, sums = cache
        flag = self.env.switched(move, t) if self.env.free else None
        sums = self._first(state, context) if flag is None else sums + rows(self.layers[0].get_parameter("weight"), flag)
        return self._rest(sums), (context, sums)


@dataclass(frozen=True)
class Lookup:
    """An embedding of the whole state beside an MLP: capacity by memory, for spaces of up to a million states.

    A rough landscape must be memorised; a row a state does it faster than width does.
    """

    hidden: int = 64
    layers: int = 2
    width: int = 64

    def build(self, env: Env, gens: Generators, context: int) -> Trunk:
        return _LookupTrunk(env, self, gens, context)


class _LookupTrunk(Trunk):
    def __init__(self, env: Any, spec: Lookup, gens: Generators, context: int):
        super().__init__()
        if not hasattr(env, "index"):
            raise UserError("the lookup trunk needs an environment that can be enumerated: use --net mlp here")
        self.env, self.numbered = env, numbers(env)
        self.mlp = _MLPTrunk(env, spec.hidden, spec.layers, gens, context)
        self.table = Embedding(interior(env), spec.width, gens, std=1.0 / math.sqrt(spec.width))
        self.width = spec.hidden + spec.width

    def forward(self, state, context):
        return self._join(self.mlp(state, context), self.env.index(state))

    def begin(self, state, context):
        row = self.env.index(state)
        hidden, inner = self.mlp.begin(state, context)
        return self._join(hidden, row), (inner, row)

    def advance(self, cache, state, move, t):
        inner, row = cache
        follow = getattr(self.env, "next_index", None)  # one multiplication where the order of states knows it
        row = self.env.index(state) if follow is None else follow(row, move)
        hidden, inner = self.mlp.advance(inner, state, move, t)
        return self._join(hidden, row), (inner, row)

    def _join(self, hidden: Tensor, row: Tensor) -> Tensor:
        return torch.cat([hidden, self.table(row.clamp(max=self.table.weight.shape[1] - 1))], -1)


def numbers(env: Any) -> bool:
    """Whether states have numbers, of 64 bits, by a formula: to list them all would cost more than it saves."""
    return isinstance(env, Enumerable) and env.contexts is None and type(env).count is not Enumerable.count and env.count() < 2**62


def interior(env: Any) -> int:
    """How many states come before the first complete one, or all of them: only states with a choice need a row."""
    complete = env.complete(env.all_states())
    first = int(complete.to(torch.uint8).argmax())
    return first if bool(complete[first:].all()) else len(complete)


class Encoder(nn.Module):
    """From context rows [S, N] to vectors [S, N, C]."""

    width: int

    def forward(self, row: Tensor) -> Tensor:
        raise TypeError(f"{type(self).__name__} must define forward(row)")


class EncoderNet(Protocol):
    """The description of a context encoder: a value such as `MLPEncoder(64)`."""

    def build(self, env: Env, gens: Generators) -> Encoder: ...


@dataclass(frozen=True)
class MLPEncoder:
    """Fully connected layers on the flattened context."""

    hidden: int = 64
    layers: int = 2

    def build(self, env: Env, gens: Generators) -> Encoder:
        return _MLPEncoder(env, self, gens)


class _MLPEncoder(Encoder):
    def __init__(self, env: Env, spec: MLPEncoder, gens: Generators):
        super().__init__()
        assert env.contexts is not None
        self.table: Tensor
        self.register_buffer("table", env.contexts.flatten(1).float(), persistent=False)
        self.width = spec.hidden
        sizes = [self.table.shape[1]] + [spec.hidden] * spec.layers
        self.layers = nn.ModuleList(Linear(a, b, gens, gain=math.sqrt(2.0)) for a, b in pairwise(sizes))

    def forward(self, row):
        x = self.table[row]
        for layer in self.layers:
            x = relu(layer(x))
        return x


class Early(NamedTuple):
    """States that all trajectories meet in their first steps: in the order of the environment's numbers, from 0 on."""

    steps: int
    states: Tensor  # [n, D]
    features: Tensor | None = None  # of the states, where they are kept


MOST_SHARED = 4  # states a trajectory of the batch: it may end long before its last step, and then costs a GPU nothing more
MOST_KEPT = 1 << 22  # numbers
LEAST_SAVED = {"cuda": 4096, "cpu": 64}  # rows of a pass: looking states up costs a few operators


def _early(env: Any, steps: int, batch: int, device: torch.device) -> Early | None:
    """The number of steps that saves most."""
    owner: Any = next(cls for cls in type(env).__mro__ if "index" in vars(cls))
    if device.type != "cpu" and not vars(owner).get("index_stays", False):
        return None
    saved = {}
    for t in range(1, steps + 1):
        if env.early_count(t) > batch * (steps if device.type == "cpu" else min(steps, MOST_SHARED)):
            break
        saved[t] = t * batch - env.early_count(t)
    best = max(saved, key=lambda t: saved[t], default=0)
    if not saved or saved[best] < max(LEAST_SAVED.get(device.type, 64), steps * batch // 4):
        return None
    states = env.early_states(best)
    if not (torch.equal(env.index(states), torch.arange(len(states))) and torch.equal(states[0], env.initial((1,))[0])):
        return None  # someone's own order of states
    states = states.to(device)
    features = env.features(states) if device.type != "cpu" else None
    return Early(best, states, features if features is not None and features.numel() <= MOST_KEPT else None)


BLOCK = 64  # rows of a block of distinct states, times whatever keeps blocks to sixteen a batch


class Policy(nn.Module):
    """One network, three heads: actions, the move that led here, log-flow; and log Z with a scale of its own.

    Masks are not its business: it returns raw logits.
    """

    LOG_Z_SCALE = 10.0  # log Z travels far; its own scale lets one learning rate serve everything

    def __init__(
        self,
        env: Env,
        net: Net = MLP(),  # noqa: B008 - a frozen value
        *,
        seeds: Sequence[int] = (0,),
        learned_backward: bool = True,
        back_action: bool = False,
        encoder: EncoderNet = MLPEncoder(),  # noqa: B008 - a frozen value, used where the environment has contexts
    ):
        super().__init__()
        self.env = env
        gens = [torch.Generator().manual_seed(s) for s in seeds]
        moves = env.num_moves
        self.encoder = None if env.contexts is None else encoder.build(env, gens)
        width = 0 if self.encoder is None else self.encoder.width
        self.trunk = net.build(env, gens, width)
        self.back_action = back_action  # whether it has a head for the action given the move
        self.sizes = [moves, moves if learned_backward and not env.tree else 0, 1, moves * moves if back_action else 0]
        self.head = Linear(self.trunk.width, sum(self.sizes), gens, gain=0.1)
        self.uniform: Tensor
        self.register_buffer("uniform", torch.zeros(1), persistent=False)
        self._early: dict[tuple[int, int], Early | None] = {}  # by steps and batch
        self.log_z_unit = nn.Parameter(torch.zeros(len(seeds), 1))
        self.log_z_head = Linear(width, 1, gens, gain=0.1) if width else None

    @property
    def num_seeds(self) -> int:
        return self.log_z_unit.shape[0]

    @property
    def device(self) -> torch.device:
        return self.log_z_unit.device

    def context(self, state: Tensor) -> Tensor | None:
        """[S, B, C] of states [S, B, D], once a batch; None where the environment has no contexts."""
        return None if self.encoder is None else self.encoder(state[..., 0])

    def log_z(self, context: Tensor | None) -> Tensor:
        """[S, B], or [S, 1] where there are no contexts."""
        if self.log_z_head is None or context is None:
            return self.LOG_Z_SCALE * self.log_z_unit
        return self.LOG_Z_SCALE * (self.log_z_unit + self.log_z_head(context).squeeze(-1))

    @torch.no_grad()
    def start_log_z(self, estimate: Tensor) -> None:
        """Begin from an estimate [S]: a far-off log Z would otherwise bend the policy while it travels."""
        self.log_z_unit.copy_(torch.where(estimate.isfinite(), estimate / self.LOG_Z_SCALE, 0).unsqueeze(1))

    def forward(self, state: Tensor, context: Tensor | None = None) -> PolicyOut:
        """Any states [S, N, D]."""
        context = self.context(state) if context is None else context
        return self._parts(self.head(self.trunk(state, context)), self.log_z(context))

    def along(self, traj: Trajectories, context: Tensor | None = None, flows: bool = True) -> PolicyOut:
        """All states of a batch in one pass, [n, S, B, ...] of n states; without `flows`, log_flow stands relative to log Z."""
        early = self.early(len(traj.states), traj.states.shape[2])
        if early is not None and (early.steps == len(traj.states) or traj.states.is_cuda):
            made = self._shared(traj.states, early)
        elif self._repeats(traj.states):
            made = self._distinct(traj.states)
        else:
            made = self.head(self._along(traj, context))
        made = made.view(len(made), -1, traj.states.shape[2], made.shape[-1]).transpose(0, 1)
        return self._parts(made, self.log_z(context) if flows else None)

    def _along(self, traj: Trajectories, context: Tensor | None) -> Tensor:
        """[S, (T+1) * B, H]."""
        hidden = self.trunk.along(traj, context).transpose(0, 1)
        return hidden.reshape(hidden.shape[0], -1, hidden.shape[-1])

    def _repeats(self, states: Tensor) -> bool:
        """Whether to look for repeated states: off the GPU, where shapes may depend on data, if states have numbers."""
        return not states.is_cuda and self.encoder is None and self.trunk.numbered and not torch.compiler.is_compiling()

    def _distinct(self, states: Tensor) -> Tensor:
        """The head's outputs [S, n * B, ...], each distinct state of a seed computed once: finished ones repeat, early ones are shared.

        They go through the network in blocks of a size that no data can change: how many distinct states one seed has must not
        touch, through the rounding of a larger product, the figures of another.
        """
        flat = states.transpose(0, 1).flatten(1, 2)  # [S, N, D]
        seeds, many, _ = flat.shape
        ordered, where = self.env.index(flat).sort(1)  # type: ignore[attr-defined]
        rank = torch.zeros_like(ordered)
        rank[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).cumsum(1)
        name = torch.empty_like(rank).scatter_(1, where, rank)  # which of its seed's distinct states each is
        most = int(rank[:, -1].max()) + 1
        size = most if seeds == 1 else BLOCK * -(-many // (16 * BLOCK))
        first = torch.zeros(seeds, -(-most // size) * size, dtype=torch.long).scatter_(1, rank, where)  # where each stands in the batch
        once = flat.gather(1, first.unsqueeze(-1).expand(-1, -1, flat.shape[-1]))
        made = [self.head(self.trunk(part, None)) for part in once.split(size, 1)]
        return rows(made[0] if len(made) == 1 else torch.cat(made, 1), name)

    def early(self, steps: int, batch: int) -> Early | None:
        """The first of `steps` states of a batch's trajectories, where they are far fewer than the trajectories."""
        if self.encoder is not None or not self.trunk.numbered or torch.compiler.is_compiling():
            return None
        found = self._early.get((steps, batch))
        if (steps, batch) not in self._early or (found is not None and found.states.device != self.device):  # it may have been moved
            found = self._early[steps, batch] = _early(self.env, steps, batch, self.device)
        return found

    def raw(self, states: Tensor) -> Tensor:
        """The head's outputs [S, N, ...] for every seed at the same states [N, D]."""
        return self.head(self.trunk(states.expand(self.num_seeds, -1, -1), None))

    def _shared(self, states: Tensor, early: Early) -> Tensor:
        """The head's outputs [S, n * B, ...]: of early states each computed once, whoever meets it; of later ones each for itself."""
        index = self.env.index(states[: early.steps]).transpose(0, 1).flatten(1)  # type: ignore[attr-defined]
        made = rows(self.raw(early.states), index)
        if early.steps == len(states):
            return made
        late = states[early.steps :].transpose(0, 1).flatten(1, 2)
        return torch.cat([made, self.head(self.trunk(late, None))], 1)

    def begin(self, state: Tensor, context: Tensor | None = None) -> tuple[Tensor, Any]:
        """The actions' logits [S, B, M] at the first state of a rollout, and a cache for the next."""
        hidden, cache = self.trunk.begin(state, context)
        return self.head(hidden)[..., : self.sizes[0]], cache

    def advance(self, cache: Any, state: Tensor, move: Tensor, t: int) -> tuple[Tensor, Any]:
        """The same at the state after `move` was made at step t."""
        hidden, cache = self.trunk.advance(cache, state, move, t)
        return self.head(hidden)[..., : self.sizes[0]], cache

    def _parts(self, made: Tensor, log_z: Tensor | None) -> PolicyOut:
        forward, backward, flow, pairs = made.split(self.sizes, -1)
        moves = self.env.num_moves
        back = backward if self.sizes[1] else self.uniform.expand_as(forward)
        back_action = pairs.unflatten(-1, (moves, moves)) if self.sizes[3] else None
        flow = flow.squeeze(-1)
        return PolicyOut(forward, back, back_action, flow if log_z is None else flow + log_z)
