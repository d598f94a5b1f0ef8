"""Inventory control: the manager orders, the supplier sometimes delivers another amount, and stock must meet a demand that nobody knows.

    python examples/inventory.py

A forecaster of the deliveries that demand asks for is trained through a supplier who delivers some other amount one time in five (`noise="slip"`): its *orders* are
corrected so that what *arrives* follows demand. The same law trained as if every order arrived is the comparison.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from stochflow.forecast import Forecaster
from stochflow.learn.objectives import MARGINAL, REALISED

WEEKS, AHEAD, MISSES = 160, 4, 0.2


def demand(seed: int = 0) -> pd.DataFrame:
    """Weekly demand with a yearly swing, in units sold."""
    dice = np.random.default_rng(seed)
    week = np.arange(WEEKS)
    sold = 40 + 10 * np.sin(2 * np.pi * week / 52) + dice.normal(0, 4, WEEKS)
    return pd.DataFrame({"ds": pd.date_range("2021-01-03", periods=WEEKS, freq="W"), "y": np.round(sold)})


def main(steps: int = 300) -> dict[str, float]:
    """Share of weeks in which what was delivered lies within 5 units of what was sold, for both forecasters."""
    sold = demand()
    found = {}
    for name, form in (("corrected", MARGINAL), ("as if exact", REALISED)):
        planner = Forecaster(
            None, form, horizon=AHEAD, freq="W", noise="slip", stick=MISSES, encoder="mlp", seeds=2, steps=steps, bins=17, samples=400
        )  # fmt: skip
        tested = planner.backtest(sold, origins=3)
        delivered, needed = tested.samples, tested.truth
        found[name] = float((np.abs(delivered - needed[:, None]) <= 5).mean())
        print(
            f"orders {name}: {found[name]:.0%} of deliveries within 5 units of demand, spread {delivered.std(1).mean():.1f}"
        )
    return found


if __name__ == "__main__":
    main()
