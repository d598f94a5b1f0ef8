"""How members are combined: weights fitted to their errors from rolling origins of the past.

N series    O origins    M members    H steps of the horizon
"""

from __future__ import annotations

import numpy as np

from stochflow.forecast.members import CELLS


def weights(errors: np.ndarray, horizon: int, floor: np.ndarray) -> np.ndarray:
    """[N, M], not negative, sum 1: the combination with the smallest squared errors, held towards the inverse fourth power of their sizes, or towards their likelihood where there are many more independent origins than members."""
    count, origins, members, _ = errors.shape
    step = max(1, CELLS // (origins * members * horizon))
    parts = [_products(errors[i : i + step], floor[i : i + step]) for i in range(0, count, step)]
    own = np.concatenate([p[0] for p in parts])  # [N, M, M]
    many = np.concatenate([p[1] for p in parts]) / horizon  # independent origins
    pool = own.mean(0) / max(float(np.trace(own.mean(0))), 1e-12) * members
    own = own / np.maximum(np.trace(own, axis1=1, axis2=2)[:, None, None], 1e-12) * members
    if count > 1:
        share = (many / (many + 6.0))[:, None, None]
        own = share * own + (1 - share) * pool
    mse = np.maximum(np.diagonal(own, axis1=1, axis2=2), 1e-9)
    start = (mse / mse.min(1, keepdims=True)) ** -np.maximum(2.0, 0.5 * (many - members))[:, None]
    start /= start.sum(1, keepdims=True)
    hold = 2.0 * members / (many + 1.0) * mse.min(1)
    pulled = own + hold[:, None, None] * np.eye(members)
    made = start.copy()
    rate = 1.0 / np.linalg.norm(pulled, axis=(1, 2))[:, None]
    for _ in range(300):
        slope = np.einsum("nmk,nk->nm", pulled, made) - hold[:, None] * start
        made = _simplex(made - rate * slope)
    made = np.where(made < 0.01, 0, made)
    return made / made.sum(1, keepdims=True)


def _products(errors: np.ndarray, floor: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """([N, M, M] mean products of the members' standardised errors, [N] origins): outliers are cut, and older origins count less."""
    _, origins, members, _ = errors.shape
    e = errors.transpose(0, 2, 1, 3).astype(np.float64)  # [N, M, O, H]
    seen = np.all(np.isfinite(e), axis=1, keepdims=True)
    w = seen * 0.5 ** (np.arange(origins)[::-1] / max(origins / 2, 1.0))[:, None]
    e = np.where(seen, e, 0)
    with np.errstate(all="ignore"):
        middle = np.sqrt((w * e**2).sum((2, 3)) / w.sum((2, 3)))  # [N, M]
    size = np.where(np.isfinite(middle), middle, 0).min(1)[:, None, None, None] + floor[:, None, None, None]
    step = np.sqrt((w * e**2).sum((1, 2)) / (w.sum((1, 2)) * members).clip(1e-12))  # [N, H]
    step = np.maximum(step / np.maximum(step.mean(1, keepdims=True), 1e-300), 1e-3)
    e = (e / size / step[:, None, None]).clip(-6, 6) * np.sqrt(w)
    flat = e.reshape(len(e), members, -1)
    return flat @ flat.swapaxes(1, 2) / w.sum((2, 3)).clip(1e-12)[..., None], np.any(seen, axis=(1, 3)).sum(1)


def _simplex(x: np.ndarray) -> np.ndarray:
    """The nearest points [N, M] that are not negative and sum to 1."""
    ordered = -np.sort(-x, 1)
    over = (ordered.cumsum(1) - 1) / np.arange(1, x.shape[1] + 1)
    last = (ordered > over).sum(1) - 1
    return np.maximum(x - over[np.arange(len(x)), last][:, None], 0)
