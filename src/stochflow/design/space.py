"""The strings that may be ordered: all of some lengths, or those that design rules leave; and what a synthesiser makes of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stochflow.design.generate import LISTED, all_texts, finished_count
from stochflow.design.model import Model, Orders, through
from stochflow.design.settings import Noise, Settings
from stochflow.design.surrogates import Prediction
from stochflow.errors import UserError
from stochflow.worlds.rules import Rules
from stochflow.worlds.strings import Strings


class Space:
    """`env` builds exactly the strings that `accepts` allows; `summary` says how many, where that is known."""

    def __init__(self, settings: Settings, rules: Path | Rules | None):
        fixed = settings.min_length == settings.max_length
        self.rules: Any = None
        self.env: Strings
        if rules is None:
            self.env = Strings(settings.alphabet, settings.max_length, None if fixed else settings.min_length)
            self.accepts: Callable[[str], bool] = self._plain
            self.summary = f"{finished_count(self.env):.3g} strings" if self.env.length < 200 else ""
            return
        lengths = settings.max_length if fixed else (settings.min_length, settings.max_length)
        written = rules if isinstance(rules, Rules) else Rules.read(str(rules), wild_type=settings.wild_type or None)
        self.rules = written.compile(settings.alphabet, lengths, approximate=settings.rules_approximate)
        self.env, self.accepts, self.summary = self.rules.env(), self.rules.accepts, self.rules.summary()

    def _plain(self, text: str) -> bool:
        shortest = self.env.length if self.env.min_length is None else self.env.min_length
        return shortest <= len(text) <= self.env.length

    def broken(self, text: str) -> list[str]:
        """Rules that a text does not meet, in words."""
        return [] if self.rules is None else list(self.rules.broken(text))


def make_synthesis(noise: Noise, alphabet: str) -> Any:
    """The `Synthesis` that a campaign's noise describes."""
    from stochflow.worlds.channels import Neighbour, Slip
    from stochflow.worlds.synthesis import Synthesis

    law: Any
    if noise.kind == "table":
        law = [list(row) for row in noise.table]
        if len(law) != len(alphabet):
            raise UserError(
                f"the confusion table has {len(law)} rows, but the alphabet {alphabet} has {len(alphabet)} letters"
            )
    else:
        law = Slip(noise.rate) if noise.kind == "slip" else Neighbour(noise.rate)
    return Synthesis(alphabet, law, insertion=noise.insertion, deletion=noise.deletion)


def substitutions(noise: Noise, letters: int) -> np.ndarray | None:
    """[K, K] chance of each letter made for each ordered; None where letters are also lost or inserted."""
    if noise.insertion or noise.deletion:
        return None
    if noise.kind == "table":
        return np.array(noise.table)
    if noise.kind == "slip":
        return (1 - noise.rate) * np.eye(letters) + noise.rate / letters
    table = np.zeros((letters, letters))
    for i in range(letters):
        for j in (i - 1, i + 1):
            if 0 <= j < letters:
                table[i, j] = noise.rate / 2
        table[i, i] = 1 - table[i].sum()
    return table


class Believed:
    """Predictions of orders: the model's own without noise, else averaged over what an order may become; exact where listed."""

    def __init__(self, model: Model, space: Space, settings: Settings, seed: int):
        self.model, self.exact, self.seed, self.columns = model, True, seed, settings.columns
        self._table: list[Prediction] | None = None
        self._index: dict[str, int] = {}
        self.synthesis = None if settings.noise is None else make_synthesis(settings.noise, settings.alphabet)
        self._orders: Orders | None = None
        if settings.noise is None:
            return
        plain = Strings(settings.alphabet, settings.max_length)
        table = substitutions(settings.noise, len(settings.alphabet))
        if table is not None and settings.min_length == settings.max_length and finished_count(plain) <= LISTED:
            texts = all_texts(plain)
            self._index = {t: i for i, t in enumerate(texts)}
            self._table = [_through(table, p, settings.max_length) for p in model.predict(texts)]
        else:
            self._orders, self.exact = Orders(model, self.synthesis, seed=seed), False

    @property
    def simulated(self) -> int:
        """How many makings of each order its expected value is the mean of; 0: it is exact."""
        return 0 if self._orders is None else self._orders.makings

    def predict(self, texts: Sequence[str]) -> list[Prediction]:
        if self._table is not None:
            at = np.array([self._index[t] for t in texts], dtype=np.int64)
            return [Prediction(p.mean[at], p.sd[at], p.draws[:, at]) for p in self._table]
        return self.model.predict(texts) if self._orders is None else self._orders.predict(texts)

    def makings(self, texts: Sequence[str], makings: int = 256) -> list[tuple[np.ndarray, np.ndarray]]:
        """Per column, of the predictions of what each order may become: the value [N] that nine in ten are at least as good as
        (10 % quantile), and their standard deviation [N].
        """
        assert self.synthesis is not None
        made = self.synthesis.make(list(texts), makings, seed=self.seed)
        width = self.model.features.length
        flat = [m[:width] for row in made for m in row]
        different = {t: i for i, t in enumerate(dict.fromkeys(flat))}
        at = np.array([different[t] for t in flat], dtype=np.int64).reshape(len(texts), -1)
        found = []
        for column, p in zip(self.columns, self.model.predict(list(different)), strict=True):
            low = column.sign * np.quantile(column.sign * p.mean[at], 0.1, axis=1)
            found.append((low, p.mean[at].std(1)))
        return found


def _through(table: np.ndarray, p: Prediction, length: int) -> Prediction:
    draws = through(table, p.draws, length)
    return Prediction(through(table, p.mean, length), draws.std(0, ddof=1), draws)
