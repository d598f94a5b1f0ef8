"""What a campaign is told: once, when it is made (`Settings`, kept in campaign.json), and for each batch (`Ask`). No torch."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from stochflow import __version__
from stochflow.design.objectives import Column
from stochflow.errors import UserError, did_you_mean

FORMAT = 1  # of a campaign folder; a newer one is refused by name
Replicates = Literal["mean", "median"]


@dataclass(frozen=True)
class Noise:
    """What a synthesiser makes of an order: `kind` slip or neighbour with a rate, or a confusion table [K, K] by letters."""

    kind: Literal["slip", "neighbour", "table"]
    rate: float = 0.0
    table: tuple[tuple[float, ...], ...] = ()
    insertion: float = 0.0
    deletion: float = 0.0

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
        except (TypeError, KeyError) as error:
            raise UserError(f"{where} cannot be read ({error}): restore it from a copy") from error
        return made.check(where)

    def check(self, where: str) -> Settings:
        whole = all(isinstance(n, int) for n in (self.min_length, self.max_length, self.seed))
        if not (
            whole
            and 1 <= self.min_length <= self.max_length <= 10_000
            and len(set(self.alphabet)) >= 2
            and self.columns
        ):
            raise UserError(f"{where} has lengths, an alphabet or columns that make no sense: restore it from a copy")
        return self


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

    def check(self) -> Ask:
        if self.batch < 1 or self.batch > 100_000:
            raise UserError(f"--batch {self.batch} must lie between 1 and 100000")
        if self.replicate < 0 or self.steps < 1 or min(self.min_distance or 0, self.max_distance or 0) < 0:
            raise UserError(
                "--replicate, --min-distance and --max-distance must not be negative, and --steps must be at least 1"
            )
        if self.replicate + len(self.controls) >= self.batch:
            raise UserError(
                f"--batch {self.batch} has no well left beside {self.replicate} repeats and {len(self.controls)} controls: make it larger"
            )
        return self
