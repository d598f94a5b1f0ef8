"""The command: read, back-test, learn, forecast, tilt, and leave a folder that can be opened again."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from stochflow import __version__
from stochflow.errors import UserError
from stochflow.files.memory import need
from stochflow.files.reading import read_cells, read_json, shown
from stochflow.forecast import report, rivals
from stochflow.forecast.config import Forecast
from stochflow.forecast.forecaster import Forecaster
from stochflow.forecast.frame import SHIPPED, read, read_csv, shipped
from stochflow.forecast.page import write_page
from stochflow.forecast.report import TILTED
from stochflow.forecast.training import Watch
from stochflow.runs.atomic import refuse_special, replacing, text_file
from stochflow.runs.export import harmless
from stochflow.runs.lock import Lock

if TYPE_CHECKING:
    import pandas as pd

    from stochflow.forecast.tilted import Tilted

Score = Callable[[np.ndarray], np.ndarray]


class Tilt(NamedTuple):
    """What futures are asked for beside the forecaster's own."""

    score: Score
    name: str
    beta: float = 0.0
    at_least: float | None = None  # the probability that the score reaches this is asked for
    series: str | None = None


class Forecasted(NamedTuple):
    """What `forecast_command` leaves: its folder, the figures of the back-test, the forecasts, the files in the folder."""

    path: Path
    metrics: dict[str, Any]
    table: pd.DataFrame
    files: list[Path]

    @property
    def summary(self) -> str:
        """The figures and the first forecasts, in a few lines."""
        return report.summary(self.metrics, self.table)


def forecast_command(
    settings: Forecast,
    data: str | Path | None = None,
    out: str | Path = "forecast",
    watch: Watch | None = None,
    model: str | Path | None = None,
    tilt: Tilt | None = None,
) -> Forecasted:
    """Read, back-test over rolling origins, learn from everything, forecast, and write the folder: all of it or nothing.

    `data` is a CSV file, the name of a shipped series, or None for the monthly CO2 at Mauna Loa. `watch` is called as training goes on.
    `model`: the folder of an earlier forecast, whose forecaster is used on `data` (or on its own past) without learning anything.
    """
    settings.check()
    target = Path(out)
    if model is not None:
        forecaster, word = _as_asked(Forecaster.load(model), settings, model), str(model)
        if data is not None:  # what is kept in the folder is what its forecasts follow
            forecaster.tracks, forecaster.stamps = forecaster._past(_frame(str(data)), None)
        with report.whole_folder(target) as folder:
            return _written(folder, target, forecaster, {}, word, tilt)
    word = "co2" if data is None else str(data)
    frame = _frame(word)
    series = frame[settings.id_col].nunique() if settings.id_col in frame else 1
    _need_memory(settings, series)
    if settings.origins:
        report.need_metrics()
        rivals.need(settings.rivals)
    with report.whole_folder(target) as folder:  # refuses a folder in use before anything is trained
        forecaster = Forecaster(settings, watch=watch)
        if settings.future:  # before anything is learned
            s = settings
            _, tracks, stamps = read(frame, s.freq, s.gaps, s.season, columns=forecaster._columns())
            forecaster.check_ahead(forecaster._long_enough(tracks, stamps)[0])
        metrics: dict[str, Any] = {}
        if settings.origins:
            metrics = _tested(forecaster, frame, folder)
        forecaster.fit(frame)
        return _written(folder, target, forecaster, metrics, word, tilt)


FREE = ("levels", "samples", "seed", "id_col", "time_col", "target_col", "device")  # with a forecaster that has learned


