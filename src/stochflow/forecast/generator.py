"""A generator of futures, fed batch by batch: `{"time_series": [batch, steps, features]}`, as the source documents feed theirs.

>>> from stochflow.forecast.generator import SeriesGenerator
>>> generator = SeriesGenerator(features=3, steps=10, horizon=2, targets=(0, 1), objective=SGFNKL())
>>> generator.train_step({"time_series": batch})

Environment, encoders, dynamics, modes and trainer are those of `Forecaster`; windows change from batch to batch, the networks stay.

    B batch    n futures of a window
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from stochflow.errors import UserError, did_you_mean
from stochflow.forecast import report
from stochflow.forecast.batches import Columns, windows_of
from stochflow.forecast.config import FLAGS, Forecast
from stochflow.forecast.training import follow, make_channel, make_policy, make_trainer
from stochflow.learn.evaluate import evaluate
from stochflow.learn.objectives import MARGINAL, Objective
from stochflow.learn.rollout import rollout
from stochflow.nets.encoders import EncoderNet
from stochflow.nets.layers import Net
from stochflow.nets.windows import WindowEncoder
from stochflow.scores.rewards import Linear
from stochflow.types import Task, World
from stochflow.worlds.series import Bins

LIMIT = 4.0  # where bins end, in units of a window's changes over the horizon


class _Error:
    """Oracle: minus the mean of |error|^power, in scaled units, of forecasts of the present windows."""

    on_device = True

    def __init__(self, env: Columns, power: int):
        self.env, self.power = env, power

    def __call__(self, state: Tensor) -> Tensor:
        off = self.env.values(state) - self.env.windows.target.to(state.device)[state[..., 0]]
        return -off.abs().pow(self.power).mean(-1)


class SeriesGenerator:
    """Futures of the last `horizon` steps of windows of `steps` steps and `features` columns, given the steps before.

    `targets`: the columns whose next values are forecast, as a vector. `objective` (modes mse and mae): detailed or trajectory balance, SGFN-KL
    with the entropy ratio, or another one of `learn.objectives`. `net` and `encoder` are the trunk and the reader of windows, such as
    `MLP(64, 3)` and `WindowTransformer(width=32, layers=2, heads=4)`. Everything else is a setting of `Forecast`: mode, bins, batch, lr,
    noise and stick, seed ...
    """

    def __init__(
        self,
        features: int,
        steps: int = 10,
        horizon: int = 1,
        targets: tuple[int, ...] = (0,),
        *,
        objective: Objective | None = None,
        net: Net | None = None,
        encoder: EncoderNet | None = None,
        **settings: Any,
    ):
        for word in settings:
            if word not in FLAGS:
                raise UserError(f"there is no setting {word!r}{did_you_mean(word, FLAGS)}: it takes {', '.join(FLAGS)}")
        s = dataclasses.replace(Forecast(mode="mse", bins=33, seeds=1), **settings).check()
        if objective is not None and s.mode not in ("mse", "mae"):
            raise UserError(
                f"mode {s.mode} has an objective of its own: leave out `objective`, or take mode mse or mae"
            )
        self.settings, self.shape = s, (steps, features)
        self.horizon, self.targets = horizon, tuple(targets)
        windows, ratio = windows_of(torch.zeros(1, steps, features), horizon, self.targets)
        self.env = Columns(windows, Bins(s.bins, LIMIT), ratio)
        oracle = _Error(self.env, 1 if s.mode == "mae" else 2)
        self.task = Task(self.env, make_channel(s), oracle, Linear(s.beta or self.env.horizon / 2))
        rows = torch.arange(1)
        form = getattr(objective, "form", MARGINAL)
        self.policy = make_policy(self.env, s, rows, net, encoder, form.back_action)
        self.trainer = make_trainer(self.task, self.policy, s, rows, objective=objective)

    # learning -------------------------------------------------------------------------------------------------------

    def train_step(self, batch: Mapping[str, Any]) -> dict[str, float]:
        """One step of the policy and of the dynamics on a batch; the trainer's figures."""
        self._use(self._read(batch, self.shape[0]))
        self.trainer.train(self.trainer.steps_done + 1)
        return {name: float(value.mean()) for name, value in self.trainer.stats.items()}

    def get_loss(self, batch: Mapping[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
        """(loss of a batch with its gradient, figures of the objective), without a step."""
        self._use(self._read(batch, self.shape[0]))
        t = self.trainer
        if self.settings.mode == "nll":
            traj = follow(self.env, torch.arange(len(self.env.windows.scale)).expand(self.settings.seeds, -1))
        else:
            traj = t.source.mix(t.score(t.act()))
        terms = evaluate(self.task, self.policy, t.dynamics, traj, t.step, t.objective.needs)
        loss, figures = t.objective.loss_and_stats(
            terms, World(self.task, self.policy, t.dynamics, traj, t.step, t._ask)
        )
        return loss.sum(), figures

    # forecasting ----------------------------------------------------------------------------------------------------

    def sample(self, past: Any, n: int = 100) -> Tensor:
        """[B, n, horizon, targets] futures, in the columns' units, of windows [B, steps - horizon, features] by the averaged weights."""
        past = torch.as_tensor(past, dtype=torch.float64)
        wanted = (self.shape[0] - self.horizon, self.shape[1])
        if past.dim() != 3 or tuple(past.shape[1:]) != wanted:
            raise UserError(f"the past has shape {tuple(past.shape)}, but must be [batch, {wanted[0]}, {wanted[1]}]")
        self._use(torch.cat([past, past[:, -1:].expand(-1, self.horizon, -1)], 1))
        seeds, each = self.settings.seeds, -(-n // self.settings.seeds)
        rows = torch.arange(len(past)).repeat_interleave(each).expand(seeds, -1)
        with self.trainer.averaged(), torch.no_grad():
            final = rollout(self.task, self.policy, rows.shape[1], row=rows).states[-1]
        flat = self.env.unscale(self.env.values(final, draw=True), final[..., 0])  # [S, B * each, horizon * targets]
        made = flat.view(seeds, len(past), each, -1).permute(1, 2, 0, 3).reshape(len(past), each * seeds, -1)[:, :n]
        return made.unflatten(-1, (self.horizon, len(self.targets)))

    def figures(self, batch: Mapping[str, Any], n: int = 200) -> dict[str, float]:
        """MSE of the mean, MAE of the median, and CRPS of `n` futures of each window of a batch, beside what followed."""
        series = self._read(batch, self.shape[0])
        truth = series[:, -self.horizon :, list(self.targets)].flatten(1).numpy()
        drawn = self.sample(series[:, : -self.horizon], n).flatten(2).numpy()
        return {**report.errors(drawn, truth), "crps": float(np.mean(report.crps(drawn, truth)))}

    # batches --------------------------------------------------------------------------------------------------------

    def _read(self, batch: Mapping[str, Any], steps: int) -> Tensor:
        """[B, steps, features] of a batch, as the generator was made for."""
        if not isinstance(batch, Mapping) or "time_series" not in batch:
            raise UserError('a batch is {"time_series": [batch, steps, features]}, but this one has no "time_series"')
        try:
            series = torch.as_tensor(batch["time_series"], dtype=torch.float64)
        except (TypeError, ValueError) as error:
            raise UserError(f"time_series cannot be read as numbers ({error}): give [batch, steps, features]") from None
        if series.dim() != 3 or tuple(series.shape[1:]) != (steps, self.shape[1]) or not len(series):
            raise UserError(
                f"time_series has shape {tuple(series.shape)}, but the generator was made for [batch, {steps}, {self.shape[1]}]"
            )
        return series

    def _use(self, series: Tensor) -> None:
        """Let environment, encoder and sources speak of these windows."""
        self.env.use(*windows_of(series, self.horizon, self.targets))
        assert isinstance(self.policy.encoder, WindowEncoder)
        self.policy.encoder.attach(self.env)
        rows = torch.arange(len(series))
        source: Any = self.trainer.source
        for part in (source, getattr(source, "own", None), getattr(source, "targets", None)):
            if part is not None and hasattr(part, "allowed"):
                part.allowed = rows
