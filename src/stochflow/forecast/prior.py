"""The law of a panel's errors as whole paths, from which networks start and to which forecasts fall back.

    P residual paths    H steps    J widths    K = P J components    M bins
Residual paths are standardised by the spread of each step, and whitened: z = factor^-1 r has uncorrelated steps. The law of z is a mixture of
Gaussian kernels around shrunken paths, a z_i + b c_j noise, with a^2 + b^2 E c^2 = 1, so that it keeps the paths' variance; whitening gives the
noise the paths' correlation too. The width b and the share of wide kernels are those under which paths that were left out are likeliest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.special import logsumexp, ndtr

from stochflow.forecast import covariates, location
from stochflow.forecast.location import Ensemble, Plan, backward, forward
from stochflow.forecast.scales import TRIALS, Residuals
from stochflow.worlds.paths import Paths
from stochflow.worlds.series import Bins, Cut, Located, Track, Windows

MOST_PATHS = 160
WIDTHS = (0.3, 0.45, 0.6, 0.75, 0.88, 0.97)
WIDE = 2.2  # times as wide: the kernels of the tails
SHARES = (0.0, 0.01, 0.05, 0.15)
MOST_LOG = 1.5  # spread of errors of logarithms from which they are no use: intervals would span factors of 50
MOST_GROWN = 3.0  # times that paths about their mean are enlarged
SCORED = 160  # left-out paths that choose the width
EVIDENCE = 2.0  # of the log-likelihood of independent paths, for kernels that are not nearly normal and for tails


def correlation(paths: np.ndarray, effective: float) -> np.ndarray:
    """[H, H], the sample's (about zero) held towards that of errors in which a share of every shock stays."""
    horizon = paths.shape[1]
    target = min((_staying(horizon, a) for a in TRIALS), key=lambda c: float(np.square(c - _sample(paths)).sum()))
    share = effective / (effective + 0.5 * horizon + 2.0)
    return share * _sample(paths) + (1 - share) * target


def _sample(paths: np.ndarray) -> np.ndarray:
    if len(paths) < 2:
        return np.eye(paths.shape[1])
    spread = np.sqrt(np.square(paths).mean(0))
    x = paths / np.where(spread > 0, spread, 1.0)
    return np.where(np.eye(paths.shape[1]) > 0, 1.0, x.T @ x / len(x))


def _staying(horizon: int, share: float) -> np.ndarray:
    """The correlation of e_h = shock_h + share * (all earlier shocks)."""
    mix = np.eye(horizon) + share * np.tri(horizon, k=-1)
    cover = mix @ mix.T
    spread = np.sqrt(np.diagonal(cover))
    return cover / spread[:, None] / spread[None]


def factors(residuals: Residuals, shape: np.ndarray) -> np.ndarray:
    """[N + 1, H, H] lower triangular, from innovations to errors in units of a series' scale; the last for series that are new."""
    count, horizon = shape.shape
    paths, series = residuals.path, residuals.series
    effective = sum(np.bincount(series, minlength=count)) / horizon if len(paths) else 0.0
    pooled = correlation(paths, effective) if len(paths) else _staying(horizon, 0.6)
    made = []
    for k in range(count):
        own = paths[series == k]
        share = len(own) / horizon / (len(own) / horizon + 10.0) if count > 1 else 1.0
        cover = (
            pooled if count == 1 or share < 0.2 else share * correlation(own, len(own) / horizon) + (1 - share) * pooled
        )
        made.append(shape[k][:, None] * np.linalg.cholesky(cover + 1e-6 * np.eye(horizon)))
    made.append(np.exp(np.log(shape).mean(0))[:, None] * np.linalg.cholesky(pooled + 1e-6 * np.eye(horizon)))
    return np.stack(made)


