"""The words of `stochflow design new` as values: columns with their goals, and what the synthesiser does."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from stochflow.errors import UserError, did_you_mean


def columns_of(asked: Any) -> tuple[tuple[Any, ...], bool]:
    """The columns with their goals, weights and thresholds; and whether a guessed column is to be minimised."""
    from stochflow.design.objectives import Column

    up, down = [n for n in asked.maximise if n != "*"], [n for n in asked.minimise if n != "*"]
    names = list(dict.fromkeys([*asked.value, *up, *down]))
    every_down = "*" in asked.minimise
    both = set(up) & set(down)
    if both or ("*" in asked.maximise and every_down):
        raise UserError(
            "a column cannot be both maximised and minimised: say --maximise A --minimise B with different names"
        )
    weights, limits = by_name("--weight", asked.weight, names), by_name("--threshold", asked.threshold, names)
    goals = {n: "minimise" if n in down or (every_down and n not in up) else "maximise" for n in names}
    made = tuple(Column(n, goals[n], weights.get(n, 1.0), limits.get(n)) for n in names)  # type: ignore[arg-type]
    return made, every_down


def by_name(flag: str, words: tuple[str, ...], names: list[str]) -> dict[str, float]:
    """NAME=NUMBER words as numbers by name."""
    found = {}
    for word in words:
        name, equals, text = word.rpartition("=")
        try:
            number = float(text)
        except ValueError:
            number = math.nan
        if not equals or not math.isfinite(number):
            raise UserError(f"{flag} {word!r} must be NAME=NUMBER, such as {names[0] if names else 'activity'}=2")
        if not names:
            raise UserError(f"{flag} names the column {name!r}, but no column is named yet: say --value {name} as well")
        if name not in names:
            raise UserError(
                f"{flag} names the column {name!r}{did_you_mean(name, names)}, which is not among {', '.join(names)}"
            )
        found[name] = number
    return found


def noise_of(asked: Any, columns: list[str]) -> Any:
    """The `Noise` that the words describe, None without any; `columns` are those that hold the values."""
    from stochflow.design.settings import Noise

    if not asked.noise:
        if asked.insertion or asked.deletion:
            return Noise("slip", 0.0, (), asked.insertion, asked.deletion)
        return None
    kind, _, rate = asked.noise.partition(":")
    if kind in ("slip", "neighbour"):
        try:
            chance = float(rate)
        except ValueError:
            chance = -1.0
        if not 0 <= chance <= 1:
            raise UserError(f"--noise {asked.noise!r} must give a probability, such as {kind}:0.1")
        return Noise(kind, chance, (), asked.insertion, asked.deletion)  # type: ignore[arg-type]
    if not Path(asked.noise).is_file():
        raise UserError(
            f"--noise {asked.noise!r} is neither slip:RATE nor neighbour:RATE nor a file: give one of these"
        )
    from stochflow.design.data import read_data
    from stochflow.worlds.channels import Confusion

    found = read_data(asked.data, asked.sequence, columns, asked.alphabet)
    table = Confusion(asked.noise, alphabet=found.alphabet).table.tolist()
    return Noise("table", 0.0, tuple(tuple(row) for row in table), asked.insertion, asked.deletion)
