"""What a spreadsheet does to a table is understood or refused in one sentence."""

from __future__ import annotations

import gzip

import numpy as np
import pytest

from stochflow.design.data import enough, pooled, read_data
from stochflow.errors import UserError

GOOD = ["ACGTACGT", "ACGTACGA", "TTGTACGT", "ACGGGCGT", "CCCTACGT", "ACGTAAAA", "GCGTACTT", "ATATACGT", "GGGTACCC"]


def table(tmp_path, lines, name="lab.csv"):
    file = tmp_path / name
    text = "\n".join(lines) + "\n"
    file.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return file


def rows(values=None, texts=GOOD):
    values = values or [f"{0.1 * (7 * i % 10):.1f}" for i in range(len(texts))]
    return [f"{t},{v}" for t, v in zip(texts, values, strict=True)]


@pytest.mark.parametrize("name", ["lab.csv", "lab.csv.gz"])
def test_columns_are_guessed_where_one_reading_is_possible(tmp_path, name):
    found = read_data(table(tmp_path, ["seq,activity", *rows()], name))
    assert (found.columns, found.alphabet, found.sequences) == (["activity"], "ACGT", GOOD)
    assert len(found.notes) == 2


def test_semicolons_decimal_commas_and_lower_case_are_read(tmp_path):
    lines = [f"{t.lower()};{0.1 * i:.1f}".replace(".", ",") for i, t in enumerate(GOOD)]
    found = read_data(table(tmp_path, ["\ufeffsequence;y", *lines]), "Sequence", ["Y"])
    assert found.columns == ["y"]
    assert found.sequences == GOOD
    assert found.values[3, 0] == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("header", "lines", "said"),
    [
        ("seq,y", rows(["0.5 nM"] * 9), "a number with a unit"),
        ("seq,y", rows(["<0.1"] * 9), "a bound"),
        ("seq,y", rows(["0.5", "high", *["0.1"] * 7]), "which is not a number"),
        ("seq,y", rows(["0.5"] * 9), "there is nothing to learn"),
        ("seq,y", rows()[:5], "at least 8"),
        ("seq,y", rows([str(i) for i in range(9)]), "only counts the rows"),
        ("seq,y", [*rows(), "ACGUACGU,0.5"], "RNA"),
        ("seq,y", [*rows(), "MKLVWFWF,0.5"], "which is not DNA"),
        ("seq,y", [*rows(), "ACGTNCGT,0.5"], "the letter 'N'"),
        ("seq,y", [*rows(), *[f"{t[:5]}-KLV,0.4" for t in GOOD]], "the letter '-'"),
        (
            "seq,y",
            [*rows(), *[f"MKLV{t[:4]},0.4" for t in GOOD]],
            "line 2 of .* looks like DNA .* and line 11 of .* is protein",
        ),
        ("seq,y", [f"MKLVW*,{v}" for v in (1.5, 0.5, 2.5)], "the letter '\\*' .MKLVW.*which is not protein"),
        ("seq,y", [f"{t[:4]} {t[4:]},0.4" for t in GOOD], "the letter ' ' .*which is not DNA"),
        ("seq,y", [f'{t},"1,{i}00.5"' for i, t in enumerate(GOOD, 1)], "without a mark between thousands"),
        ("seq,y", rows([f"{i}e300" for i in (1, 5, 2, 7, 3, 8, 4, 9, 6)]), "another unit"),
        ("# of a reader", ["seq,y", *rows()], "delete what stands above"),
        ("seq,y", [*rows(), ",0.5"], "has no sequence"),
        ("seq,y", [*rows(), "ACGTACGG,0,5"], "cells"),
        ("seq,a,b", [f"{r},{3 * i}" for i, r in enumerate(rows())], "all hold numbers"),
        ("n,m", ["1,2", "2,3"], "sequences"),
        ("seq,y,y", [f"{r},1" for r in rows()], "two columns"),
        ("seq,y", [], "no rows"),
        (rows()[0], rows()[1:], "which are no names"),
        ("seq,y", [*rows(), "", "", "ACGTTTTT,0.5 nM"], "line 13 of"),
        ("seq,y", ['"ACGT\nACGT",0.5', *rows(), "ACGTTTTT,0.5 nM"], "line 13 of"),
    ],
)
def test_each_mistake_is_one_sentence(tmp_path, header, lines, said):
    with pytest.raises(UserError, match=said) as caught:
        enough(read_data(table(tmp_path, [header, *lines])))
    assert "\n" not in str(caught.value)


def test_a_spreadsheets_own_line_and_its_errors_are_understood(tmp_path):
    values = ["#N/A", "#DIV/0!", *[f"{0.1 * (7 * i % 10):.1f}" for i in range(2, 9)]]
    lines = ["sep=;", "well;seq;y", *[f"A{i};{r}" for i, r in enumerate(rows(values), 1)], "A10;;", "A11;ACGTAAAC;0.5"]
    found = read_data(table(tmp_path, [line.replace(",", ";") + "\r" for line in lines]))
    assert found.sequences == [*GOOD[2:], "ACGTAAAC"]
    assert found.notes[-1] == "3 of 11 rows have no value and are left out"
    assert found.ids[-1] == "row 13"


def test_letters_are_read_in_the_case_of_their_alphabet(tmp_path):
    lines = ["seq,y", *[r.lower() for r in rows()]]
    assert read_data(table(tmp_path, lines), alphabet="ACGT").sequences == GOOD
    assert read_data(table(tmp_path, lines), alphabet="acgt").sequences == [t.lower() for t in GOOD]


def test_a_column_made_from_another_is_named(tmp_path):
    lines = [f"{r},{np.exp(0.1 * (7 * i % 10)):.4f}" for i, r in enumerate(rows())]
    with pytest.raises(UserError, match="leakage"):
        enough(read_data(table(tmp_path, ["seq,y,z", *lines]), values=["y", "z"]))


def test_a_spreadsheet_is_no_csv(tmp_path):
    (tmp_path / "lab.xlsx").write_bytes(b"PK\x03\x04rest")
    with pytest.raises(UserError, match="save it as CSV"):
        read_data(tmp_path / "lab.xlsx")


def test_repeats_are_pooled_and_give_the_noise():
    rng = np.random.default_rng(0)
    truth = rng.normal(size=400)
    texts = [f"s{i}" for i in range(400) for _ in range(3)]
    found = pooled(texts, (np.repeat(truth, 3) + 0.3 * rng.normal(size=1200))[:, None])
    assert found.counts.tolist() == [[3]] * 400
    assert found.noise[0] == pytest.approx(0.3, rel=0.08)
    assert np.abs(found.values[:, 0] - truth).mean() < 0.2
    robust = pooled(["a", "a", "a", "b"], np.array([[1.0], [1.2], [50.0], [np.nan]]), "median")
    assert robust.values[0, 0] == 1.2
    assert np.isnan(robust.values[1, 0])
