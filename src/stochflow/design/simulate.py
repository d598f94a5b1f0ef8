"""A dry run: the rounds of a campaign played on an oracle, beside a random and a genetic choice of the same wells.

The oracle is an argument: none is ever read from a campaign's folder.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from stochflow.design.campaign import Campaign
from stochflow.design.plain import CHOICES
from stochflow.design.settings import Ask
from stochflow.design.space import Space, make_synthesis
from stochflow.design.store import as_csv, as_json, read_csv, write
from stochflow.errors import UserError

Oracle = Callable[[list[str]], Any]
TOP = 10  # "the best" of a curve is the mean of so many


@dataclasses.dataclass(frozen=True)
class Simulated:
    """Where the played campaign lies, and the mean of the best `TOP` values after each round, of each way to choose."""

    campaign: Campaign
    curves: dict[str, list[float]]


def simulate(source: Campaign, oracle: Oracle, out: str | os.PathLike[str], rounds: int, how: Ask) -> Simulated:
    """Play `rounds` rounds in a copy of the campaign, from all that was measured so far."""
    settings = source.settings
    if len(settings.columns) != 1:
        raise UserError(
            "a dry run plays one measured column, but this campaign has several: make one with a single --value"
        )
    if rounds < 1:
        raise UserError(f"--rounds {rounds} must be at least 1")
    played = _copy(source, Path(out))
    space = Space(settings, played.path / "rules.toml" if settings.rules else None)
    column, begun = settings.columns[0], played.measured()
    first = dict(zip(begun.sequences, begun.values[:, 0].tolist(), strict=True))
    maker = _Maker(played, oracle)
    curves: dict[str, list[float]] = {"this campaign": [_top(first.values(), column.sign)]}
    for _ in range(rounds):
        rows = played.ask(how.batch, how)
        made = maker([r["sequence"] for r in rows], len(played.store.rounds()))
        played.tell(
            [
                {"id": r["id"], column.name: v, **({"made": m} if m != r["sequence"] else {})}
                for r, (m, v) in zip(rows, made, strict=True)
            ]
        )
        now = played.measured()
        curves["this campaign"].append(_top(now.values[:, 0].tolist(), column.sign))
    for name, choose in CHOICES.items():
        known, curve = dict(first), [curves["this campaign"][0]]
        for r in range(rounds):
            batch = choose(space, known, column.sign, how.batch, settings.seed * 1009 + r)
            known.update(maker(batch, r + 1))
            curve.append(_top(known.values(), column.sign))
        curves[name] = curve
    write(
        played.path / "simulation.json", as_json({"rounds": rounds, "batch": how.batch, "top": TOP, "curves": curves})
    )
    return Simulated(played, curves)


class _Maker:
    """Orders to (made, value); what an order becomes depends on the round and its well alone."""

    def __init__(self, campaign: Campaign, oracle: Oracle):
        settings = campaign.settings
        self.oracle, self.seed, self.letters = oracle, settings.seed, settings.max_length
        self.synthesis = None if settings.noise is None else make_synthesis(settings.noise, settings.alphabet)

    def __call__(self, orders: Sequence[str], round_: int) -> list[tuple[str, float]]:
        made = list(orders)
        if self.synthesis is not None:  # a seed a well: orders of one round do not share their noise
            seeds = np.random.default_rng((self.seed, round_)).integers(0, 2**31, len(made))
            made = [self.synthesis.make([m], 1, seed=int(s))[0][0] for m, s in zip(made, seeds, strict=True)]
        try:
            values = [float(v) for v in self.oracle(list(made))]
        except UserError:
            raise
        except Exception as error:
            raise UserError(
                f"the oracle failed on {len(made)} sequences that begin with {made[0]!r}: {type(error).__name__}: {error}"
            ) from error
        if len(values) != len(made):
            raise UserError(f"the oracle gave {len(values)} values for {len(made)} sequences: give one each")
        return list(zip(made, values, strict=True))


def _copy(source: Campaign, out: Path) -> Campaign:
    """The settings and all measurements in a folder of their own, as its round 0; the campaign itself is not touched."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise UserError(f"{out} is not empty: choose another --out for the dry run")
    out.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source.path / "sources", out / "sources")
    (out / "measured").mkdir()
    for file in source.store.recordings():  # ids of earlier rounds are those that the played rounds will give
        rows = [{**row, "id": f"before {row['id']}", "round": 0} for row in read_csv(file)]
        write(out / "measured" / file.name, as_csv(rows))
    (out / "rounds").mkdir()
    if source.settings.rules:
        shutil.copy(source.path / "rules.toml", out / "rules.toml")
    write(out / "campaign.json", as_json(source.settings.to_dict()))
    return Campaign.open(out)


def _top(values: Any, sign: float) -> float:
    ranked = sorted((sign * v for v in values if np.isfinite(v)), reverse=True)[:TOP]
    return sign * float(np.mean(ranked))
