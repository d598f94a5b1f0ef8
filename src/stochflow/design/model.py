"""What a campaign believes of sequences: a checked and fitted surrogate for each measured column, also of orders that come out wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from stochflow.design import validation
from stochflow.design.data import Measured
from stochflow.design.features import Features
from stochflow.design.surrogates import Fitted, Prediction, available, surrogate
from stochflow.design.validation import Checked

BLOCK = 4096  # sequences whose features are in memory together
SHOWN = 400  # held-out predictions kept for the calibration plot


@dataclass
class ColumnModel:
    """One column: every surrogate on held-out groups, the best first, and that one fitted to all rows."""

    column: str
    checked: list[Checked]
    fitted: Fitted
    texts: list[str]  # rows that were cross-validated
    rows: int  # rows that it was fitted to
    identity: float  # share of equal letters from which sequences were held out together; 1: each by itself
    repeat_noise: float  # standard deviation of one measurement by its repeats, NaN without any
    single_noise: float  # what the mean of repeats hides of it: a new well is measured once

    @property
    def best(self) -> Checked:
        return self.checked[0]


class Model:
    """Predicts every column of any text; `predict` gives one `Prediction` a column, its sd calibrated."""

    def __init__(self, features: Features, parts: list[ColumnModel], seed: int):
        self.features, self.parts, self.seed = features, parts, seed

    def predict(self, texts: Sequence[str]) -> list[Prediction]:
        found: list[list[Prediction]] = [[] for _ in self.parts]
        for start in range(0, max(len(texts), 1), BLOCK):
            x = self.features(self.features.tokens(texts[start : start + BLOCK]))
            for made, part in zip(found, self.parts, strict=True):
                made.append(_stretched(part.fitted.predict(x), part.best.calibration.stretch))
        return [joined(made) for made in found]

    @cached_property
    def figures(self) -> list[dict[str, Any]]:
        """What the round's model.json keeps of it."""
        return [self._figures(part) for part in self.parts]

    @property
    def reach(self) -> int:
        """The largest distance to a known sequence at which every column's predictions were tested."""
        return min(max((int(b["to"]) for b in f["by_distance"]), default=1) for f in self.figures)

    def _figures(self, part: ColumnModel) -> dict[str, Any]:
        best = part.best
        shown = np.random.default_rng(self.seed).permutation(len(best.y))[:SHOWN]
        cover = validation.coverage_table(best, self.seed)
        widths = {str(level): q for level, q in best.calibration.quantiles.items()}
        return {
            "column": part.column,
            "chosen": best.name,
            "rows": part.rows,
            "considered": [c.figures() for c in part.checked],
            "noise": best.calibration.noise,
            "repeat_noise": part.repeat_noise,
            "identity": part.identity,
            "stretch": best.calibration.stretch,
            "quantiles": widths,
            "coverage": cover,
            "by_distance": validation.by_distance(part.texts, best, self.seed),
            "held_out": [
                {
                    "y": float(best.y[i]),
                    "mean": float(best.mean[i]),
                    "s": float(best.calibration.width(best.sd[i : i + 1])[0]),
                }
                for i in shown
            ],
            "importance": importance(self.features, part, self.seed),
        }


def fit(measured: Measured, names: Sequence[str], features: Features, kind: str = "auto", seed: int = 0) -> Model:
    """Choose (for `auto`, among what is installed) and fit a surrogate for each column of the measured values."""
    kinds = [surrogate(n) for n in (available() if kind == "auto" else [kind])]
    parts = []
    for c, name in enumerate(names):
        there = np.flatnonzero(~np.isnan(measured.values[:, c]))
        texts = [measured.sequences[i] for i in there]
        y = measured.values[there, c]
        groups, identity = validation.grouped(texts)
        x = features(features.tokens(texts))
        some = np.arange(len(y))
        if len(y) > validation.MOST:
            some = np.sort(np.random.default_rng(seed).permutation(len(y))[: validation.MOST])
        checked = validation.choose(kinds, x[torch.from_numpy(some)], y[some], groups[some], seed)
        fitted = surrogate(checked[0].name).fit(x, y, groups, seed)
        noise = float(measured.noise[c])
        hidden = noise * math.sqrt(1 - float((1 / measured.counts[there, c]).mean())) if math.isfinite(noise) else 0.0
        kept = [texts[i] for i in some]
        parts.append(ColumnModel(name, checked, fitted, kept, len(y), identity, noise, hidden))
    return Model(features, parts, seed)


def _stretched(p: Prediction, by: float) -> Prediction:
    """With the sd that held-out errors call for; draws keep their mean."""
    return Prediction(p.mean, p.sd * by, p.mean + (p.draws - p.mean) * by)


def joined(parts: Sequence[Prediction]) -> Prediction:
    """Predictions of consecutive blocks as one."""
    return Prediction(
        np.concatenate([p.mean for p in parts]),
        np.concatenate([p.sd for p in parts]),
        np.concatenate([p.draws for p in parts], 1),
    )


def importance(features: Features, part: ColumnModel, seed: int) -> list[float]:
    """Per position, how much predictions change (root mean square, in units of their spread) when its letters are shuffled
    among the sequences; empty where lengths differ."""
    if not features.same_length:
        return []
    tokens = features.tokens(part.texts[:500])
    base = part.fitted.predict(features(tokens)).mean
    size = float(base.std())
    rng, found = np.random.default_rng(seed), []
    for place in range(tokens.shape[1]):
        mixed = tokens.clone()
        mixed[:, place] = tokens[torch.from_numpy(rng.permutation(len(tokens))), place]
        change = part.fitted.predict(features(mixed)).mean - base
        found.append(float(np.sqrt((change**2).mean())) / size if size > 0 else 0.0)
    return found


# orders ---------------------------------------------------------------------------------------------------------


class Orders:
    """A model of what is made, asked about what is ordered: every function is averaged over what an order may become.

    `synthesis` makes strings of orders (`make(texts, makings, seed)`); the same random numbers serve every order.
    """

    def __init__(self, model: Model, synthesis: Any, makings: int = 32, seed: int = 0):
        self.inner, self.synthesis, self.makings, self.seed = model, synthesis, makings, seed

    def predict(self, texts: Sequence[str]) -> list[Prediction]:
        made = self.synthesis.make(list(texts), self.makings, seed=self.seed)  # [N][makings]
        flat = [
            m[: self.inner.features.length] for row in made for m in row
        ]  # insertions beyond what was ever measured
        different = {t: i for i, t in enumerate(dict.fromkeys(flat))}
        at = np.array([different[t] for t in flat], dtype=np.int64).reshape(len(texts), -1)
        return [_averaged(p, at) for p in self.inner.predict(list(different))]


def _averaged(p: Prediction, at: np.ndarray) -> Prediction:
    """The mean over makings of every function; the sd of the mean from the functions, at least as sure as one making."""
    draws = p.draws[:, at].mean(2)
    mean = p.mean[at].mean(1)
    sd = draws.std(0, ddof=1) if len(draws) > 1 else p.sd[at].mean(1) / math.sqrt(at.shape[1])
    return Prediction(mean, sd, draws)


def through(table: np.ndarray, values: np.ndarray, length: int) -> np.ndarray:
    """E[v(made) | order] of all K^L strings in lexicographic order, position by position, [..., K^L]; table [K, K] row = order."""
    letters = len(table)
    out = values.reshape(-1, *[letters] * length)
    for place in range(length):
        out = np.moveaxis(np.tensordot(table, out, axes=(1, place + 1)), 0, place + 1)
    return out.reshape(values.shape)
