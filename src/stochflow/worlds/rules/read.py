"""Rules from a TOML file: one table per rule, or a list of tables where a kind of rule is used more than once."""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from stochflow.errors import UserError, did_you_mean
from stochflow.files.reading import MB, read_text
from stochflow.worlds.rules import language as say
from stochflow.worlds.rules.peptides import Charge, Hydrophobicity

FILE = MB  # the most that is read
KINDS: dict[str, type[say.Rule]] = {
    "gc": say.GC,
    "forbidden": say.Forbidden,
    "required": say.Required,
    "fixed": say.Fixed,
    "allowed": say.Allowed,
    "homopolymer": say.Homopolymer,
    "edits": say.EditBudget,
    "length": say.Length,
    "regex": say.Regex,
    "charge": Charge,
    "hydrophobicity": Hydrophobicity,
}


def read_rules(path: Path, wild_type: str | None = None) -> list[say.Rule]:
    """The rules of a file; a UserError says what in it is wrong."""
    try:
        data = tomllib.loads(read_text(path, FILE))
    except tomllib.TOMLDecodeError as problem:
        raise UserError(f"the rules in {path} are not TOML: {problem}: mend the line") from None
    return parse_rules(data, wild_type, str(path))


def parse_rules(data: Mapping[str, Any], wild_type: str | None = None, where: str = "the rules") -> list[say.Rule]:
    """The rules that such a file holds."""
    found = []
    for kind, value in data.items():
        if kind not in KINDS:
            raise UserError(f"{where}: [{kind}] is no rule{did_you_mean(kind, KINDS)}: there are {', '.join(KINDS)}")
        tables = value if isinstance(value, list) else [value]
        for number, table in enumerate(tables, start=1):
            at = f"{where}, [{kind}]" + (f" number {number}" if len(tables) > 1 else "")
            if not isinstance(table, Mapping):
                raise UserError(f"{at} is {table!r}, but a rule is a table of settings")
            found.append(_rule(KINDS[kind], dict(table), wild_type, at))
    return found


def _rule(cls: type[say.Rule], table: dict[str, Any], wild_type: str | None, at: str) -> say.Rule:
    known = {f.name: f.type for f in fields(cls)}  # type: ignore[arg-type]
    for key, value in table.items():
        if key not in known:
            raise UserError(f'{at}: "{key}" is not a setting{did_you_mean(key, known)}: there are {", ".join(known)}')
        _check(f'{at}: "{key}"', value, str(known[key]))
    if cls is say.EditBudget and "wild_type" not in table:
        if wild_type is None:
            raise UserError(
                f"{at} counts edits from a wild type, and none is given: add wild_type here, or --wild-type to a campaign"
            )
        table["wild_type"] = wild_type
    if "positions" in table:
        table["positions"] = _positions(table["positions"], at)
    make: Callable[..., say.Rule] = cls
    try:
        return make(**table)
    except TypeError:
        missing = [f.name for f in fields(cls) if f.name not in table and f.default is f.default_factory]  # type: ignore[arg-type]
        raise UserError(f"{at} needs {', '.join(missing)}") from None
    except UserError as problem:
        raise UserError(f"{at}: {problem}") from None


def _positions(value: Any, at: str) -> dict[int, str]:
    if not isinstance(value, Mapping) or not all(k.isdigit() and isinstance(v, str) for k, v in value.items()):
        raise UserError(f'{at}: positions are written {{ 10 = "A", 12 = "G" }}, counted from 1, not {value!r}')
    return {int(k): v for k, v in value.items()}


def _check(what: str, value: Any, kind: str) -> None:
    """Refuse a value of another kind than the rule's setting; what is made of parts is checked by the rule itself."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    good = {
        "float": number,
        "int": number and isinstance(value, int),
        "int | None": number and isinstance(value, int),
        "bool": isinstance(value, bool),
        "str": isinstance(value, str),
    }.get(kind, True)
    if kind.startswith("tuple[str") and not isinstance(value, str):
        good = isinstance(value, list) and all(isinstance(v, str) for v in value)
    if kind.startswith("str | tuple"):
        good = isinstance(value, str) or (
            isinstance(value, Mapping) and all(isinstance(v, (int, float)) for v in value.values())
        )
    if not good:
        wanted = {"float": "a number", "int": "a whole number", "int | None": "a whole number", "bool": "true or false"}
        raise UserError(f"{what} is {value!r}, but it must be {wanted.get(kind, 'a text, or a list of texts')}")
