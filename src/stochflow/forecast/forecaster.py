"""Forecasts as samples from a flow network: fit on a long frame, predict, back-test.

>>> from stochflow.forecast import Forecaster, shipped
>>> Forecaster(horizon=12, freq="MS").fit(shipped("co2")).predict()

The mathematics and what each mode converges to are in docs/forecasting.md.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from stochflow.errors import UserError, did_you_mean
from stochflow.forecast import report
from stochflow.forecast.backtest import Backtest, backtest
from stochflow.forecast.config import FLAGS, Forecast
from stochflow.forecast.frame import Columns, need_pandas, read, shipped
from stochflow.forecast.location import Plan
from stochflow.forecast.prior import Prior, learn
from stochflow.forecast.prior import sample as sample_paths
from stochflow.forecast.support import Limits, limits, within
from stochflow.forecast.training import LEAST_WINDOWS, Fitted, Look, Stage, Watch, fit, split, untrained
from stochflow.learn import objectives
from stochflow.learn.objectives import Form
from stochflow.learn.rollout import rollout
from stochflow.nets.windows import attach, remembering
from stochflow.ops import one_thread
from stochflow.worlds.series import Bins, Cut, Series, Track, Windows

if TYPE_CHECKING:
    import pandas as pd

    from stochflow.forecast.tilt import Probability, Score
    from stochflow.forecast.tilted import Tilted

__all__ = ["Forecast", "Forecaster", "shipped"]

log = logging.getLogger("stochflow")

NAME = "stochflow"  # the column of point forecasts
HELD_OUT = 0.15  # of the training windows, the last ones, to find out how long to train
TOGETHER = 4_000  # futures drawn at once
UNTESTED = 100  # most iterations where nothing validates: longer, networks learn few windows by heart
LEAST_ROWS = 6  # values of a series beyond a horizon
MOST_WINDOWS = 20_000  # held for training
PANEL = 10  # series from which on one window of each is enough to validate
MOST_VALID = 500  # windows that validate


class Forecaster:
    """`Forecaster(horizon=12, freq="MS")`; the settings are the flags of `stochflow forecast`.

    `form` = objectives.REALISED trains as if orders were always carried out, the baseline under actuator noise.
    `watch` is called with a `Look` as training goes on.
    """

    def __init__(
        self,
        settings: Forecast | None = None,
        /,
        form: Form = objectives.MARGINAL,
        watch: Watch | None = None,
        **changes: Any,
    ):
        for word in changes:
            if word not in FLAGS:
                raise UserError(f"there is no setting {word!r}{did_you_mean(word, FLAGS)}: it takes {', '.join(FLAGS)}")
        self.settings = dataclasses.replace(settings or Forecast(), **changes).check()
        self.form, self.watch = form, watch or (lambda look: None)
        self.device = _device(self.settings.device)
        self.fitted: Fitted | None = None
        self.prior: Prior
        self.limits: dict[str, Limits]

    # learning -------------------------------------------------------------------------------------------------------

    def fit(self, frame: pd.DataFrame, until: Any = None) -> Forecaster:
        """Learn from the rows up to the stamp `until` (all of them by default); later rows are never looked at."""
        s = self.settings
        self.schema, tracks, stamps = read(frame, s.freq, s.gaps, s.season, until, columns=self._columns())
        self.window = self._length(self.schema.season)
        self.tracks, self.stamps, self.skipped = self._long_enough(tracks, stamps)
        self._check_log(self.tracks)
        self.limits = limits(self.tracks, s.support)
        with one_thread():
            self._fit()
        return self

    def refit(self) -> Forecaster:
        """Learn again from the same tracks, with the present settings."""
        self._need()
        with one_thread():
            self._fit()
        return self

    def _fit(self) -> None:
        s, tracks = self.settings, self.tracks
        cut = Cut(
            self.window,
            s.horizon,
            float(self.schema.season),
            "seasonal" if s.location == "auto" else s.location,
            self.schema.periods,
        )
        plan = self._plan()
        ensemble = s.location == "auto"
        self.watch(Look("finding location and spread of every step", 0, 1, None, None))
        self.prior = learn(tracks, cut, plan, s.bins, ensemble)
        self.watch(Look("finding location and spread of every step", 1, 1, None, None))
        final, rows = self._final()
        count = int(final.windows.known.sum())
        if (
            s.mode == "nll"
            and s.noise == "none"
            and (s.network == "off" or (s.network == "auto" and count < LEAST_WINDOWS))
        ):
            self.fitted = untrained(final, s, self.device)
            return
        early = self._early(cut, plan, ensemble, final.bins)
        if s.mode == "nll" and s.network == "auto" and s.noise == "none" and (early is None or not len(early.valid)):
            log.info("%d windows are too few to hold any out: forecasts follow the statistical law alone", count)
            self.fitted = untrained(final, s, self.device)
            return
        if early is None or not len(early.valid):
            s = dataclasses.replace(s, steps=min(s.steps, UNTESTED))
            log.warning(
                "only %d windows to train on, too few to hold any out and find how long to train: stopping after %d iterations, "
                "and intervals may be too narrow",
                count,
                s.steps,
            )
            early = Stage(final, rows, rows[:0])
        self.fitted = fit(early, Stage(final, rows, rows[:0]), s, self.device, self.form, self.watch)
        if self.fitted.share == 0:
            log.info(
                "the network does not help on the windows that validate: forecasts follow the statistical law alone"
            )
        else:
            log.info("trained for %d iterations, following the network by %g", self.fitted.steps, self.fitted.share)

    def _columns(self) -> Columns:
        s = self.settings
        return Columns(s.id_col, s.time_col, s.target_col, s.future)

    def _plan(self) -> Plan:
        """Seasons in whole rows, and a longer one for the regression's waves."""
        season = self.schema.season
        whole = [p for p in self.schema.periods if abs(p - round(p)) < 1e-6 and round(p) > season]
        long = [p for p in self.schema.periods if p > season + 0.5 and p not in whole[:1]]
        seasons = tuple(m for m in (season, *[round(p) for p in whole[:1]]) if m > 1)
        return Plan(self.settings.horizon, seasons, max(long, default=0.0), True if self.settings.log else None)

    def _length(self, season: int) -> int:
        """Steps of a window."""
        s = self.settings
        return s.window or max(2 * season + min(season, 12), 2 * s.horizon, 8)

    def _least(self) -> int:
        """Rows without which a series cannot be forecast."""
        return self.settings.horizon + LEAST_ROWS

    def _long_enough(
        self, tracks: list[Track], stamps: list[list[Any]], rows: list[int] | None = None
    ) -> tuple[list[Track], list[list[Any]], list[str]]:
        """Tracks with enough values (among the first `rows` of each), and the names of the others, which are left out with a warning."""
        least = self._least()
        seen = [
            int(np.isfinite(t.y[: None if rows is None else r]).sum())
            for t, r in zip(tracks, rows or [0] * len(tracks), strict=True)
        ]
        good = [i for i, n in enumerate(seen) if n >= least]
        if not good:
            longest = max(range(len(tracks)), key=lambda i: seen[i])
            raise UserError(
                f"series {tracks[longest].name!r} has {seen[longest]} values to learn from, but a horizon of {self.settings.horizon} needs "
                f"{least}: shorten --horizon"
                + (" or lower --origins (0: no back-test)" if rows is not None else ", or give more data")
            )
        short = [tracks[i].name for i in range(len(tracks)) if seen[i] < least]
        if short:
            shown = ", ".join(repr(x) for x in short[:3]) + (" ..." if len(short) > 3 else "")
            log.warning(
                "%d of %d series have fewer than %d values and are left out: %s", len(short), len(tracks), least, shown
            )
        return [tracks[i] for i in good], [stamps[i] for i in good], short

    def _check_log(self, tracks: list[Track]) -> None:
        if not self.settings.log:
            return
        for t in tracks:
            if np.nanmin(t.y) <= 0:
                raise UserError(f"--log was asked for, but series {t.name!r} has values of 0 or less: leave --log out")

    def _training_origins(self, tracks: Sequence[Track], most: int = MOST_WINDOWS) -> list[np.ndarray]:
        """Origins of training windows, thinned out evenly where they are too many to hold."""
        first = [min(self.window, max(self._plan().warm(len(t.y)), self.window // 2)) for t in tracks]
        total = sum(max(len(t.y) - self.settings.horizon - f + 1, 0) for t, f in zip(tracks, first, strict=True))
        self._stride = max(self.settings.stride, -(-total // most))
        made = [self.cut.origins(t, self._stride, f) for t, f in zip(tracks, first, strict=True)]
        return [
            np.array([e for e in at if np.isfinite(t.y[max(0, e - self.window) : e]).any()], dtype=np.int64)
            for t, at in zip(tracks, made, strict=True)
        ]

    @property
    def cut(self) -> Cut:
        return self.prior.cut

    def _final(self) -> tuple[Series, torch.Tensor]:
        """All training windows around the prior of the whole past, and those whose targets are known."""
        changed = self.prior.transformed(self.tracks)
        ends = self._training_origins(changed)
        if not sum(map(len, ends)):
            ends = [np.array([len(t.y)]) for t in changed]  # too short to train on: the forecast's own windows
        env = self._env(self.prior, self.prior.windows(changed, ends))
        return env, env.windows.known.nonzero().squeeze(1)

    def _early(self, cut: Cut, plan: Plan, ensemble: bool, bins: Bins) -> Stage | None:
        """Windows around a prior of what came before the windows that validate; None where there are too few."""
        s = self.settings
        ends = self._training_origins(self.prior.transformed(self.tracks))
        parts = [split(at.tolist(), HELD_OUT, s.horizon, self._stride, len(ends) >= PANEL) for at in ends]
        if not any(last for _, last in parts):
            return None
        shorter = [
            t._replace(time=t.time[:n], y=t.y[:n], real=t.real[:n], categories=t.categories[:n])
            for t, at, (_, last) in zip(self.tracks, ends, parts, strict=True)
            for n in [int(at[last[0]]) if last else len(t.y)]
        ]
        prior = learn(shorter, cut, plan, bins, ensemble)
        env = self._env(prior, prior.windows(prior.transformed(self.tracks), ends))
        start, train, valid = 0, [], []
        for at, (some, last) in zip(ends, parts, strict=True):
            train += [start + i for i in some]
            valid += [start + i for i in last]
            start += len(at)
        known = env.windows.known
        rows = [torch.tensor([i for i in part if known[i]], dtype=torch.long) for part in (train, valid)]
        if len(rows[1]) > MOST_VALID:
            rows[1] = rows[1][torch.linspace(0, len(rows[1]) - 1, MOST_VALID).long()]
        return Stage(env, rows[0], rows[1]) if len(rows[0]) else None

    def _env(self, prior: Prior, windows: Windows) -> Series:
        return Series(windows, prior.bins, self.schema.sizes, self.schema.static_sizes, prior.paths)

    # forecasting ----------------------------------------------------------------------------------------------------

    def predict(self, frame: pd.DataFrame | None = None, until: Any = None) -> pd.DataFrame:
        """A row per series and step: unique_id, ds, stochflow (the median), stochflow-lo-80, stochflow-hi-80, ...

        Forecasts follow the last row of each series: of what was fitted, or of `frame` up to `until`.
        """
        tracks, stamps = self._past(frame, until)
        drawn = self.pool(self.draw(tracks, [[len(t.y)] for t in tracks]))
        return self.table([t.name for t in tracks], self.ahead(tracks, stamps), drawn)

    def ahead(self, tracks: list[Track], stamps: list[list[Any]]) -> list[list[Any]]:
        """Stamps of the steps after the last row of each track: the user's own where he gave them."""
        horizon = self.settings.horizon
        made = [
            list(t.later[:horizon]) if len(t.later) >= horizon else self.schema.after(s[-1], horizon)
            for t, s in zip(tracks, stamps, strict=True)
        ]
        return [self.schema.shown(x) for x in made]

    def sample(self, frame: pd.DataFrame | None = None, until: Any = None) -> np.ndarray:
        """[series, samples, horizon]: the futures that `predict` summarises."""
        tracks, _ = self._past(frame, until)
        return self.pool(self.draw(tracks, [[len(t.y)] for t in tracks]))

    def backtest(
        self, frame: pd.DataFrame, origins: int | None = None, step: int | None = None, refit: bool | None = None
    ) -> Backtest:
        """Forecasts from `origins` rolling origins, `step` rows apart (a horizon by default), the last of them a horizon before the end.

        A copy of this forecaster is fitted on what came before the first origin, or with `refit` before each; a forecast sees everything
        up to its own.
        """
        return backtest(self, frame, origins, step, refit)

    def cross_validation(
        self, frame: pd.DataFrame, n_windows: int | None = None, step_size: int | None = None, refit: bool = True
    ) -> pd.DataFrame:
        """The table of `backtest`: unique_id, ds, cutoff, y, stochflow, stochflow-lo-80, ..."""
        return self.backtest(frame, n_windows, step_size, refit).table

    def draw(self, tracks: list[Track], ends: list[list[int]]) -> np.ndarray:
        """[S, windows, samples / S, horizon] futures of the windows that end before rows `ends` of each track.

        The same seed gives the same futures, and the random stream outside is left as it was. Where no network is used, S is 1.
        """
        fitted = self._need()
        for track, at in zip(tracks, ends, strict=True):
            if min(at) < 2 or not np.isfinite(track.y[: min(at)]).any():
                raise UserError(f"series {track.name!r} has {min(at)} rows before its forecast: give more")
        changed = self.prior.transformed(tracks)
        with one_thread():
            env = self._env(self.prior, self.prior.windows(changed, [np.array(at) for at in ends]))
            made = self._prior_draws(env) if fitted.share == 0 else self._network_draws(env)
        start = 0
        for track, at in zip(tracks, ends, strict=True):
            here = slice(start, start + len(at))
            seeds, windows, each, horizon = made[:, here].shape
            flat = made[:, here].swapaxes(0, 1).reshape(windows, seeds * each, horizon)
            flat = within(self.prior.restored(track, np.array(at), flat), self.limits.get(track.name, self.limits[""]))
            made[:, here] = flat.reshape(windows, seeds, each, horizon).swapaxes(0, 1)
            start += len(at)
        return made

    def _prior_draws(self, env: Series) -> np.ndarray:
        """[1, windows, samples, horizon] transformed futures of the statistical law."""
        s, w = self.settings, env.windows
        with torch.random.fork_rng([]), torch.no_grad():
            torch.manual_seed(s.seed + 1)
            chosen = sample_paths(self.prior.paths, env.bins, s.samples, w.series, w.origin)
            values = env.unscale(
                env.bins.draw(chosen.float()), torch.arange(len(w.scale)).unsqueeze(1).expand(chosen.shape[:2])
            )
        return values.unsqueeze(0).numpy()

    def _network_draws(self, env: Series) -> np.ndarray:
        s, fitted = self.settings, self._need()
        trained = fitted.task.env
        assert isinstance(trained, Series)
        policy = fitted.policy
        each = -(-s.samples // s.seeds)
        rows = torch.arange(len(env.windows.scale), device=self.device)
        task = fitted.task._replace(env=env)
        made = []
        devices = [self.device] if self.device.type == "cuda" else []
        attach(policy, env)
        try:
            with torch.random.fork_rng(devices), torch.no_grad(), remembering(policy, len(rows)):
                torch.manual_seed(s.seed + 1)
                for part in rows.split(max(1, TOGETHER // each)):
                    chosen = part.repeat_interleave(each).expand(s.seeds, -1)
                    final = rollout(task, policy, chosen.shape[1], row=chosen).states[-1].cpu()
                    values = env.unscale(env.values(final, draw=True), final[..., 0])
                    made.append(values.view(s.seeds, len(part), each, s.horizon))
        finally:
            attach(policy, trained)
        return torch.cat(made, 1).numpy()

    def pool(self, drawn: np.ndarray) -> np.ndarray:
        """[windows, samples, horizon]: the seeds' futures taken in turn."""
        seeds, windows, each, horizon = drawn.shape
        return drawn.transpose(1, 2, 0, 3).reshape(windows, each * seeds, horizon)[:, : self.settings.samples]

    def table(self, names: list[str], stamps: list[list[Any]], drawn: np.ndarray) -> pd.DataFrame:
        """The long frame of medians and intervals of futures [windows, samples, horizon]."""
        pandas = need_pandas()
        s, horizon = self.settings, drawn.shape[2]
        made = pandas.DataFrame(
            {
                s.id_col: np.repeat(np.array(names, dtype=object), horizon),
                s.time_col: [t for part in stamps for t in part],
            }
        )
        made[NAME] = np.median(drawn, axis=1).reshape(-1)
        for level in s.levels:
            low, high = np.quantile(drawn, [0.5 - level / 200, 0.5 + level / 200], axis=1)
            made[f"{NAME}-lo-{level}"] = low.reshape(-1)
            made[f"{NAME}-hi-{level}"] = high.reshape(-1)
        return made

    def measure(self, drawn: np.ndarray, truth: np.ndarray, names: list[str]) -> dict[str, Any]:
        """Figures of futures [windows, samples, horizon] of named series, errors scaled by what this forecaster was fitted on."""
        past = {t.name: t.y for t in self.tracks}
        found = report.measure(drawn, truth, names, past, self.schema.season)
        return {**found, "windows": len(truth), "forecasts": int(np.isfinite(truth).sum())}

    def tilt(
        self,
        score: Score,
        beta: float,
        series: str | None = None,
        *,
        frame: pd.DataFrame | None = None,
        until: Any = None,
        samples: int = 1000,
        steps: int = 100,
    ) -> Tilted:
        """Futures of one series in proportion to P(future) exp(beta score(future)), P being this forecaster.

        `score` takes futures [n, horizon] in the series' own units and returns [n] numbers. `steps`: training iterations of a stage.
        """
        from stochflow.forecast import tilted

        return tilted.tilt(tilted.Session(self, score, series, frame, until), beta, samples, steps)

    def probability(
        self,
        score: Score,
        at_least: float,
        series: str | None = None,
        *,
        frame: pd.DataFrame | None = None,
        until: Any = None,
        draws: int = 20_000,
        steps: int = 100,
    ) -> Probability:
        """P(score(future) >= at_least) under this forecaster, with an interval, however rare it is."""
        from stochflow.forecast import tilted

        return tilted.probability(tilted.Session(self, score, series, frame, until), at_least, draws, steps)[0]

    def save(self, folder: str | Path) -> Path:
        """Write `model.safetensors` and `model.json` into a folder; nothing is pickled."""
        from stochflow.forecast import saved

        return saved.save(self, folder)

    @classmethod
    def load(cls, folder: str | Path) -> Forecaster:
        """The forecaster that `save` wrote."""
        from stochflow.forecast import saved

        return saved.load(folder, cls)

    def _past(self, frame: pd.DataFrame | None, until: Any) -> tuple[list[Track], list[list[Any]]]:
        self._need()
        tracks, stamps = self.tracks, self.stamps
        if frame is not None:
            s = self.settings
            _, tracks, stamps = read(frame, s.freq, s.gaps, s.season, until, self.schema, self._columns())
        elif until is not None:
            raise UserError("`until` cuts a frame, but none was given: predict(frame, until=...)")
        self.check_ahead(tracks)
        return tracks, stamps

    def check_ahead(self, tracks: Sequence[Track]) -> None:
        """UserError where a column that is known in advance is not known for every step to forecast."""
        horizon, columns = self.settings.horizon, self.settings.future
        for t in tracks:
            if columns and len(t.later) < horizon:
                raise UserError(
                    f"series {t.name!r} has {len(t.later)} rows after its last value, but {', '.join(columns)} must be known for {horizon} steps: "
                    "add rows with them and without a value"
                )

    def _need(self) -> Fitted:
        if self.fitted is None:
            raise UserError("this forecaster has learned nothing yet: call fit(frame) first")
        return self.fitted


def _device(word: str) -> torch.device:
    if word == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda was asked for, but torch sees no CUDA device: use --device cpu")
    return torch.device("cuda" if word == "cuda" or (word == "auto" and torch.cuda.is_available()) else "cpu")
