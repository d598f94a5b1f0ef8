"""Back-tests: forecasts from rolling origins beside what happened, what they are measured by, and rivals on the same origins."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from stochflow.errors import UserError
from stochflow.forecast import report, rivals
from stochflow.forecast.calibration import joint
from stochflow.forecast.frame import read
from stochflow.forecast.training import LEAST_WINDOWS, Look
from stochflow.worlds.series import Track

if TYPE_CHECKING:
    import pandas as pd

    from stochflow.forecast.forecaster import Forecaster

log = logging.getLogger("stochflow")

CHEAP = 20_000  # windows that are learned from anew at every origin


def backtest(
    forecaster: Forecaster, frame: pd.DataFrame, origins: int | None, step: int | None, refit: bool | None
) -> Backtest:
    """See `Forecaster.backtest`."""
    s = forecaster.settings
    count = s.origins if origins is None else origins
    apart = s.horizon if step is None else step
    if count < 1 or apart < 1:
        raise UserError(f"{count} origins {apart} rows apart test nothing: give at least one of each")
    _, tracks, stamps = read(frame, s.freq, s.gaps, s.season, columns=forecaster._columns())
    again = _again(forecaster, tracks) if refit is None else refit
    firsts = [len(t.y) - s.horizon - apart * (count - 1) for t in tracks]
    begins = [when[f - 1] for when, f in zip(stamps, firsts, strict=True) if f >= 1]
    begin = min(begins) if begins else stamps[0][0]
    before = [min(max(f, 0), sum(x <= begin for x in when)) for f, when in zip(firsts, stamps, strict=True)]
    tracks, stamps, left = forecaster._long_enough(tracks, stamps, before)
    ends = [[len(t.y) - s.horizon - apart * (count - 1 - i) for i in range(count)] for t in tracks]
    parts: list[tuple[list[list[int]], Any]] = (
        [
            ([[at[i]] for at in ends], min(w[at[i] - 1] for w, at in zip(stamps, ends, strict=True)))
            for i in range(count)
        ]
        if again
        else [(ends, min(w[at[0] - 1] for w, at in zip(stamps, ends, strict=True)))]
    )
    kept = frame if not left else frame[~frame[s.id_col].astype(str).isin(left)] if s.id_col in frame.columns else frame
    made, earlier = [], None
    for at, begin in parts:
        log.info("back-test: %d origins, learning from what came up to %s", len(at[0]), begin)
        fitted = _before(forecaster, kept, begin)
        _, seen, _ = read(kept, s.freq, s.gaps, s.season, schema=fitted.schema, columns=forecaster._columns())
        made.append(fitted.draw(seen, at))
        earlier = earlier or fitted
    assert earlier is not None
    drawn = made[0] if not again else _interleaved(made, len(tracks))
    names = [t.name for t, at in zip(tracks, ends, strict=True) for _ in at]
    later = [earlier.schema.shown(when[e : e + s.horizon]) for when, at in zip(stamps, ends, strict=True) for e in at]
    cutoffs = [earlier.schema.shown([when[e - 1]])[0] for when, at in zip(stamps, ends, strict=True) for e in at]
    truth = np.stack([t.y[e : e + s.horizon] for t, at in zip(tracks, ends, strict=True) for e in at])
    table = earlier.table(names, later, forecaster.pool(drawn))
    table.insert(2, "cutoff", np.repeat(np.array(cutoffs, dtype=object), s.horizon))
    table["cutoff"] = table["cutoff"].infer_objects()
    table.insert(3, s.target_col, truth.reshape(-1))
    return Backtest(table, drawn, truth, earlier, left, tracks, ends)


def _again(forecaster: Forecaster, tracks: Sequence[Track]) -> bool:
    """Whether a back-test learns anew at every origin: by default where no network is tried, because the statistical law is cheap."""
    s = forecaster.settings
    if s.refit != "auto":
        return s.refit == "on"
    plain = s.mode == "nll" and s.noise == "none" and s.network != "on"
    half = forecaster._length(1) // 2
    windows = sum(max(len(t.y) - s.horizon - half, 0) for t in tracks)
    return plain and (windows < LEAST_WINDOWS or (s.network == "off" and windows < CHEAP))


def _before(forecaster: Forecaster, frame: pd.DataFrame, begin: Any) -> Forecaster:
    """A copy of this forecaster, fitted on what came up to a stamp."""
    shown = str(begin).removesuffix(" 00:00:00")  # a day needs no midnight

    def watch(look: Look) -> None:
        forecaster.watch(look._replace(stage=f"back-test after {shown}: {look.stage}"))

    return type(forecaster)(forecaster.settings, forecaster.form, watch).fit(frame, until=begin)


def _interleaved(parts: list[np.ndarray], series: int) -> np.ndarray:
    """Draws of one origin after the other, each [S, series, n, H], as those of all origins of each series."""
    stacked = np.stack([_one_seed(p) for p in parts], 2)  # [1, series, origins, n, H]
    return stacked.reshape(1, series * len(parts), *stacked.shape[3:])


def _one_seed(drawn: np.ndarray) -> np.ndarray:
    """[1, windows, n, H]: futures of the seeds taken in turn, because not every refit uses a network."""
    seeds, windows, each, horizon = drawn.shape
    return drawn.transpose(1, 2, 0, 3).reshape(1, windows, each * seeds, horizon)


class Backtest(NamedTuple):
    """Forecasts from rolling origins, beside what happened."""

    table: pd.DataFrame  # unique_id, ds, cutoff, y, stochflow, stochflow-lo-80, ...
    drawn: np.ndarray  # [S, windows, samples / S, horizon]
    truth: np.ndarray  # [windows, horizon]
    forecaster: Forecaster  # what was fitted before the first origin
    skipped: list[str]  # series with too few values before it
    tracks: list[Track]
    ends: list[list[int]]  # rows before each forecast, of each track

    @property
    def names(self) -> list[str]:
        """The series of each window."""
        return list(self.table[self.forecaster.settings.id_col][:: self.truth.shape[1]])

    @property
    def samples(self) -> np.ndarray:
        """[windows, samples, horizon] pooled futures."""
        return self.forecaster.pool(self.drawn)

    def measure(self) -> dict[str, Any]:
        """MASE, CRPS, pinball loss and 80 % coverage of the pooled futures."""
        return self.forecaster.measure(self.samples, self.truth, self.names)

    def joint(self) -> dict[str, float]:
        """Whether futures hold together: coverage of totals, maxima and differences, correlations, scores of whole paths."""
        scale = {t.name: report.scaled(t.y, 1) for t in self.tracks}
        return joint(self.samples, self.truth, np.array([scale[n] for n in self.names]))

    def against(self, names: Sequence[str]) -> pd.DataFrame:
        """CRPS of rivals beside ours: over all, per series and per step, with intervals of the differences."""
        season, horizon = self.forecaster.schema.season, self.truth.shape[1]
        found = {}
        for name in names:
            made = [
                rivals.forecasts(name, t, e, season, horizon)
                for t, at in zip(self.tracks, self.ends, strict=True)
                for e in at
            ]
            found[name] = rivals.normal_crps(self.truth, *(np.stack(x) for x in zip(*made, strict=True)))
        return rivals.compared(report.crps(self.samples, self.truth), found, self.names)
