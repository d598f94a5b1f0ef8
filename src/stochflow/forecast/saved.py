"""A fitted forecaster as two files: `model.safetensors` with every array, `model.json` with everything else. Nothing is unpickled.

The tracks it was fitted on are kept with it, so that it forecasts without data as it did before; their stamps are kept as text.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from stochflow.errors import UserError
from stochflow.files.reading import read_bytes, read_json, shown
from stochflow.forecast.config import Forecast
from stochflow.forecast.frame import Schema, need_pandas
from stochflow.forecast.location import Ensemble, Plan
from stochflow.forecast.prior import Prior
from stochflow.forecast.regression import Layout
from stochflow.forecast.smoothing import Rates
from stochflow.forecast.support import Limits
from stochflow.forecast.training import Counted, Fitted, make_channel, make_policy
from stochflow.nets.windows import PathPolicy
from stochflow.noise.dynamics import Known
from stochflow.runs.atomic import replacing
from stochflow.scores.rewards import Linear
from stochflow.types import Task
from stochflow.worlds.paths import Paths
from stochflow.worlds.series import Bins, Cut, Nearness, Track

if TYPE_CHECKING:
    from stochflow.forecast.forecaster import Forecaster

FORMAT = 1
ARRAYS, TEXT = "model.safetensors", "model.json"
MOST = 1 << 30  # bytes of a model that are read
_ENSEMBLE = (
    "power",
    "spread",
    "coefficients",
    "growth",
    "repeated",
    "weights",
    "unit",
    "shape",
    "bias",
    "quiet",
    "height",
    "anchor",
)
_TRACK = ("time", "y", "real", "categories", "static", "static_categories", "known")


# writing --------------------------------------------------------------------------------------------------------------


def save(forecaster: Forecaster, folder: str | Path) -> Path:
    """Write both files into a folder, each whole or not at all; returns the folder."""
    from safetensors.torch import save as packed

    fitted, prior = forecaster._need(), forecaster.prior
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    arrays: dict[str, Tensor] = {f"paths.{k}": v for k, v in prior.paths._asdict().items()}
    arrays["power"] = _tensor(prior.power)
    if prior.effects is not None:
        arrays["effects"] = _tensor(prior.effects)
    if prior.ensemble is not None:
        arrays |= {f"ensemble.{k}": _tensor(getattr(prior.ensemble, k)) for k in _ENSEMBLE}
        arrays |= {f"rates.{k}": _tensor(v) for k, v in prior.ensemble.rates._asdict().items()}
    if fitted.share:
        arrays |= {f"policy.{k}": v.detach().cpu() for k, v in fitted.policy.state_dict().items()}
        arrays |= {f"dynamics.{k}": v.detach().cpu() for k, v in fitted.dynamics.state_dict().items()}
    for i, track in enumerate(forecaster.tracks):
        arrays |= {f"track.{i}.{k}": _tensor(getattr(track, k)) for k in _TRACK if getattr(track, k) is not None}
    told = {
        "format": FORMAT,
        "settings": dataclasses.asdict(forecaster.settings),
        "schema": _schema(forecaster.schema),
        "window": forecaster.window,
        "skipped": forecaster.skipped,
        "limits": {k: list(v) for k, v in forecaster.limits.items()},
        "prior": _prior(prior),
        "fitted": {
            "steps": fitted.steps,
            "temperature": fitted.temperature,
            "share": fitted.share,
            "validation": fitted.validation,
        },
        "tracks": [{"name": t.name, "later": [str(x) for x in t.later]} for t in forecaster.tracks],
        "stamps": [[str(x) for x in s] for s in forecaster.stamps],
    }
    with replacing(folder / ARRAYS) as file:
        file.write(packed({k: v.contiguous().clone() for k, v in arrays.items()}))  # none shares memory
    with replacing(folder / TEXT, text=True) as file:
        file.write(json.dumps(told, allow_nan=False) + "\n")
    return folder


def _tensor(x: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(x))


def _schema(schema: Schema) -> dict[str, Any]:
    number = isinstance(schema.freq, int)
    made = {k: v for k, v in dataclasses.asdict(schema).items() if k not in ("freq", "anchor")}
    return {
        **made,
        "freq": schema.freq if number else schema.freq.freqstr,
        "anchor": schema.anchor if number else str(schema.anchor),
    }


def _prior(prior: Prior) -> dict[str, Any]:
    ensemble = prior.ensemble
    return {
        "cut": dataclasses.asdict(prior.cut),
        "names": prior.names,
        "bins": dataclasses.asdict(prior.bins),
        "chosen": prior.chosen,
        "ensemble": None
        if ensemble is None
        else {
            "plan": dataclasses.asdict(ensemble.plan),
            "layout": dataclasses.asdict(ensemble.layout),
            "powers": ensemble.powers,
        },
    }


# reading --------------------------------------------------------------------------------------------------------------


def load(folder: str | Path, kind: type[Forecaster]) -> Forecaster:
    """The forecaster (of this class) that `save` wrote; running it runs no code of the folder."""
    from safetensors import SafetensorError
    from safetensors.torch import load as unpacked

    folder = Path(folder)
    if not (folder / TEXT).exists():
        raise UserError(
            f"{shown(folder)} holds no forecaster: give the folder of `stochflow forecast` or of `Forecaster.save`"
        )
    told = read_json(folder / TEXT, most=MOST)
    if not isinstance(told, dict) or told.get("format") != FORMAT:
        raise UserError(
            f"{shown(folder / TEXT)} is not of format {FORMAT}, which this version reads: save the forecaster with this version"
        )
    try:
        arrays = unpacked(read_bytes(folder / ARRAYS, MOST, in_folder=True))
        return _rebuilt(told, arrays, kind)
    except UserError:
        raise
    except (SafetensorError, KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as problem:
        raise UserError(
            f"{shown(folder)} holds a damaged forecaster ({type(problem).__name__}: {problem}): fit it anew"
        ) from None


def _rebuilt(told: dict[str, Any], arrays: dict[str, Tensor], kind: type[Forecaster]) -> Forecaster:
    made = kind(_settings(told["settings"]))
    made.schema = _read_schema(told["schema"])
    made.window, made.skipped = int(told["window"]), list(told["skipped"])
    made.limits = {k: Limits(*v) for k, v in told["limits"].items()}
    made.tracks = [_track(i, t, arrays, made.schema) for i, t in enumerate(told["tracks"])]
    made.stamps = [_stamps(s, made.schema) for s in told["stamps"]]
    for track, stamps in zip(made.tracks, made.stamps, strict=True):
        if len(track.y) != len(stamps):
            raise ValueError(f"series {track.name!r} has {len(track.y)} values and {len(stamps)} stamps")
    made.prior = _read_prior(told["prior"], arrays)
    made.fitted = _fitted(made, told["fitted"], arrays)
    return made


def _settings(told: dict[str, Any]) -> Forecast:
    known = {f.name for f in dataclasses.fields(Forecast)}
    settings: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in told.items() if k in known}
    return Forecast(**{**settings, "device": "auto"}).check()


def _read_schema(told: dict[str, Any]) -> Schema:
    pandas = need_pandas()
    number = isinstance(told["freq"], int)
    words = {k: {c: tuple(v) for c, v in told[k].items()} for k in ("categories", "static_categories")}
    return Schema(
        told["freq"] if number else pandas.tseries.frequencies.to_offset(told["freq"]),
        told["anchor"] if number else pandas.Timestamp(told["anchor"]),
        int(told["season"]),
        tuple(told["periods"]),
        tuple(told["ids"]),
        tuple(told["real"]),
        words["categories"],
        {k: (float(a), float(b)) for k, (a, b) in told["static"].items()},
        words["static_categories"],
        tuple(told["future"]),
        None if told["zone"] is None else (str(told["zone"][0]), str(told["zone"][1])),
    )


def _stamps(texts: list[str], schema: Schema) -> list[Any]:
    if isinstance(schema.freq, int):
        return [int(x) for x in texts]
    return list(need_pandas().to_datetime(texts, format="ISO8601"))


def _track(i: int, told: dict[str, Any], arrays: dict[str, Tensor], schema: Schema) -> Track:
    fields = {k: arrays[f"track.{i}.{k}"].numpy() for k in _TRACK if f"track.{i}.{k}" in arrays}
    return Track(str(told["name"]), **fields, later=tuple(_stamps(told["later"], schema)))


def _read_prior(told: dict[str, Any], arrays: dict[str, Tensor]) -> Prior:
    names = tuple(told["names"])
    cut = Cut(**{**told["cut"], "periods": tuple(told["cut"]["periods"])})
    ensemble = None
    if told["ensemble"] is not None:
        plan, layout = told["ensemble"]["plan"], told["ensemble"]["layout"]
        none = torch.zeros(len(names), 0, 1)  # a folder of before autoregressions were members
        arrays = {"ensemble.repeated": none, **arrays}
        fields = {k: arrays[f"ensemble.{k}"].numpy() for k in _ENSEMBLE}
        ensemble = Ensemble(
            plan=Plan(plan["horizon"], tuple(plan["seasons"]), plan["long"], plan["log"]),
            names=names,
            rates=Rates(*[arrays[f"rates.{k}"].numpy() for k in Rates._fields]),
            layout=Layout(layout["lags"], tuple(layout["seasons"]), tuple(layout["waves"]), layout["base"]),
            powers=(float(told["ensemble"]["powers"][0]), float(told["ensemble"]["powers"][1])),
            **fields,
        )
    paths = Paths(*[arrays[f"paths.{k}"] for k in Paths._fields])
    bins = Bins(**told["bins"])
    if paths.table.shape[0] != cut.horizon or paths.table.shape[2] != bins.count:
        raise ValueError("the law of paths does not fit the horizon and the bins")
    effects = arrays["effects"].numpy() if "effects" in arrays else None
    return Prior(cut, names, arrays["power"].numpy(), ensemble, paths, bins, dict(told["chosen"]), effects)


def _fitted(made: Forecaster, told: dict[str, Any], arrays: dict[str, Tensor]) -> Fitted:
    changed = made.prior.transformed(made.tracks)
    env = made._env(made.prior, made.prior.windows(changed, [np.array([len(t.y)]) for t in changed]))
    share = float(told["share"])
    settings = made.settings if share else dataclasses.replace(made.settings, seeds=1)
    task = Task(env, make_channel(settings), Nearness(env), Linear(1.0))
    policy = make_policy(env, settings, torch.zeros(1, dtype=torch.long))
    dynamics: Any = Known(env, task.channel)
    if share:
        policy.load_state_dict({k[7:]: v for k, v in arrays.items() if k.startswith("policy.")})
        counts = {k[9:]: v for k, v in arrays.items() if k.startswith("dynamics.")}
        if "counts" in counts:
            dynamics = Counted(env, settings.seeds)
            dynamics.load_state_dict(counts)
    if isinstance(policy, PathPolicy):
        policy.share.fill_(share)
    policy.to(made.device)
    looks = [[float(x) for x in row] for row in told["validation"]]
    return Fitted(task, policy, dynamics, int(told["steps"]), float(told["temperature"]), looks, share)
