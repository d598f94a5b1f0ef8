"""The best law that any policy can have in a noisy world, beside the law of a GFlowNet that ignores the noise.

On trees the target is projected state by state (method 3.5 and 13 in docs/method.md): water-filling for `Slip`, an
interior-point method for other channels. On DAGs a linear program in action flows finds the least L1.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from stochflow.errors import UserError, need_kind
from stochflow.files.progress import counted, stage
from stochflow.law import metrics
from stochflow.law.doors import need_task
from stochflow.law.exact import (
    Graph,
    TargetLaw,
    channel_table,
    flows,
    invert,
    law_from_log_pi,
    law_from_moves,
    target_law,
)
from stochflow.ops import NEG
from stochflow.types import Task
from stochflow.worlds.channels import Slip
from stochflow.worlds.env import Channel

FEASIBLE = 1e-6  # total variation below which the target counts as reached: what a linear program resolves
GAP = 1e-11  # nats to which a state's projection is proved optimal
LP_VARIABLES = (
    20_000  # action flows beyond which no program is tried (64 x 64 cells: 8,000, some 5 s; 8^4: 14,000, 20 s)
)
LP_SECONDS = 60.0


@dataclass(frozen=True)
class Distance:
    """How far a law lies from the target."""

    tv: float
    l1: float
    mean_l1: float  # L1 over the number of objects
    kl_target_model: float
    kl_model_target: float


@dataclass(frozen=True)
class Floor:
    """What is achievable; distances are None where they are not known, and `reason` says why."""

    kind: str | None  # 'forward-KL' on trees, 'min-TV' on DAGs
    reason: str | None
    log_z: float
    best: Distance | None
    reverse_kl: Distance | None  # the law of least KL(P || target): trees only
    state_kl: Distance | None  # per-state KL(p || q) with exact flows, where the detached flow KL ends: trees only
    naive: Distance  # a perfect deterministic GFlowNet, executed through the channel
    feasible: bool | None  # the target itself can be reached
    uniform_feasible: bool  # ... with a uniform backward policy
    noisy: bool
    tree: bool
    fixed_length: bool  # no STOP: every way has the same number of decisions
    laws: dict[str, Tensor] = field(default_factory=dict, repr=False, compare=False)  # each [N]

    @property
    def floor_tv(self) -> float | None:
        return None if self.best is None else self.best.tv

    @property
    def floor_tv_reverse_kl(self) -> float | None:
        return None if self.reverse_kl is None else self.reverse_kl.tv

    @property
    def naive_tv(self) -> float:
        return self.naive.tv

    def brief(self) -> dict[str, Any]:
        """What stands beside every measured law."""
        return {
            "floor_tv": self.floor_tv,
            "floor_kind": self.kind,
            "floor_tv_reverse_kl": self.floor_tv_reverse_kl,
            "naive_tv": self.naive_tv,
            "log_z": self.log_z,
        }

    def to_json(self) -> dict[str, Any]:
        """The best law's own distances, the four floors, and the other laws by name; what is infinite or unknown is None."""
        names = {"reverse_kl": self.reverse_kl, "state_kl": self.state_kl, "naive": self.naive}
        best = asdict(self.best) if self.best else dict.fromkeys(Distance.__dataclass_fields__)
        out = {**best, **self.brief(), "floor_reason": self.reason, "feasible": self.feasible}
        out |= {name: asdict(d) if d else None for name, d in names.items()}
        return _finite(out)


def _finite(x: Any) -> Any:
    if isinstance(x, dict):
        return {k: _finite(v) for k, v in x.items()}
    return None if isinstance(x, float) and not math.isfinite(x) else x


