"""Forecasts as objects: a state is the number of a window of the past and the bins chosen so far.

Windows, scales and targets stay in tables; the state holds a row number, and the oracle finds its target by it.
    R windows    W steps of a window    L horizon    F real features (the series first)    G categories    K bins
The scale of a window is computed from that window, and its lower bound from all that came before its end, so values
after its end cannot leak into it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import one_hot

from stochflow.errors import UserError
from stochflow.ops import PerDevice
from stochflow.worlds.conditioned import Conditioned
from stochflow.worlds.paths import Paths
from stochflow.worlds.strings import BYTES, Strings

FAR = 20.0  # scaled inputs are clipped here: an outlier must not dominate a network
LEAST_SEEN = 0.25  # share of a window that must be seen for training: less is an outage
FLAT = 0.1  # least scale of a window, in standard deviations of all changes before its end


# bins ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bins:
    """K bins in scaled units: K - 2 of equal width on [-limit, limit], and one beyond each end."""

    count: int = 64
    limit: float = 4.0

    def __post_init__(self) -> None:
        if not 4 <= self.count <= len(BYTES):
            raise UserError(f"{self.count} bins were asked for, but between 4 and {len(BYTES)} can be used")
        if not (math.isfinite(self.limit) and self.limit > 0):
            raise UserError(f"the bins end at {self.limit}, but they need a finite end above 0")

    @property
    def width(self) -> float:
        return 2 * self.limit / (self.count - 2)

    def index(self, value: Tensor) -> Tensor:
        """The bin of each scaled value, [...] int64."""
        return (((value + self.limit) / self.width).floor() + 1).clamp(0, self.count - 1).long()

    def centre(self, index: Tensor) -> Tensor:
        """The value a bin stands for; a bin beyond the end stands half a width beyond it."""
        return (index - 0.5) * self.width - self.limit

    def draw(self, index: Tensor) -> Tensor:
        """A value drawn uniformly from each bin, [...]."""
        return self.centre(index) + (torch.rand(index.shape, device=index.device) - 0.5) * self.width


# windows ------------------------------------------------------------------------------------------------------------


class Track(NamedTuple):
    """One series as numbers: `time` in steps of the frequency (real where stamps are irregular), NaN = missing."""

    name: str
    time: np.ndarray  # [n] float64, increasing
    y: np.ndarray  # [n]
    real: np.ndarray  # [n, F-1] further real features
    categories: np.ndarray  # [n, G] int64, 0 = unknown or missing
    static: np.ndarray  # [Q]
    static_categories: np.ndarray  # [H] int64
    known: np.ndarray | None = None  # [n + k, C] covariates that are known in advance, k rows beyond the last value
    later: tuple[Any, ...] = ()  # stamps of those k rows, as the user gave them


class Windows(NamedTuple):
    """R windows and the values that followed them, scaled."""

    values: Tensor  # [R, W, F] 0 where missing
    seen: Tensor  # [R, W, F] bool
    categories: Tensor  # [R, W, G]
    age: Tensor  # [R, W] steps before the origin, >= 0
    phase: Tensor  # [R, W, P] sines and cosines of the seasons
    static: Tensor  # [R, Q]
    static_categories: Tensor  # [R, H]
    target: Tensor  # [R, L] scaled; 0 where it is not known
    known: Tensor  # [R] bool: all of the target is there, and enough of the window
    location: Tensor  # [R, L] float64, in the series' own units
    scale: Tensor  # [R] float64
    series: Tensor  # [R] number of the series
    origin: Tensor  # [R] row of the series before which the forecast begins

    def unscale(self, value: Tensor, row: Tensor) -> Tensor:
        """Values [..., L] in units of the scale of windows [...] -> in the series' own units, float64."""
        where = row.to(self.scale.device)
        return self.location[where] + self.scale[where].unsqueeze(-1) * value.double()


class Located(NamedTuple):
    """Locations and scales that were found elsewhere, for R windows."""

    location: np.ndarray  # [R, L]
    scale: np.ndarray  # [R]
    series: np.ndarray  # [R]
    factor: np.ndarray  # [N, L, L] lower triangular: targets are innovations z, and errors are scale * factor z


LOCATIONS = ("mean", "last", "seasonal", "shifted")


