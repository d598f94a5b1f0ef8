"""A causal transformer as the policy's trunk, for strings of fixed and variable length.

Position p of the sequence [BOS, x_1, ..., x_L] sees tokens up to x_p only, so one pass over a finished string gives the
hidden vectors of all its prefixes, and a rollout needs one new position per step beside the cached keys and values.
Shapes as in `types`, with P = L + 1 positions. Padding follows the letters, so the causal mask hides it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, layer_norm, relu, scaled_dot_product_attention

from stochflow.errors import UserError, need_whole
from stochflow.nets.layers import Embedding, Generators, Linear, Trunk
from stochflow.types import Trajectories
from stochflow.worlds.env import Env

ROWS = 1 << 15  # sequences in one attention call: GPU kernels refuse a batch of more than 2^16 - 1


@dataclass(frozen=True)
class Transformer:
    """`layers` pre-norm blocks; a context is added to BOS. Of states that hold thoughts it reads the thoughts."""

    width: int = 64
    heads: int = 4
    layers: int = 2
    positions: Literal["learned", "sinusoidal"] = "learned"

    def __post_init__(self) -> None:
        for name in ("width", "heads", "layers"):
            need_whole(f"{name} of a transformer", getattr(self, name), 1)
        if self.width % self.heads:
            raise UserError(
                f"a width of {self.width} cannot be shared by {self.heads} heads: give a multiple of {self.heads}"
            )

        if self.positions not in ("learned", "sinusoidal"):
            raise UserError(f"positions are learned or sinusoidal, not {self.positions!r}")

    def build(self, env: Env, gens: Generators, context: int) -> Trunk:
        return (ThoughtTrunk if holds_thoughts(env) else _TransformerTrunk)(env, self, gens, context)


class Places(nn.Module):
    """Position encodings [S, 1, P, width] by the waves of different lengths that need no training."""

    def __init__(self, count: int, width: int, seeds: int):
        super().__init__()
        rate = 10_000.0 ** (-torch.arange(0, width, 2) / width)
        angle = torch.arange(count).unsqueeze(1) * rate
        waves = torch.stack([angle.sin(), angle.cos()], -1).flatten(1)[:, :width]
        self.weight: Tensor
        self.register_buffer("weight", waves.expand(seeds, -1, -1).clone(), persistent=False)

    def forward(self) -> Tensor:
        return self.weight.unsqueeze(1)


class LearnedPlaces(Embedding):
    """Position encodings [S, 1, P, width] that are learned."""

    def forward(self) -> Tensor:  # type: ignore[override]
        return self.weight.unsqueeze(1)


def positions(spec: Any, count: int, gens: Generators) -> Any:
    """The encodings of `count` positions that `spec.positions` names."""
    if spec.positions == "sinusoidal":
        return Places(count, spec.width, len(gens))
    return LearnedPlaces(count, spec.width, gens, std=0.5)


class Norm(nn.Module):
    """Layer norm of [S, N, width], with a scale and a shift per seed."""

    def __init__(self, width: int, seeds: int):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(seeds, 1, width))
        self.bias = nn.Parameter(torch.zeros(seeds, 1, width))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addcmul(self.bias, layer_norm(x, x.shape[-1:]), self.weight)


class Block(nn.Module):
    """x + attention(norm x), then x + feed-forward(norm x), on [S, N * P, width]."""

    def __init__(self, width: int, heads: int, layers: int, gens: Generators):
        super().__init__()
        self.heads = heads
        quiet = (2 * layers) ** -0.5  # so that the 2 * layers residual branches together keep the variance
        self.norm, self.norm_wide = Norm(width, len(gens)), Norm(width, len(gens))
        self.queries_keys_values = Linear(width, 3 * width, gens)
        self.out = Linear(width, width, gens, gain=quiet)
        self.wide = Linear(width, 4 * width, gens, gain=2**0.5)
        self.narrow = Linear(4 * width, width, gens, gain=quiet)

    def split(self, x: Tensor, positions: int) -> Tensor:
        """Queries, keys and values of [S, N * P, width] by one product, [3, S * N, heads, P, width / heads]."""
        made = self.queries_keys_values(self.norm(x)).view(-1, positions, 3, self.heads, x.shape[-1] // self.heads)
        return made.permute(2, 0, 3, 1, 4)

    def finish(self, x: Tensor, heads: Tensor) -> Tensor:
        """Add the heads [S * N, heads, P, ...] and the feed-forward layer to the residual stream [S, N * P, width]."""
        x = x + self.out(heads.transpose(1, 2).reshape(x.shape))
        return x + self.narrow(gelu(self.wide(self.norm_wide(x))))

    def forward(self, x: Tensor, positions: int) -> Tensor:
        """Causal attention: every position attends to itself and those before it; [S, N * P, width]."""
        query, key, value = self.split(x, positions)
        parts = zip(query.split(ROWS), key.split(ROWS), value.split(ROWS), strict=True)
        seen = [scaled_dot_product_attention(q, k, v, is_causal=True) for q, k, v in parts]
        return self.finish(x, seen[0] if len(seen) == 1 else torch.cat(seen))


class Stack(nn.Module):
    """Blocks and a last norm, for the policy's trunk and the encoder of thoughts."""

    def __init__(self, width: int, heads: int, layers: int, gens: Generators):
        super().__init__()
        self.width, self.heads = width, heads
        self.blocks = nn.ModuleList(Block(width, heads, layers, gens) for _ in range(layers))
        self.last = Norm(width, len(gens))

    def forward(self, x: Tensor) -> Tensor:
        """[S, N, P, width] -> [S, N, P, width], each position from itself and those before it."""
        seeds, many, positions, width = x.shape
        flat = x.reshape(seeds, many * positions, width)
        for block in self.blocks:
            flat = block(flat, positions)
        return self.last(flat).view(x.shape)


