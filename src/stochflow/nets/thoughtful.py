"""A trunk for states that hold thoughts: a transformer reads the intended actions, and its vector stands beside the string's."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import relu

from stochflow.nets.layers import Embedding, Generators, Linear, Trunk
from stochflow.nets.transformer import Stack, positions
from stochflow.worlds.env import Env


class ThoughtTrunk(Trunk):
    """[encoding of the thoughts | one-hot string] -> one ReLU layer, [S, N, width].

    The thoughts of a state are a sequence of their own, known in full: attention needs no mask beyond the causal one,
    and the vector at the last thought is their encoding.
    """

    def __init__(self, env: Any, spec: Any, gens: Generators, context: int):
        super().__init__()
        self.env, self.width, self.letters, self.length = env, spec.width, env.letters, env.length
        self.embed = Embedding(self.letters + 2, spec.width, gens, std=0.5)  # thoughts, padding, first token
        self.place = positions(spec, self.length + 1, gens)
        self.stack = Stack(spec.width, spec.heads, spec.layers, gens)
        features = self.length * self.letters
        self.join = Linear(spec.width + features + context, spec.width, gens, gain=2**0.5)

    def forward(self, state, context):
        thoughts, text = self.env.thoughts(state), self.env.text(state)
        first = torch.full_like(thoughts[..., :1], self.letters + 1)
        x = self.embed(torch.cat([first, thoughts], -1)) + self.place()
        at = (thoughts != self.letters).sum(-1)[..., None, None].expand(*thoughts.shape[:-1], 1, self.width)
        read = self.stack(x).gather(2, at).squeeze(2)
        letters = (text.unsqueeze(-1) == torch.arange(self.letters, device=text.device)).flatten(-2).to(read)
        parts = [read, letters] if context is None else [read, letters, context]
        return relu(self.join(torch.cat(parts, -1)))


def holds_thoughts(env: Env) -> bool:
    """Whether its states are a string beside the intended actions."""
    return hasattr(env, "thoughts") and hasattr(env, "text")
