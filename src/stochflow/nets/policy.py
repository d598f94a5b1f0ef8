"""The `Policy`: a trunk and its heads, and forward passes over many states that compute repeated states once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from stochflow.errors import UserError, need_seeds, one_line
from stochflow.nets.encoders import EncoderNet, MLPEncoder
from stochflow.nets.layers import Linear, Net, rows
from stochflow.nets.mlp import MLP
from stochflow.types import PolicyOut, Trajectories
from stochflow.worlds.env import Enumerable, Env, need_env

BLOCK = 64  # rows of a block of distinct states are a multiple of this


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
        need_env(env)
        need_seeds(seeds)
        if not hasattr(net, "build"):
            raise UserError(f"net is {one_line(repr(net), 80)}, but it must be a network, such as MLP(128, 2)")
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
        self.log_z_unit = nn.Parameter(torch.zeros(len(seeds), 1))
        self.log_z_head = Linear(width, 1, gens, gain=0.1) if width else None

    def refuse_shared(self) -> None:
        """UserError where a trunk of one's own shares weights between seeds: they would not be independent."""
        seeds = self.num_seeds
        own = [p for p in self.trunk.parameters() if p.requires_grad]
        if seeds == 1 or not own or type(self.trunk).__module__.startswith("stochflow."):
            return
        with torch.enable_grad():
            state = self.env.initial((seeds, 1)).to(self.device)
            first = self(state, self.context(state)).forward[0].sum()
            gradients = torch.autograd.grad(first, own, allow_unused=True)
        for p, g in zip(own, gradients, strict=True):
            apart = p.dim() > 0 and p.shape[0] == seeds
            if not apart or (g is not None and bool(g[1:].any())):
                raise UserError(
                    f"the trunk {type(self.trunk).__name__} shares its weights between the {seeds} seeds, which would then not be "
                    "independent: stack its parameters as [seeds, ...] (stochflow.nets.layers has Linear, Embedding and Norm), or train one seed"
                )

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

    def forward(self, state: Tensor, context: Tensor | None = None, repeats: bool = False) -> PolicyOut:
        """Logits and log-flows [S, N, ...] of any states [S, N, D]; `repeats`: many of them are the same."""
        context = self.context(state) if context is None else context
        if repeats and self._repeats(state):
            return self._parts(self._distinct(state.unsqueeze(0)), self.log_z(context))
        return self._parts(self.head(self.trunk(state, context)), self.log_z(context))

    def along(self, traj: Trajectories, context: Tensor | None = None, flows: bool = True) -> PolicyOut:
        """All states of a batch in one pass, [n, S, B, ...]; without `flows`, log Z is not added to log_flow."""
        if self._repeats(traj.states):
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

    def _index(self, states: Tensor) -> Tensor:
        assert isinstance(self.env, Enumerable)  # which a numbered trunk implies
        return self.env.index(states)

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
