"""What columns that are known in advance add to a series: a regression of its changes on their changes.

    N series    n rows    C columns
Changes are over a season, so that what repeats by itself is not put down to a column. The effect is taken off before anything else
is learned and added to the futures again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from stochflow.worlds.series import Track

CERTAIN = 2.0  # standard errors from which an effect is kept
HOLD = 0.5  # rows' worth of shrinkage


def fit(tracks: Sequence[Track], season: int) -> np.ndarray:
    """[N, C] effects of a unit of each column, in the units of the tracks given."""
    made = []
    for track in tracks:
        assert track.known is not None
        lag = season if len(track.y) > 2 * season + track.known.shape[1] else 1
        x = np.nan_to_num(track.known[: len(track.y)])
        dx, dy = x[lag:] - x[:-lag], track.y[lag:] - track.y[:-lag]
        good = np.isfinite(dy)
        made.append(_regression(dx[good], dy[good] - dy[good].mean() if good.any() else dy[good]))
    return np.stack(made)


def _regression(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Least squares [C], with columns left out whose effect is not clear."""
    keep = np.flatnonzero((x != 0).any(0)) if len(x) else np.zeros(0, dtype=np.int64)
    made = np.zeros(x.shape[1])
    while len(keep) and len(y) > len(keep) + 3:
        part = x[:, keep]
        gram = part.T @ part + HOLD * np.diag(np.square(part).mean(0))
        inverse = np.linalg.inv(gram)
        b = inverse @ part.T @ y
        left = y - part @ b
        error = np.sqrt(np.diagonal(inverse) * (left @ left) / (len(y) - len(keep)))
        clear = np.abs(b) >= CERTAIN * np.maximum(error, 1e-300)
        if clear.all():
            made[keep] = b
            break
        keep = keep[np.arange(len(keep)) != (np.abs(b) / np.maximum(error, 1e-300)).argmin()]
    return made


def effect(track: Track, weights: np.ndarray, rows: int) -> np.ndarray:
    """[rows] what the columns add, 0 where they are not known."""
    made = np.zeros(rows)
    if track.known is not None and track.known.size:
        added = np.nan_to_num(track.known) @ weights
        count = min(rows, len(added))
        made[:count] = added[:count]
    return made
