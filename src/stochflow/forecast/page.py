"""A forecast folder as one page of HTML that travels by itself: fans with some paths, back-test, calibration, rivals, figures.

It reads the folder alone. Everything shown is escaped: names of series come from files.
"""

from __future__ import annotations

import base64
import csv
import html
import json
import math
from pathlib import Path
from typing import Any

from stochflow.errors import UserError
from stochflow.files.reading import read_bytes, read_cells, read_json, shown
from stochflow.files.schema import anything, mapping
from stochflow.forecast.report import TILTED, TOLD
from stochflow.runs.atomic import write_text

MOST = 1 << 28
_OBJECT = mapping({}, more=anything)
ROWS = 60  # of a table that are shown

STYLE = """
:root{color-scheme:light dark}body{font:16px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem}
img{max-width:100%;background:#fff;border-radius:4px}table{border-collapse:collapse;font-size:.85rem;display:block;overflow-x:auto}
td,th{padding:.2rem .6rem;text-align:right;border-bottom:1px solid #8884}td:first-child,th:first-child{text-align:left}
h2{margin-top:2rem}small{opacity:.75}
"""


def write_page(folder: Path, title: str) -> Path:
    """`report.html` of a forecast folder."""
    return write_text(folder / "report.html", page(folder, title))


def page(folder: Path, title: str) -> str:
    config = read_json(folder / "config.json", mapping({"chosen": _OBJECT, "forecast": _OBJECT}, more=anything), MOST)
    metrics = read_json(folder / "metrics.json", _OBJECT, MOST) if (folder / "metrics.json").is_file() else {}
    chosen = config.get("chosen", {})
    parts = [f"<h1>{html.escape(title)}</h1>", f"<p>{html.escape(_verdict(metrics, chosen))}</p>"]
    parts.append(_picture(folder, "fan.png", "Forecasts: intervals, median and some of the futures"))
    if (folder / "tilted.png").is_file():
        parts += [
            "<h2>Tilted futures</h2>",
            _figures({k: v for k, v in metrics.items() if k.startswith(TILTED)}),
        ]
        parts.append(_picture(folder, "tilted.png", "Tilted futures beside the forecaster's own"))
    tested = {k: v for k, v in metrics.items() if not k.startswith(TILTED)}
    if tested:
        parts += ["<h2>Back-test</h2>", _figures(tested)]
    parts.append(
        _table(
            folder / "rivals.csv",
            "Rivals",
            "CRPS, lower is better; difference is stochflow minus the rival, with a 95 % interval",
        )
    )
    parts.append(_by_series(folder / "windows.csv"))
    parts.append(_table(folder / "backtest.csv", "What was forecast and what happened", ""))
    parts.append(_table(folder / "forecasts.csv", "Forecasts", ""))
    settings = {
        **config.get("forecast", {}),
        **{f"chosen: {k}": v for k, v in chosen.items()},
    }
    parts += ["<h2>Settings</h2>", _rows([("setting", "value"), *[(k, _text(v)) for k, v in settings.items()]])]
    body = "\n".join(p for p in parts if p)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>{html.escape(title)}</title><style>{STYLE}</style><body>{body}</body></html>\n"
    )


def _verdict(metrics: dict[str, Any], chosen: dict[str, Any]) -> str:
    share = chosen.get("share")
    law = (
        "Forecasts follow the statistical law of paths; the network did not help or was not tried."
        if share == 0
        else f"Forecasts follow a network beside the statistical law of paths, by a share of {_text(share)}."
    )
    inside = metrics.get("coverage_80")
    if isinstance(inside, int | float):
        law += f" In the back-test the 80 % interval held {inside:.0%} of the values"
        total = metrics.get("coverage_80_total")
        law += f" and {total:.0%} of the totals over the horizon." if isinstance(total, int | float) else "."
    return law


def _picture(folder: Path, name: str, words: str) -> str:
    if not (folder / name).is_file():
        return ""
    data = base64.b64encode(read_bytes(folder / name, MOST, in_folder=True)).decode()
    return f'<figure><img alt="{html.escape(words)}" src="data:image/png;base64,{data}"><figcaption><small>{html.escape(words)}</small></figcaption></figure>'


def _figures(found: dict[str, Any]) -> str:
    return (
        _rows([("figure", "value"), *[(TOLD.get(k, k.replace("_", " ")), _text(v)) for k, v in found.items()]])
        if found
        else ""
    )


def _lines(path: Path) -> list[list[str]]:
    if not path.is_file():
        return []
    try:
        return [row for row in csv.reader(read_cells(path, MOST).splitlines()) if row]
    except csv.Error as error:
        raise UserError(f"{shown(path)} is no CSV file that can be read ({error}): restore or remove it") from None


def _table(path: Path, title: str, note: str) -> str:
    found = _lines(path)
    if len(found) < 2:
        return ""
    more = (
        f"<p><small>and {len(found) - 1 - ROWS} more rows in {html.escape(path.name)}</small></p>"
        if len(found) > ROWS + 1
        else ""
    )
    said = f"<p><small>{html.escape(note)}</small></p>" if note else ""
    return f"<h2>{html.escape(title)}</h2>{said}{_rows([tuple(_short(x) for x in row) for row in found[: ROWS + 1]])}{more}"


def _by_series(path: Path) -> str:
    """Mean CRPS of each series."""
    found = _lines(path)[1:]
    each: dict[str, list[float]] = {}
    for row in found:
        name, value = row[0], _score(row)
        if value is not None:
            each.setdefault(name, []).append(value)
    if len(each) < 2:
        return ""
    worst = sorted(each.items(), key=lambda x: -sum(x[1]) / len(x[1]))
    rows = [(name, f"{sum(v) / len(v):.4g}", str(len(v))) for name, v in worst[:ROWS]]
    return "<h2>By series</h2>" + _rows([("series", "CRPS", "windows"), *rows])


def _score(row: list[str]) -> float | None:
    """The third cell as a number; None where it is none."""
    try:
        value = float(row[2])
    except (IndexError, ValueError):
        return None
    return value if math.isfinite(value) else None


def _rows(rows: list[tuple[str, ...]]) -> str:
    head, *body = rows
    made = "".join(f"<th>{html.escape(x)}</th>" for x in head)
    lines = "".join("<tr>" + "".join(f"<td>{html.escape(x)}</td>" for x in row) + "</tr>" for row in body)
    return f"<table><thead><tr>{made}</tr></thead><tbody>{lines}</tbody></table>"


def _short(text: str) -> str:
    try:
        return f"{float(text):.5g}" if "." in text else text
    except ValueError:
        return text


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)
