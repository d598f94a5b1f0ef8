"""Rules as the text of a TOML file that reads as the same rules."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from stochflow.errors import UserError
from stochflow.worlds.rules.read import KINDS

if TYPE_CHECKING:
    from stochflow.worlds.rules.language import Rule


def rules_text(rules: Iterable[Rule]) -> str:
    """One table a rule, in their order within each kind."""
    kinds = {cls: kind for kind, cls in KINDS.items()}
    parts = []
    for rule in rules:
        if type(rule) not in kinds:
            raise UserError(f"a file has no word for the rule {rule!r}: there are {', '.join(KINDS)}")
        given = [(f.name, getattr(rule, f.name)) for f in fields(rule)]  # type: ignore[arg-type]
        lines = [f"{name} = {_text(value)}" for name, value in given if value is not None and value != ()]
        parts.append("\n".join([f"[[{kinds[type(rule)]}]]", *lines, ""]))
    return "\n".join(parts)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if all(isinstance(part, str) for part in value):
        return f"[{', '.join(map(_text, value))}]"
    return f"{{ {', '.join(f'{_text(str(key))} = {_text(each)}' for key, each in value)} }}"