@torch.no_grad()
def floor(task: Task, graph: Graph | None = None, target: TargetLaw | None = None) -> Floor:
    """The best achievable law of an enumerable task under its channel, for any channel."""
    need_task(task)
    need_kind("graph", graph, (Graph, type(None)), "a Graph, as in floor(task, Graph(task.env, row=0)), or None")
    need_kind("target", target, (TargetLaw, type(None)), "a TargetLaw, as target_law gives it, or None")
    if graph is None and task.env.contexts is not None:
        raise UserError(
            f"each of the {len(task.env.contexts)} conditions of {task.env!r} has a floor of its own: "
            "name one, as in floor(task, Graph(task.env, row=0))"
        )
    graph = graph or Graph(task.env)
    target = target or target_law(graph, task)
    channel = task.channel
    tree = graph.is_tree
    log_flow, log_q = flows(graph, target.log_reward)
    ways = invert(graph, channel, log_q)[1]
    uniform = bool((ways | (log_flow == -math.inf)).all())
    laws: dict[str, Tensor] = {}
    reason: str | None = None
    if channel.exact:
        laws = dict.fromkeys(["best", "naive", *(["reverse_kl", "state_kl"] if tree else [])], target.target)
    else:
        laws["naive"] = law_from_log_pi(graph, channel, log_q)[0]
        if tree:
            reason = _never_happens(graph, channel)
            laws |= {} if reason else _tree_laws(graph, channel, target, log_q)
        else:
            best, reason = (target.target, None) if uniform else _least_l1(graph, channel, target.target)
            laws |= {} if best is None else {"best": best}
    kind = None if "best" not in laws else "forward-KL" if tree else "min-TV"
    far = {name: distance(law, target.target, graph.terminal) for name, law in laws.items()}
    best_far = far.get("best")
    return Floor(
        kind=kind,
        reason=reason,
        log_z=target.log_z,
        best=best_far,
        reverse_kl=far.get("reverse_kl"),
        state_kl=far.get("state_kl"),
        naive=far["naive"],
        feasible=None if best_far is None else best_far.tv < FEASIBLE,
        uniform_feasible=uniform,
        noisy=not channel.exact,
        tree=tree,
        fixed_length=bool((graph.terminal == graph.complete).all()) and _one_depth(graph),
        laws=laws,
    )


def _one_depth(graph: Graph) -> bool:
    """All objects are finished at the same depth."""
    return sum(bool(graph.complete[level].any()) for level in graph.levels) == 1


def distance(law: Tensor, target: Tensor, terminal: Tensor) -> Distance:
    """All distances of one law [N] from the target [N]."""
    gap = float(metrics.l1(law, target))
    return Distance(
        tv=gap / 2,
        l1=gap,
        mean_l1=gap / int(terminal.sum()),
        kl_target_model=float(metrics.kl(target, law)),
        kl_model_target=float(metrics.kl(law, target)),
    )


# where objectives end ---------------------------------------------------------------------------------------------

_TRAJECTORY = {"tb", "stb", "stb-head", "logvar", "kl"}
_TRANSITION = {"db", "sdb", "sdb-head", "subtb", "ssubtb", "ssubtb-head"}
_MIXED = {"sgfn-kl", "sgfn-kl-gamma"}  # out of reach they end between the limits of their two parts: not known

_BASELINES = {"naive-tb", "naive-db", "intended-tb", "intended-db"}


def caution(objective: str) -> str:
    """A warning that belongs beside the figures of an objective (by its word); "" for most."""
    if not objective.endswith("-published"):
        return ""
    return (
        f"{objective} is the joint form as published, whose learned law of the action follows the residual: with a target out of "
        f"reach or learned noise it can end at a wrong law with a small loss, so use {objective.removesuffix('-published')} instead."
    )


def limit_tv(objective: str, floor: Floor, backward: str = "learned") -> float | None:
    """The TV of the law to which an objective (by its word) converges on-policy; None where that is not known.

    Where the target is feasible every sound objective reaches it. Elsewhere, on trees: trajectory objectives follow the
    gradient of KL(P || target), so they end at its minimum; transition objectives do so where all objects are equally
    long; the detached flow KL ends at the per-state projection. Joint forms equal the marginal ones, and a head learned by
    likelihood has their expected gradient; the published joint form has no limit that holds for every model of the
    noise. Baselines that take the realised move for their own choice end at the naive law. With a uniform `backward`
    policy on a DAG, feasible means feasible with that policy.
    """
    need_kind("objective", objective, str, "the word of an objective, such as tb")
    need_kind("floor", floor, Floor, "a Floor, as floor(task) gives it")
    if objective not in _TRAJECTORY | _TRANSITION | _MIXED | _BASELINES | {"flow-kl"}:
        return None  # the published form, or one of the user's own
    free = floor.tree or backward != "uniform"  # the backward policy can follow, or has nothing to say
    if not floor.noisy:
        return 0.0
    if objective.startswith("naive-"):
        return (
            floor.naive_tv if floor.tree or backward == "uniform" else None
        )  # another backward policy, another naive law
    if objective in _BASELINES:
        return None
    if floor.uniform_feasible or (free and floor.feasible):
        return 0.0
    if not floor.tree or objective in _MIXED:
        return None
    if objective == "flow-kl":
        return None if floor.state_kl is None else floor.state_kl.tv
    if objective in _TRAJECTORY or floor.fixed_length:
        return floor.floor_tv_reverse_kl
    return None


# trees: per-state projections -------------------------------------------------------------------------------------


