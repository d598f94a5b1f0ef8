"""The documents' `MLP(num_tokens, num_outputs, ...)`: fully connected layers on one-hot prefixes, one output row per prefix."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from stochflow.errors import UserError
from stochflow.nets.layers import Generators, Net, Trunk
from stochflow.nets.policy import Policy
from stochflow.worlds.env import Env, numbers


class MLP(nn.Module):
    """[B, L * K] one-hot letters -> [B, num_outputs] at the prefix of `lens` letters, or [L + 1, B, num_outputs] at all.

    Assigned to a generator's `model` it is trained itself: the policy there reads these layers.
    """

    def __init__(
        self,
        num_tokens: int,
        num_outputs: int,
        num_hid: int = 64,
        num_layers: int = 2,
        max_len: int = 8,
        dropout: float = 0.0,
        partition_init: float = 0.0,
        causal: bool = False,
    ):
        super().__init__()
        if dropout != 0 or causal:
            raise UserError("dropout and causal must be 0 and False: both would make residuals of one string disagree")
        self.num_tokens, self.num_outputs, self.max_len = num_tokens, num_outputs, max_len
        self.num_hid, self.num_layers, self.partition_init = num_hid, num_layers, partition_init
        sizes = [num_tokens * max_len] + [num_hid] * num_layers
        parts: list[nn.Module] = []
        for a, b in pairwise(sizes):
            parts += [nn.Linear(a, b), nn.ReLU()]
        self.layers = nn.Sequential(*parts, nn.Linear(sizes[-1], num_outputs))

    def forward(self, x: Tensor, mask: None = None, return_all: bool = False, lens: Any = None) -> Tensor:
        """The outputs at the prefixes of x, [B, L * K] or [B, L, K]."""
        if mask is not None:
            raise UserError("MLP takes no mask: give lens for strings of several lengths")
        one_hot = x.reshape(len(x), -1, self.num_tokens)
        if one_hot.shape[1] != self.max_len:
            raise UserError(
                f"x has {one_hot.shape[1]} letters of {self.num_tokens} tokens, but this MLP was made for {self.max_len}"
            )
        place = torch.arange(self.max_len, device=x.device)
        if not return_all:
            length = one_hot.any(-1).sum(1) if lens is None else torch.as_tensor(lens, device=x.device)
            return self.layers((one_hot * (place < length.unsqueeze(1)).unsqueeze(-1)).flatten(1))
        every = torch.arange(self.max_len + 1, device=x.device)
        known = (place < every.unsqueeze(1)).view(self.max_len + 1, 1, self.max_len, 1)  # prefixes of 0 to L letters
        return self.layers((one_hot * known).flatten(2))

    def policy(self, env: Any, seed: int, back_action: bool) -> Policy:
        """A policy that reads these layers: its actions, its flow, and with `back_action` the law of the action, too."""
        tokens, length = getattr(env, "tokens", None), getattr(env, "length", None)
        if (tokens, length) != (self.num_tokens, self.max_len):
            raise UserError(
                f"this MLP reads strings of {self.max_len} letters of {self.num_tokens} kinds, but the generator builds {env!r}"
            )
        want = 2 * env.num_moves + 1
        if self.num_outputs != want:
            raise UserError(
                f"num_outputs is {self.num_outputs}, but a policy has {want}: actions, backward actions, log-flow"
            )
        net: Net = _Hidden(self)
        made = Policy(env, net, seeds=[seed], back_action=back_action)
        made.head = _Outputs(self.layers[-1], env.num_moves, back_action)  # type: ignore[assignment]
        with torch.no_grad():
            made.log_z_unit.fill_(self.partition_init / Policy.LOG_Z_SCALE)
        return made


class _Hidden:
    """The description of a trunk that is the hidden layers of an `MLP` there is."""

    def __init__(self, mlp: MLP):
        self.mlp = mlp

    def build(self, env: Env, gens: Generators, context: int) -> Trunk:
        return _HiddenTrunk(self.mlp, env)


class _HiddenTrunk(Trunk):
    def __init__(self, mlp: MLP, env: Env):
        super().__init__()
        self.layers, self.tokens, self.numbered = mlp.layers[:-1], mlp.num_tokens, numbers(env)
        self.width = mlp.num_hid if mlp.num_layers else mlp.num_tokens * mlp.max_len

    def forward(self, state, context):
        letters = state.unsqueeze(-1) == torch.arange(self.tokens, device=state.device)  # padding is none of them
        return self.layers(letters.flatten(-2).float())


class _Outputs(nn.Module):
    """The columns of a documents' output layer in the order of a policy's head: actions, log-flow, and pairs as asked."""

    def __init__(self, linear: nn.Module, moves: int, pairs: bool):
        super().__init__()
        self.linear, self.moves, self.pairs = linear, moves, pairs

    def forward(self, hidden: Tensor) -> Tensor:
        actions, back, flow = self.linear(hidden).split([self.moves, self.moves, 1], -1)
        parts = [actions, flow]
        if self.pairs:  # of a prefix the letter that led there is known, so that every row is this one
            parts.append(back.unsqueeze(-2).expand(*back.shape[:-1], self.moves, self.moves).flatten(-2))
        return torch.cat(parts, -1)