@dataclass(frozen=True)
class Cut:
    """How windows are cut out of a series, and around which location their future is centred.

    `mean` of the window; its `last` value; the value one `seasonal` period earlier, plus the window's mean change per
    period; or that value `shifted` by the change since one period before the end. The scale is the window's standard
    deviation about its location, and at least a tenth of that of the changes per period over the whole past: a window
    that happens to be flat would make the scale too small for the next steps.
    """

    window: int
    horizon: int
    season: float = 1.0
    location: str = "seasonal"
    periods: tuple[float, ...] = ()  # seasons whose phase a network may see

    def __post_init__(self) -> None:
        if self.horizon < 1:
            raise UserError(f"a horizon of {self.horizon} steps forecasts nothing: give a horizon of at least 1")
        if self.window < 2:
            raise UserError(f"a window of {self.window} steps has no standard deviation: give a window of at least 2")
        if self.location not in LOCATIONS:
            raise UserError(f"there is no location {self.location!r}: take one of {', '.join(LOCATIONS)}")

    def origins(self, track: Track, stride: int = 1, first: int | None = None) -> np.ndarray:
        """Window ends (rows before the first forecast step) with a whole target behind them, the last one included.

        `first`: from which row on; before a whole window the missing rows count as not seen.
        """
        last = len(track.y) - self.horizon
        start = self.window if first is None else first
        return np.arange(last, start - 1, -stride)[::-1]

    def __call__(self, tracks: Sequence[Track], ends: Sequence[np.ndarray], located: Located | None = None) -> Windows:
        """The windows of each series that end at the given rows; targets are read where the series goes on."""
        count = [len(at) for at in ends]
        if not sum(count):
            raise UserError(
                f"no series is long enough for a window of {self.window} steps: shorten --window or give more data"
            )
        starts = np.concatenate([[0], np.cumsum(count)])
        parts = []
        for i, (track, at) in enumerate(zip(tracks, ends, strict=True)):
            if count[i]:
                here = slice(int(starts[i]), int(starts[i + 1]))
                own = None if located is None else located._replace(
                    location=located.location[here], scale=located.scale[here], series=located.series[here]
                )  # fmt: skip
                parts.append(self._of(track, np.asarray(at, dtype=np.int64), i, own))
        columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
        return Windows(*[torch.from_numpy(np.ascontiguousarray(x)) for x in columns])

    def _of(self, track: Track, ends: np.ndarray, number: int, located: Located | None) -> tuple[np.ndarray, ...]:
        """The columns of `Windows` for the windows [R] of one series."""
        width, horizon = self.window, self.horizon

        def past(x: np.ndarray, fill: float) -> np.ndarray:
            """[R, W, ...] rows before each end; before the series there is `fill`."""
            padded = np.concatenate([np.full((width, *x.shape[1:]), fill, dtype=x.dtype), x])
            view = np.lib.stride_tricks.sliding_window_view(padded, width, 0)  # [n + 1, ..., W]
            return np.moveaxis(view[ends], -1, 1)

        y = past(track.y, np.nan)
        have = np.isfinite(y)
        if not have.any(1).all():
            row = int(ends[~have.any(1)][0])
            raise UserError(
                f"series {track.name!r} has no value at all in the {width} steps before row {row}: "
                "lengthen --window or fill it"
            )
        before = track.time[0] - np.arange(width, 0, -1.0)
        every = np.concatenate([before, track.time, track.time[-1] + np.arange(1.0, horizon + 1)])
        time = np.lib.stride_tricks.sliding_window_view(every, width)[ends]
        now = time[:, -1]
        step = np.arange(horizon)
        ahead = every[width + ends[:, None] + step] - now[:, None]
        rows = ends[:, None] + step
        truth = np.where(rows < len(track.y), track.y[rows.clip(max=len(track.y) - 1)], np.nan)

        lag = max(1, round(self.season))
        filled = _filled(y)
        last = filled[:, -1]
        change = np.full_like(y, np.nan)
        if width > lag:
            earlier = filled[:, :-lag]
            change[:, lag:] = y[:, lag:] - np.where(have.cumsum(1)[:, :-lag] > 0, earlier, np.nan)
        some = np.isfinite(change)
        drift = np.where(some, change, 0).sum(1) / some.sum(1).clip(min=1)
        if located is None:
            location, scale = self._about(filled, have, change, last, drift)
            scale = np.maximum(scale, FLAT * self._ever(track.y, ends))
            who = np.full(len(ends), number)
            target = (truth - location) / scale[:, None]
        else:
            location, scale, who = located.location, located.scale, located.series
            whole = np.where(np.isfinite(truth), truth - location, 0) / scale[:, None]
            innovations = np.linalg.solve(located.factor[who[0]], whole.T).T  # a track is one series
            target = np.where(np.all(np.isfinite(truth), axis=1, keepdims=True), innovations, np.nan)
        each = scale[:, None]
        values = np.stack([(y - last[:, None]) / each, (change - drift[:, None]) / each], 2)
        values = np.concatenate([values, _standardised(past(track.real, np.nan))], 2)
        seen = np.isfinite(values)
        values = np.where(seen, values, 0).clip(-FAR, FAR)
        static = np.concatenate(
            [
                self._phases(now),
                ((location - last[:, None]) / each).clip(-FAR, FAR),
                ahead - np.arange(1, horizon + 1),  # 0 unless stamps are irregular
                np.broadcast_to(track.static, (len(ends), len(track.static))),
            ],
            1,
        )
        known = np.isfinite(target).all(1) & (have.sum(1) >= np.minimum(width, np.maximum(ends, 2)) * LEAST_SEEN)
        f32 = np.float32
        return (
            values.astype(f32),
            seen,
            past(track.categories, 0),
            (now[:, None] - time).astype(f32),
            self._phases(time).astype(f32),
            static.astype(f32),
            np.broadcast_to(track.static_categories, (len(ends), len(track.static_categories))),
            np.where(np.isfinite(target), target, 0).astype(f32),
            known,
            location,
            scale,
            who.astype(np.int64),
            ends,
        )

    def _about(
        self, filled: np.ndarray, have: np.ndarray, change: np.ndarray, last: np.ndarray, drift: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Location [R, L] and scale [R] before any training, from the values of the windows that were seen."""
        width, horizon, lag = self.window, self.horizon, max(1, round(self.season))
        some = np.isfinite(change)
        counted = some.sum(1)
        y = np.where(have, filled, np.nan)
        own = np.nanstd(y, 1)
        flat = np.repeat(last[:, None], horizon, 1)
        if self.location == "mean":
            location, scale = np.repeat(np.nanmean(y, 1)[:, None], horizon, 1), own
        elif self.location == "last":
            location, scale = flat, _lagged(filled, have, horizon)
        else:
            step = np.arange(1, horizon + 1)
            periods = -(-step // lag)
            earlier = filled[:, (width - 1 + step - periods * lag).clip(min=0)]
            middle = np.where(some, change, 0)
            spread = np.sqrt(np.where(some, (change - drift[:, None]) ** 2, 0).sum(1) / counted.clip(min=1))
            newest = np.take_along_axis(middle, (width - 1 - some[:, ::-1].argmax(1))[:, None], 1)
            if self.location == "seasonal":
                location, scale = earlier + periods * drift[:, None], spread
            else:
                location, scale = earlier + periods * newest, _lagged(middle, some, horizon)
            few = counted < 2
            location = np.where(few[:, None], flat, location)
            scale = np.where(few, _lagged(filled, have, horizon), scale)
        size = np.nanmax(np.abs(y), 1)
        floor = 1e-6 * np.where(size > 0, size, 1.0) + 1e-2 * own
        return location, np.maximum(scale, floor)

    def _ever(self, y: np.ndarray, ends: np.ndarray) -> np.ndarray:
        """[R] standard deviation of the changes per period, in rows, over all rows before each end."""
        lag = min(max(1, round(self.season)), max(int(ends.min()) - 1, 1))
        change = y[lag:] - y[:-lag]
        seen = np.isfinite(change)
        x = np.where(seen, change, 0)
        x = np.concatenate([np.zeros(lag + 1), x])
        n = np.concatenate([np.zeros(lag + 1), seen]).cumsum().clip(min=1)
        mean = x.cumsum() / n
        return np.sqrt(np.maximum(np.square(x).cumsum() / n - mean**2, 0))[ends]

    def _phases(self, time: np.ndarray) -> np.ndarray:
        """[..., 2 per period]."""
        angles = [2 * np.pi * time / p for p in self.periods]
        return np.stack([f(a) for a in angles for f in (np.sin, np.cos)], -1) if angles else np.zeros((*time.shape, 0))


def _filled(y: np.ndarray) -> np.ndarray:
    """Windows [R, W] with the last value seen in place of missing ones, and the first one before it."""
    have = np.isfinite(y)
    width = y.shape[1]
    first = have.argmax(1)[:, None]
    at = np.maximum(np.maximum.accumulate(np.where(have, np.arange(width), 0), axis=1), first)
    return np.take_along_axis(y, at, 1)


def _lagged(x: np.ndarray, seen: np.ndarray, horizon: int) -> np.ndarray:
    """[R] root mean square change over about half the horizon, as far as the windows [R, W] reach."""
    lag = max(1, min((horizon + 1) // 2, x.shape[1] // 2))
    both = seen[:, lag:] & seen[:, :-lag]
    return np.sqrt(np.where(both, (x[:, lag:] - x[:, :-lag]) ** 2, 0).sum(1) / both.sum(1).clip(min=1))


def _standardised(x: np.ndarray) -> np.ndarray:
    """Each column of windows [R, W, F-1] by the mean and standard deviation of its seen values; NaN stays NaN."""
    seen = np.isfinite(x)
    count = seen.sum(1, keepdims=True).clip(min=1)
    mean = np.where(seen, x, 0).sum(1, keepdims=True) / count
    std = np.sqrt(np.where(seen, (x - mean) ** 2, 0).sum(1, keepdims=True) / count)
    return (x - mean) / np.where(std > 1e-9, std, 1.0)


# environment --------------------------------------------------------------------------------------------------------


class Series(Conditioned):
    """States are [window row | bins so far]; a move appends a bin.

    `sizes` and `static_sizes` say how many values each category takes (0 = unknown included). With `paths`, bins are of
    innovations: a future's errors are their factor times its innovations, so that uncorrelated bins are a correlated path.
    """

    def __init__(
        self,
        windows: Windows,
        bins: Bins,
        sizes: Sequence[int] = (),
        static_sizes: Sequence[int] = (),
        paths: Paths | None = None,
    ):
        self.windows, self.bins, self.paths = windows, bins, paths
        self.sizes, self.static_sizes = tuple(sizes), tuple(static_sizes)
        super().__init__(Strings(BYTES[: bins.count], windows.target.shape[1]), self._dense())
        self._truth = PerDevice(bins.index(windows.target))

    def _dense(self) -> Tensor:
        """All fields of a window as one vector, [R, N], for encoders that use no structure."""
        w = self.windows
        rows = len(w.scale)
        parts = [w.values, w.seen.float(), w.age.unsqueeze(-1) / w.age.shape[1], w.phase]
        parts += [one_hot(w.categories[..., i], n).float() for i, n in enumerate(self.sizes)]
        flat = [torch.cat(parts, -1).flatten(1), w.static]
        flat += [one_hot(w.static_categories[..., i], n).float() for i, n in enumerate(self.static_sizes)]
        return torch.cat([x.reshape(rows, -1) for x in flat], 1)

    def features(self, state: Tensor) -> Tensor:
        """The step (one-hot), the scaled values so far, and the last bin (one-hot): [..., L + L + K]."""
        chosen = state[..., 1:]
        size, k = self.inner.lengths(chosen), self.num_moves  # type: ignore[attr-defined]
        values = torch.where(chosen < k, self.bins.centre(chosen.float()) / self.bins.limit, 0)
        last = chosen.gather(-1, (size - 1).clamp(min=0).unsqueeze(-1)).squeeze(-1)  # K, the padding, at the start
        return torch.cat(
            [one_hot(size, self.horizon + 1)[..., :-1], values, one_hot(last, k + 1)[..., :-1]], -1
        ).float()

    def truth(self, row: Tensor) -> Tensor:
        """The bins that really followed, [..., L]."""
        return self._truth(row.device)[0][row]

    def values(self, state: Tensor, draw: bool = False) -> Tensor:
        """The forecast of finished states in scaled units, [..., L]: bin centres, or values drawn from the bins."""
        chosen = state[..., 1:]
        return self.bins.draw(chosen) if draw else self.bins.centre(chosen.float())

    def unscale(self, value: Tensor, row: Tensor) -> Tensor:
        """Values of bins [..., L] as futures of windows [...] in the series' own units, float64."""
        value = value.double()
        if self.paths is not None:
            which = self.windows.series[row.to(self.windows.series.device)].clamp(max=len(self.paths.factor) - 1)
            made = torch.empty_like(value)
            for k in which.unique().tolist():  # a factor per row would take far more memory than the rows
                here = which == k
                made[here] = value[here] @ self.paths.factor[k].T
            value = made
        return self.windows.unscale(value, row)

    def __repr__(self) -> str:
        return f"Series({len(self.windows.scale)} windows, {self.bins.count} bins, horizon {self.horizon})"


class Nearness:
    """Oracle: minus the mean over the horizon of |v(x_h) - y_h|^power / sigma_h^power, with y the target of the row.

    power 2 is the mean squared error, power 1 the mean absolute one. With `Linear(beta)` this is log R.
    """

    on_device = True

    def __init__(self, env: Series, power: int = 2, sigma: Tensor | None = None):
        if power not in (1, 2):
            raise UserError(f"power = {power}, but forecasts are scored by absolute (1) or squared (2) errors")
        self.env, self.power = env, power
        self.sigma = torch.ones(env.horizon) if sigma is None else sigma.float()
        if not bool((self.sigma > 0).all()):
            raise UserError("every sigma_h must be above 0: errors are measured in units of it")
        self._constants = PerDevice(env.windows.target, self.sigma)

    def __call__(self, state: Tensor) -> Tensor:
        target, sigma = self._constants(state.device)
        off = (self.env.values(state) - target[state[..., 0]]) / sigma
        return -(off.abs() if self.power == 1 else off.square()).mean(-1)
