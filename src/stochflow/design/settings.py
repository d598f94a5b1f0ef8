"""What a campaign is told: once, when it is made (`Settings`, kept in campaign.json), and for each batch (`Ask`). No torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from stochflow import __version__
from stochflow.design.objectives import Column
from stochflow.errors import UserError, did_you_mean

FORMAT = 1  # of a campaign folder; a newer one is refused by name
LONGEST = 10_000  # letters of a design
SAMPLERS = ("auto", "exact", "gflownet", "search")
Replicates = Literal["mean", "median"]


@dataclass(frozen=True)
class Noise:
    """What a synthesiser makes of an order: `kind` slip or neighbour with a rate, or a confusion table [K, K] by letters."""

    kind: Literal["slip", "neighbour", "table"]
    rate: float = 0.0
    table: tuple[tuple[float, ...], ...] = ()
    insertion: float = 0.0
    deletion: float = 0.0

    def __post_init__(self) -> None:
        for what, rate in (("insertion", self.insertion), ("deletion", self.deletion)):
            if not 0 <= rate < 1:
                raise UserError(f"the rate of {what}s is {rate}, but it must be a probability below 1")
        if not 0 <= self.rate <= 1:
            raise UserError(f"the rate of {self.kind} is {self.rate}, but it must be a probability")

    def describe(self) -> str:
        what = f"{self.kind} {self.rate:g}" if self.kind != "table" else "a confusion table"
        gaps = (
            f", insertions {self.insertion:g} and deletions {self.deletion:g} a letter"
            if self.insertion or self.deletion
            else ""
        )
        return what + gaps


@dataclass(frozen=True)
class Settings:
    """What holds for all rounds."""

    sequence: str  # column names of the first file
    columns: tuple[Column, ...]
    alphabet: str
    min_length: int
    max_length: int
    replicates: Replicates = "mean"
    wild_type: str = ""
    noise: Noise | None = None
    rules: bool = False  # whether the folder holds rules.toml
    rules_approximate: bool = False
    seed: int = 0

    @property
    def noise_keeps_length(self) -> bool:
        """Whether what is made has as many letters as what was ordered."""
        return self.noise is None or not (self.noise.insertion or self.noise.deletion)

    @property
    def aligned(self) -> bool:
        """Whether distances are edit distances, also between sequences that happen to have one length."""
        return self.min_length != self.max_length

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": __version__, **dataclasses.asdict(self)}

    @staticmethod
    def from_dict(data: Any, where: str) -> Settings:
        """Checked as it is read: the folder may be a stranger's."""
        if not isinstance(data, dict) or not isinstance(data.get("format"), int):
            raise UserError(f"{where} does not describe a campaign: restore it from a copy")
        if data["format"] > FORMAT:
            raise UserError(
                f"{where} has format {data['format']}, but stochflow {__version__} reads up to {FORMAT}: upgrade stochflow"
            )
        known = {f.name for f in dataclasses.fields(Settings)}
        given = {k: v for k, v in data.items() if k not in ("format", "version")}
        for key in given:
            if key not in known:
                raise UserError(f'{where} has a setting "{key}" that is not known{did_you_mean(key, known)}: remove it')
        try:
            given["columns"] = tuple(Column(**c) for c in given["columns"])
            noise = given.get("noise")
            if noise is not None:
                given["noise"] = Noise(**{**noise, "table": tuple(tuple(row) for row in noise.get("table", ()))})
            made = Settings(**given)
        except (TypeError, KeyError, AttributeError) as error:
            raise UserError(f"{where} cannot be read ({error}): restore it from a copy") from error
        return made.check(where)

    def check(self, where: str, remedy: str = "restore the file from a copy") -> Settings:
        """Itself, where every value has the type and range that the rest of the package relies on."""
        try:
            held = (
                (
                    "lengths",
                    _whole(self.min_length)
                    and _whole(self.max_length)
                    and 1 <= self.min_length <= self.max_length <= LONGEST,
                ),
                (
                    "alphabet",
                    isinstance(self.alphabet, str) and 2 <= len(self.alphabet) == len(set(self.alphabet)) <= 128,
                ),
                ("sequence", isinstance(self.sequence, str)),
                ("wild_type", isinstance(self.wild_type, str) and set(self.wild_type) <= set(self.alphabet)),
                (
                    "columns",
                    bool(self.columns)
                    and all(map(_sound_column, self.columns))
                    and len({c.name for c in self.columns}) == len(self.columns),
                ),
                ("replicates", self.replicates in ("mean", "median")),
                ("rules", isinstance(self.rules, bool) and isinstance(self.rules_approximate, bool)),
                ("noise", self.noise is None or _sound_noise(self.noise, len(self.alphabet))),
                ("seed", _whole(self.seed) and 0 <= self.seed < 2**40),
            )
        except TypeError as error:
            raise UserError(
                f"{where} has a setting of another type than it should: restore the file from a copy"
            ) from error
        for what, fine in held:
            if not fine:
                raise UserError(f'{where}: the setting "{what}" makes no sense: {remedy}')
        return self


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _sound_column(c: Column) -> bool:
    limit = c.threshold is None or _number(c.threshold)
    return isinstance(c.name, str) and c.goal in ("maximise", "minimise") and _number(c.weight) and limit