def whitened(residuals: Residuals, shape: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """[P, H] innovations of the residual paths, about their mean and as large as they are about zero.

    Few and overlapping paths have a mean by chance, which is neither a forecast nor missing from their spread.
    """
    made = np.empty_like(residuals.path)
    for k in np.unique(residuals.series):
        at = residuals.series == k
        made[at] = np.linalg.solve(factor[k], (residuals.path[at] * shape[k]).T).T
    if len(made) < 2:
        return made
    centred = made - made.mean(0)
    left = np.square(centred).mean(0)
    return centred * np.sqrt(np.square(made).mean(0) / np.where(left > 0, left, 1.0)).clip(max=MOST_GROWN)


def choose(z: np.ndarray, series: np.ndarray, origin: np.ndarray) -> tuple[float, float]:
    """(width, share of wide kernels) under which left-out paths [P, H] are likeliest; overlapping ones are left out with them.

    Where that says little, the law is nearly normal: by luck in the choice, rare events would be several times as likely, or half as likely.
    """
    count, horizon = z.shape
    rows = np.linspace(0, count - 1, min(SCORED, count)).astype(int)
    near = (series[rows][:, None] == series[None]) & (np.abs(origin[rows][:, None] - origin[None]) < horizon)
    if count < 4 or near.all(1).any():
        return WIDTHS[-1], SHARES[2]
    alone = min(len(rows), count / horizon)
    best, chosen = -np.inf, (WIDTHS[-1], SHARES[2])
    for share in SHARES:
        for width in WIDTHS:
            keep, narrow = _shrink(width, share)
            logs = []
            for c in (narrow, narrow * WIDE):
                off = np.zeros((len(rows), count))
                for t in range(horizon):
                    off += np.square((z[rows, t][:, None] - keep * z[None, :, t]) / c)
                logs.append(-0.5 * off - horizon * np.log(c))
            both = np.logaddexp(logs[0] + np.log(1 - share), logs[1] + np.log(share)) if share else logs[0]
            value = float(logsumexp(np.where(near, -np.inf, both), axis=1).mean() - np.log((~near).sum(1)).mean())
            value -= EVIDENCE / alone * ((width < WIDTHS[-1]) + (share > 0))
            if value > best:
                best, chosen = value, (width, share)
    return chosen


def _shrink(width: float, share: float) -> tuple[float, float]:
    """(factor of the paths, spread of the narrow kernels) with unit variance in all; `width` is the root of the kernels' part of it."""
    return float(np.sqrt(1 - width**2)), float(width / np.sqrt(1 - share + share * WIDE**2))


def components(
    residuals: Residuals, z: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, float, float]:
    """(centres [P, H], spreads [J], weights [J], rows of the residuals [P], width, share) of the kernels."""
    if not len(z):
        return np.zeros((1, z.shape[1])), np.array([1.0, WIDE]), np.array([0.95, 0.05]), np.array([0]), 1.0, 0.05
    rows = np.unique(np.linspace(0, len(z) - 1, min(MOST_PATHS, len(z))).round().astype(int))
    width, share = choose(z[rows], residuals.series[rows], residuals.origin[rows])
    keep, narrow = _shrink(width, share)
    if share == 0:
        return keep * z[rows], np.array([narrow]), np.ones(1), rows, width, share
    return keep * z[rows], np.array([narrow, narrow * WIDE]), np.array([1 - share, share]), rows, width, share


def limit(z: np.ndarray) -> float:
    """Where the bins end: a little beyond nearly all innovations."""
    far = float(np.quantile(np.abs(z), 0.9995)) if z.size else 0.0
    return min(max(1.15 * far, 4.5), 12.0)


def tabulate(centres: np.ndarray, spreads: np.ndarray, bins: Bins) -> np.ndarray:
    """[P, J, H, M] probabilities of the bins under each kernel."""
    edges = np.concatenate([[-np.inf], -bins.limit + bins.width * np.arange(bins.count - 1), [np.inf]])
    place = (edges - centres[:, None, :, None]) / spreads[None, :, None, None]
    upper, lower = place[..., 1:], place[..., :-1]
    made = np.where(lower > 0, ndtr(-lower) - ndtr(-upper), ndtr(upper) - ndtr(lower))  # accurate in both tails
    made = np.maximum(made, 1e-12)
    return made / made.sum(-1, keepdims=True)


def make(residuals: Residuals, shape: np.ndarray, bins: Bins | int) -> tuple[Paths, Bins, dict[str, float]]:
    """The law of a panel's futures, the bins it is given in (or how many), and what was chosen."""
    factor = factors(residuals, shape)
    z = whitened(residuals, shape, factor)
    centres, spreads, weights, rows, width, share = components(residuals, z)
    bins = Bins(bins, limit(z)) if isinstance(bins, int) else bins
    table = tabulate(centres, spreads, bins)
    count, widths = table.shape[:2]
    table = table.reshape(count * widths, *table.shape[2:])
    some = len(residuals.series) > 0
    series = residuals.series[rows] if some else np.full(1, -1)
    origin = residuals.origin[rows] if some else np.zeros(1)
    made = Paths(
        torch.from_numpy(np.ascontiguousarray(table.transpose(1, 0, 2))).float(),
        torch.from_numpy(np.log(table).transpose(1, 2, 0).copy()).float(),
        torch.from_numpy(np.log(np.tile(weights, count) / count)).float(),
        torch.from_numpy(np.repeat(series, widths)).long(),
        torch.from_numpy(np.repeat(origin, widths)).long(),
        torch.from_numpy(factor),
    )
    return made, bins, {"kernel_width": width, "wide_share": share, "paths": float(len(rows))}


def sample(paths: Paths, bins: Bins, count: int, series: torch.Tensor, origin: torch.Tensor) -> torch.Tensor:
    """Bins [R, count, L] of futures of windows [R], drawn from the law: a component, and at each step a bin of its own."""
    weight = paths.start(series, origin)
    made = []
    for part in weight.split(max(1, 2_000_000 // (count * len(paths.table)))):
        chosen = torch.multinomial(part.softmax(-1), count, replacement=True)  # [r, count]
        cumulative = paths.table.cumsum(-1)
        coin = torch.rand(*chosen.shape, len(paths.table))
        steps = [
            torch.searchsorted(
                cumulative[t][chosen].reshape(-1, bins.count), coin[..., t].reshape(-1, 1).contiguous()
            ).view(chosen.shape)
            for t in range(len(paths.table))
        ]
        made.append(torch.stack(steps, -1).clamp(max=bins.count - 1))
    return torch.cat(made)


# the whole of it ------------------------------------------------------------------------------------------------------


@dataclass
class Prior:
    """Location and scale of every step, and the law of the errors, of a panel: a forecaster without a network."""

    cut: Cut
    names: tuple[str, ...]
    power: np.ndarray  # [N] of each series' transformation
    ensemble: Ensemble | None  # None: the location is the cut's own
    paths: Paths
    bins: Bins
    chosen: dict[str, float]
    effects: np.ndarray | None = None  # [N, C] of columns that are known in advance

    def number(self, name: str) -> int:
        return self._place.get(name, len(self.names))

    def __post_init__(self) -> None:
        self._place = {name: i for i, name in enumerate(self.names)}

    def power_of(self, name: str) -> float:
        k = self.number(name)
        return float(self.power[k]) if k < len(self.names) else float(np.median(self.power))

    def transformed(self, tracks: Sequence[Track]) -> list[Track]:
        """Tracks in the units in which everything is learned."""
        made = [t._replace(y=forward(t.y, self.power_of(t.name))) for t in tracks]
        return made if self.effects is None else [t._replace(y=t.y - self.effect(t)[: len(t.y)]) for t in made]

    def effect(self, track: Track) -> np.ndarray:
        """[n + horizon] what columns that are known in advance add to a track's rows, and to the steps after them."""
        rows = len(track.y) + self.cut.horizon
        k = self.number(track.name)
        if self.effects is None or not len(self.effects):
            return np.zeros(rows)
        return covariates.effect(track, self.effects[k] if k < len(self.names) else self.effects.mean(0), rows)

    def restored(self, track: Track, ends: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Transformed futures [windows, samples, H] of a track from rows `ends`, in its own units."""
        added = self.effect(track)[np.asarray(ends)[:, None] + np.arange(self.cut.horizon)]
        return backward(values + added[:, None], self.power_of(track.name))

    def windows(self, tracks: Sequence[Track], ends: Sequence[np.ndarray]) -> Windows:
        """Windows of transformed tracks, targets as innovations."""
        return self.cut(tracks, ends, self.locate(tracks, ends))

    def locate(self, tracks: Sequence[Track], ends: Sequence[np.ndarray]) -> Located:
        factor = self.paths.factor.numpy()
        if self.ensemble is not None:
            return Located(*self.ensemble.locate(tracks, ends), factor)
        plain = self.cut(tracks, ends)
        who = np.repeat([self.number(t.name) for t in tracks], [len(at) for at in ends])
        return Located(plain.location.numpy(), plain.scale.numpy(), who, factor)


def _changed(tracks: Sequence[Track], power: np.ndarray, plan: Plan) -> tuple[list[Track], np.ndarray | None]:
    """(transformed tracks without the effects of columns known in advance, those effects [N, C])."""
    changed = [t._replace(y=forward(t.y, p)) for t, p in zip(tracks, power, strict=True)]
    if not all(t.known is not None and t.known.size for t in tracks):
        return changed, None
    effects = covariates.fit(changed, plan.pair[0])
    bare = [t._replace(y=t.y - covariates.effect(t, b, len(t.y))) for t, b in zip(changed, effects, strict=True)]
    return bare, effects


def learn(tracks: Sequence[Track], cut: Cut, plan: Plan, bins: Bins | int, ensemble: bool = True) -> Prior:
    """Fit on whole tracks (untransformed); without `ensemble`, forecasts are centred where the cut says."""
    names = tuple(t.name for t in tracks)
    power = location.powers(tracks, plan)
    changed, effects = _changed(tracks, power, plan)
    if ensemble:
        found, residuals = location.fit(changed, power, plan)
        lost = (power == 0.0) & (found.unit * found.shape.max(1) > MOST_LOG) & (plan.log is None)
        if lost.any():
            power = np.where(lost, 0.5, power)
            changed, effects = _changed(tracks, power, plan)
            found, residuals = location.fit(changed, power, plan)
        paths, made, chosen = make(residuals, found.shape, bins)
        return Prior(cut, names, power, found, paths, made, chosen, effects)
    ends = [cut.origins(t, first=plan.warm(len(t.y))) for t in changed]
    windows = cut(changed, ends)
    good = windows.known.numpy()
    path, series, origin = (x.numpy()[good] for x in (windows.target.double(), windows.series, windows.origin))
    size = np.sqrt(np.square(path).mean(0)) if len(path) else np.ones(plan.horizon)
    shape = np.tile(np.maximum(size, 1e-3), (len(tracks), 1))
    paths, made, chosen = make(Residuals(path / shape[0], series, origin), shape, bins)
    return Prior(cut, names, power, None, paths, made, chosen, effects)