def _as_asked(forecaster: Forecaster, settings: Forecast, model: str | Path) -> Forecaster:
    """A loaded forecaster with the settings that were asked for; UserError where one was settled when it learned."""
    own = dataclasses.asdict(forecaster.settings)
    asked = {k: v for k, v in dataclasses.asdict(settings).items() if v != getattr(Forecast(), k) and v != own[k]}
    settled = [k for k in asked if k not in FREE]
    if settled:
        name = settled[0]
        raise UserError(
            f"--{name.replace('_', '-')} {asked[name]} changes nothing in {shown(Path(model))}, which has learned already: leave it out, or forecast without --model"
        )
    forecaster.settings = dataclasses.replace(forecaster.settings, **asked).check()
    return forecaster


def _need_memory(settings: Forecast, series: int, row: int = 16) -> None:
    """UserError where the futures or the network of a forecast would not fit; `row`: bytes of one value of one future."""
    s = settings
    futures = float(row) * s.samples * s.horizon * series * (1 + s.origins)
    need(futures, f"{s.samples} futures of {series} series", "lower --samples (-n of sample), --horizon or --origins")
    if s.network != "off":  # weights, gradients, moments and the average; then what a batch leaves for its gradient
        net = 20.0 * s.seeds * s.hidden * (8 * s.hidden + s.bins) + 8.0 * s.seeds * s.batch * s.horizon * s.hidden
        need(net, "the network", "lower --seeds, --hidden or --batch")


def _frame(word: str) -> pd.DataFrame:
    return shipped(word) if word in SHIPPED and not Path(word).exists() else read_csv(word)


def _tested(forecaster: Forecaster, frame: pd.DataFrame, folder: Path) -> dict[str, Any]:
    """The back-test's figures; its table, its scores per window and the rivals are written."""
    import pandas

    s = forecaster.settings
    tested = forecaster.backtest(frame)
    _to_csv(tested.table, folder / "backtest.csv")
    value = report.crps(tested.samples, tested.truth)
    cutoffs = tested.table["cutoff"][:: s.horizon]
    windows = pandas.DataFrame({"unique_id": tested.names, "cutoff": list(cutoffs), "crps": np.nanmean(value, 1)})
    _to_csv(windows, folder / "windows.csv")
    if s.rivals:
        _to_csv(tested.against(s.rivals), folder / "rivals.csv")
    figures = {**tested.measure(), **tested.joint()}
    if tested.skipped:
        figures["series_left_out"] = len(tested.skipped)
    return figures


def _written(
    folder: Path, target: Path, forecaster: Forecaster, metrics: dict[str, Any], word: str, tilt: Tilt | None
) -> Forecasted:  # fmt: skip
    table, metrics = _write(folder, forecaster, metrics, word, tilt)
    write_page(folder, title=target.name)
    return Forecasted(target, metrics, table, sorted(target / p.name for p in folder.iterdir()))


def _write(
    folder: Path, forecaster: Forecaster, metrics: dict[str, Any], word: str, tilt: Tilt | None
) -> tuple[pd.DataFrame, dict[str, Any]]:
    """(forecasts, figures): everything of a folder but the back-test's tables and the page."""
    table = forecaster.predict()
    drawn = forecaster.sample()
    _to_csv(table, folder / "forecasts.csv")
    _to_npy(drawn, folder / "samples.npy")
    past = zip(forecaster.tracks, forecaster.stamps, strict=True)
    history = {t.name: (forecaster.schema.shown(when), t.y) for t, when in past}
    settings = forecaster.settings
    recent = max(6 * settings.horizon, forecaster.window)
    report.fan_chart(folder / "fan.png", history, table, settings, recent, drawn)
    if tilt is not None:
        found, tilted = tilted_futures(forecaster, tilt)
        metrics = {**metrics, **found}
        _to_csv(tilted.table(), folder / "tilted.csv")
        _to_npy(tilted.paths, folder / "tilted.npy")
        report.tilt_chart(folder / "tilted.png", history[tilted.series], tilted, recent)
    report.write_json(folder / "metrics.json", metrics)
    fitted = forecaster._need()
    told: dict[str, Any] = {
        "data": word,
        "window": forecaster.window,
        "season": forecaster.schema.season,
        "location": settings.location,
        "skipped": forecaster.skipped,
    }
    told |= {"steps": fitted.steps, "temperature": fitted.temperature, "share": fitted.share, "version": __version__}
    told |= forecaster.prior.chosen
    report.write_json(folder / "config.json", {"forecast": dataclasses.asdict(settings), "chosen": told})
    forecaster.save(folder)
    return table, metrics


