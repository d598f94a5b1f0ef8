"""The exact law of a policy that sees states in a world whose noise sees more: dynamic programming over (state, memory).

Where the noise has a memory, states alone do not settle the law. Pairs of a state and a memory do, and pairs that agree are
merged, so a sufficient memory (a count, a belief) keeps the list short; at worst it holds every (action, move) history,
M^(2T) of them. Small worlds only, float64. Shapes as in `types`, N = all states in the environment's own order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stochflow.errors import UserError
from stochflow.law.doors import answer, need_acting
from stochflow.law.exact import Graph, need_graph
from stochflow.ops import NEG, masked_log_softmax
from stochflow.worlds.env import Channel

PAIRS = 2_000_000  # (state, memory) pairs in one step of time, beyond which the walk is refused


class MemoryLaw(NamedTuple):
    """What a policy pi(a | s) does in a world with a memory."""

    law: Tensor  # [S, N] probability that each state is the finished object
    visits: Tensor  # [S, N] probability that each state is on the way
    kernel: Tensor  # [S, N, M, M] P(move | state, action) averaged over the memories with which this policy reaches the state
    pairs: int  # distinct (state, memory) pairs


class Averaged(Channel):
    """A kernel of states alone [S, N, M, M]: the noise as an observer without history sees it.

    It depends on the policy it was averaged under. For that policy it gives the very law of the world with memory.
    """

    whole = True

    def __init__(self, graph: Graph, kernel: Tensor):
        self.graph = graph
        self.log_kernel = torch.where(kernel > 0, kernel.clamp(min=1e-300).log(), NEG)

    def log_probs(self, state, legal, action, memory=None):
        seeds = torch.arange(len(self.log_kernel), device=state.device).view(-1, *[1] * (state.dim() - 2))
        return torch.where(legal, self.log_kernel[seeds, self.graph.env.index(state), action], NEG)  # type: ignore[attr-defined]

    def __repr__(self) -> str:
        return "Averaged(kernel of states)"


@torch.no_grad()
def memory_law(graph: Graph, channel: Channel, policy: Callable[[Tensor], Any], seeds: int | None = None) -> MemoryLaw:
    """The law of `policy` (states [S, n, D] to `PolicyOut`, S = `policy.num_seeds` unless given) through a channel with memory."""
    need_graph(graph)
    need_acting(channel, policy, seeds)
    env = graph.env
    channel = env.applied(channel)
    if env.contexts is not None and graph.row is None:
        raise UserError(
            "this environment has contexts, and each has a law of its own: build Graph(env, row) for one of them"
        )
    rows = int(getattr(policy, "num_seeds", 1)) if seeds is None else seeds
    count, moves, where = len(graph), env.num_moves, graph.states.device
    visits = torch.zeros(rows, count, dtype=torch.float64, device=where)
    law = torch.zeros_like(visits)
    kernel = torch.zeros(rows, count, moves, moves, dtype=torch.float64, device=where)
    at = torch.tensor([graph.root], device=where)  # [n] which state
    memory = channel.begin(graph.states[at])
    if memory is None:
        memory = torch.zeros(1, 1, device=where)
    chance = torch.ones(rows, 1, dtype=torch.float64, device=where)  # [S, n] of being at this pair now
    pairs = 0
    for _ in range(env.horizon + 1):
        pairs += len(at)
        visits.index_add_(1, at, chance)
        done = graph.complete[at]
        law.index_add_(1, at[done], chance[:, done])
        at, memory, chance = at[~done], memory[~done], chance[:, ~done]
        if not len(at):
            break
        state, mask = graph.states[at], graph.mask[at]
        legal = env.real_moves(mask)
        log_pi = masked_log_softmax(_logits(policy, graph, at, rows), mask)  # [S, n, M]
        if env.stop is not None:
            law.index_add_(1, at, chance * log_pi[..., env.stop].exp())
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for a in range(moves):
            if a == env.stop:
                continue
            action = torch.full_like(at, a)
            moved = channel.log_probs(state, legal, action, memory).double().exp() * legal  # [n, M]
            kernel[:, :, a].index_add_(1, at, chance.unsqueeze(-1) * moved)
            for m in range(moves):
                go = (legal[:, m] & legal[:, a] & (moved[:, m] > 0)).nonzero().squeeze(1)
                flow = chance[:, go] * log_pi[:, go, a].exp() * moved[go, m]
                after = channel.remember(memory[go], state[go], action[go], torch.full_like(action[go], m))
                assert after is not None
                found.append((graph.child[at[go], m].long(), after, flow))
        at, memory, chance = _merge(found)
    kernel = kernel / kernel.sum(-1, keepdim=True).clamp(min=1e-300)
    return MemoryLaw(law, visits, kernel, pairs)


def _logits(policy: Callable[[Tensor], Any], graph: Graph, at: Tensor, rows: int) -> Tensor:
    """[S, n, M]; a policy of states is asked once per state, whatever the number of memories."""
    states, back = at.unique(return_inverse=True)
    found = answer(policy, graph.states[states].expand(rows, -1, -1), graph.env.num_moves)
    return found.forward.double()[:, back]


def _merge(found: list[tuple[Tensor, Tensor, Tensor]]) -> tuple[Tensor, Tensor, Tensor]:
    """Pairs that agree become one; beliefs that differ by rounding alone count as equal."""
    at, memory, chance = (
        torch.cat([f[0] for f in found]),
        torch.cat([f[1] for f in found]),
        torch.cat([f[2] for f in found], 1),
    )
    flat = (memory if memory.dim() > 1 else memory.unsqueeze(1)).flatten(1).double()
    key = torch.cat([at.unsqueeze(1).double(), (flat * 1e10).round() / 1e10], 1)
    _, back = key.unique(dim=0, return_inverse=True)
    many = int(back.max()) + 1 if len(back) else 0
    if many > PAIRS:
        raise UserError(
            f"the memory tells {many:,} pairs apart, more than the {PAIRS:,} that can be walked: take a smaller world"
        )
    first = torch.full((many,), len(at), dtype=torch.long, device=at.device)
    first.scatter_reduce_(0, back, torch.arange(len(at), device=at.device), "amin")
    merged = torch.zeros(len(chance), many, dtype=torch.float64, device=at.device).index_add_(1, back, chance)
    return at[first], memory[first], merged
