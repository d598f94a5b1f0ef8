"""Arguments parsed by tyro, whose complaints, boxes of several lines, become one sentence."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Sequence
from typing import Any

import tyro

from stochflow.errors import UserError, as_word, did_you_mean
from stochflow.runs.config import ALIASES

_FRAME = re.compile(r"^[\s╭│╰|+]+|[\s╮│╯|+]+$")


def parsed(kind: Any, words: Sequence[str], prog: str, config: Sequence[Any] = ()) -> Any:
    """What the words say, as a value of this kind; UserError where they do not. Help is printed, and ends by SystemExit."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of tyro, about types that it does not know
            return tyro.cli(kind, args=list(words), prog=prog, config=tuple(config))
    except SystemExit as stop:
        if not stop.code:
            raise
        raise UserError(sentence(said.getvalue(), prog)) from None
    except UserError:
        raise
    except (AssertionError, ValueError, TypeError, OverflowError, KeyError, IndexError, AttributeError) as error:
        raise UserError(f"these words are not understood ({error}): `{prog} --help` shows the flags") from error


def sentence(box: str, prog: str) -> str:
    """The words of a box: what is wrong, what was perhaps meant, and where the flags are listed."""
    lines = [_FRAME.sub("", line) for line in box.splitlines()]
    underlined = len(lines) > 1 and lines[1].strip() and not lines[1].strip("─-═ ")
    if underlined:  # the title, where frames cannot be drawn
        lines = lines[2:]
    parts: list[list[str]] = [[]]
    for line in lines:
        if not line.strip("─-═ "):
            parts.append([])
        elif not re.match(r"^[╭─]", line.strip()):
            parts[-1].append(line.strip())
    whole = [" ".join(part) for part in parts if part]
    what = (whole[0] if whole else "these words are not understood").rstrip(". ")
    near: list[str] = []
    for part in whole[1:]:
        if re.match(r"(Perhaps you meant|Arguments? similar)", part):
            near += re.findall(r"(?<!\S)--[a-z][\w-]*", part)
    choice = re.match(r"invalid choice '([^']*)' .*Expected one of \((.*)\)", what, re.IGNORECASE)
    if choice:
        known = re.findall(r"'([^']+)'", choice[2])
        other = ALIASES.get(as_word(choice[1]))
        meant = f' (did you mean "{other}"?)' if other in known else did_you_mean(choice[1], known)
        return f"{what[:1].lower()}{what[1:]}{meant}: `{prog} --help` shows the flags"
    meant = f" (did you mean {' or '.join(dict.fromkeys(near[:3]))}?)" if near else ""
    return f"{what[:1].lower()}{what[1:]}{meant}: `{prog} --help` shows the flags"