def tilted_futures(forecaster: Forecaster, tilt: Tilt) -> tuple[dict[str, Any], Tilted]:
    """(figures, futures) of a tilt; with a level to reach, of the futures that reach it."""
    from stochflow.forecast import tilted

    if tilt.at_least is not None:
        session = tilted.Session(forecaster, tilt.score, tilt.series)
        found, made = tilted.probability(session, tilt.at_least, draws=20_000, steps=100)
        figures = {"event": f"{tilt.name} >= {tilt.at_least:g}", "event_probability": found.value}
        figures |= {
            "event_low": found.low,
            "event_high": found.high,
            "event_hits": found.hits,
            "event_draws": found.draws,
        }
        if not len(made.paths):
            raise UserError(
                f"no future of {found.draws} reached {tilt.name} >= {tilt.at_least:g} (probability below {found.high:.2g}): give a nearer level"
            )
        return figures, made
    made = forecaster.tilt(tilt.score, tilt.beta, tilt.series)
    figures = {"tilt": f"{tilt.name}, beta {tilt.beta:g}", "tilt_effective": made.effective, "tilt_log_z": made.log_z}
    own = np.asarray(tilt.score(made.own), dtype=np.float64)
    return {**figures, "score_tilted": made.mean(tilt.score), "score_own": float(own.mean())}, made


def _harmless(table: pd.DataFrame) -> pd.DataFrame:
    """The table without cells that a spreadsheet would take for formulas."""
    words = {c: table[c].map(harmless) for c in table.columns if table[c].dtype == object}
    return table.assign(**words).rename(columns=harmless)


def _to_csv(table: pd.DataFrame, path: Path) -> None:
    with text_file(path) as file:
        _harmless(table).to_csv(file, index=False)


def _to_npy(array: np.ndarray, path: Path) -> None:
    with replacing(path) as file:
        np.save(file, array, allow_pickle=False)


# folders --------------------------------------------------------------------------------------------------------------


def is_forecast(folder: str | Path) -> bool:
    """Whether a folder is one of `stochflow forecast`."""
    return (Path(folder) / "model.json").is_file() and (Path(folder) / "forecasts.csv").is_file()


def sample_folder(folder: Path, n: int, seed: int, out: Path | None) -> str:
    """`n` futures of each series of a saved forecast as a long table (unique_id, sample, ds, value; series and stamps under their own names): written, or as text."""
    import pandas

    forecaster = Forecaster.load(folder)
    forecaster.settings = dataclasses.replace(
        forecaster.settings, samples=n, seed=forecaster.settings.seed + seed
    ).check()
    _need_memory(dataclasses.replace(forecaster.settings, origins=0, network="off"), len(forecaster.tracks), 100)
    drawn = forecaster.sample()
    when = forecaster.ahead(forecaster.tracks, forecaster.stamps)
    parts = [
        pandas.DataFrame(
            {
                forecaster.settings.id_col: track.name,
                "sample": np.repeat(np.arange(len(paths)), len(stamps)),
                forecaster.settings.time_col: stamps * len(paths),
                "value": paths.reshape(-1),
            }
        )
        for track, paths, stamps in zip(forecaster.tracks, drawn, when, strict=True)
    ]
    table = pandas.concat(parts)
    if out is None:
        return _harmless(table).to_csv(index=False)
    _to_csv(table, out)
    return f"{len(table)} rows written to {shown(out)}\n"


