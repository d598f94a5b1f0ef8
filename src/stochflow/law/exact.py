"""The law of policy and channel together, by dynamic programming over all states of an enumerable environment.

Shapes as in `types`, with N = all states in the environment's own order. Everything is float64.
The mathematics (flows on trees and DAGs, who can reach the target) is in docs/method.md.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from stochflow.errors import UserError, need_kind, need_number, need_whole, one_line
from stochflow.files.memory import need
from stochflow.files.progress import counted, stage
from stochflow.law.doors import answer, need_acting, need_task, need_tensor
from stochflow.learn.evaluate import move_law
from stochflow.ops import NEG, masked_log_softmax
from stochflow.types import Task
from stochflow.worlds.channels import Exact, Slip
from stochflow.worlds.check_task import say_negative
from stochflow.worlds.env import Channel, Enumerable, Env

CHUNK = 1 << 15  # states looked at together: bounds the memory of networks and of [n, M, D] intermediates


class Graph:
    """All states of an environment and where each move leads: what every exact computation walks along.

    `row` names the context for environments that have them; `device` is where the tensors, and so the policy, live.
    """

    states: Tensor  # [N, D]
    mask: Tensor  # [N, M] legal moves, STOP included
    child: Tensor  # [N, M] int32 or int64: where a real move leads; -1 for illegal moves and STOP
    parents: Tensor  # [N] how many (parent, move) edges lead here
    complete: Tensor  # [N] nothing but STOP is left
    terminal: Tensor  # [N] objects may end here: complete, or STOP is legal
    levels: list[Tensor]  # states by the length of the longest way to them: [n_0], [n_1], ... (parents come first)
    root: int

    def __init__(self, env: Env, row: int | None = None, device: str | torch.device | None = None):
        if not isinstance(env, Enumerable):
            raise UserError(
                f"{env!r} cannot be enumerated, so its law is not exact: derive it from Enumerable (all_states, index)"
            )
        conditions = 1 if env.contexts is None else len(env.contexts)
        if row is not None and (isinstance(row, bool) or not isinstance(row, int) or not 0 <= row < conditions):
            raise UserError(
                f"row is {one_line(repr(row), 80)}, but the conditions of {env!r} are numbered 0 to {conditions - 1}"
            )
        self.env, self.row = env, row
        if type(env).count is not Enumerable.count:  # a formula knows: else the list itself would be needed twice
            each = 8 * env.state_dim + 13 * env.num_moves + 16  # bytes: states, masks, children, what is made of them
            need(float(env.count()) * each, f"the graph of all states of {env!r}", "make the space smaller")
        need_kind("device", device, (str, torch.device, type(None)), "a device, such as cpu, or None")
        try:
            self.states = env.all_states(row).to(device)
        except (TypeError, ValueError, RuntimeError) as problem:
            if device is None:
                raise
            raise UserError(
                f"device is {one_line(repr(device), 80)}, which cannot be used here ({one_line(str(problem), 120)}): leave it out, or give cpu"
            ) from problem
        rows = None if row is None else torch.full((1,), row, device=self.states.device)
        self.root = int(env.index(env.initial((1,), rows).to(self.states.device)))
        count, moves = len(self.states), env.num_moves
        where = self.states.device
        self.mask = torch.empty(count, moves, dtype=torch.bool, device=where)
        # int32 halves the largest table; 10^7 states of 5 moves are then 200 MB
        self.child = torch.empty(count, moves, dtype=torch.int32 if count < 2**31 else torch.int64, device=where)
        self.parents = torch.zeros(count, dtype=torch.long, device=where)
        for part in counted(_chunks(count), "listing the states, in parts", -(-count // CHUNK)):
            state = self.states[part]
            mask = env.moves(state)
            every = torch.arange(moves, device=where).expand(len(state), moves)
            place = env.index(env.step(state.unsqueeze(1).expand(-1, moves, -1), every))
            self.mask[part] = mask
            legal = env.real_moves(mask)
            self.child[part] = torch.where(legal, place, -1).to(self.child.dtype)
            edges = place[legal]
            odd = edges[(edges < 0) | (edges >= count)]
            if len(odd):
                raise UserError(
                    f"index() of {env!r} names state {int(odd[0])}, but all_states() lists {count}: run check_env on it"
                )
            self.parents.index_add_(0, edges, torch.ones_like(edges))
        self.complete = (self.child < 0).all(1)
        self.terminal = self.complete if env.stop is None else self.complete | self.mask[:, env.stop]
        self.levels = self._levels()

    def _levels(self) -> list[Tensor]:
        """Peel off, again and again, the states all of whose parents are gone: the k-th layer has longest way k."""
        waiting = self.parents.clone()
        orphans = (waiting == 0).nonzero().squeeze(1)
        if orphans.tolist() != [self.root]:
            lost = next((i for i in orphans.tolist() if i != self.root), self.root)
            what = "has a parent" if lost == self.root else "cannot be reached"
            raise UserError(
                f"state {self.states[lost].tolist()} of {self.env!r} {what}, but exactly the initial state is without parents: "
                "correct all_states, index or moves (check_env names the fault)"
            )
        level, levels, seen = orphans, [], 0
        with stage("ordering the states", len(self.states), lambda: seen):
            while len(level):
                levels.append(level)
                seen += len(level)
                below = self.child[level]
                below = below[below >= 0].long()
                waiting.index_add_(0, below, torch.full_like(below, -1))
                level = below[waiting[below] == 0].unique()
        if seen != len(self.states):
            raise UserError(
                f"the moves of {self.env!r} run in a circle, but an object must end: make every move lead to a new state"
            )
        return levels

    @property
    def is_tree(self) -> bool:
        """Every state but the first has exactly one parent."""
        return bool((self.parents <= 1).all())

    def __len__(self) -> int:
        return len(self.states)

    def __repr__(self) -> str:
        return f"Graph({self.env!r}, {len(self)} states)"


class TargetLaw(NamedTuple):
    """What is to be sampled, over all states."""

    log_reward: Tensor  # [N], -inf where no object ends
    target: Tensor  # [N], sums to one
    log_z: float


class Solution(NamedTuple):
    """Exact flows, and the policy that realises them through the channel where that is possible."""

    log_flow: Tensor  # [N]
    log_q: Tensor  # [N, M] the wanted law of moves, F(child) P_B / F(s); NEG where illegal
    log_pb: Tensor  # [N, M] backward law of the move that led here; NEG where none did
    log_pi: Tensor  # [N, M] actions whose moves follow log_q; the nearest policy where there is none
    feasible: Tensor  # [N] whether log_pi brings log_q about exactly


def need_graph(graph: object) -> None:
    """UserError unless this is a graph."""
    need_kind("graph", graph, Graph, "a Graph, as in exact_law(Graph(env), channel, policy)")


def _chunks(count: int, size: int = CHUNK) -> Iterator[slice]:
    return (slice(start, min(start + size, count)) for start in range(0, count, size))


# what is wanted ---------------------------------------------------------------------------------------------------


@torch.no_grad()
def target_law(graph: Graph, task: Task) -> TargetLaw:
    """The final reward of every object and the law proportional to it."""
    need_graph(graph)
    need_task(task)
    log_reward = torch.full((len(graph),), -math.inf, dtype=torch.float64, device=graph.states.device)
    ends, below = graph.terminal.nonzero().squeeze(1), 0
    for part in counted(_chunks(len(ends)), "rewards of all objects, in parts", -(-len(ends) // CHUNK)):
        state = graph.states[ends[part]]
        score = torch.as_tensor(task.oracle(state)).to(log_reward)
        below += int((score < 0).sum())
        log_reward[ends[part]] = task.reward(score, state, None).to(log_reward)
    if bool(log_reward.isnan().any()) or bool((log_reward == math.inf).any()):
        bad = int((log_reward.isnan() | (log_reward == math.inf)).nonzero()[0])
        raise UserError(
            f"the log-reward of state {graph.states[bad].tolist()} is {float(log_reward[bad])}: an oracle must give every object a finite reward"
        )
    say_negative(task, below, len(ends), "all objects")
    log_z = log_reward.logsumexp(0)
    return TargetLaw(log_reward, (log_reward - log_z).exp(), float(log_z))


@torch.no_grad()
def tabular_solution(graph: Graph, task: Task, target: TargetLaw | None = None) -> Solution:
    """Flows of a uniform backward policy, exact, and the policy that realises them through the task's channel.

    On trees these are the only flows. On DAGs other backward policies give others, and a noisy channel may need them:
    `feasible` says where this one will do.
    """
    need_graph(graph)
    need_task(task)
    need_kind("target", target, (TargetLaw, type(None)), "a TargetLaw, as target_law gives it, or None")
    log_reward = (target or target_law(graph, task)).log_reward
    log_flow, log_q = flows(graph, log_reward)
    log_pb = torch.full_like(log_q, NEG)
    for part in _chunks(len(graph)):
        came = graph.env.parents(graph.states[part])
        log_pb[part] = torch.where(came, -came.sum(1, keepdim=True).clamp(min=1).to(log_q).log(), NEG)
    log_pi, feasible = invert(graph, task.channel, log_q)
    return Solution(log_flow, log_q, log_pb, log_pi, feasible)


def flows(graph: Graph, log_reward: Tensor) -> tuple[Tensor, Tensor]:
    """log F [N] and log q = log F(child) P_B / F [N, M] for the uniform backward policy: F(s) = R(s) + sum_m F(child) P_B."""
    need_graph(graph)
    need_tensor("log_reward", log_reward)
    if log_reward.shape != (len(graph),):
        raise UserError(
            f"log_reward has shape {tuple(log_reward.shape)}, but {graph!r} has {len(graph)} states: give one for each"
        )
    log_flow = log_reward.clone()
    log_q = torch.full(graph.mask.shape, NEG, dtype=torch.float64, device=log_flow.device)
    share = -graph.parents.clamp(min=1).to(log_flow).log()  # log P_B of each edge into a state
    for level in counted(reversed(graph.levels), "exact flows, level by level", len(graph.levels)):
        child = graph.child[level].long()
        after = child.clamp(min=0)
        flow = torch.where(child >= 0, log_flow[after] + share[after], -math.inf)
        if graph.env.stop is not None:
            flow[:, graph.env.stop] = log_reward[level]
        decides = ~graph.complete[level]
        total = torch.where(decides, flow.logsumexp(1), log_reward[level])
        log_flow[level] = total
        # a state from which every reward is zero is never wanted: any law will do there
        law = torch.where(total.isinf().unsqueeze(1), 0.0, flow - total.unsqueeze(1))
        log_q[level] = masked_log_softmax(law.clamp(min=NEG), graph.mask[level])
    return log_flow, log_q


def channel_table(env: Env, channel: Channel, state: Tensor, mask: Tensor) -> Tensor:
    """P(move | state, action) as [n, M actions, M moves] float64; rows of STOP and of illegal actions are unit vectors."""
    channel = env.applied(channel)
    no_memory(channel, state)
    legal = env.real_moves(mask)
    rows = [channel.log_probs(state, legal, torch.full_like(state[:, 0], a)) for a in range(env.num_moves)]
    table = torch.stack(rows, 1).double().exp()
    still = torch.eye(env.num_moves, dtype=torch.float64, device=state.device)
    return torch.where(legal.unsqueeze(2), table * legal.unsqueeze(1), still)


def invert(graph: Graph, channel: Channel, log_q: Tensor, tolerance: float = 1e-6) -> tuple[Tensor, Tensor]:
    """The policy [N, M] whose moves follow `log_q` through the channel, and where there is one [N].

    Where there is none, negative probabilities are cut off: a starting point, not the best policy (see `floors`).
    """
    need_graph(graph)
    need_kind("channel", channel, Channel, "a channel, such as Slip(0.1)")
    need_tensor("log_q", log_q, 2)
    need_number("tolerance", tolerance, 0)
    if log_q.shape != graph.mask.shape:
        raise UserError(
            f"log_q has shape {tuple(log_q.shape)}, but {tuple(graph.mask.shape)} is needed: one law of moves for each state"
        )
    env = graph.env
    log_pi = log_q.clone()
    feasible = torch.ones(len(graph), dtype=torch.bool, device=log_q.device)
    if channel.exact:
        return log_pi, feasible
    size = max(1, CHUNK * 64 // env.num_moves**2)
    for part in counted(_chunks(len(graph), size), "the policy behind the flows, in parts", -(-len(graph) // size)):
        mask = graph.mask[part]
        legal = env.real_moves(mask)
        q = log_q[part].exp()
        if isinstance(channel, Slip) and channel.alpha < 1:
            go = (q * legal).sum(1, keepdim=True)  # STOP never slips
            raw = (q - channel.alpha * go / legal.sum(1, keepdim=True).clamp(min=1)) / (1 - channel.alpha)
            raw = torch.where(legal, raw, q)
        else:
            table = channel_table(env, channel, graph.states[part], mask)
            raw = (q.unsqueeze(1) @ torch.linalg.pinv(table)).squeeze(1)
        pi = torch.where(mask, raw.clamp(min=0), 0)
        short = (pi.sum(1, keepdim=True) <= 0) & mask.any(1, keepdim=True)
        pi = torch.where(short, mask.to(pi), pi)
        pi = pi / pi.sum(1, keepdim=True).clamp(min=1e-300)
        log_pi[part] = torch.where(pi > 0, pi.clamp(min=1e-300).log(), NEG)
        got = move_law(env, channel, graph.states[part], mask, log_pi[part]).exp()
        feasible[part] = ((got - q).abs() * mask).sum(1) < float(tolerance)
    return log_pi, feasible | graph.complete


# what is sampled --------------------------------------------------------------------------------------------------


def no_memory(channel: Channel, state: Tensor) -> None:
    """A law over states exists only where the noise depends on nothing but the state."""
    if channel.begin(state) is not None:
        raise UserError(
            f"{channel!r} depends on the past, so states alone do not settle the law: `stochflow.law.exact_memory.memory_law` takes the past in; or evaluate by sampling"
        )


@torch.no_grad()
def exact_law(graph: Graph, channel: Channel, policy: Callable[[Tensor], Any], seeds: int | None = None) -> Tensor:
    """[S, N] probability that each state is the finished object, under the policy executed through the channel.

    `policy` maps states [S, n, D] to a `PolicyOut`; S is `policy.num_seeds` unless given.
    """
    need_graph(graph)
    need_acting(channel, policy, seeds)
    return _walk(graph, channel, _policy_moves(graph, policy, seeds), _seeds(policy, seeds))[1]


@torch.no_grad()
def state_law(graph: Graph, channel: Channel, policy: Callable[[Tensor], Any], seeds: int | None = None) -> Tensor:
    """[S, N] probability that each state is visited on the way; one at the initial state."""
    need_graph(graph)
    need_acting(channel, policy, seeds)
    return _walk(graph, channel, _policy_moves(graph, policy, seeds), _seeds(policy, seeds))[0]


@torch.no_grad()
def law_from_log_pi(graph: Graph, channel: Channel, log_pi: Tensor) -> Tensor:
    """[S, N] law of a tabular policy: log-probabilities (or logits) of the actions [S, N, M], or [N, M] for one."""
    table = log_pi.unsqueeze(0) if log_pi.ndim == 2 else log_pi
    return _walk(graph, channel, lambda which: table[:, which], len(table))[1]


@torch.no_grad()
def law_from_moves(graph: Graph, log_move: Tensor) -> Tensor:
    """[N] law of a chain given by the log-probabilities of its moves [N, M], STOP included, with the noise already in them."""
    return law_from_log_pi(graph, Exact(), log_move)[0]


def _seeds(policy: Callable[[Tensor], Any], seeds: int | None) -> int:
    return int(getattr(policy, "num_seeds", 1)) if seeds is None else seeds


def _policy_moves(graph: Graph, policy: Callable[[Tensor], Any], seeds: int | None) -> Callable[[Tensor], Tensor]:
    rows = _seeds(policy, seeds)
    moves = graph.env.num_moves
    return lambda which: answer(policy, graph.states[which].expand(rows, -1, -1), moves).forward


def _walk(graph: Graph, channel: Channel, logits: Callable[[Tensor], Tensor], seeds: int) -> tuple[Tensor, Tensor]:
    """Push probability from the initial state downwards; (visits, law), both [S, N].

    Policies are asked in large chunks, in the order of the levels, and probability moves level by level inside a chunk.
    """
    env = graph.env
    channel = env.applied(channel)
    where = graph.states.device
    no_memory(channel, graph.states[:1])
    visits = torch.zeros(seeds, len(graph), dtype=torch.float64, device=where)
    law = torch.zeros_like(visits)
    visits[:, graph.root] = 1
    deciding = [level[~graph.complete[level]] for level in graph.levels]
    order = torch.cat(deciding)
    level_of = torch.cat([torch.full_like(level, depth) for depth, level in enumerate(deciding)])
    size = max(1, CHUNK // seeds)
    for part in counted(_chunks(len(order), size), "the exact law, in parts", -(-len(order) // size)):
        here = order[part]
        mask = graph.mask[here]
        log_pi = masked_log_softmax(logits(here).double(), mask)
        state = graph.states[here].expand(seeds, -1, -1)
        p = move_law(env, channel, state, mask.expand_as(log_pi), log_pi).exp()  # [S, n, M]
        _, sizes = level_of[part].unique_consecutive(return_counts=True)
        for which, chance in zip(here.split(sizes.tolist()), p.split(sizes.tolist(), 1), strict=True):
            flow = visits[:, which].unsqueeze(2) * chance
            child = graph.child[which]
            real = child >= 0
            visits.index_add_(1, child[real].long(), flow[:, real])
            if env.stop is not None:
                law[:, which] = flow[..., env.stop]
    law[:, graph.complete] = visits[:, graph.complete]
    return visits, law


def expected_modes(law: Tensor, modes: Tensor, samples: int) -> Tensor:
    """Expected number of different modes among `samples` independent draws, sum_m 1 - (1 - P(m))^n; law [..., N] -> [...].

    `modes` is a bool mask [N] or the indices of the modes.
    """
    need_tensor("law", law)
    need_whole("samples", samples, 0)
    try:
        chance = law[..., torch.as_tensor(modes)].double().clamp(0, 1)
    except (TypeError, ValueError, IndexError, RuntimeError) as problem:
        raise UserError(
            f"modes are {one_line(repr(modes), 80)}, but they must be indices of the law's {law.shape[-1]} states, or a mask of them"
        ) from problem
    return -torch.expm1(samples * torch.log1p(-chance)).sum(-1)