def _sound_noise(noise: Noise, letters: int) -> bool:
    chances = [noise.rate, noise.insertion, noise.deletion]
    if not all(_number(x) and 0 <= x <= 1 for x in chances) or noise.kind not in ("slip", "neighbour", "table"):
        return False
    if noise.kind != "table":
        return not noise.table
    rows = noise.table
    square = len(rows) == letters and all(len(row) == letters for row in rows)
    return (
        square
        and all(_number(x) and x >= 0 for row in rows for x in row)
        and all(abs(sum(row) - 1) < 1e-6 for row in rows)
    )


def _check_preference(preference: Any) -> None:
    fine = isinstance(preference, Mapping) and all(_number(w) and w >= 0 for w in preference.values())
    if not fine or not sum(preference.values()) > 0:
        raise UserError(
            f"the preference is {preference!r}: give a number of at least 0 for each column that counts, as {{'activity': 2, 'toxicity': 1}}"
        )


@dataclass(frozen=True)
class Ask:
    """How the next batch is chosen."""

    batch: int = 96
    acquisition: Literal["gain", "ucb", "ei", "thompson", "greedy"] = "gain"
    kappa: float = 1.0
    model: Literal["auto", "ensemble", "ridge", "gp", "forest"] = "auto"
    sampler: Literal["auto", "exact", "gflownet", "search"] = "auto"
    min_distance: int | None = None
    max_distance: int | None = None
    controls: tuple[str, ...] = ()
    replicate: int = 0
    steps: int = 300
    seed: int | None = None
    preference: Mapping[str, float] | None = None  # of columns by name; without it, many around the columns' weights

    def check(self) -> Ask:
        if self.preference is not None:
            _check_preference(self.preference)
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise UserError(f"--seed {self.seed} must lie between 0 and {2**63 - 1}")
        if not _whole(self.batch) or self.batch < 1 or self.batch > 100_000:
            raise UserError(f"--batch {self.batch!r} must be a whole number between 1 and 100000")
        if isinstance(self.controls, str):
            raise UserError(f"controls = {self.controls!r} is one text: give the names one by one, as ('best',)")
        if self.sampler not in SAMPLERS:
            raise UserError(
                f"there is no sampler {self.sampler!r}{did_you_mean(self.sampler, SAMPLERS)}: take one of {', '.join(SAMPLERS)}"
            )
        if self.replicate < 0 or self.steps < 1 or min(self.min_distance or 0, self.max_distance or 0) < 0:
            raise UserError(
                "--replicate, --min-distance and --max-distance must not be negative, and --steps must be at least 1"
            )
        if self.steps > 10**9:
            raise UserError(f"--steps {self.steps} must be at most {10**9}")
        if self.replicate + len(self.controls) >= self.batch:
            raise UserError(
                f"--batch {self.batch} has no well left beside {self.replicate} repeats and {len(self.controls)} controls: make it larger"
            )
        return self
