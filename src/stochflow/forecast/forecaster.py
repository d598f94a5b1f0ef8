"""Forecasts as samples from a flow network: fit on a long frame, predict, back-test.

>>> from stochflow.forecast import Forecaster, shipped
>>> Forecaster(horizon=12, freq="MS").fit(shipped("co2")).predict()

The mathematics and what each mode converges to are in docs/forecasting.md.
"""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from stochflow import __version__
from stochflow.errors import UserError, did_you_mean
from stochflow.forecast import report
from stochflow.forecast.config import FLAGS, Forecast
from stochflow.forecast.frame import ID, SHIPPED, STAMP, VALUE, need_pandas, read, read_csv, shipped
from stochflow.forecast.training import Fitted, Look, Watch, fit, split
from stochflow.learn import objectives
from stochflow.learn.objectives import Form
from stochflow.learn.rollout import rollout
from stochflow.nets.windows import WindowEncoder, remembering
from stochflow.worlds.series import FAR, LOCATIONS, Bins, Cut, Series, Track, Windows

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Backtest", "Forecast", "Forecasted", "Forecaster", "forecast_command", "shipped"]

log = logging.getLogger("stochflow")

NAME = "stochflow"  # the column of point forecasts
HELD_OUT = 0.15  # of the training windows, the last ones, to find out how long to train
OVERFLOW = 0.995  # share of the training targets that lie within the bins' ends (a tenth further out)
TOGETHER = 20_000  # futures drawn at once
MANY = 5  # series from which on whole ones may validate, where each alone is too short for it
UNTESTED = 100  # most iterations where nothing validates: longer, networks learn few windows by heart


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

    # learning -------------------------------------------------------------------------------------------------------

    def fit(self, frame: pd.DataFrame, until: Any = None) -> Forecaster:
        """Learn from the rows up to the stamp `until` (all of them by default); later rows are never looked at."""
        s = self.settings
        self.schema, tracks, self.stamps = read(frame, s.freq, s.gaps, s.season, until)
        self.tracks = tracks
        self.window = self._length(self.schema.season)
        for track in tracks:
            if len(track.y) < self.window + s.horizon:
                raise UserError(self._too_short(track, self.window))
        self.cut, windows, train, valid = self._windows(tracks)
        whole = not len(valid) and len(tracks) >= MANY
        if whole:
            train, valid = self._whole_series(tracks, train)
        if not len(valid) and s.steps > UNTESTED:
            s = dataclasses.replace(s, steps=UNTESTED)
            log.warning(
                "only %d windows to train on, too few to hold any out and find how long to train: stopping after %d iterations, "
                "and intervals may be too narrow",
                len(train),
                UNTESTED,
            )
        known = windows.target[torch.cat([train, valid])]
        limit = 1.1 * float(known.abs().flatten().quantile(OVERFLOW)) if known.numel() < 2**24 else 4.0
        env = self._env(windows, Bins(s.bins, min(max(limit, 1e-3), FAR)))
        log.info("training on %d windows of %d series, %d windows validating", len(train), len(tracks), len(valid))
        self.fitted = fit(env, s, train, valid, self.device, self.form, whole, self.watch)
        log.info("trained for %d iterations, temperature %g", self.fitted.steps, self.fitted.temperature)
        return self

    def _length(self, season: int) -> int:
        """Steps of a window."""
        s = self.settings
        return s.window or max(2 * season + min(season, 12), 2 * s.horizon, 8)

    def _too_short(self, track: Track, window: int) -> str:
        horizon = self.settings.horizon
        return (
            f"series {track.name!r} has {len(track.y)} rows, but a window of {window} and a horizon of {horizon} need "
            f"{window + horizon}: shorten --window or --horizon, or leave the series out"
        )

    def _windows(self, tracks: list[Track]) -> tuple[Cut, Windows, torch.Tensor, torch.Tensor]:
        """Training windows around the location that came closest in them, and which of them validate."""
        s = self.settings
        kinds = LOCATIONS if s.location == "auto" else (s.location,)
        made: dict[str, tuple[float, Cut, Windows]] = {}
        for kind in kinds:
            cut = Cut(self.window, s.horizon, float(self.schema.season), kind, self.schema.periods)
            windows = cut(tracks, [cut.origins(t, s.stride) for t in tracks])
            made[kind] = (_closeness(windows, tracks, cut, s.stride), cut, windows)
        _, cut, windows = min(made.values(), key=lambda m: m[0])
        train: list[int] = []
        valid: list[int] = []
        start = 0
        for track in tracks:
            ends = cut.origins(track, s.stride)
            some, last = split(ends.tolist(), HELD_OUT, s.horizon, s.stride)
            train += [start + i for i in some]
            valid += [start + i for i in last]
            start += len(ends)
        usable = windows.known
        rows = [torch.tensor([i for i in part if usable[i]], dtype=torch.long) for part in (train, valid)]
        if not len(rows[0]):
            raise UserError(
                f"no window of {self.window} steps has a whole horizon of {s.horizon} known values behind it: fill gaps, or shorten both"
            )
        return cut, windows, rows[0], rows[1]

    def _whole_series(self, tracks: list[Track], rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Windows of most series, and those of a few evenly chosen ones to validate."""
        count = [len(self.cut.origins(t, self.settings.stride)) for t in tracks]
        owner = torch.repeat_interleave(torch.arange(len(tracks)), torch.tensor(count))[rows]
        have = owner.unique()
        held = max(1, round(HELD_OUT * len(have)))
        if len(have) < MANY:
            return rows, rows[:0]
        chosen = have[torch.arange(held) * len(have) // held + len(have) // (2 * held)]
        last = torch.isin(owner, chosen)
        return rows[~last], rows[last]

    def _env(self, windows: Windows, bins: Bins) -> Series:
        return Series(windows, bins, self.schema.sizes, self.schema.static_sizes)

    # forecasting ----------------------------------------------------------------------------------------------------

    def predict(self, frame: pd.DataFrame | None = None, until: Any = None) -> pd.DataFrame:
        """A row a series and step: unique_id, ds, stochflow (the median), stochflow-lo-80, stochflow-hi-80, ...

        Forecasts follow the last row of each series: of what was fitted, or of `frame` up to `until`.
        """
        tracks, stamps = self._past(frame, until)
        drawn = self.pool(self.draw(tracks, [[len(t.y)] for t in tracks]))
        later = [self.schema.after(s[-1], self.settings.horizon) for s in stamps]
        return self.table([t.name for t in tracks], later, drawn)

    def sample(self, frame: pd.DataFrame | None = None, until: Any = None) -> np.ndarray:
        """[series, samples, horizon]: the futures that `predict` summarises."""
        tracks, _ = self._past(frame, until)
        return self.pool(self.draw(tracks, [[len(t.y)] for t in tracks]))

    def backtest(self, frame: pd.DataFrame, origins: int | None = None, step: int | None = None) -> Backtest:
        """Forecasts from `origins` rolling origins, `step` rows apart (a horizon by default), the last of them a horizon before the end.

        A copy of this forecaster is fitted once, on what came before the first origin; each forecast sees everything up to its own.
        """
        s = self.settings
        count = s.origins if origins is None else origins
        apart = s.horizon if step is None else step
        if count < 1 or apart < 1:
            raise UserError(f"{count} origins {apart} rows apart test nothing: give at least one of each")
        schema, tracks, stamps = read(frame, s.freq, s.gaps, s.season)
        window = self._length(schema.season)
        need = window + s.horizon
        ends, limits = [], []
        for track, when in zip(tracks, stamps, strict=True):
            last = len(track.y) - s.horizon
            at = [last - apart * i for i in reversed(range(count))]
            if len(track.y) < need:
                raise UserError(self._too_short(track, window))
            if at[0] < need:
                raise UserError(
                    f"series {track.name!r} has {len(track.y)} rows, of which {max(at[0], 0)} come before the first of {count} origins "
                    f"{apart} rows apart, but a window of {window} and a horizon of {s.horizon} need {need} there: lower --origins "
                    "(0: no back-test), or shorten --window or --horizon"
                )
            ends.append(at)
            limits.append(when[at[0] - 1])
        begin = min(limits)
        first = tracks[limits.index(begin)].name
        for track, when in zip(tracks, stamps, strict=True):
            before = sum(stamp <= begin for stamp in when)
            if before < need:
                raise UserError(
                    f"series {track.name!r} has {before} rows up to {begin}, the first origin of series {first!r} and the end of what the "
                    f"back-test learns from, but needs {need}: forecast it by itself, or give up the back-test with --origins 0"
                )
        log.info("back-test: %d origins, learning from what came up to %s", count, begin)
        when_shown = str(begin).removesuffix(" 00:00:00")  # a day needs no midnight

        def watch(look: Look) -> None:
            self.watch(look._replace(stage=f"back-test after {when_shown}: {look.stage}"))

        earlier = Forecaster(s, self.form, watch).fit(frame, until=begin)
        drawn = earlier.draw(read(frame, s.freq, s.gaps, s.season, schema=earlier.schema)[1], ends)
        names = [t.name for t, at in zip(tracks, ends, strict=True) for _ in at]
        later = [when[e : e + s.horizon] for when, at in zip(stamps, ends, strict=True) for e in at]
        cutoffs = [when[e - 1] for when, at in zip(stamps, ends, strict=True) for e in at]
        truth = np.stack([t.y[e : e + s.horizon] for t, at in zip(tracks, ends, strict=True) for e in at])
        table = earlier.table(names, later, self.pool(drawn))
        table.insert(2, "cutoff", np.repeat(np.array(cutoffs, dtype=object), s.horizon))
        table["cutoff"] = table["cutoff"].infer_objects()
        table.insert(3, VALUE, truth.reshape(-1))
        return Backtest(table, drawn, truth, earlier)

    def draw(self, tracks: list[Track], ends: list[list[int]]) -> np.ndarray:
        """[S, windows, samples / S, horizon] futures of the windows that end before rows `ends` of each track.

        The same seed gives the same futures, and the random stream outside is left as it was.
        """
        s, fitted = self.settings, self._need()
        for track, at in zip(tracks, ends, strict=True):
            if min(at) < self.window:
                raise UserError(
                    f"series {track.name!r} has {min(at)} rows before its forecast, but a window of {self.window} is needed: give more"
                )
        trained = fitted.task.env
        assert isinstance(trained, Series)
        env = self._env(self.cut(tracks, [np.array(at) for at in ends]), trained.bins)
        encoder = fitted.policy.encoder
        assert isinstance(encoder, WindowEncoder)
        each = -(-s.samples // s.seeds)
        rows = torch.arange(len(env.windows.scale), device=self.device)
        task = fitted.task._replace(env=env)
        made = []
        devices = [self.device] if self.device.type == "cuda" else []
        encoder.attach(env)
        try:
            with torch.random.fork_rng(devices), torch.no_grad(), remembering(fitted.policy, len(rows)):
                torch.manual_seed(s.seed + 1)
                for part in rows.split(max(1, TOGETHER // each)):
                    chosen = part.repeat_interleave(each).expand(s.seeds, -1)
                    final = rollout(task, fitted.policy, chosen.shape[1], row=chosen).states[-1].cpu()
                    values = env.windows.unscale(env.values(final, draw=True), final[..., 0])
                    made.append(values.view(s.seeds, len(part), each, s.horizon))
        finally:
            encoder.attach(trained)
        return torch.cat(made, 1).numpy()

    def pool(self, drawn: np.ndarray) -> np.ndarray:
        """[windows, samples, horizon]: the seeds' futures taken in turn."""
        seeds, windows, each, horizon = drawn.shape
        return drawn.transpose(1, 2, 0, 3).reshape(windows, each * seeds, horizon)[:, : self.settings.samples]

    def table(self, names: list[str], stamps: list[list[Any]], drawn: np.ndarray) -> pd.DataFrame:
        """The long frame of medians and intervals of futures [windows, samples, horizon]."""
        pandas = need_pandas()
        horizon = drawn.shape[2]
        made = pandas.DataFrame(
            {ID: np.repeat(np.array(names, dtype=object), horizon), STAMP: [t for part in stamps for t in part]}
        )
        made[NAME] = np.median(drawn, axis=1).reshape(-1)
        for level in self.settings.levels:
            low, high = np.quantile(drawn, [0.5 - level / 200, 0.5 + level / 200], axis=1)
            made[f"{NAME}-lo-{level}"] = low.reshape(-1)
            made[f"{NAME}-hi-{level}"] = high.reshape(-1)
        return made

    def measure(self, drawn: np.ndarray, truth: np.ndarray, names: list[str]) -> dict[str, Any]:
        """Figures of futures [windows, samples, horizon] of named series, errors scaled by what this forecaster was fitted on."""
        pandas = need_pandas()
        past = pandas.DataFrame({ID: np.repeat([t.name for t in self.tracks], [len(t.y) for t in self.tracks])})
        past[STAMP] = np.concatenate([np.arange(len(t.y)) for t in self.tracks])
        past[VALUE] = np.concatenate([t.y for t in self.tracks])
        found = report.measure(drawn, truth, names, past, self.schema.season)
        return {**found, "windows": len(truth), "forecasts": int(np.isfinite(truth).sum())}

    def _past(self, frame: pd.DataFrame | None, until: Any) -> tuple[list[Track], list[list[Any]]]:
        self._need()
        if frame is None:
            if until is not None:
                raise UserError("`until` cuts a frame, but none was given: predict(frame, until=...)")
            return self.tracks, self.stamps
        s = self.settings
        _, tracks, stamps = read(frame, s.freq, s.gaps, s.season, until, self.schema)
        return tracks, stamps

    def _need(self) -> Fitted:
        if self.fitted is None:
            raise UserError("this forecaster has learned nothing yet: call fit(frame) first")
        return self.fitted


class Backtest(NamedTuple):
    """Forecasts from rolling origins, beside what happened."""

    table: pd.DataFrame  # unique_id, ds, cutoff, y, stochflow, stochflow-lo-80, ...
    drawn: np.ndarray  # [S, windows, samples / S, horizon]
    truth: np.ndarray  # [windows, horizon]
    forecaster: Forecaster  # what was fitted before the first origin

    def measure(self) -> dict[str, Any]:
        """MASE, CRPS, pinball loss and 80 % coverage of the pooled futures."""
        return self.forecaster.measure(
            self.forecaster.pool(self.drawn), self.truth, list(self.table[ID][:: self.truth.shape[1]])
        )


def _closeness(windows: Windows, tracks: list[Track], cut: Cut, stride: int) -> float:
    """Mean absolute error of the location itself over the training windows, in units of each series' own spread."""
    spread = np.concatenate([np.full(len(cut.origins(t, stride)), np.nanstd(t.y) or 1.0) for t in tracks])
    off = (windows.target.double().abs() * windows.scale.unsqueeze(1)).mean(1).numpy() / spread
    known = windows.known.numpy()
    return float(off[known].mean()) if known.any() else float("inf")


def _device(word: str) -> torch.device:
    if word == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda was asked for, but torch sees no CUDA device: use --device cpu")
    return torch.device("cuda" if word == "cuda" or (word == "auto" and torch.cuda.is_available()) else "cpu")


# the command --------------------------------------------------------------------------------------------------------


class Forecasted(NamedTuple):
    """What `forecast_command` leaves: its folder, the figures of the back-test, the forecasts, the files in the folder."""

    path: Path
    metrics: dict[str, Any]
    table: pd.DataFrame
    files: list[Path]

    @property
    def summary(self) -> str:
        """The figures and the first forecasts, in a few lines."""
        return report.summary(self.metrics, self.table)


def forecast_command(
    settings: Forecast, data: str | Path | None = None, out: str | Path = "forecast", watch: Watch | None = None
) -> Forecasted:
    """Read, back-test over rolling origins, train on everything, forecast, and write the folder: all of it or nothing.

    `data` is a CSV file, the name of a shipped series, or None for the monthly CO2 at Mauna Loa. `watch` is called as training goes on.
    """
    settings.check()
    target = Path(out)
    word = "co2" if data is None else str(data)
    frame = shipped(word) if word in SHIPPED and not Path(word).exists() else read_csv(word)
    if settings.origins:
        report.need_metrics()
    with report.whole_folder(target) as folder:  # refuses a folder in use before anything is trained
        forecaster = Forecaster(settings, watch=watch)
        metrics: dict[str, Any] = {}
        if settings.origins:
            tested = forecaster.backtest(frame)
            tested.table.to_csv(folder / "backtest.csv", index=False)
            metrics = tested.measure()
        forecaster.fit(frame)
        table = forecaster.predict()
        table.to_csv(folder / "forecasts.csv", index=False)
        np.save(folder / "samples.npy", forecaster.sample(), allow_pickle=False)
        history = {t.name: (when, t.y) for t, when in zip(forecaster.tracks, forecaster.stamps, strict=True)}
        report.fan_chart(
            folder / "fan.png", history, table, settings.levels, max(6 * settings.horizon, forecaster.window)
        )
        report.write_json(folder / "metrics.json", metrics)
        fitted = forecaster._need()
        told = {
            "data": word,
            "window": forecaster.window,
            "season": forecaster.schema.season,
            "location": forecaster.cut.location,
        }
        told |= {"steps": fitted.steps, "temperature": fitted.temperature, "version": __version__}
        report.write_json(folder / "config.json", {"forecast": dataclasses.asdict(settings), "chosen": told})
    return Forecasted(target, metrics, table, sorted(target.iterdir()))