class Cache(NamedTuple):
    """Keys and values of a rollout, allocated once for all positions: sizes are fixed, so a CUDA graph can record it.

    They are written in place: a cache serves one rollout and cannot branch.
    """

    seen: tuple[Tensor, ...]  # per layer keys, then values, [2, S * B, heads, P, width / heads]
    hidden: Tensor  # [S, B, width] of the present state


class _TransformerTrunk(Trunk):
    grows = True

    def __init__(self, env: Env, spec: Transformer, gens: Generators, context: int):
        super().__init__()
        strings = strings_of(env)
        # the last columns: a conditioned state begins with its row number
        self.columns = slice(env.state_dim - strings.length, env.state_dim)
        self.state_dim, self.context_width = env.state_dim, context
        self.tokens, self.length, self.fixed = strings.tokens, strings.length, env.stop is None
        self.width = spec.width
        self.embed = Embedding(self.tokens + 2, spec.width, gens, std=0.5)  # letters, padding, BOS
        self.place = positions(spec, self.length + 1, gens)
        self.context = Linear(context, spec.width, gens) if context else None
        self.stack = Stack(spec.width, spec.heads, spec.layers, gens)

    # reading --------------------------------------------------------------------------------------------------------

    def forward(self, state, context):
        self._check(state, context)
        text = state[..., self.columns]
        at = (text != self.tokens).sum(-1)  # the position of the last letter
        hidden = self._read(text, context)  # [S, N, P, width]
        return hidden.gather(2, at[..., None, None].expand(*at.shape, 1, self.width)).squeeze(2)

    def along(self, traj: Trajectories, context: Tensor | None) -> Tensor:
        self._check(traj.states[-1], context)
        text = traj.states[-1][..., self.columns]  # [S, B, L]
        hidden = self._read(text, context).permute(2, 0, 1, 3)  # [P, S, B, width]; time t has t letters
        if self.fixed:
            return hidden
        time = torch.arange(self.length + 1, device=text.device)[:, None, None]
        at = torch.minimum(time, (text != self.tokens).sum(-1))  # after the end a state does not change
        return hidden.gather(0, at.unsqueeze(-1).expand(*at.shape, self.width))

    def _read(self, text: Tensor, context: Tensor | None) -> Tensor:
        """Tokens [S, N, n <= L] -> [S, N, n + 1, width]."""
        tokens = torch.cat([text.new_full((*text.shape[:-1], 1), self.tokens + 1), text], -1)
        x = self.embed(tokens) + self.place.weight[:, : tokens.shape[-1]].unsqueeze(1)
        if self.context is not None:
            x = torch.cat([x[:, :, :1] + self.context(context).unsqueeze(2), x[:, :, 1:]], 2)
        return self.stack(x)

    # rollouts -------------------------------------------------------------------------------------------------------

    def begin(self, state: Tensor, context: Tensor | None) -> tuple[Tensor, Any]:
        self._check(state, context)
        seeds, batch = state.shape[:2]
        shape = (2, seeds * batch, self.stack.heads, self.length + 1, self.width // self.stack.heads)
        weight = self.place.weight
        # uninitialised: a position is read only after it was written
        seen = tuple(torch.empty(shape, device=state.device, dtype=weight.dtype) for _ in self.stack.blocks)
        start = torch.full((seeds, batch), self.tokens + 1, device=state.device)
        x = self.embed(start) + weight[:, :1]
        hidden = self._next(x if self.context is None else x + self.context(context), seen, 0)
        return hidden, Cache(seen, hidden)

    def advance(self, cache: Any, state: Tensor, move: Tensor, t: int) -> tuple[Tensor, Any]:
        letter = state[..., self.columns][..., t]  # padding where the string has ended
        x = self.embed(letter) + self.place.weight[:, t + 1 : t + 2]
        fresh = self._next(x, cache.seen, t + 1)
        hidden = fresh if self.fixed else torch.where((letter != self.tokens).unsqueeze(-1), fresh, cache.hidden)
        return hidden, Cache(cache.seen, hidden)

    def _next(self, x: Tensor, seen: tuple[Tensor, ...], position: int) -> Tensor:
        """The hidden vector [S, B, width] of one new position; its keys and values are written into `seen`."""
        blocks: Any = self.stack.blocks
        for block, kept in zip(blocks, seen, strict=True):
            fresh = block.split(x, 1)  # [3, S * B, heads, 1, width / heads]
            kept[..., position : position + 1, :] = fresh[1:]
            keys, values = kept[..., : position + 1, :]
            x = block.finish(x, _attend(fresh[0], keys, values))
        return self.stack.last(x)

    # checks ---------------------------------------------------------------------------------------------------------

    def _check(self, state: Tensor, context: Tensor | None) -> None:
        if state.shape[-1] != self.state_dim:
            raise UserError(
                f"states have {state.shape[-1]} columns, but this transformer reads strings of at most {self.length} "
                f"letters ({self.state_dim} columns): build the policy on an environment of the length you need"
            )
        wide = 0 if context is None else context.shape[-1]
        if wide != self.context_width:
            raise UserError(
                f"the context is {wide} wide, but this transformer was built for a width of {self.context_width}: "
                "encode it with the policy's own encoder (policy.context(state))"
            )
        if state.device.type == "cpu" and not torch.compiler.is_compiling() and state.numel():
            text = state[..., self.columns]  # not on a GPU: reading the values would wait for the device
            if bool((text < 0).any()) or bool((text > self.tokens).any()):
                odd = int(text[(text < 0) | (text > self.tokens)][0])
                raise UserError(
                    f"a state holds the token {odd}, but letters are 0 to {self.tokens - 1} and {self.tokens} is "
                    "padding: "
                    "make states with env.encode, which names a foreign letter"
                )


def _attend(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention of one new position [n, heads, 1, ...] to all keys and values [n, heads, P, ...]."""
    if not query.is_cuda:  # two plain products: the fused CPU kernel is slower for a single query
        return torch.matmul(torch.matmul(query * query.shape[-1] ** -0.5, keys.transpose(-1, -2)).softmax(-1), values)
    parts = zip(query.split(ROWS), keys.split(ROWS), values.split(ROWS), strict=True)
    seen = [scaled_dot_product_attention(q, k, v) for q, k, v in parts]
    return seen[0] if len(seen) == 1 else torch.cat(seen)


def strings_of(env: Env, trunk: str = "transformer") -> Any:
    """The strings that an environment builds, with or without a condition: `tokens`, `length`, and `pad` = tokens."""
    inner: Any = env
    while not hasattr(inner, "tokens") and hasattr(inner, "inner"):
        inner = inner.inner
    if not all(hasattr(inner, name) for name in ("tokens", "length", "pad")):
        other = "transformer" if hasattr(inner, "thoughts") else "mlp"
        raise UserError(f"the {trunk} trunk reads strings, and {env!r} builds none: use --net {other} here")
    return inner


def parameter_count(module: nn.Module) -> int:
    """The number of parameters of one seed."""
    return sum(p[0].numel() for p in module.parameters())


# states that hold thoughts -------------------------------------------------------------------------------------------


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