def resume_folder(folder: Path, steps: int, watch: Watch | None = None) -> str:
    """Learn again, from the start, from the data that a saved forecast keeps, with up to `steps` training iterations; forecasts, picture, settings
    and page are replaced. Figures of the back-test stay those of before; tilted futures, which belong to the earlier forecaster, are removed.
    """
    before = Forecaster.load(folder)  # what is no forecast is refused before anything is made there
    try:
        lock = Lock(folder, "forecast", "")
    except OSError as error:
        raise UserError(
            f"{shown(folder)} cannot be written ({error.strerror or error}): allow it, or copy it"
        ) from error
    with contextlib.closing(lock):
        return _resume(folder, before, steps, watch)


def _resume(folder: Path, forecaster: Forecaster, steps: int, watch: Watch | None) -> str:
    """The same, alone in the folder."""
    old = forecaster.settings.steps
    if steps and steps <= old:
        raise UserError(f"{shown(folder)} was allowed {old} training iterations: give more with --steps")
    forecaster.settings = dataclasses.replace(forecaster.settings, steps=steps or old).check()
    forecaster.watch = watch or forecaster.watch
    forecaster.refit()
    kept = {k: v for k, v in _told(folder / "metrics.json").items() if not k.startswith(TILTED)}
    chosen = _told(folder / "config.json").get("chosen", {})
    word = str(chosen.get("data", "")) if isinstance(chosen, dict) else ""
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as made:
        _write(Path(made), forecaster, kept, word, None)
        for file in sorted(Path(made).iterdir()):
            refuse_special(folder / file.name)
            os.replace(file, folder / file.name)
    for name in ("tilted.csv", "tilted.npy", "tilted.png"):
        (folder / name).unlink(missing_ok=True)
    write_page(folder, title=folder.name)
    fitted = forecaster._need()
    return f"learned for {fitted.steps} of at most {forecaster.settings.steps} iterations; the network is followed by {fitted.share:g}"


def _told(path: Path) -> dict[str, Any]:
    """The object of a JSON file; empty where there is none."""
    found = read_json(path) if path.is_file() else {}
    return found if isinstance(found, dict) else {}


def _windows(path: Path) -> pd.Series:
    """The scores of a back-test's windows, by series and cutoff."""
    import pandas

    try:
        found = pandas.read_csv(io.StringIO(read_cells(path)), dtype={"unique_id": str, "cutoff": str})
        scores = found.set_index(["unique_id", "cutoff"])["crps"].astype(float)
        return scores[~scores.index.duplicated()]
    except (KeyError, ValueError) as error:
        if isinstance(error, UserError):
            raise
        raise UserError(
            f"{shown(path)} is no table of unique_id, cutoff and crps ({error}): restore it, or forecast again"
        ) from None


def compare_folders(folders: list[Path]) -> str:
    """Back-tests side by side: mean CRPS over the windows that all share, and the difference from the first with a 95 % interval."""
    import pandas

    tables = []
    for folder in folders:
        if not (folder / "windows.csv").is_file():
            raise UserError(f"{shown(folder)} holds no back-test: forecast it with --origins above 0")
        tables.append(_windows(folder / "windows.csv"))
    joined = pandas.concat(tables, axis=1, join="inner", keys=range(len(tables))).dropna()
    if not len(joined):
        raise UserError("these forecasts have no window in common: back-test them on the same series and origins")
    dice = np.random.default_rng(0)
    lines = [f"CRPS over {len(joined)} windows that all share (lower is better)"]
    for i, folder in enumerate(folders):
        line = f"  {shown(folder):<40} {joined[i].mean():.5g}"
        if i:
            off = (joined[i] - joined[0]).to_numpy()
            means = off[dice.integers(len(off), size=(1000, len(off)))].mean(1)
            low, high = np.quantile(means, [0.025, 0.975])
            words = "no difference beyond noise" if low <= 0 <= high else "better" if high < 0 else "worse"
            line += f"   {off.mean():+.4g} from the first ({low:+.4g} to {high:+.4g}): {words}"
        lines.append(line)
    return "\n".join(lines) + "\n"
