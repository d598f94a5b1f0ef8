"""Stamps as people write them: day or month first, months without a day, offsets that change."""

import numpy as np
import pandas as pd
import pytest

from stochflow.errors import UserError
from stochflow.forecast.frame import read


def stamps_of(column, freq=""):
    """The stamps, and the zone, that a column is read as."""
    schema, _, stamps = read(pd.DataFrame({"ds": column, "y": np.arange(len(column), dtype=float)}), freq)
    return schema.shown(stamps[0]), schema


@pytest.mark.parametrize("written", ["%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y", "%d-%m-%Y", "%m/%d/%Y %H:%M"])
@pytest.mark.parametrize(("freq", "rows"), [("MS", 40), ("D", 40), ("W", 40), ("QS", 20)])
def test_the_order_of_day_and_month_is_the_one_in_which_stamps_do_not_leap(written, freq, rows):
    meant = pd.date_range("2019-01-01", periods=rows, freq=freq)
    found, _ = stamps_of(meant.strftime(written))
    assert found == list(meant)


def test_dates_that_are_regular_in_both_orders_are_refused_unless_the_frequency_is_given():
    year = pd.date_range("2020-01-01", periods=12, freq="MS")
    with pytest.raises(UserError, match="day or with the month first"):
        stamps_of(year.strftime("%d/%m/%Y"))
    assert stamps_of(year.strftime("%d/%m/%Y"), "MS")[0] == list(year)
    days = pd.date_range("2020-01-01", periods=12, freq="D")
    assert stamps_of(year.strftime("%d/%m/%Y"), "D")[0] == list(days)


@pytest.mark.parametrize("kind", [str, int])
def test_six_digits_can_be_a_month_and_eight_a_day_but_counters_stay_numbers(kind):
    months, days = pd.date_range("2015-03-01", periods=30, freq="MS"), pd.date_range("2015-03-01", periods=30)
    assert stamps_of([kind(x) for x in months.strftime("%Y%m")])[0] == list(months)
    assert stamps_of([kind(x) for x in days.strftime("%Y%m%d")])[0] == list(days)
    assert stamps_of([kind(x) for x in range(200101, 200131)])[0] == list(range(200101, 200131))


def test_periods_are_dates():
    found, _ = stamps_of(pd.period_range("2015-01", periods=20, freq="M"))
    assert found == list(pd.date_range("2015-01-01", periods=20, freq="MS"))


def test_forecasts_follow_in_the_offset_of_the_newest_stamp():
    meant = pd.date_range("2023-10-20", periods=24 * 14, freq="h", tz="Europe/Berlin")  # summer time ends
    found, schema = stamps_of([str(x) for x in meant])
    assert found[-1] == meant[-1]
    assert str(found[-1]) == str(meant[-1])
    assert str(schema.shown(schema.after(meant[-1].tz_convert("UTC").tz_localize(None), 1))[0]).endswith("+01:00")


@pytest.mark.parametrize("freq", ["D", "MS", "W"])
def test_midnights_of_a_place_are_days_though_their_offset_changes(freq):
    meant = pd.date_range("2023-01-01", periods=60, freq=freq, tz="Europe/Paris")
    found, schema = stamps_of([str(x) for x in meant])
    assert [x.tz_localize(None) for x in found] == [x.tz_localize(None) for x in meant]
    assert schema.freq == pd.tseries.frequencies.to_offset("W-SUN" if freq == "W" else freq)
