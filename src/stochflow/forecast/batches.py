"""Windows of a batch `[B, steps, features]` as a task: the futures of the target columns are objects, chosen bin by bin.

This is the same environment that `Forecaster` trains on (`worlds.series.Series`), for code that brings arrays and no frame. Several target columns make a vector the next
value: their bins are chosen one after the other, step by step.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from stochflow.errors import UserError
from stochflow.scores.rewards import Linear
from stochflow.types import Task
from stochflow.worlds.channels import Exact
from stochflow.worlds.env import Channel
from stochflow.worlds.series import Bins, Nearness, Series, Windows


class Batch(NamedTuple):
    """A task over the windows of a batch, and how its objects are read."""

    task: Task
    rows: Tensor  # [B] the windows' row numbers
    horizon: int
    targets: tuple[int, ...]

    def values(self, states: Tensor) -> Tensor:
        """Futures [..., horizon, targets] of finished states [..., D], in the columns' own units."""
        env = self.task.env
        assert isinstance(env, Series)
        flat = env.unscale(env.values(states), states[..., 0])
        return flat.unflatten(-1, (self.horizon, len(self.targets)))

    def errors(self, states: Tensor, truth: Tensor) -> dict[str, float]:
        """MSE and MAE of futures [B, ..., D] beside what followed [B, horizon, targets]."""
        off = self.values(states) - truth.double()
        return {"mse": float(off.square().mean()), "mae": float(off.abs().mean())}


def windows_of(series: Any, horizon: int, targets: tuple[int, ...] = (0,)) -> tuple[Windows, Tensor]:
    """(windows of a batch [B, steps, features], ratio [B, horizon * targets] of each value's unit to the window's scale).

    The last `horizon` steps of each are what is to be forecast; everything else is read off the steps before them.
    """
    try:
        batch = torch.as_tensor(series, dtype=torch.float64)
    except (TypeError, ValueError) as error:
        raise UserError(f"time_series cannot be read as numbers ({error}): give [batch, steps, features]") from None
    if batch.dim() != 3:
        raise UserError(f"time_series must be [batch, steps, features], but has shape {tuple(batch.shape)}")
    if not bool(torch.isfinite(batch).all()):
        raise UserError("time_series holds a value that is not finite: fill or leave out its window")
    steps, features = batch.shape[1:]
    if not 1 <= horizon <= steps - 2:
        raise UserError(f"a horizon of {horizon} leaves fewer than 2 of {steps} steps to look at: shorten it")
    wrong = [c for c in targets if not 0 <= c < features]
    if wrong or not targets:
        raise UserError(f"target columns {targets} are not among the {features} features: number them from 0")
    past, later = batch[:, :-horizon], batch[:, -horizon:, list(targets)]
    last = past[:, -1:]
    spread = past.diff(dim=1).square().mean(1, keepdim=True).sqrt()  # [B, 1, features]
    spread = torch.maximum(spread, 1e-6 * past.abs().amax(1, keepdim=True).clamp(min=1.0))
    grown = spread * horizon**0.5
    scaled = (past - last) / grown
    rows, width = len(batch), past.shape[1]
    unit = grown[:, 0, list(targets)].repeat(1, horizon)  # [B, horizon * targets]
    centre = last[:, 0, list(targets)].repeat(1, horizon)
    target = ((later.reshape(rows, -1) - centre) / unit).float()
    first = unit[:, :1]  # a window has one scale: other columns are measured in the first one's
    ratio = (unit / first).float()
    windows = Windows(
        values=scaled.clamp(-20, 20).float(),
        seen=torch.ones(scaled.shape, dtype=torch.bool),
        categories=torch.zeros(rows, width, 0, dtype=torch.long),
        age=torch.arange(width - 1, -1, -1.0).expand(rows, width).clone(),
        phase=torch.zeros(rows, width, 0),
        static=ratio.log().clamp(-20, 20),
        static_categories=torch.zeros(rows, 0, dtype=torch.long),
        target=target,
        known=torch.ones(rows, dtype=torch.bool),
        location=centre,
        scale=first.squeeze(1),
        series=torch.arange(rows),
        origin=torch.full((rows,), width),
    )
    return windows, ratio


def windows_task(
    series: Tensor,
    horizon: int,
    bins: int = 33,
    targets: tuple[int, ...] = (0,),
    channel: Channel | None = None,
    power: int = 2,
    beta: float = 0.0,
) -> Batch:
    """The task of forecasting the last `horizon` steps of windows [B, steps, features] from the steps before them.

    Values are centred on the last one seen of each column and measured in units of its changes in the window. The reward is
    exp(-beta mean |error|^power) as in modes mse and mae; `beta` 0 is half the number of values.
    """
    windows, ratio = windows_of(series, horizon, targets)
    limit = min(max(1.1 * float(windows.target.abs().max()), 1.0), 20.0)
    env = Columns(windows, Bins(bins, limit), ratio)
    count = windows.target.shape[1]
    task = Task(env, channel or Exact(), Nearness(env, power), Linear(beta or count / 2))
    return Batch(task, torch.arange(len(windows.scale)), horizon, tuple(targets))


class Columns(Series):
    """A series whose values have units of their own, column by column."""

    def __init__(self, windows: Windows, bins: Bins, ratio: Tensor):
        super().__init__(windows, bins)
        self.ratio = ratio

    def use(self, windows: Windows, ratio: Tensor) -> None:
        """Speak of other windows of the same shape from now on; whatever encodes windows must be attached anew."""
        super().__init__(windows, self.bins)
        self.ratio = ratio

    def unscale(self, value: Tensor, row: Tensor) -> Tensor:
        return self.windows.unscale(value * self.ratio[row.to(self.ratio.device)], row)
