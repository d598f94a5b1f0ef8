"""Whether whole futures hold together: totals, maxima, differences, first passages, correlations, and scores of paths.

W windows    n samples    H steps
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

MOST_PATHS = 200  # of a window, for scores that compare all pairs of paths
FACTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {  # of paths [..., H]
    "total": lambda x: x.sum(-1),
    "maximum": lambda x: x.max(-1),
    "difference": lambda x: x[..., -1] - x[..., 0],
}


def covered(drawn: np.ndarray, truth: np.ndarray, fact: Callable[[np.ndarray], np.ndarray], level: int = 80) -> float:
    """Share of windows whose fact lies within the interval of the sampled ones [W, n, H]."""
    whole = np.isfinite(truth).all(1)
    if not whole.any():
        return float("nan")
    low, high = np.quantile(fact(drawn[whole]), [0.5 - level / 200, 0.5 + level / 200], axis=1)
    real = fact(truth[whole])
    return float(((low <= real) & (real <= high)).mean())


def lag_correlation(errors: np.ndarray) -> float:
    """Correlation of neighbouring steps of errors [..., H], pooled over steps, about zero."""
    a, b = errors[..., :-1], errors[..., 1:]
    good = np.isfinite(a) & np.isfinite(b)
    a, b = a[good], b[good]
    size = np.sqrt((a * a).sum() * (b * b).sum())
    return float((a * b).sum() / size) if size > 0 else float("nan")


def first_passage(drawn: np.ndarray, truth: np.ndarray, bars: np.ndarray | None = None) -> float:
    """Mean over windows of the error (Brier) of P(the path rises above a bar by step h), over steps.

    `bars` [W]: the same for all forecasters that are compared; by default the median of the sampled maxima, which only tells of calibration.
    """
    whole = np.isfinite(truth).all(1)
    drawn, truth = drawn[whole], truth[whole]
    if not len(truth):
        return float("nan")
    bar = np.median(drawn.max(2), 1) if bars is None else bars[whole]
    passed = np.maximum.accumulate(drawn > bar[:, None, None], axis=2).mean(1)
    real = np.maximum.accumulate(truth > bar[:, None], axis=1)
    return float(np.square(passed - real).mean())


def energy(drawn: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """[W] energy score of paths, lower is better."""
    import scoringrules

    return np.concatenate(
        [scoringrules.es_ensemble(t[None], _some(d)[None], estimator="fair") for d, t in zip(drawn, truth, strict=True)]
    )


def variogram(drawn: np.ndarray, truth: np.ndarray) -> np.ndarray:
    """[W] variogram score of order 1/2, lower is better: it sees correlations that the energy score hardly does."""
    import scoringrules

    return np.concatenate(
        [scoringrules.vs_ensemble(t[None], _some(d)[None], p=0.5) for d, t in zip(drawn, truth, strict=True)]
    )


def _some(paths: np.ndarray) -> np.ndarray:
    return paths[:: max(1, len(paths) // MOST_PATHS)]


def joint(drawn: np.ndarray, truth: np.ndarray, unit: np.ndarray | float = 1.0) -> dict[str, float]:
    """Figures of futures [W, n, H] beside what happened [W, H]; scores in units [W]."""
    whole = np.isfinite(truth).all(1)
    each = np.broadcast_to(np.asarray(unit, dtype=float), (len(truth),))[whole]
    drawn, truth = drawn[whole], truth[whole]
    if not len(truth):
        return {}
    centre = np.median(drawn, 1)
    found = {f"coverage_80_{name}": covered(drawn, truth, fact) for name, fact in FACTS.items()}
    if truth.shape[1] > 1:
        scaled = (truth - centre) / each[:, None]
        found["lag_1_real"] = lag_correlation(scaled)
        found["lag_1_sampled"] = lag_correlation((drawn - centre[:, None]) / each[:, None, None])
        found["growth_real"] = _growth(scaled)
        found["growth_sampled"] = _growth(((drawn - centre[:, None]) / each[:, None, None]).reshape(-1, truth.shape[1]))
    found["first_passage"] = first_passage(drawn, truth)
    scaled_paths, scaled_truth = drawn / each[:, None, None], truth / each[:, None]
    found["energy"] = float(energy(scaled_paths, scaled_truth).mean())
    found["variogram"] = float(variogram(scaled_paths, scaled_truth).mean())
    return found


def _growth(errors: np.ndarray) -> float:
    """Size of the errors [..., H] of the last third of the steps beside that of the first third."""
    third = max(1, errors.shape[1] // 3)
    first, last = np.abs(errors[:, :third]).mean(), np.abs(errors[:, -third:]).mean()
    return float(last / first) if first > 0 else float("nan")