def _tree_laws(graph: Graph, channel: Channel, target: TargetLaw, log_q: Tensor) -> dict[str, Tensor]:
    """P_fk, P_rk and the per-state reverse projection of the target, as laws over all states [N]."""
    env, stop = graph.env, graph.env.stop
    forward, reverse, state_kl = (torch.full_like(log_q, NEG) for _ in range(3))  # log-laws of the moves
    value = (
        -target.log_reward
    )  # V(s), the least cost of finishing from s; right already where nothing is left to decide
    size = max(1, (1 << 21) // env.num_moves**2)  # states together: bounds the [n, M, M] tables
    for level in counted(reversed(graph.levels), "the best law, level by level", len(graph.levels)):
        for here in level[~graph.complete[level]].split(size):
            mask = graph.mask[here]
            legal = env.real_moves(mask)
            project = _Project(graph, channel, here)

            def moves(near: Tensor, log_go: Tensor, log_stop: Tensor, legal: Tensor = legal) -> Tensor:
                """STOP by itself, the rest shared out by `near`."""
                law = torch.where(legal, near.clamp(min=1e-300).log() + log_go.unsqueeze(1), NEG)
                if stop is not None:
                    law[:, stop] = log_stop.clamp(min=NEG)
                return law

            log_want = torch.where(legal, log_q[here], NEG)
            log_go = log_want.logsumexp(1)  # of the wanted mass that goes on
            log_want = log_want - log_go.unsqueeze(1)  # of the next move, given that one comes
            log_stop = log_q[here, stop] if stop is not None else torch.full_like(log_go, NEG)
            forward[here] = moves(project.forward(torch.where(legal, log_want, -math.inf).softmax(1)), log_go, log_stop)

            # per-state KL(p || q): going on costs what cannot be had, so STOP gets relatively more
            near = project.reverse(log_want)
            weight = log_go - _cross(near, log_want, legal)
            total = torch.logaddexp(weight, log_stop)
            state_kl[here] = moves(near, weight - total, log_stop - total)

            # the Bellman recursion of KL(P || target): W(s) the cost of going on, V(s) = -log(R(s) + exp -W(s))
            hope = -value[graph.child[here].long().clamp(min=0)]
            near = project.reverse(torch.where(legal, hope, NEG))
            ahead = _cross(near, hope, legal)
            log_end = (
                torch.full_like(ahead, -math.inf)
                if stop is None
                else torch.where(mask[:, stop], target.log_reward[here], -math.inf)
            )
            value[here] = -torch.logaddexp(log_end, -ahead)
            reverse[here] = moves(near, value[here] - ahead, log_end + value[here])
    laws = {"best": forward, "reverse_kl": reverse, "state_kl": state_kl}
    return {name: law_from_moves(graph, law) for name, law in laws.items()}


def _never_happens(graph: Graph, channel: Channel) -> str | None:
    """Why the KL to the target is infinite: a legal move that no action brings about."""
    if isinstance(channel, Slip):
        return None
    deciding = (~graph.complete).nonzero().squeeze(1)
    for here in deciding.split(max(1, (1 << 21) // graph.env.num_moves**2)):
        legal = graph.env.real_moves(graph.mask[here])
        table = channel_table(graph.env, channel, graph.states[here], graph.mask[here])
        lost = legal & (torch.where(legal.unsqueeze(2), table, 0).amax(1) <= 0)
        if bool(lost.any()):
            row, move = lost.nonzero()[0].tolist()
            return f"no action brings about move {move} at state {graph.states[here[row]].tolist()}, so the KL to the target is infinite"
    return None


def _cross(p: Tensor, log_weight: Tensor, legal: Tensor) -> Tensor:
    """sum_c p (log p - log weight) over the legal moves, [n]."""
    inside = legal & (p > 0)
    return torch.where(inside, p * (p.clamp(min=1e-300).log() - log_weight), 0).sum(1)


class _Project:
    """The law of moves nearest to a wanted one among those a channel can bring about, at a batch of states."""

    def __init__(self, graph: Graph, channel: Channel, here: Tensor):
        mask = graph.mask[here]
        self.legal = graph.env.real_moves(mask)
        self.table: Tensor | None = None
        if isinstance(channel, Slip):
            self.least = channel.alpha / self.legal.sum(1, keepdim=True).clamp(min=1).double()
        else:
            # STOP is decided apart, so its row plays no part
            self.table = channel_table(graph.env, channel, graph.states[here], mask)

    def forward(self, want: Tensor) -> Tensor:
        """argmin_p KL(want || p); want [n, M] sums to one over the legal moves."""
        if self.table is None:
            return waterfill(want, self.legal, self.least)
        return forward_projection(want, self.table, self.legal)

    def reverse(self, log_weight: Tensor) -> Tensor:
        """argmin_p sum_c p (log p - log weight); log_weight [n, M] need not be normalised."""
        if self.table is None:
            want = torch.where(self.legal, log_weight, -math.inf).softmax(1)
            return waterfill(want, self.legal, self.least)
        return reverse_projection(log_weight, self.table, self.legal)


def waterfill(want: Tensor, legal: Tensor, least: Tensor) -> Tensor:
    """Projection of `want` [n, M] on {p >= least on legal moves, sum p = 1}: p = max(least, scale * want), for both KLs.

    Smallest first, raise moves to `least` until the rest, scaled to fill what remains, stays above it.
    """
    want = torch.where(legal, want, 0)
    ordered, _ = torch.where(legal, want, math.inf).sort(1)
    real = ordered.isfinite()
    ordered = torch.where(real, ordered, 0)
    above = ordered.flip(1).cumsum(1).flip(1)  # what is wanted of this move and all larger ones
    raised = torch.arange(want.shape[1], device=want.device)  # k: how many moves are raised
    scale = (1 - raised * least) / above.clamp(min=1e-300)
    enough = (scale * ordered >= least) & real
    # rounding may refuse even the last candidate: then all but the largest move are raised
    last = (raised == legal.sum(1, keepdim=True) - 1) & real
    first = (enough | last).to(torch.uint8).argmax(1, keepdim=True)
    filled = torch.maximum(least, scale.gather(1, first) * want)
    filled = torch.where(legal, filled, 0)
    return filled / filled.sum(1, keepdim=True).clamp(min=1e-300)


def forward_projection(want: Tensor, table: Tensor, legal: Tensor) -> Tensor:
    """argmin_p KL(want || p) over p = pi C; want [n, M] sums to one, table C [n, M, M], p [n, M]."""
    return _project(want, lambda p, rows: (-want[rows] / p, want[rows] / p**2), table, legal)


def reverse_projection(log_weight: Tensor, table: Tensor, legal: Tensor) -> Tensor:
    """argmin_p sum_c p (log p - log weight) over p = pi C; the weights [n, M] need not be normalised."""
    want = torch.where(legal, log_weight, -math.inf).softmax(1)
    return _project(want, lambda p, rows: (p.log() - log_weight[rows], 1 / p), table, legal)


def _project(
    want: Tensor, slopes: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]], table: Tensor, legal: Tensor
) -> Tensor:
    """The nearest law p = pi C [n, M]: `want` itself where the channel can bring it about, else by an interior-point method.

    `slopes(p, rows)` gives the first and second derivative of a separable convex cost of p. EM and exponentiated gradient
    have the same optimum but crawl near the edge of what is possible. Rows leave once convexity proves them within GAP
    nats of their optimum: no policy gains more than its mean slope exceeds its least one.
    """
    raw = (want.unsqueeze(1) @ torch.linalg.pinv(table)).squeeze(1)
    off = ((raw.unsqueeze(1) @ table).squeeze(1) - want).abs().amax(1)
    reached = (raw >= -1e-12).all(1) & (off < 1e-12)
    law = want.clone()
    rows = (~reached).nonzero().squeeze(1)
    pi = legal[rows] / legal[rows].sum(1, keepdim=True).clamp(min=1).double()
    dual, price = legal[rows].double(), torch.zeros_like(pi[:, :1])  # of pi >= 0, and of sum pi = 1
    for _ in range(200):
        if not len(rows):
            return law
        may, c = legal[rows], table[rows]
        p = (pi.unsqueeze(1) @ c).squeeze(1)
        first, second = slopes(torch.where(may, p, 1), rows)
        slope = (c @ torch.where(may, first, 0).unsqueeze(2)).squeeze(2)
        left = (pi * slope).sum(1) - torch.where(may, slope, math.inf).amin(1)
        law[rows] = p
        # a tenth of the present complementarity is the next step's goal
        barrier = torch.where(may, 0.1 * ((pi * dual).sum(1) / may.sum(1)).unsqueeze(1) / pi.clamp(min=1e-300), 0)
        ratio = torch.where(may, dual / pi.clamp(min=1e-300), 1)
        curve = (c * torch.where(may, second, 0).unsqueeze(1)) @ c.mT
        curve = torch.where(may.unsqueeze(1) & may.unsqueeze(2), curve, 0) + torch.diag_embed(ratio)
        right = torch.stack([torch.where(may, slope - price - barrier, 0), may.double()], 2)
        answer = torch.linalg.solve(curve, right)
        pull, push = answer[..., 0], answer[..., 1]
        shift = (1 - pi.sum(1, keepdim=True) + pull.sum(1, keepdim=True)) / push.sum(1, keepdim=True)
        turn = torch.where(may, shift * push - pull, 0)
        turn_dual = torch.where(may, barrier - dual - ratio * turn, 0)
        pi = pi + _inside(pi, turn) * turn
        dual = dual + _inside(dual, turn_dual) * turn_dual
        price = price + shift
        still = left > GAP
        rows, pi, dual, price = rows[still], pi[still], dual[still], price[still]
    raise RuntimeError(
        f"the projection of {len(rows)} states did not converge; the largest gap is {float(left.max()):.2g} nats"
    )


def _inside(x: Tensor, turn: Tensor) -> Tensor:
    """How far to go along `turn`, at most once, so that x stays above zero; [n, 1]."""
    room = torch.where(turn < 0, -x / turn.clamp(max=-1e-300), math.inf).amin(1, keepdim=True)
    return (0.995 * room).clamp(max=1)


# DAGs: a linear program -------------------------------------------------------------------------------------------


def _least_l1(graph: Graph, channel: Channel, target: Tensor) -> tuple[Tensor | None, str | None]:
    """The law [N] nearest to the target in L1 over all policies, or None and why not.

    Variables: f(s, a) the flow that intends a at s, t(s) the flow that ends at s, u(s) >= t(s) - target(s); least sum u.
    What leaves a state is what comes in: t(s) + sum_a f(s, a) = 1[s first] + sum f(s', a) P(m | s', a) over edges m to s.
    """
    import numpy as np
    from scipy.optimize import linprog
    from scipy.sparse import coo_matrix, hstack, identity

    env, count = graph.env, len(graph)
    legal = graph.child >= 0
    wide = int(legal.sum())
    if wide > LP_VARIABLES:
        return (
            None,
            f"the linear program would have {wide:,} action flows, more than the {LP_VARIABLES:,} it solves in reasonable time",
        )
    which, action = (x.numpy() for x in legal.cpu().nonzero(as_tuple=True))  # action flow j: (state, action)
    number = np.full(legal.shape, -1)
    number[which, action] = np.arange(wide)
    ends = graph.terminal.cpu().nonzero().squeeze(1).numpy()
    table = channel_table(env, channel, graph.states, graph.mask).cpu().numpy()
    s, a, m = np.nonzero((table > 0) & legal.cpu().numpy()[:, :, None] & legal.cpu().numpy()[:, None, :])
    into = coo_matrix((table[s, a, m], (graph.child.cpu().numpy()[s, m], number[s, a])), shape=(count, wide))
    out = coo_matrix((np.ones(wide), (which, np.arange(wide))), shape=(count, wide))
    finish = coo_matrix((np.ones(len(ends)), (ends, np.arange(len(ends)))), shape=(count, len(ends)))
    empty = coo_matrix((count, len(ends)))
    one = identity(len(ends))
    balance = hstack([out - into, finish, empty], format="csr")
    excess = hstack([coo_matrix((len(ends), wide)), one, -one], format="csr")
    scale = float(len(ends))  # so that flows are of order one, where the solver's tolerances are meant
    start = np.zeros(count)
    start[graph.root] = scale
    cost = np.concatenate([np.zeros(wide + len(ends)), np.ones(len(ends))])
    with stage(f"solving a linear program of {wide:,} action flows, for at most {LP_SECONDS:.0f} s"):
        answer = linprog(
            cost,
            A_ub=excess,
            b_ub=scale * target.cpu().numpy()[ends],
            A_eq=balance,
            b_eq=start,
            method="highs",
            options={"time_limit": LP_SECONDS},
        )
    if answer.x is None or answer.status != 0:
        return (
            None,
            f"the linear program of {wide:,} action flows was not solved within {LP_SECONDS:.0f} s ({answer.message.strip()})",
        )
    # through the policy, so that the law is one that exists and not one within the solver's tolerance
    flow = np.zeros(legal.shape)
    flow[which, action] = answer.x[:wide].clip(min=0)
    if env.stop is not None:
        flow[ends, env.stop] = answer.x[wide : wide + len(ends)].clip(min=0)
    weight = torch.as_tensor(flow, device=target.device)
    idle = weight.sum(1, keepdim=True) <= 0
    log_pi = torch.where(idle, 0.0, torch.where(weight > 0, weight.clamp(min=1e-300).log(), NEG))
    return law_from_log_pi(graph, channel, log_pi)[0], None
