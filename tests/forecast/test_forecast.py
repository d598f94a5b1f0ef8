"""The forecaster and its command: no leak, the columns people expect, and every bad table named before anything is written."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pandas as pd
import pytest
import torch

from stochflow.errors import UserError
from stochflow.forecast import Forecast, Forecaster, forecast_command, shipped
from stochflow.forecast.config import FLAGS
from stochflow.forecast.frame import read, read_csv
from stochflow.forecast.report import summary, whole_folder, write_json
from stochflow.worlds.series import FAR

QUICK = {"horizon": 4, "encoder": "mlp", "seeds": 2, "steps": 20, "samples": 60, "hidden": 16, "bins": 16}
TRAINED = {**QUICK, "network": "on"}


def monthly(count=80, names=("a",), start="2000-01-01") -> pd.DataFrame:
    dice = np.random.default_rng(0)
    parts = []
    for i, name in enumerate(names):
        t = np.arange(count)
        y = 50 * (i + 1) + 0.3 * t + 5 * np.sin(2 * np.pi * t / 12) + dice.normal(0, 1, count)
        parts.append(pd.DataFrame({"unique_id": name, "ds": pd.date_range(start, periods=count, freq="MS"), "y": y}))
    return pd.concat(parts, ignore_index=True)


def features(frame: pd.DataFrame) -> pd.DataFrame:
    """Real, categorical and static columns beside the series."""
    dice = np.random.default_rng(3)
    made = frame.copy()
    made["price"] = dice.normal(size=len(made))
    made["kind"] = dice.choice(["x", "y", "z"], len(made))
    made["region"] = np.where(made["unique_id"] == "a", "north", "south")
    made["size"] = np.where(made["unique_id"] == "a", 1.0, 7.0)
    return made


# fit and predict ------------------------------------------------------------------------------------------------------


def test_five_lines_give_the_frame_people_expect():
    frame = monthly(names=("a", "b"))
    made = Forecaster(freq="MS", **QUICK).fit(frame).predict()
    assert list(made.columns) == [
        "unique_id", "ds", "stochflow", "stochflow-lo-80", "stochflow-hi-80", "stochflow-lo-95", "stochflow-hi-95"
    ]  # fmt: skip
    assert list(made["unique_id"]) == ["a"] * 4 + ["b"] * 4
    assert list(made["ds"][:4]) == list(pd.date_range("2006-09-01", periods=4, freq="MS"))
    nested = made["stochflow-lo-95"] <= made["stochflow-lo-80"]
    assert (
        nested & (made["stochflow-lo-80"] <= made["stochflow"]) & (made["stochflow"] <= made["stochflow-hi-80"])
    ).all()


@pytest.mark.parametrize("encoder", ["mlp", "transformer"])
def test_nothing_after_the_origin_leaks(encoder):
    """Values and covariates of every series after the origin become noise before fit: the forecasts are the same, bit for bit."""
    frame = features(monthly(names=("a", "b")))
    origin = pd.Timestamp("2005-08-01")
    later = frame["ds"] > origin
    assert 0 < later.sum() < len(frame)
    noised = frame.copy()
    dice = np.random.default_rng(9)
    noised.loc[later, "y"] = dice.normal(0, 1e3, later.sum())
    noised.loc[later, "price"] = dice.normal(0, 1e3, later.sum())
    noised.loc[later, "kind"] = dice.choice(["x", "never seen"], later.sum())
    quick = {**TRAINED, "encoder": encoder, "steps": 8}
    one, two = (Forecaster(freq="MS", **quick).fit(f, until=origin) for f in (frame, noised))
    assert np.array_equal(one.sample(), two.sample())
    assert one.predict().equals(two.predict())
    assert not np.array_equal(one.sample(), one.sample(frame))  # a later origin is another forecast


def test_a_forecast_from_a_later_origin_equals_that_of_the_back_test():
    frame = monthly()
    tested = Forecaster(freq="MS", **QUICK).backtest(frame, origins=3, step=4)
    assert tested.truth.shape == (3, 4)
    assert list(tested.table.columns[:4]) == ["unique_id", "ds", "cutoff", "y"]
    assert np.array_equal(tested.table["y"], frame["y"][-12:])
    first = tested.table["cutoff"].iloc[0]
    assert first == frame["ds"].iloc[-13]
    alone = tested.forecaster.predict(frame, until=first)
    assert list(alone["ds"]) == list(tested.table["ds"][:4])
    assert tested.forecaster.stamps[0][-1] == first  # nothing later was trained on


@pytest.mark.parametrize("mode", ["mse", "mae", "mix"])
def test_every_mode_forecasts_and_repeats_itself(mode):
    frame = monthly()
    one, two = (Forecaster(freq="MS", mode=mode, **QUICK).fit(frame).sample() for _ in range(2))
    assert one.shape == (1, 60, 4)
    assert np.isfinite(one).all()
    assert np.array_equal(one, two)


@pytest.mark.parametrize("noise", ["slip", "neighbour"])
def test_an_actuator_that_misses_is_counted(noise):
    made = Forecaster(freq="MS", noise=noise, stick=0.3, **QUICK).fit(monthly())
    counts = made.fitted.dynamics.counts
    missed = 1 - float(counts.diagonal(dim1=1, dim2=2).sum() / counts.sum())
    wanted = 0.3 * 15 / 16 if noise == "slip" else 0.3
    assert abs(missed - wanted) < 0.06
    assert np.isfinite(made.sample()).all()


def test_the_random_stream_outside_is_left_alone():
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    Forecaster(freq="MS", **QUICK).fit(monthly()).predict()
    assert torch.equal(torch.rand(3), wanted)


def test_gaps_and_irregular_stamps_are_taken_when_allowed():
    frame = monthly()
    holes = frame.drop(index=[20, 21, 50]).reset_index(drop=True)
    holes.loc[30, "y"] = np.nan
    made = Forecaster(freq="MS", gaps="allow", **QUICK).fit(holes).predict()
    assert len(made) == 4
    shifted = frame.copy()
    shifted["ds"] = shifted["ds"] + pd.to_timedelta(np.random.default_rng(0).integers(0, 9, len(frame)), unit="D")
    assert np.isfinite(Forecaster(freq="MS", gaps="allow", **QUICK).fit(shifted).predict()["stochflow"]).all()


def test_stamps_off_the_grid_go_on_by_whole_steps():
    """Whatever the last stamp, the forecast is for 1, 2, ... steps later, which is what the network is asked about."""
    frame = monthly()
    for days in (0, 14):
        shifted = frame.assign(ds=frame["ds"] + pd.Timedelta(days=days))
        schema, tracks, stamps = read(shifted, "MS", "allow")
        later = schema.after(stamps[0][-1], 3)
        more = pd.DataFrame({"ds": [*stamps[0], *later], "y": 0.0})
        time = read(more, "MS", "allow", schema=schema)[1][0].time
        assert np.allclose(time[-3:] - tracks[0].time[-1], [1, 2, 3], atol=1e-4)
    assert later[0].strftime("%Y-%m-%d") == "2006-09-14"  # 14 of 31 days into August, 14 of 30 days into September


def test_a_series_that_rests_most_of_the_time_is_not_forecast_absurdly():
    """One day in ten holds a 1, all others a 0. Flat windows once had hardly any scale, and bins that reached thousands."""
    y = (np.random.default_rng(0).random(300) < 0.1).astype(float)
    frame = pd.DataFrame({"ds": pd.date_range("2000-01-01", periods=300, freq="D"), "y": y})
    made = Forecaster(freq="D", location="last", **QUICK).fit(frame)
    assert made.fitted.task.env.bins.limit <= FAR
    tested = made.sample(frame), made.backtest(frame, origins=10).drawn
    assert all(np.abs(drawn).max() < 15 for drawn in tested)


def test_a_series_that_rests_is_forecast_where_it_rests():
    """Ties with the value that forecasts are centred on lie in the middle of a bin. On its edge, as with an even number of bins, samples
    fall to one side of them: in a trial with 64 bins the 80 % interval held 6 of the 56."""
    y = (np.random.default_rng(0).random(400) < 0.1).astype(float)
    frame = pd.DataFrame({"ds": pd.date_range("2000-01-01", periods=400, freq="D"), "y": y})
    assert Forecast().bins % 2 == 1
    quick = {**QUICK, "horizon": 7, "bins": Forecast().bins, "steps": 60, "samples": 400}
    tested = Forecaster(freq="D", location="last", **quick).backtest(frame, origins=8)
    low, high = np.quantile(tested.forecaster.pool(tested.drawn), [0.1, 0.9], axis=1)
    assert tested.truth.size == 56
    assert ((low <= tested.truth) & (tested.truth <= high)).mean() >= 0.7


def test_series_without_a_past_before_the_first_origin_are_left_out_and_counted(caplog):
    late = monthly(names=("late",)).assign(ds=lambda f: f["ds"] + pd.DateOffset(months=200))
    frame = pd.concat([monthly(), late], ignore_index=True)
    tested = Forecaster(freq="MS", **QUICK).backtest(frame, origins=1, step=4)
    assert tested.skipped == ["late"]
    assert set(tested.table["unique_id"]) == {"a"}
    assert any("1 of 2 series have fewer than 10 values" in r.getMessage() for r in caplog.records)


def test_short_series_of_a_panel_are_left_out_and_counted(caplog):
    frame = pd.concat([monthly(), monthly(count=9, names=("short",))], ignore_index=True)
    made = Forecaster(freq="MS", **QUICK).fit(frame)
    assert made.skipped == ["short"]
    assert set(made.predict()["unique_id"]) == {"a"}
    assert any("left out: 'short'" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize(
    ("freq", "rows", "horizon"), [("MS", 120, 12), ("W-SUN", 104, 8), ("YS", 25, 6), ("h", 24 * 15, 24)]
)
def test_ten_years_of_months_and_two_of_weeks_are_enough(freq, rows, horizon):
    t = np.arange(rows)
    season = {"MS": 12, "W-SUN": 52, "YS": 1, "h": 24}[freq]
    y = 10 + np.sin(2 * np.pi * t / season) + np.random.default_rng(0).normal(0, 0.1, rows)
    frame = pd.DataFrame({"ds": pd.date_range("2010-01-01", periods=rows, freq=freq), "y": y})
    made = Forecaster(horizon=horizon, samples=50, network="off").fit(frame).predict()
    assert len(made) == horizon
    assert (made["stochflow"] - 10).abs().max() < 1.6


def test_where_nothing_validates_training_is_short_and_says_so(caplog):
    made = Forecaster(freq="MS", **{**TRAINED, "steps": 120}).fit(monthly(count=40))
    assert made.fitted.validation == []
    assert made.fitted.steps == 100
    assert [r.levelname for r in caplog.records if "too few to hold any out" in r.getMessage()] == ["WARNING"]


def test_a_short_series_follows_the_statistical_law_and_says_so(caplog):
    caplog.set_level("INFO", "stochflow")
    made = Forecaster(freq="MS", **QUICK).fit(monthly())
    assert made.fitted.share == 0
    assert made.fitted.steps == 0
    off = Forecaster(freq="MS", **{**QUICK, "network": "off"}).fit(monthly())
    assert np.array_equal(made.sample(), off.sample())


def test_integer_stamps_and_frames_without_ids():
    frame = pd.DataFrame({"ds": np.arange(1900, 1980), "y": np.random.default_rng(0).normal(size=80).cumsum()})
    made = Forecaster(**QUICK).fit(frame).predict()
    assert list(made["ds"]) == [1980, 1981, 1982, 1983]


def test_features_are_recognised_for_what_they_are():
    schema, tracks, _ = read(features(monthly(names=("a", "b"))))
    assert (schema.real, list(schema.categories), list(schema.static), list(schema.static_categories)) == (
        ("price",), ["kind"], ["size"], ["region"],
    )  # fmt: skip
    assert schema.static_sizes == (3, 3)  # the series itself and its region, each with a place for what is unknown
    assert tracks[1].static.tolist() == [1.0]
    assert set(tracks[0].categories[:, 0]) == {1, 2, 3}


@pytest.mark.parametrize(
    ("freq", "season"), [("MS", 12), ("QS", 4), ("h", 24), ("30min", 48), ("D", 7), ("W-SAT", 52), ("YS", 1), ("B", 5)]
)
def test_seasons_follow_from_the_frequency(freq, season):
    frame = pd.DataFrame({"ds": pd.date_range("2001-01-01", periods=30, freq=freq), "y": np.arange(30.0)})
    schema, tracks, stamps = read(frame)
    assert schema.season == season
    assert np.allclose(tracks[0].time, np.arange(30) + tracks[0].time[0])
    assert schema.after(stamps[0][-1], 1)[0] == pd.date_range(stamps[0][-1], periods=2, freq=freq)[1]


# bad input -------------------------------------------------------------------------------------------------------------


def put(frame: pd.DataFrame, row: int, column: str, value) -> pd.DataFrame:
    made = frame.astype({column: object})
    made.loc[row, column] = value
    return made


def mixed() -> pd.DataFrame:
    days = pd.DataFrame({"unique_id": "b", "ds": pd.date_range("2000-01-01", periods=80, freq="D"), "y": 1.0})
    return pd.concat([monthly(), days], ignore_index=True)


BAD = {
    "text in y": (lambda f: put(f, 7, "y", "n/k"), {}, "line 9, column y: 'n/k'"),
    "nothing in y": (lambda f: put(f, 7, "y", np.nan), {}, "line 9, column y: the value is missing"),
    "infinite y": (lambda f: put(f, 7, "y", "inf"), {}, "line 9, column y: the value is infinite"),
    "bad date": (lambda f: put(f, 3, "ds", "sometime"), {}, "line 5, column ds: 'sometime'"),
    "no date": (lambda f: put(f, 3, "ds", np.nan), {}, "line 5, column ds"),
    "missing stamp": (lambda f: f.drop(index=10), {}, "no stamp 2000-11-01"),
    "missing stamp, frequency unsaid": (lambda f: f.drop(index=10), {"freq": ""}, "no stamp 2000-11-01"),
    "duplicated stamp": (lambda f: put(f, 10, "ds", f["ds"][9]), {}, "2000-10-01 00:00:00 twice .line 11 and line 12"),
    "frequencies mixed in a series": (lambda f: put(f, 10, "ds", "2000-11-13"), {}, "mixed frequencies.*line 12"),
    "frequencies mixed over series": (lambda f: mixed(), {"freq": ""}, "mixed frequencies"),
    "wrong frequency": (lambda f: f, {"freq": "D"}, "no stamp 2000-01-02"),
    "unknown frequency": (lambda f: f, {"freq": "fortnightly"}, "no frequency"),
    "off the frequency": (lambda f: f.assign(ds=f["ds"] + pd.Timedelta(days=3)), {}, "not on the frequency"),
    "too short": (lambda f: f[:8], {}, "series 'a' has 8 values to learn from, but a horizon of 4 needs 10"),
    "too short to back-test": (
        lambda f: f[:40],
        {"origins": 8},
        "8 values to learn from, but a horizon of 4 needs 10: shorten --horizon or lower --origins",
    ),
    "no column y": (lambda f: f.rename(columns={"y": "value"}), {}, "column 'y' is missing"),
    "no rows": (lambda f: f[:0], {}, "no rows"),
    "empty feature": (lambda f: f.assign(extra=np.nan), {}, "'extra' is empty"),
    "horizon of 0": (lambda f: f, {"horizon": 0}, "--horizon is 0"),
    "noise without a rate": (lambda f: f, {"noise": "slip"}, "contradict"),
    "too many origins": (
        lambda f: f,
        {"origins": 50},
        "0 values to learn from, but a horizon of 4 needs 10: shorten --horizon or lower --origins",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named_and_nothing_is_written(case, tmp_path):
    spoil, changes, words = BAD[case]
    file, out = tmp_path / "data.csv", tmp_path / "out"
    spoil(monthly()).to_csv(file, index=False)
    if changes.get("origins"):
        pytest.importorskip("scoringrules")
    settings = Forecast(**{"freq": "MS", "origins": 0, **QUICK, **changes})
    with pytest.raises(UserError, match=words):
        forecast_command(settings, file, out)
    assert [p.name for p in tmp_path.iterdir()] == ["data.csv"]


def test_other_mistakes_are_named(tmp_path):
    with pytest.raises(UserError, match="no file"):
        read_csv(tmp_path / "none.csv")
    with pytest.raises(UserError, match=r"no file 'co3' .did you mean .co2.*air_passengers, sea_temperature"):
        forecast_command(Forecast(origins=0, **QUICK), "co3", tmp_path / "out")
    with pytest.raises(UserError, match="did you mean"):
        shipped("co3")
    with pytest.raises(UserError, match="did you mean"):
        Forecaster(horizons=3)
    with pytest.raises(UserError, match="fit"):
        Forecaster().predict()
    with pytest.raises(UserError, match="DataFrame"):
        Forecaster().fit([1, 2, 3])
    fitted = Forecaster(freq="MS", **QUICK).fit(features(monthly(names=("a", "b"))))
    with pytest.raises(UserError, match="'price' was there at fit"):
        fitted.predict(monthly())
    with pytest.raises(UserError, match="row 7, column y"):
        Forecaster(freq="MS", **QUICK).fit(put(monthly(), 7, "y", "x"))


# the command -----------------------------------------------------------------------------------------------------------


def test_the_command_writes_everything_at_once(tmp_path):
    file, out = tmp_path / "data.csv", tmp_path / "out"
    monthly(names=("a", "b")).to_csv(file, index=False)
    made = forecast_command(Forecast(freq="MS", origins=0, **QUICK), file, out)
    assert {p.name for p in made.files} == {
        "config.json", "fan.png", "forecasts.csv", "metrics.json", "model.json", "model.safetensors", "report.html", "samples.npy"
    }  # fmt: skip
    assert np.load(out / "samples.npy").shape == (2, 60, 4)
    written = pd.read_csv(out / "forecasts.csv")
    assert np.allclose(written["stochflow"], made.table["stochflow"])
    kept = json.loads((out / "config.json").read_text())
    assert set(kept["forecast"]) == set(FLAGS)
    with pytest.raises(UserError, match="already holds"):
        forecast_command(Forecast(freq="MS", origins=0, **QUICK), file, out)


def test_training_tells_how_far_it_is():
    """Each stage begins at 0 and ends at its last step, with the loss in between."""
    looks = []
    Forecaster(freq="MS", watch=looks.append, **{**TRAINED, "steps": 60}).backtest(monthly(), origins=1)
    stages = list(dict.fromkeys(look.stage for look in looks))
    assert stages == [
        "back-test after 2006-04-01: finding location and spread of every step",
        "back-test after 2006-04-01: finding out how long to train, on 39 windows and 7 that validate",
        *(["back-test after 2006-04-01: training on 49 windows"] if len(stages) == 3 else []),
    ]
    for stage in stages:
        steps = [look.step for look in looks if look.stage == stage]
        last = [look for look in looks if look.stage == stage][-1]
        assert steps[0] == 0
        assert steps == sorted(set(steps)) or last.steps == 0
        assert last.step == last.steps
    trained = [look for look in looks if "how long" in look.stage]
    assert [look.step for look in trained] == [0, 25, 50, 60]
    assert all(np.isfinite(look.validation) for look in trained)


def test_the_summary_shows_figures_and_the_first_forecasts():
    made = Forecaster(freq="MS", **QUICK).fit(monthly(names=("a", "b"))).predict()
    text = summary({"mase": 0.51234, "coverage_80": 0.8, "windows": 16}, made)
    assert "MASE of the median" in text
    assert "0.5123" in text
    assert "forecast of a\n" in text
    assert "2006-09-01" in text
    assert "and 1 more series in forecasts.csv" in text
    assert "its first 3 steps of 4" in summary({}, made, rows=3)
    assert "back-test" not in summary({}, made)


@pytest.mark.extra
def test_the_back_test_is_measured_with_the_packages_people_use(tmp_path):
    pytest.importorskip("scoringrules")
    pytest.importorskip("utilsforecast")
    made = forecast_command(Forecast(**{**QUICK, "horizon": 6}, origins=4), "air_passengers", tmp_path / "out")
    assert {"mase", "crps", "pinball", "coverage_80", "windows", "forecasts", "coverage_80_total", "energy"} <= set(
        made.metrics
    )
    table = pd.read_csv(tmp_path / "out" / "backtest.csv")
    frame = shipped("air_passengers").astype({"y": float})
    past = frame["y"][: 144 - 24].to_numpy()
    scale = np.abs(past[12:] - past[:-12]).mean()
    assert made.metrics["mase"] == pytest.approx(np.abs(table["stochflow"] - table["y"]).mean() / scale, rel=1e-6)
    inside = (table["stochflow-lo-80"] <= table["y"]) & (table["y"] <= table["stochflow-hi-80"])
    assert made.metrics["coverage_80"] == pytest.approx(inside.mean())


def test_what_is_not_finite_is_null_in_json(tmp_path):
    """A series that never changes has no scale for its MASE."""
    write_json(tmp_path / "metrics.json", {"mase": float("inf"), "crps": np.float64("nan"), "windows": 8})
    assert json.loads((tmp_path / "metrics.json").read_text(), parse_constant=pytest.fail) == {
        "mase": None,
        "crps": None,
        "windows": 8,
    }


def test_the_help_of_the_window_says_what_happens():
    for horizon, season, wanted in ((12, 12, 36), (12, 24, 60), (40, 12, 80), (1, 1, 8)):
        assert (
            Forecaster(horizon=horizon)._length(season) == wanted == max(2 * season + min(12, season), 2 * horizon, 8)
        )


def test_a_failure_leaves_nothing_behind(tmp_path):
    class Oops(Exception):
        pass

    def half() -> None:
        with whole_folder(tmp_path / "out") as folder:
            (folder / "half.csv").write_text("x")
            raise Oops

    with pytest.raises(Oops):
        half()
    assert list(tmp_path.iterdir()) == []


def test_the_later_of_two_that_write_the_same_folder_is_told(tmp_path):
    def both() -> None:
        with whole_folder(tmp_path / "out") as later:
            (later / "forecasts.csv").write_text("later")
            with whole_folder(tmp_path / "out") as earlier:
                (earlier / "forecasts.csv").write_text("earlier")

    with pytest.raises(UserError, match="another process has written it meanwhile"):
        both()
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert (tmp_path / "out" / "forecasts.csv").read_text() == "earlier"


def test_the_flags_need_no_torch():
    import subprocess
    import sys

    code = "import sys; import stochflow.forecast.config; print([m for m in ('torch', 'numpy', 'pandas') if m in sys.modules])"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )
    assert all(dataclasses.fields(Forecast)[i].name == name for i, name in enumerate(FLAGS))


@pytest.mark.parametrize(
    "changes",
    [
        {"mix": 0.0},
        {"stick": 1.5, "noise": "slip"},
        {"bins": 2},
        {"levels": (0,)},
        {"mode": "mle"},
        {"lr": 0.0},
        {"window": -1},
        {"seeds": 0},
    ],
    ids=str,
)
def test_impossible_settings_are_refused(changes):
    with pytest.raises(UserError, match="--"):
        Forecaster(**changes)
