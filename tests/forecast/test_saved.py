"""A forecaster kept in a folder, the folder's page, and what the other commands do with it."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch

from stochflow.cli.commands import main
from stochflow.errors import UserError
from stochflow.forecast import Forecast, Forecaster, forecast_command, shipped
from stochflow.forecast.calibration import covered, first_passage, joint, lag_correlation
from stochflow.forecast.command import Tilt, resume_folder
from stochflow.forecast.rivals import naive, normal_crps

QUICK = {"horizon": 4, "encoder": "mlp", "seeds": 2, "steps": 20, "samples": 60, "hidden": 16, "bins": 17}


def panel(count=80, names=("a", "b"), **more) -> pd.DataFrame:
    dice = np.random.default_rng(0)
    parts = []
    for i, name in enumerate(names):
        t = np.arange(count)
        y = 50 * (i + 1) + 0.3 * t + 5 * np.sin(2 * np.pi * t / 12) + dice.normal(0, 1, count)
        parts.append(
            pd.DataFrame(
                {"unique_id": name, "ds": pd.date_range("2000-01-01", periods=count, freq="MS", **more), "y": y}
            )
        )
    return pd.concat(parts, ignore_index=True)


@pytest.mark.parametrize(
    "changes",
    [
        {"network": "off"},
        {"network": "on"},
        {"mode": "mse"},
        {"noise": "slip", "stick": 0.2},
        {"location": "last", "network": "off"},
    ],
)
def test_a_forecaster_comes_back_bit_for_bit(changes, tmp_path):
    frame = panel()
    made = Forecaster(freq="MS", **QUICK, **changes).fit(frame)
    again = Forecaster.load(made.save(tmp_path / "kept"))
    assert np.array_equal(made.sample(), again.sample())
    later = panel(92)
    assert made.predict(later).equals(again.predict(later))
    assert not list((tmp_path / "kept").glob("*.p*kl*"))
    assert {p.name for p in (tmp_path / "kept").iterdir()} == {"model.json", "model.safetensors"}


def test_a_folder_of_before_autoregressions_were_members_still_forecasts(tmp_path):
    """Its weights are of fewer members."""
    from safetensors.torch import load_file, save_file

    made = Forecaster(freq="MS", network="off", **QUICK).fit(panel())
    kept = made.save(tmp_path / "kept")
    arrays = load_file(kept / "model.safetensors")
    count = arrays.pop("ensemble.repeated").shape[1]
    assert count == 2
    early = arrays["ensemble.weights"][:, :-count]
    arrays["ensemble.weights"] = (early / early.sum(1, keepdim=True)).contiguous()
    save_file(arrays, kept / "model.safetensors")
    near = np.abs(Forecaster.load(kept).predict()["stochflow"] - made.predict()["stochflow"])
    assert near.max() < 1.5


def test_a_damaged_folder_is_named(tmp_path):
    made = Forecaster(freq="MS", network="off", **QUICK).fit(panel())
    kept = made.save(tmp_path / "kept")
    with pytest.raises(UserError, match="holds no forecaster"):
        Forecaster.load(tmp_path)
    told = json.loads((kept / "model.json").read_text())
    for spoil in (
        {"prior": {}},
        {"window": "x"},
        {"format": 99},
        {"settings": {"horizon": -1}},
        {"limits": 3},
        {"tracks": []},
    ):
        (kept / "model.json").write_text(json.dumps({**told, **spoil}))
        if spoil == {"tracks": []}:
            continue  # no series, nothing to forecast: the next check says so
        with pytest.raises(UserError):
            Forecaster.load(kept)
    (kept / "model.json").write_text(json.dumps(told))
    (kept / "model.safetensors").write_bytes(b"not tensors")
    with pytest.raises(UserError, match="damaged"):
        Forecaster.load(kept)


def test_time_zones_are_kept(tmp_path):
    days = panel(120, ("a",))
    days["ds"] = pd.date_range("2024-01-01", periods=120, freq="D", tz="Europe/Berlin")
    made = Forecaster(freq="D", network="off", **QUICK).fit(days)
    table = Forecaster.load(made.save(tmp_path / "days")).predict()
    assert str(table["ds"].dt.tz) == "Europe/Berlin"
    assert table["ds"].iloc[0] == pd.Timestamp("2024-04-30", tz="Europe/Berlin")
    hours = panel(200, ("a",))
    hours["ds"] = pd.date_range(
        "2024-03-25", periods=200, freq="h", tz="Europe/Berlin"
    )  # over the change of the clocks
    made = Forecaster(network="off", **QUICK).fit(hours)
    assert made.predict()["ds"].iloc[0] == hours["ds"].iloc[-1] + pd.Timedelta("1h")
    assert made.backtest(hours, 2).table["cutoff"].iloc[-1] == hours["ds"].iloc[-5]


def test_values_stay_where_they_can_be():
    dice = np.random.default_rng(0)
    counts = panel(150, ("a",)).assign(y=dice.poisson(0.7, 150).astype(float))
    drawn = Forecaster(freq="MS", network="off", **QUICK).fit(counts).sample()
    assert drawn.min() == 0
    assert (drawn == np.round(drawn)).all()
    free = Forecaster(freq="MS", network="off", support="any", **QUICK).fit(counts).sample()
    assert (free != np.round(free)).any()
    with pytest.raises(UserError, match="excludes"):
        Forecaster(freq="MS", support="nonnegative", **QUICK).fit(counts.assign(y=counts["y"] - 3))
    with pytest.raises(UserError, match="--log was asked for"):
        Forecaster(freq="MS", log=True, **QUICK).fit(counts)


def test_columns_are_called_as_the_user_calls_them():
    frame = panel().rename(columns={"unique_id": "shop", "ds": "day", "y": "sales"})
    made = Forecaster(freq="MS", network="off", id_col="shop", time_col="day", target_col="sales", **QUICK)
    assert list(made.fit(frame).predict().columns[:2]) == ["shop", "day"]
    table = made.cross_validation(frame, n_windows=2, step_size=4)
    assert list(table.columns[:4]) == ["shop", "day", "cutoff", "sales"]


def test_refitting_at_every_origin_sees_more():
    frame = panel(names=("a",))
    once, each = (Forecaster(freq="MS", network="off", **QUICK).backtest(frame, 3, refit=r) for r in (False, True))
    assert np.array_equal(once.truth, each.truth)
    one, other = (np.median(x.samples, 1) for x in (once, each))
    assert np.abs(one[0] - other[0]).max() < 1  # learned from the same rows
    assert not np.allclose(one[2], other[2], atol=1e-3)
    assert once.forecaster.stamps == each.forecaster.stamps


# calibration ------------------------------------------------------------------------------------------------------------


def test_figures_of_paths_on_a_walk_that_is_known():
    dice = np.random.default_rng(0)
    drawn, truth = dice.normal(size=(300, 100, 8)).cumsum(-1), dice.normal(size=(300, 8)).cumsum(-1)
    pytest.importorskip("scoringrules")
    found = joint(drawn, truth)
    assert all(0.7 < found[f"coverage_80_{k}"] < 0.9 for k in ("total", "maximum", "difference"))
    assert found["lag_1_real"] == pytest.approx(found["lag_1_sampled"], abs=0.06)
    assert found["growth_real"] == pytest.approx(found["growth_sampled"], rel=0.15)
    loose = dice.normal(size=drawn.shape) * np.sqrt(np.arange(1, 9))  # right widths, no correlation
    apart = joint(loose, truth)
    assert apart["coverage_80_total"] < 0.6
    assert apart["variogram"] > found["variogram"]
    assert apart["energy"] > found["energy"]
    bars = np.full(300, 2.0)
    assert first_passage(drawn, truth, bars) < first_passage(loose, truth, bars)


def test_small_figures_by_hand():
    assert lag_correlation(np.array([[1.0, 1.0, -1.0]])) == pytest.approx(0.0)
    paths = np.arange(11.0).reshape(1, 11, 1)
    assert covered(paths, np.array([[5.0]]), lambda x: x.sum(-1)) == 1
    assert covered(paths, np.array([[10.0]]), lambda x: x.sum(-1)) == 0


def test_rivals_by_hand():
    centre, spread = naive(np.array([1.0, 2, 3, 2, 3, 4]), 3, 4)
    assert centre.tolist() == [2, 3, 4, 2]
    assert np.allclose(spread, [1, 1, 1, 2**0.5])
    dice = np.random.default_rng(0)
    sample = dice.normal(2, 3, 200_000)
    wanted = np.abs(sample - 1).mean() - np.abs(sample[::2] - sample[1::2]).mean() / 2
    assert normal_crps(np.array([1.0]), np.array([2.0]), np.array([3.0]))[0] == pytest.approx(wanted, rel=0.02)


# the folder -------------------------------------------------------------------------------------------------------------


def tall(paths: np.ndarray) -> np.ndarray:
    return paths.sum(1)


def failing(paths: np.ndarray) -> np.ndarray:
    return np.full(len(paths), 1 // 0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("scoringrules")
    out = tmp_path_factory.mktemp("forecast") / "<b>air"
    forecast_command(Forecast(**{**QUICK, "horizon": 6, "network": "off"}, origins=3), "air_passengers", out)
    return out


def test_the_folder_holds_what_others_need(folder):
    assert {p.name for p in folder.iterdir()} == {
        "backtest.csv", "config.json", "fan.png", "forecasts.csv", "metrics.json", "model.json", "model.safetensors", "report.html",
        "rivals.csv", "samples.npy", "windows.csv",
    }  # fmt: skip
    rivals = pd.read_csv(folder / "rivals.csv")
    assert list(rivals["of"][:3]) == ["all", "series air_passengers", "step 1"]
    assert len(rivals) == 2 + 6
    assert ((rivals["low"] <= rivals["difference"]) & (rivals["difference"] <= rivals["high"])).all()
    assert np.allclose(rivals["difference"], rivals["stochflow"] - rivals["theirs"])
    page = (folder / "report.html").read_text()
    assert "<b>air" not in page
    assert "&lt;b&gt;air" in page
    assert page.count("data:image/png;base64,") == 1
    assert "http" not in page.split("</style>")[1]


def test_other_commands_take_the_folder(folder, tmp_path, capsys):
    assert main(["report", str(folder), "--out", str(tmp_path / "page.html")]) == 0
    assert "<h2>Rivals</h2>" in (tmp_path / "page.html").read_text()
    assert main(["sample", str(folder), "-n", "5", "--out", str(tmp_path / "drawn.csv")]) == 0
    drawn = pd.read_csv(tmp_path / "drawn.csv")
    assert len(drawn) == 5 * 6
    assert list(drawn.columns) == ["unique_id", "sample", "ds", "value"]
    capsys.readouterr()
    assert main(["compare", str(folder), str(folder)]) == 0
    assert "no difference beyond noise" in capsys.readouterr().out
    assert main(["resume", str(folder), "--steps", "30", "--quiet"]) == 0
    assert json.loads((folder / "model.json").read_text())["settings"]["steps"] == 30


def test_resuming_renews_everything_but_the_back_test(folder, tmp_path):
    out = tmp_path / "tilted"
    forecast_command(Forecast(), None, out, model=folder, tilt=Tilt(tall, "tall", 0.02))
    (out / "metrics.json").write_text(json.dumps({**json.loads((out / "metrics.json").read_text()), "mase": 1.0}))
    assert (out / "tilted.csv").is_file()
    before = json.loads((out / "config.json").read_text())["forecast"]["steps"]
    (out / "fan.png").write_bytes(b"old")
    resume_folder(out, before + 10)
    assert json.loads((out / "config.json").read_text())["forecast"]["steps"] == before + 10
    assert (out / "fan.png").read_bytes()[1:4] == b"PNG"
    assert json.loads((out / "metrics.json").read_text()) == {"mase": 1.0}
    assert not list(out.glob("tilted*"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["tilted"]
    with pytest.raises(UserError, match="was allowed"):
        resume_folder(out, before)


def test_a_saved_forecaster_is_used_on_new_data_and_tilted(folder, tmp_path):
    new = shipped("air_passengers")
    file = tmp_path / "new.csv"
    new[:-12].to_csv(file, index=False)
    words = ["forecast", str(file), "--model", str(folder), "--out", str(tmp_path / "out"), "--quiet"]
    assert main([*words, "--score", f"{__name__}:none"]) == 2
    assert main(words) == 0
    table = pd.read_csv(tmp_path / "out" / "forecasts.csv")
    assert table["ds"].iloc[0] == "1960-01-01"
    main(["sample", str(tmp_path / "out"), "-n", "3", "--out", str(tmp_path / "drawn.csv")])
    assert list(pd.read_csv(tmp_path / "drawn.csv")["ds"][:6]) == list(table["ds"])  # the folder keeps the new data
    again = Forecaster.load(folder)
    found = again.tilt(tall, 0.02, steps=10, samples=200)
    assert found.paths.sum(1).mean() > found.own.sum(1).mean()
    assert torch.is_tensor(found.drawn.states)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--beta", "0.01"], "--score"),
        (["--score", f"{__name__}:tall", "--beta", "1", "--at-least", "7000"], "one of the two"),
        (["--score", f"{__name__}:tall", "--beta", "nan"], "finite"),
        (["--score", f"{__name__}:failing"], "ZeroDivisionError"),
        (["--horizon", "5"], "without --model"),
        (["--rivals", "ets"], "without --model"),
    ],
)
def test_what_a_learned_forecaster_cannot_do_is_said_in_a_sentence(folder, tmp_path, capsys, words, said):
    out = tmp_path / "out"
    assert main(["forecast", "--model", str(folder), "--out", str(out), *words]) == 2
    told = capsys.readouterr().err.strip()
    assert said in told
    assert len(told.splitlines()) == 1
    assert not out.exists()


def test_futures_are_tilted_to_low_scores_and_intervals_are_as_asked(folder, tmp_path, capsys):
    out = tmp_path / "low"
    words = ["--score", f"{__name__}:tall", "--beta", "-0.02", "--levels", "50", "--samples", "64"]
    assert main(["forecast", "--model", str(folder), "--out", str(out), "--quiet", *words]) == 0
    figures = json.loads((out / "metrics.json").read_text())
    assert figures["score_tilted"] < figures["score_own"]
    told = capsys.readouterr().out
    assert "tilted futures" in told
    assert "back-test" not in told
    assert "stochflow-lo-50" in (out / "forecasts.csv").read_text()
    assert np.load(out / "samples.npy").shape[1] == 64


def test_tables_name_series_and_stamps_as_the_user_does(tmp_path):
    frame = shipped("air_passengers").rename(columns={"unique_id": "line", "ds": "month", "y": "people"})
    names = {"id_col": "line", "time_col": "month", "target_col": "people"}
    settings = Forecast(**{**QUICK, "origins": 0, "network": "off"}, **names)
    frame.to_csv(tmp_path / "data.csv", index=False)
    forecast_command(settings, tmp_path / "data.csv", tmp_path / "out", tilt=Tilt(tall, "tall", 0.02))
    for file in ("forecasts.csv", "tilted.csv"):
        assert list(pd.read_csv(tmp_path / "out" / file).columns[:2]) == ["line", "month"]
    main(["sample", str(tmp_path / "out"), "-n", "2", "--out", str(tmp_path / "drawn.csv")])
    assert list(pd.read_csv(tmp_path / "drawn.csv").columns) == ["line", "sample", "month", "value"]


def test_a_rival_that_is_not_installed_is_told_before_anything_is_learned(tmp_path, monkeypatch):
    from stochflow.forecast import rivals

    monkeypatch.setattr(rivals, "find_spec", lambda name: None)
    looks = []
    with pytest.raises(UserError, match="leave it out of --rivals"):
        forecast_command(Forecast(**QUICK, rivals=("naive", "ets")), "co2", tmp_path / "out", looks.append)
    assert not looks
    assert not (tmp_path / "out").exists()


def test_figures_that_no_tilt_can_have_are_refused(folder):
    made = Forecaster.load(folder)
    for beta, more in ((float("nan"), {}), (float("inf"), {}), (1.0, {"samples": 0}), (1.0, {"steps": -1})):
        with pytest.raises(UserError, match="must be"):
            made.tilt(tall, beta, **more)
    for level, more in ((float("nan"), {}), (1.0, {"draws": 0})):
        with pytest.raises(UserError, match="must be"):
            made.probability(tall, level, **more)
    assert made.probability(tall, at_least=-1e9, draws=200, steps=2).value <= 1
