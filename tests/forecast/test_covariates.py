"""Columns that are known in advance: rows after the last value, holidays as words, and what is missing of them."""

import numpy as np
import pandas as pd
import pytest

from stochflow.cli.commands import main
from stochflow.errors import UserError
from stochflow.forecast import Forecaster
from stochflow.forecast.frame import read_csv

H = 6


def sold(rows=104, ahead=H) -> pd.DataFrame:
    """Sales that fall with the price, which is known for the weeks after the last."""
    dice = np.random.default_rng(0)
    price = np.round(dice.uniform(8, 12, rows + ahead), 1)
    y = 200 - 10 * price + dice.normal(0, 1, rows + ahead)
    y[rows:] = np.nan
    return pd.DataFrame({"ds": pd.date_range("2020-01-06", periods=rows + ahead, freq="W-MON"), "y": y, "price": price})


def planner() -> Forecaster:
    return Forecaster(horizon=H, future=("price",), network="off", samples=200)


def test_forecasts_follow_the_price():
    frame = sold()
    made = planner().fit(frame).predict()
    assert np.abs(made["stochflow"].to_numpy() - (200 - 10 * frame["price"].to_numpy()[-H:])).max() < 4


def test_steps_whose_price_is_not_known_are_no_forecast(tmp_path, capsys):
    with pytest.raises(UserError, match="3 rows after its last value, but price must be known for 6 steps"):
        planner().fit(sold(ahead=3)).predict()
    sold(ahead=0).to_csv(tmp_path / "sold.csv", index=False)
    words = ["forecast", str(tmp_path / "sold.csv"), "--horizon", "6", "--future", "price", "--network", "off"]
    assert main([*words, "--out", str(tmp_path / "out")]) == 2
    assert "0 rows after its last value" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_prices_after_an_origin_in_the_past_are_used():
    frame = sold(rows=104 + H, ahead=0)
    origin = frame["ds"].iloc[103]
    made = planner().fit(frame, until=origin)
    truth = 200 - 10 * frame["price"].to_numpy()[-H:]
    assert np.abs(made.predict()["stochflow"].to_numpy() - truth).max() < 4
    assert made.predict(frame, until=origin).equals(made.predict())
    other = frame.assign(y=np.where(frame["ds"] > origin, -1e6, frame["y"]))  # values after the origin tell nothing
    assert planner().fit(other, until=origin).predict().equals(made.predict())


def test_a_hole_in_a_known_column_is_named():
    frame = sold()
    frame.loc[7, "price"] = np.nan
    with pytest.raises(UserError, match="row 7, column price: the value is missing"):
        planner().fit(frame)
    frame["price"] = "cheap"
    with pytest.raises(UserError, match="'cheap' is not a finite number"):
        planner().fit(frame)


def test_holidays_may_be_true_and_false(tmp_path):
    frame = sold()
    frame["price"] = np.random.default_rng(1).random(len(frame)) < 0.3
    frame["y"] = frame["y"].notna().map({True: 50.0, False: np.nan}) + 20 * frame["price"]
    frame.to_csv(tmp_path / "words.csv", index=False)
    made = planner().fit(read_csv(tmp_path / "words.csv")).predict()
    assert np.allclose(made["stochflow"], 50 + 20 * frame["price"][-H:], atol=2)
