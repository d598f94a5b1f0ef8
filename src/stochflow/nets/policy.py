"""The `Policy`: a trunk and its heads, and forward passes over many states that compute repeated states once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from stochflow.nets.encoders import EncoderNet, MLPEncoder
from stochflow.nets.layers import Linear, Net, rows
from stochflow.nets.mlp import MLP
from stochflow.types import PolicyOut, Trajectories
from stochflow.worlds.env import Enumerable, Env


class Early(NamedTuple):
    """All states that trajectories can meet in their first steps, in the order of the environment's numbers."""

    steps: int
    states: Tensor  # [n, D]
    features: Tensor | None = None  # [n, F] of the states, where they are kept


# Early states per trajectory of the batch at most, on a GPU: a trajectory may end long before its last step, and a
# finished one costs no further forward passes there.
MOST_SHARED = 4
MOST_KEPT = 1 << 22  # features of early states that are kept
LEAST_SAVED = {"cuda": 4096, "cpu": 64}  # rows of a forward pass: looking states up costs a few operators
BLOCK = 64  # rows of a block of distinct states are a multiple of this


def _early(env: Enumerable, steps: int, batch: int, device: torch.device) -> Early | None:
    """The early states for the number of steps that saves most rows; None where sharing them does not pay."""
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
        return None  # a subclass with another order of states
    states = states.to(device)
    features = env.features(states) if device.type != "cpu" else None  # read by the rollout kernel
    return Early(best, states, features if features is not None and features.numel() <= MOST_KEPT else None)


class Policy(nn.Module):
    """One network, three heads: actions, the move that led here, log-flow; and log Z with its own scale.

    It returns raw logits: masks are applied by its callers.
    """

    LOG_Z_SCALE = 10.0  # log Z changes most in training; its own scale lets one learning rate serve all parameters

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
        """[S, B, C] of states [S, B, D], once per batch; None where the environment has no contexts."""
        return None if self.encoder is None else self.encoder(state[..., 0])

    def log_z(self, context: Tensor | None) -> Tensor:
        """[S, B], or [S, 1] where there are no contexts."""
        if self.log_z_head is None or context is None:
            return self.LOG_Z_SCALE * self.log_z_unit
        return self.LOG_Z_SCALE * (self.log_z_unit + self.log_z_head(context).squeeze(-1))

    @torch.no_grad()
    def start_log_z(self, estimate: Tensor) -> None:
        """Begin from an estimate [S]: a log Z that is far off distorts the policy until it has converged."""
        self.log_z_unit.copy_(torch.where(estimate.isfinite(), estimate / self.LOG_Z_SCALE, 0).unsqueeze(1))

    def forward(self, state: Tensor, context: Tensor | None = None) -> PolicyOut:
        """Logits and log-flows [S, N, ...] of any states [S, N, D]."""
        context = self.context(state) if context is None else context
        return self._parts(self.head(self.trunk(state, context)), self.log_z(context))

    def along(self, traj: Trajectories, context: Tensor | None = None, flows: bool = True) -> PolicyOut:
        """All states of a batch in one pass, [n, S, B, ...]; without `flows`, log Z is not added to log_flow."""
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
        """Hidden vectors of all states, [S, n * B, H]."""
        hidden = self.trunk.along(traj, context).transpose(0, 1)
        return hidden.reshape(hidden.shape[0], -1, hidden.shape[-1])

    def _repeats(self, states: Tensor) -> bool:
        """Whether to look for repeated states: not on a GPU, where shapes must not depend on data."""
        return not states.is_cuda and self.encoder is None and self.trunk.numbered and not torch.compiler.is_compiling()

    def _distinct(self, states: Tensor) -> Tensor:
        """The head's outputs [S, n * B, ...], each distinct state of a seed computed once.

        Distinct states pass through the network in blocks of a size that does not depend on data: the number of
        distinct states of one seed must not change the rounding of another's products.
        """
        flat = states.transpose(0, 1).flatten(1, 2)  # [S, N, D]
        seeds, many, _ = flat.shape
        ordered, where = self._index(flat).sort(1)
        rank = torch.zeros_like(ordered)
        rank[:, 1:] = (ordered[:, 1:] != ordered[:, :-1]).cumsum(1)
        name = torch.empty_like(rank).scatter_(1, where, rank)  # number of each state among the distinct ones
        most = int(rank[:, -1].max()) + 1
        size = most if seeds == 1 else BLOCK * -(-many // (16 * BLOCK))
        padded = -(-most // size) * size
        first = torch.zeros(seeds, padded, dtype=torch.long).scatter_(1, rank, where)  # one position per distinct state
        once = flat.gather(1, first.unsqueeze(-1).expand(-1, -1, flat.shape[-1]))
        made = [self.head(self.trunk(part, None)) for part in once.split(size, 1)]
        return rows(made[0] if len(made) == 1 else torch.cat(made, 1), name)

    def early(self, steps: int, batch: int) -> Early | None:
        """The first of `steps` states of a batch's trajectories, where they are far fewer than the trajectories."""
        if self.encoder is not None or not self.trunk.numbered or torch.compiler.is_compiling():
            return None
        found = self._early.get((steps, batch))
        moved = found is not None and found.states.device != self.device
        if moved or (steps, batch) not in self._early:
            assert isinstance(self.env, Enumerable)
            found = self._early[steps, batch] = _early(self.env, steps, batch, self.device)
        return found

    def _index(self, states: Tensor) -> Tensor:
        assert isinstance(self.env, Enumerable)  # which a numbered trunk implies
        return self.env.index(states)

    def raw(self, states: Tensor) -> Tensor:
        """The head's outputs [S, N, ...] for every seed at the same states [N, D]."""
        return self.head(self.trunk(states.expand(self.num_seeds, -1, -1), None))

    def _shared(self, states: Tensor, early: Early) -> Tensor:
        """The head's outputs [S, n * B, ...]: each early state computed once, later ones one by one."""
        index = self._index(states[: early.steps]).transpose(0, 1).flatten(1)
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
