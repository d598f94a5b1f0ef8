"""The documents' `MLP(num_tokens, num_outputs, ...)`: fully connected layers on one-hot prefixes, one output row per prefix."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from stochflow.errors import UserError
from stochflow.nets.mlp import MLP as Layers
from stochflow.nets.policy import Policy


class MLP(nn.Module):
    """[B, L * K] one-hot letters -> [B, num_outputs] at the prefix of `lens` letters, or [L + 1, B, num_outputs] at all.

    Assigned to a generator's `model` it is trained as its policy, with these layers and weights of its own.
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
        """A policy of these sizes for a generator's strings; its first layer and hidden layers start from these weights."""
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
        made = Policy(env, Layers(self.num_hid, self.num_layers), seeds=[seed], back_action=back_action)
        linear = [layer for layer in self.layers if isinstance(layer, nn.Linear)]
        trunk: Any = made.trunk
        with torch.no_grad():
            for mine, its in zip(linear[:-1], trunk.layers, strict=True):
                its.weight.copy_(mine.weight.T.unsqueeze(0))
                its.bias.copy_(mine.bias.view(1, 1, -1))
            made.log_z_unit.fill_(self.partition_init / Policy.LOG_Z_SCALE)
        return made
