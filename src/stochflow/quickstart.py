"""The small API: a square grid, a policy, a loop of six lines. docs/quickstart.md is its guide.

Shapes: N samples  D = size * size cells  A = 3 actions (Down, Right, Terminate)  T = 2 (size - 1), the longest walk.
A state is a one-hot row of D numbers, as the caller gives and gets it; inside, it is the number of its cell (row * size + column).
There are only D states, so the policy is evaluated once on all of them and everything else is looked up in that table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, overload

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot

from stochflow.errors import UserError
from stochflow.files.shield import plain_matplotlib
from stochflow.ops import masked_log_softmax
from stochflow.worlds.grid import Corners
from stochflow.worlds.grid import Grid as Hypergrid

DOWN, RIGHT, TERMINATE = range(3)
NUM_ACTIONS = 3
LOG_Z_SCALE = 10.0  # log Z = scale * parameter: Adam moves log Z ten times as fast as a weight, so that one learning rate suits both
TINY = 1e-30  # a probability of a user's own network is raised to this before its logarithm


class Grid:
    """A size x size grid walked Down (+size) and Right (+1) from the first cell; Terminate anywhere.

    R = 0.01 + 0.5 prod(|n| > 1/4) + 2 prod(3/10 < |n| < 4/10), n = coordinate / (size - 1) - 1/2, decided in integers.
    """

    num_actions = NUM_ACTIONS

    def __init__(self, size: int):
        if not isinstance(size, int) or isinstance(size, bool) or size < 2:
            raise UserError(
                f"Grid(size={size!r}) has nowhere to go: give a whole number of at least 2, for example Grid(size=16)"
            )
        self.size = size
        self.state_dim = size * size  # D
        self.horizon = 2 * (size - 1)  # T; in the far corner only Terminate is left, which is no decision
        self._world = Hypergrid(ndim=2, side=size)
        cells = self._world.all_states()  # [D, 2], in the order of the one-hot index
        bands = Corners(side=size, base=0.0)(cells)  # 0, 0.5 or 2.5: exact in any precision
        self.rewards: Tensor = 1e-2 + bands.double()  # [D]
        self.target: Tensor = self.rewards / self.rewards.sum()  # [D], the law to learn: R / Z
        self.legal: Tensor = self._world.moves(cells)  # [D, A]
        self.parents: Tensor = self._world.parents(cells)  # [D, A]: moves that may have led here
        after = [self._world.step(cells, torch.full((len(cells),), action)) for action in range(NUM_ACTIONS)]
        self.next_cell: Tensor = torch.stack(
            [self._world.index(state) for state in after], -1
        )  # [D, A]; Terminate stays

    def cell(self, s: Tensor) -> Tensor:
        """Numbers [N] of the cells of one-hot states [N, D]."""
        if not isinstance(s, Tensor) or s.ndim != 2 or s.shape[1] != self.state_dim:
            found = f"a tensor of shape {tuple(s.shape)}" if isinstance(s, Tensor) else type(s).__name__
            raise UserError(
                f"states of this grid are one-hot rows of shape [N, {self.state_dim}], but {found} was given: use one_hot(cells, env.state_dim).float()"
            )
        row, cell = s.nonzero(as_tuple=True)  # the one pass over all N x D numbers
        if (
            len(cell) != len(s)
            or not bool((row == torch.arange(len(s), device=s.device)).all())
            or not bool((s[row, cell] == 1).all())
        ):
            raise UserError(
                "every row of the states must be one-hot (a single 1, zeros elsewhere): use one_hot(cells, env.state_dim).float()"
            )
        return cell

    def state(self, cell: Tensor) -> Tensor:
        """One-hot states [N, D] of cells [N]."""
        s = torch.zeros(len(cell), self.state_dim, device=cell.device)
        s[torch.arange(len(cell), device=cell.device), cell] = 1.0
        return s

    def mask(self, s: Tensor) -> Tensor:
        """Legal actions [N, A] in states [N, D]."""
        return self.legal.to(s.device)[self.cell(s)]

    def step(self, s: Tensor, action: Tensor) -> Tensor:
        """States [N, D] after legal actions [N]; Terminate leaves the state as it is."""
        return self.state(self.next_cell.to(s.device)[self.cell(s), action])

    def reward(self, s: Tensor) -> Tensor:
        """Rewards [N] of states [N, D], float64."""
        return self.rewards.to(s.device)[self.cell(s)]

    def __repr__(self) -> str:
        return f"Grid(size={self.size})"


class ForwardPolicy(nn.Module):
    """State vectors [N, D] -> probabilities [N, A] of Down, Right, Terminate, before the edges of the grid are masked.

    One hidden layer: with one-hot input it already gives every cell its own 32 numbers, and a second one only slows it down.
    """

    def __init__(self, state_dim: int, hidden_dim: int = 32, num_actions: int = NUM_ACTIONS):
        super().__init__()
        _side(state_dim, num_actions, "ForwardPolicy")
        if not isinstance(hidden_dim, int) or hidden_dim < 1:
            raise UserError(
                f"ForwardPolicy(hidden_dim={hidden_dim!r}) has no width: give a whole number of at least 1, for example 32"
            )
        self.state_dim = state_dim
        self.hidden = nn.Linear(state_dim, hidden_dim)
        self.out = nn.Linear(hidden_dim, num_actions)

    def forward(self, s: Tensor) -> Tensor:
        return self.out(self.hidden(s).tanh()).softmax(-1)

    def logits(self) -> Tensor:
        """The logits of all D states at once, [D, A].

        The hidden layer at a one-hot vector is a column of its weight, so the D x D identity need not be multiplied.
        """
        return self.out((self.hidden.weight.T + self.hidden.bias).tanh())


class BackwardPolicy(nn.Module):
    """State vectors [N, D] -> probabilities [N, A] of the move that led there: one half each, one where there is a single parent.

    Nothing is learned. The first cell has no parents: its row is zero. Terminate is no way into a state and always zero.
    """

    probs: Tensor

    def __init__(self, state_dim: int, num_actions: int = NUM_ACTIONS):
        super().__init__()
        parents = Grid(_side(state_dim, num_actions, "BackwardPolicy")).parents
        self.state_dim = state_dim
        self.register_buffer("probs", parents / parents.sum(-1, keepdim=True).clamp(min=1), persistent=False)  # [D, A]

    def forward(self, s: Tensor) -> Tensor:
        return s.to(self.probs) @ self.probs


@dataclass(frozen=True)
class Log:
    """What happened on the way to each sample.

    The probabilities are kept for each step, 1 after the end, and in float64: their product over a long walk would
    underflow, the sum of their logarithms in the loss does not, and Z may be as large as exp(700).
    """

    total_flow: Tensor  # [] Z, with gradient
    rewards: Tensor  # [N]
    fwd_probs: Tensor  # [N, T], with gradient
    back_probs: Tensor  # [N, T]
    actions: Tensor  # [N, T] int64, -1 after the end
    cells: Tensor  # [N, T + 1] int64: the walk as cell numbers, the last one repeated after the end
    state_dim: int  # D

    @property
    def traj(self) -> Tensor:
        """The walk as state vectors [N, T + 1, D], made when asked for: on a large grid it is far larger than all the rest."""
        return one_hot(self.cells, self.state_dim).float()


class GFlowNet(nn.Module):
    """A sampler of grid cells that learns to draw them in proportion to their reward.

    `forward_policy` may be any module that maps states [N, D] to probabilities [N, A], and `backward_policy` likewise.
    """

    legal: Tensor
    next_cell: Tensor

    def __init__(self, forward_policy: nn.Module, backward_policy: nn.Module, env: Grid):
        super().__init__()
        if not isinstance(env, Grid):
            raise UserError(
                f"GFlowNet(..., env) got {type(env).__name__}: give a stochflow.quickstart.Grid, for example Grid(size=16)"
            )
        for policy in (forward_policy, backward_policy):
            dim = getattr(policy, "state_dim", env.state_dim)  # a user's own network need not say
            if dim != env.state_dim:
                raise UserError(
                    f"{type(policy).__name__} was made for state_dim = {dim}, but {env} has {env.state_dim}: give it env.state_dim"
                )
        self.forward_policy, self.backward_policy, self.env = forward_policy, backward_policy, env
        self._log_z = nn.Parameter(torch.zeros(()))
        self.register_buffer("legal", env.legal, persistent=False)
        self.register_buffer("next_cell", env.next_cell, persistent=False)

    @property
    def log_z(self) -> Tensor:
        """The learned log Z, []."""
        return LOG_Z_SCALE * self._log_z

    @property
    def total_flow(self) -> Tensor:
        """The learned Z, [] float64."""
        return self.log_z.double().exp()

    def log_probs(self) -> Tensor:
        """Log-probabilities of the three actions in all D states, [D, A]; illegal ones NEG."""
        if type(self.forward_policy) is ForwardPolicy:  # a subclass may have changed `forward`, which then decides
            logits = self.forward_policy.logits()
        else:
            logits = self._on_all(self.forward_policy).clamp(min=TINY).log()
        return masked_log_softmax(logits, self.legal)

    def back_probs(self) -> Tensor:
        """Backward probabilities of the three actions into all D states, [D, A]."""
        if type(self.backward_policy) is BackwardPolicy:
            return self.backward_policy.probs
        return self._on_all(self.backward_policy)

    def _on_all(self, policy: nn.Module) -> Tensor:
        table = policy(torch.eye(self.env.state_dim, dtype=self._log_z.dtype, device=self._log_z.device))
        want = (self.env.state_dim, NUM_ACTIONS)
        if tuple(table.shape) != want:
            raise UserError(
                f"{type(policy).__name__} gave shape {tuple(table.shape)} for all {want[0]} states: it must give {want}, probabilities"
            )
        return table

    @overload
    def sample_states(self, s0: Tensor, return_log: Literal[False] = False) -> Tensor: ...
    @overload
    def sample_states(self, s0: Tensor, return_log: Literal[True]) -> tuple[Tensor, Log]: ...

    def sample_states(self, s0: Tensor, return_log: bool = False) -> Tensor | tuple[Tensor, Log]:
        """Walk from the states s0 [N, D] to the end: final states [N, D] and, if asked for, the `Log` of the way."""
        start = self.env.cell(s0).to(self.next_cell.device)
        if not return_log:
            with torch.no_grad():
                cells, _ = self._walk(start, self.log_probs())
            return self.env.state(cells[:, -1]).to(s0)
        if bool((start != 0).any()):
            raise UserError(
                "with return_log=True every row of s0 must be the first cell, whose flow is Z: use one_hot(torch.zeros(N).long(), ...)"
            )
        log_probs = self.log_probs()
        cells, actions = self._walk(start, log_probs.detach())
        alive, action = actions >= 0, actions.clamp(min=0)
        moved = alive & (
            action != TERMINATE
        )  # to end is the only way out of the state into its sample: backward probability 1
        log = Log(
            total_flow=self.total_flow,
            rewards=self.env.rewards.to(cells.device)[cells[:, -1]],
            fwd_probs=torch.where(alive, log_probs.double()[cells[:, :-1], action], 0.0).exp(),
            back_probs=torch.where(moved, self.back_probs().double()[cells[:, 1:], action], 1.0),
            actions=actions,
            cells=cells,
            state_dim=self.env.state_dim,
        )
        return self.env.state(cells[:, -1]).to(s0), log

    def _walk(self, cell: Tensor, log_probs: Tensor) -> tuple[Tensor, Tensor]:
        """Cells [N, T + 1] and actions [N, T], -1 after the end."""
        alive = torch.ones_like(cell, dtype=torch.bool)
        cells, actions = [cell], []
        # Gumbel-max with the noise of all steps drawn at once: one call on a long tensor instead of T on short ones
        gumbel = -log_probs.new_empty(self.env.horizon, len(cell), NUM_ACTIONS).exponential_().log()
        for t in range(self.env.horizon):
            action = torch.where(alive, (log_probs[cell] + gumbel[t]).argmax(-1), TERMINATE)
            actions.append(torch.where(alive, action, -1))
            alive = action != TERMINATE
            cell = self.next_cell[cell, action]
            cells.append(cell)
        return torch.stack(cells, 1), torch.stack(actions, 1)


def trajectory_balance_loss(total_flow: Tensor, rewards: Tensor, fwd_probs: Tensor, back_probs: Tensor) -> Tensor:
    """Mean over samples of (log Z prod P_F - log R prod P_B)^2, with the products taken as sums of logarithms.

    total_flow [] or [N], rewards [N], fwd_probs and back_probs [N, T], all above zero.
    """
    if (
        rewards.ndim != 1
        or fwd_probs.ndim != 2
        or fwd_probs.shape != back_probs.shape
        or fwd_probs.shape[0] != rewards.shape[0]
    ):
        shapes = (
            f"rewards {tuple(rewards.shape)}, fwd_probs {tuple(fwd_probs.shape)}, back_probs {tuple(back_probs.shape)}"
        )
        raise UserError(f"trajectory_balance_loss got {shapes}: rewards must be [N] and both probabilities [N, T]")
    for name, x in (
        ("total_flow", total_flow),
        ("rewards", rewards),
        ("fwd_probs", fwd_probs),
        ("back_probs", back_probs),
    ):
        if not bool((x > 0).all()):
            raise UserError(
                f"trajectory_balance_loss: {name} holds a value that is NaN or not above zero, which has no logarithm"
            )
    residual = total_flow.log() + (fwd_probs.log() - back_probs.log()).sum(1) - rewards.log()  # [N]
    return residual.square().mean()


@torch.no_grad()
def exact_law(model: GFlowNet) -> Tensor:
    """The exact probability [D] with which the model ends in each cell, float64, by dynamic programming along its moves."""
    p = model.log_probs().double().exp()
    p = p / p.sum(-1, keepdim=True)  # the policy is float32: without this its rounding adds up over the walk
    reach = torch.zeros_like(p[:, 0])
    reach[0] = 1.0
    law = torch.zeros_like(reach)
    for _ in range(model.env.horizon + 1):
        law += reach * p[:, TERMINATE]
        onward = torch.zeros_like(reach)
        for move in (DOWN, RIGHT):
            onward.index_add_(0, model.next_cell[:, move], reach * p[:, move])
        reach = onward
    return law


def exact_tv(model: GFlowNet) -> float:
    """Total variation distance of the exact law to the target R / Z: 0 is perfect, 1 is disjoint."""
    law = exact_law(model).cpu()
    return 0.5 * float((law - model.env.target).abs().sum())


def plot_samples(model: GFlowNet, n: int = 10_000, path: str | Path = "samples.png") -> Path:
    """Draw n samples and save a picture of them beside the target; looking does not change the random numbers of training."""
    if not isinstance(n, int) or n < 1:
        raise UserError(f"plot_samples(n={n!r}) has nothing to draw: give a whole number of at least 1")
    plain_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    env = model.env
    device = model.next_cell.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.no_grad():
        cells, _ = model._walk(torch.zeros(n, dtype=torch.long, device=device), model.log_probs())
    share = torch.bincount(cells[:, -1].cpu(), minlength=env.state_dim) / n

    figure = Figure(figsize=(9.6, 5.2), layout="compressed")
    FigureCanvasAgg(figure)  # no window and no pyplot: the caller's own figures and backend stay as they are
    panels = {"target: reward / Z": env.target, f"{n:,} samples of the model": share.double()}
    top = max(float(x.max()) for x in panels.values())
    axes = figure.subplots(1, 2, sharey=True)
    for axis, (title, x) in zip(axes, panels.items(), strict=True):
        image = axis.imshow(x.view(env.size, env.size).numpy(), vmin=0, vmax=top, cmap="viridis")
        axis.set(title=title, xlabel="column (Right)")
        axis.xaxis.get_major_locator().set_params(integer=True)
        axis.yaxis.get_major_locator().set_params(integer=True)
    axes[0].set_ylabel("row (Down)")
    figure.colorbar(image, ax=axes, label="probability of a cell", shrink=0.9)
    figure.suptitle(f"{env.size} x {env.size} grid: exact total variation from the target {exact_tv(model):.1e}")
    path = Path(path)
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as problem:  # ValueError: an ending matplotlib does not know
        raise UserError(
            f"cannot save the picture as {path}: {problem}; give a path in an existing folder that ends in .png, .svg or .pdf"
        ) from None
    return path


def _side(state_dim: int, num_actions: int, where: str) -> int:
    """The side of the grid a policy is for."""
    if num_actions != NUM_ACTIONS:
        raise UserError(
            f"{where}(num_actions={num_actions!r}): the grid has three actions, Down, Right and Terminate: give num_actions=3"
        )
    if not isinstance(state_dim, int) or state_dim < 4 or math.isqrt(state_dim) ** 2 != state_dim:
        raise UserError(f"{where}(state_dim={state_dim!r}): no square grid has that many cells: give env.state_dim")
    return math.isqrt(state_dim)
