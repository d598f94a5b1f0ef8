"""A CSV of measured sequences, read and checked: which column is which, what cannot be used, and why, in one sentence.

N rows, C value columns. Everything a spreadsheet can do to numbers and letters is either understood and noted or refused.
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from stochflow.errors import UserError, did_you_mean
from stochflow.files.reading import MB, read_unpacked

ALPHABETS = {"DNA": "ACGT", "RNA": "ACGU", "protein": "ACDEFGHIKLMNPQRSTVWY"}
MOST = 256 * MB  # of a table that is read
LEAST = 8  # different measured sequences that a model can be fitted to
MISSING = frozenset("na n/a nan none null - -- nd n.d. failed fail error missing ? #n/a #div/0! #value!".split()) | {""}
SEQUENCE_NAMES = "sequence seq dna rna protein peptide variant design construct oligo insert".split()
VALUE_NAMES = "value y score activity fitness measurement signal target response affinity yield".split()
BESIDE = frozenset("id name well plate row column col round replicate rep index no nr number date made".split())
NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass(frozen=True)
class Table:
    """A CSV file as text: names of its columns, and rows of the same width."""

    path: str
    names: list[str]
    rows: list[list[str]]
    lines: list[int]  # where each row ends in the file
    decimal_comma: bool = False

    def column(self, name: str) -> list[str]:
        return [row[self.names.index(name)] for row in self.rows]

    def line(self, row: int) -> str:
        """Where a row stands, as an editor counts, blank lines included."""
        return f"line {self.lines[row]} of {self.path}"


@dataclass(frozen=True)
class Data:
    """Measured values by row, repeats included: NaN where a value is missing."""

    ids: list[str]
    sequences: list[str]
    columns: list[str]
    values: np.ndarray  # [N, C] float64
    alphabet: str
    notes: list[str] = field(default_factory=list)
    sequence: str = ""  # the column that the sequences are from


def read_table(path: str | os.PathLike[str]) -> Table:
    """The rows of a CSV file; commas, semicolons and tabs are told apart, `.gz` is unpacked, a byte order mark is dropped."""
    path = Path(path)
    content = read_unpacked(path, MOST)
    if content[:4] in (b"PK\x03\x04", b"\xd0\xcf\x11\xe0"):
        raise UserError(f"{path} is a spreadsheet, not text: save it as CSV and give that file")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{path} is not UTF-8 text: save it as CSV in UTF-8") from None
    if "\0" in text:
        raise UserError(f"{path} is not plain text: save it as CSV in UTF-8")
    head, _, rest = text.partition("\n")
    told = re.fullmatch(r"sep=([,;\t])\r?", head)  # a spreadsheet's own line before the header
    mark = told[1] if told else max(",;\t", key=head.count)
    reader = csv.reader(io.StringIO(rest if told else text), delimiter=mark)
    try:
        read = [(reader.line_num + bool(told), [cell.strip() for cell in row]) for row in reader]
    except csv.Error as error:
        raise UserError(f"{path} cannot be read as CSV ({error}): save it again as CSV") from None
    read = [(line, row) for line, row in read if any(row)]
    if len(read) < 2:
        raise UserError(f"{path} has no rows under its header: give a CSV of sequences and measured values")
    names, rows, lines = read[0][1], [row for _, row in read[1:]], [line for line, _ in read[1:]]
    twice = sorted({n for n in names if names.count(n) > 1 and n})
    if twice:
        raise UserError(f'{path} has two columns named "{twice[0]}": give each a name of its own')
    for i, row in enumerate(rows):
        if len(row) > len(names) and any(row[len(names) :]):
            above = ", and delete what stands above the line of names" if len(names) == 1 else ""
            raise UserError(
                f"line {lines[i]} of {path} has {len(row)} cells, but the header has {len(names)}: quote cells that hold a {mark!r}{above}"
            )
    rows = [[*row, *[""] * len(names)][: len(names)] for row in rows]
    comma = mark != "," and any(re.fullmatch(r"-?\d+,\d+", c) for row in rows for c in row)
    return Table(str(path), names, rows, lines, comma)


def number(text: str, decimal_comma: bool = False) -> float | None:
    """The number that a cell holds, NaN where it is missing, None where it is something else."""
    if text.strip().lower() in MISSING:
        return math.nan
    text = text.replace(",", ".") if decimal_comma else text
    return float(text) if NUMBER.fullmatch(text) and math.isfinite(float(text)) else None


def read_data(
    path: str | os.PathLike[str],
    sequence: str = "",
    values: Sequence[str] = (),
    alphabet: str = "",
) -> Data:
    """The measured sequences of a CSV file. Columns that are not named are guessed where one reading alone is possible."""
    table = read_table(path)
    at = _sequence_column(table, sequence)
    columns = _value_columns(table, at, list(values))
    notes = []
    if not sequence:
        notes.append(f'sequences are read from the column "{at}"')
    if not values:
        notes.append(f'values are read from the column "{columns[0]}"')
    texts = table.column(at)
    figures = np.array([[_value(table, i, c) for c in columns] for i in range(len(texts))]).reshape(len(texts), -1)
    as_read, texts = texts, [spelt(t, alphabet) for t in texts]
    if texts != as_read:
        notes.append("lower-case letters are read as upper-case ones")
    used = [i for i in range(len(texts)) if not np.isnan(figures[i]).all()]
    empty = [i for i in used if texts[i].lower() in MISSING]
    if empty:
        raise UserError(f'{table.line(empty[0])} has no sequence in the column "{at}": fill it in or delete the row')
    if len(used) < len(texts):
        notes.append(f"{len(texts) - len(used)} of {len(texts)} rows have no value and are left out")
    if not used:
        raise UserError(f'the column "{columns[0]}" of {table.path} holds no value: name another with --value')
    for c, name in enumerate(columns):
        _not_a_count(figures[used, c], name, table)
    letters = alphabet or guess_alphabet([texts[i] for i in used], [table.line(i) for i in used])
    if NUMBER.fullmatch(columns[0].replace(",", ".")) and set(spelt(at, letters)) <= set(letters):
        raise UserError(
            f"{table.path} begins with {at[:30]} and {columns[0]}, which are no names: add a first line with the names of the columns"
        )
    check_letters([texts[i] for i in used], letters, [table.line(i) for i in used])
    named = next((n for n in table.names if n.lower() in ("id", "name")), None)
    ids = table.column(named) if named else [f"row {line}" for line in table.lines]
    return Data([ids[i] for i in used], [texts[i] for i in used], columns, figures[used], letters, notes, at)


def enough(data: Data) -> None:
    """Refuses what no model can be fitted to: too few sequences, a column that does not vary, two that say the same."""
    for c, name in enumerate(data.columns):
        there = ~np.isnan(data.values[:, c])
        different = len({s for s, ok in zip(data.sequences, there, strict=True) if ok})
        if different < LEAST:
            raise UserError(
                f'the column "{name}" has values of {different} different sequences, but a model needs at least {LEAST}: measure more first'
            )
        if np.ptp(data.values[there, c]) == 0:
            raise UserError(
                f'every value in the column "{name}" is {data.values[there, c][0]:g}, so there is nothing to learn: name another with --value'
            )
        size = float(np.abs(data.values[there, c]).max())
        if not 1e-100 < size < 1e100:
            raise UserError(
                f'the values in the column "{name}" reach {size:g}, which cannot be reckoned with: write them in another unit'
            )
        for d in range(c):
            both = there & ~np.isnan(data.values[:, d])
            if both.sum() >= LEAST and _same_order(data.values[both, c], data.values[both, d]):
                raise UserError(
                    f'the columns "{data.columns[d]}" and "{name}" order the sequences in the same way (leakage: one is made from the other): keep one'
                )


# columns --------------------------------------------------------------------------------------------------------


def _named(table: Table, name: str, flag: str) -> str:
    same = [n for n in table.names if n == name] or [n for n in table.names if n.lower() == name.lower()]
    if len(same) == 1:
        return same[0]
    raise UserError(
        f'{table.path} has no column "{name}"{did_you_mean(name, table.names)}: {flag} takes one of {", ".join(table.names)}'
    )


def _looks_like_sequences(cells: Iterable[str]) -> bool:
    words = [c for c in cells if c]
    return bool(words) and sum(c.isalpha() and len(c) >= 3 for c in words) >= 0.8 * len(words)


def _looks_like_numbers(cells: Iterable[str]) -> bool:
    there = [c for c in cells if c.lower() not in MISSING]
    return bool(there) and sum(bool(re.match(r"[<>≤≥~]?\s*[-+]?\.?\d", c)) for c in there) >= 0.5 * len(there)


def _sequence_column(table: Table, asked: str) -> str:
    if asked:
        return _named(table, asked, "--sequence")
    able = [n for n in table.names if _looks_like_sequences(table.column(n))]
    plain = [n for n in table.names if not _looks_like_numbers(table.column(n))]  # with a gap or a stop in it, too
    for word in SEQUENCE_NAMES:
        for name in [*able, *plain]:
            if name.lower() == word:
                return name
    spelt = [n for n in able if set("".join(table.column(n)).upper()) <= set("".join(ALPHABETS.values()))]
    if len(spelt) == 1:
        return spelt[0]
    what = "no column looks like" if not spelt else f"the columns {', '.join(spelt)} all look like"
    raise UserError(
        f"{table.path}: {what} sequences: name one with --sequence (there are {', '.join(n or '(unnamed)' for n in table.names)})"
    )


def _value_columns(table: Table, sequence: str, asked: list[str]) -> list[str]:
    if asked:
        found = [_named(table, name, "--value") for name in asked]
        if sequence in found:
            raise UserError(f'"{sequence}" is the column of the sequences: name a measured one with --value')
        return found
    others = [n for n in table.names if n != sequence and n.lower() not in BESIDE]
    able = [n for n in others if _looks_like_numbers(table.column(n))]
    for word in VALUE_NAMES:
        for name in able:
            if name.lower() == word:
                return [name]
    if len(able) == 1:
        return able
    what = "no column holds numbers" if not able else f"the columns {', '.join(able)} all hold numbers"
    raise UserError(f"{table.path}: {what}: name what was measured with --value")


def _value(table: Table, row: int, name: str) -> float:
    text = table.rows[row][table.names.index(name)]
    found = number(text, table.decimal_comma)
    if found is not None:
        return found
    where = f'{table.line(row)} holds "{text}" in the column "{name}"'
    if re.match(r"\s*[<>≤≥~]", text):
        raise UserError(f"{where}, a bound and not a value: write the number, or leave the cell empty")
    if re.fullmatch(r"-?\d+,\d+", text):
        raise UserError(f"{where}: write decimals with a point")
    if re.fullmatch(r"[-+]?\d{1,3}([,.' ]\d{3})+([.,]\d+)?", text):
        raise UserError(f"{where}: write numbers without a mark between thousands")
    if NUMBER.match(text):
        raise UserError(f"{where}, a number with a unit: write the number alone, all in one unit")
    raise UserError(f"{where}, which is not a number: leave the cell empty where a well failed")


def _not_a_count(values: np.ndarray, name: str, table: Table) -> None:
    """An index column taken for a measurement would be learned faithfully."""
    steps = np.diff(values)
    if len(values) >= LEAST and np.isfinite(values).all() and steps[0] in (1, -1) and (steps == steps[0]).all():
        raise UserError(
            f'the column "{name}" of {table.path} only counts the rows: name what was measured with --value'
        )


def _same_order(a: np.ndarray, b: np.ndarray) -> bool:
    from scipy.stats import rankdata

    x, y = rankdata(a), rankdata(b)
    return bool(np.array_equal(x, y) or np.array_equal(x, len(y) + 1 - y))


# letters --------------------------------------------------------------------------------------------------------


def guess_alphabet(texts: Sequence[str], where: Sequence[str] | None = None) -> str:
    """DNA, RNA or protein, by the letters that occur; texts of two kinds are refused with an example of each."""
    where = where or [f"sequence {i + 1}" for i in range(len(texts))]
    used = set("".join(texts))
    pure = {name: sum(set(t) <= set(letters) for t in texts) for name, letters in ALPHABETS.items()}
    for name, letters in ALPHABETS.items():
        if used <= set(letters) and (name != "protein" or max(pure["DNA"], pure["RNA"]) < 0.8 * len(texts)):
            if name == "protein":
                _not_half_dna(texts, where)
            return letters
    with_t = next((i for i, t in enumerate(texts) if "T" in t), None)
    with_u = next((i for i, t in enumerate(texts) if "U" in t), None)
    if used <= set("ACGTU") and with_t is not None and with_u is not None:
        raise UserError(
            f"{where[with_u]} is RNA ({texts[with_u][:30]}) and {where[with_t]} is DNA ({texts[with_t][:30]}): write all with T or all with U"
        )
    most = max(("DNA", "RNA", "protein"), key=lambda name: pure[name])
    if max(pure["DNA"], pure["RNA"]) >= 0.8 * len(texts):  # nearly all letters of DNA are amino acids too
        most = "DNA" if pure["DNA"] >= pure["RNA"] else "RNA"
    rest = ", as most rows are"
    if 2 * pure[most] < len(texts):  # a gap, a stop or a space in most rows: what their other letters are
        held = {name: sum(c in letters for t in texts for c in t) for name, letters in ALPHABETS.items()}
        most = max(ALPHABETS, key=lambda name: held[name] if name == "protein" else 1.2 * held[name])
        rest = ", as most letters are"
    odd = next(i for i, t in enumerate(texts) if not set(t) <= set(ALPHABETS[most]))
    letter = next(c for c in texts[odd] if c not in ALPHABETS[most])
    raise UserError(
        f"{where[odd]} has the letter {letter!r} ({texts[odd][:30]}), which is not {most}{rest}: "
        "mend or delete it, or name all letters with --alphabet"
    )


def _not_half_dna(texts: Sequence[str], where: Sequence[str]) -> None:
    """Peptides are hardly ever spelt in A, C, G and T alone: a part of the rows that is, or a long one, is DNA among them."""
    pure = [i for i, t in enumerate(texts) if len(t) >= 6 and set(t) <= set("ACGT") and len(set(t)) > 2]
    if len(pure) >= 0.1 * len(texts) or any(len(texts[i]) >= 15 for i in pure):
        other = next(i for i, t in enumerate(texts) if not set(t) <= set("ACGT"))
        raise UserError(
            f"{where[pure[0]]} looks like DNA ({texts[pure[0]][:30]}) and {where[other]} is protein ({texts[other][:30]}): "
            "keep rows of one kind, or name all letters with --alphabet"
        )


def spelt(text: str, alphabet: str) -> str:
    """The text in the case of its alphabet: upper-case, unless the alphabet has lower-case letters of its own."""
    return text.upper() if alphabet == alphabet.upper() else text


def check_letters(texts: Sequence[str], alphabet: str, where: Sequence[str] | None = None) -> None:
    """Every text is spelt in this alphabet."""
    allowed = set(alphabet)
    for i, text in enumerate(texts):
        odd = next((c for c in text if c not in allowed), None)
        if odd is not None:
            place = where[i] if where else f"sequence {i + 1}"
            raise UserError(
                f"{place} has the letter {odd!r} ({text[:30]}), which is not among {alphabet}: mend or delete it"
            )


# repeats --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """One row per sequence, in the order of first appearance."""

    sequences: list[str]
    values: np.ndarray  # [N, C] mean or median of the repeats, NaN where there is none
    counts: np.ndarray  # [N, C] how many values that is
    noise: np.ndarray  # [C] standard deviation of a single measurement, NaN where nothing was repeated


def pooled(sequences: Sequence[str], values: np.ndarray, how: str = "mean") -> Measured:
    """Repeats of a sequence as one value; their pooled spread is the noise of a measurement."""
    order = {s: i for i, s in enumerate(dict.fromkeys(sequences))}
    at = np.array([order[s] for s in sequences], dtype=np.int64)
    n, columns = len(order), values.shape[1]
    made = np.full((n, columns), np.nan)
    counts = np.zeros((n, columns), dtype=np.int64)
    noise = np.full(columns, np.nan)
    for c in range(columns):
        there = ~np.isnan(values[:, c])
        counts[:, c] = np.bincount(at[there], minlength=n)
        total = np.bincount(at[there], weights=values[there, c], minlength=n)
        mean = np.divide(total, counts[:, c], out=np.full(n, np.nan), where=counts[:, c] > 0)
        spare = int((counts[:, c] - 1).clip(min=0).sum())
        if spare:
            noise[c] = math.sqrt(float(((values[there, c] - mean[at[there]]) ** 2).sum()) / spare)
        made[:, c] = mean
        if how == "median":
            for i in np.flatnonzero(counts[:, c] > 2):
                made[i, c] = np.median(values[there & (at == i), c])
    return Measured(list(order), made, counts, noise)
