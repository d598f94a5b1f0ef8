"""Confusion tables from files: names in any order, on either side, and what is wrong said by name."""

from __future__ import annotations

import pytest

from stochflow.cli.commands import main
from stochflow.errors import UserError
from stochflow.runs.config import Config, TFBind8Task, configure
from stochflow.runs.tasks import make_channel, tfbind8_task
from stochflow.worlds.channels import Confusion
from stochflow.worlds.confusion import read_table
from stochflow.worlds.grid import Grid
from stochflow.worlds.strings import Strings

TRUE = {"A": {"A": 0.9, "C": 0.06, "G": 0.03, "T": 0.01}, "C": {"A": 0.1, "C": 0.8, "G": 0.1, "T": 0.0}}
TRUE |= {"G": {"A": 0.0, "C": 0.25, "G": 0.7, "T": 0.05}, "T": {"A": 0.02, "C": 0.0, "G": 0.0, "T": 0.98}}
WANTED = [[TRUE[a][b] for b in "ACGT"] for a in "ACGT"]


def file(tmp_path, columns: str, rows: str, top: bool, left: bool, corner: str = "") -> str:
    lines = []
    if top:
        lines.append(",".join(([corner] if left else []) + list(columns)))
    lines += [",".join(([a] if left else []) + [str(TRUE[a][b]) for b in columns]) for a in rows]
    path = tmp_path / "c.csv"
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.mark.parametrize(
    ("columns", "rows", "top", "left", "corner"),
    [
        ("ACGT", "ACGT", False, False, ""),
        ("ACGT", "ACGT", True, False, ""),
        ("TGCA", "TGCA", True, False, ""),
        ("TGCA", "GATC", True, True, ""),
        ("TGCA", "GATC", True, True, "ordered"),
        ("CTAG", "CTAG", False, True, ""),
    ],
)
def test_names_are_read_in_any_order(tmp_path, columns, rows, top, left, corner):
    path = file(tmp_path, columns, rows, top, left, corner)
    assert read_table(path, "ACGT").rows == WANTED
    assert Confusion(path, "ACGT").table.tolist() == [pytest.approx(r) for r in WANTED]
    channel = make_channel(Strings("ACGT", 3), 0.0, "confusion", path)
    assert channel.table.tolist() == [pytest.approx(r) for r in WANTED]


def test_names_that_are_numbers_show_in_the_shape(tmp_path):
    path = tmp_path / "c.csv"
    for text in ("1,0\n0.9,0.1\n0.2,0.8\n", ",1,0\n1,0.9,0.1\n0,0.2,0.8\n"):
        path.write_text(text)
        assert read_table(path, "01").rows == [[0.8, 0.2], [0.1, 0.9]]


def test_a_grid_takes_the_columns_as_they_stand(tmp_path):
    path = tmp_path / "c.csv"
    path.write_text("up,along\n0.9,0.1\n0.2,0.8\n")
    assert make_channel(Grid(2, 4), 0.0, "confusion", str(path)).table.tolist() == [[0.9, 0.1], [0.2, 0.8]]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("A,C,G,T\n1,0,0,0\n0,1,0,0\n0,0,.9,0\n0,0,0,1\n", r"row 3 of 4 \(G\) .* sums to 0\.9, off by -0\.1"),
        ("T,A,C,G\n1,0,0,0\n0,1,0,0\n0,0,1,0\n0,0,.5,0.4\n", r"row 3 of 4 \(G\) .* sums to 0\.9"),
        ("A,C,G,U\n1,0,0,0\n0,1,0,0\n0,0,1,0\n0,0,0,1\n", "named A, C, G, U, but the letters are A, C, G, T"),
        (",A,C,G,T\nA,1,0,0,0\nC,0,1,0,0\nG,0,0,1,0\nX,0,0,0,1\n", "the rows .* are named A, C, G, X"),
        ("A,C,G,A\n1,0,0,0\n0,1,0,0\n0,0,1,0\n0,0,0,1\n", "name A more than once"),
        ("A,C,G,T\n1,0,0,0\n0,1,0,0\n0,0,1,0\n", "row 1 .* has 4 numbers, but there are 3 rows"),
        ("A,C,G,T\n1,0,0,0\n0,1,zero,0\n0,0,1,0\n0,0,0,1\n", "'zero' in row 2, column 3 is no number"),
        ("A,C,G,T\n1,0,0,0\n0,1,0,0\n0,0,1,-1\n0,0,0,1\n", r"row 3 of 4 \(G\) .* negative"),
        ("A,C,G,T\n", "names 4 letters, but has 0 rows"),
        ("", "it is empty"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(tmp_path, text, words):
    path = tmp_path / "c.csv"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        make_channel(Strings("ACGT", 3), 0.0, "confusion", str(path))


def test_an_order_that_may_not_be_the_alphabets_is_not_guessed(tmp_path):
    with pytest.raises(UserError, match="say which it is"):
        Confusion(file(tmp_path, "TGCA", "TGCA", True, False))
    assert Confusion(file(tmp_path, "ACGT", "GATC", True, True)).table.tolist() == [pytest.approx(r) for r in WANTED]


def test_stick_beside_a_table_is_refused_and_old_folders_open(tmp_path, capsys):
    path = file(tmp_path, "ACGT", "ACGT", True, False)
    words = ["train", "tfbind8", "--noise", "confusion", "--confusion", path, "--steps", "1"]
    for stick in (["--stick", "0.25"], ["--stick=0.1"]):
        assert main([*words, *stick, "--out", str(tmp_path / "run")]) == 2
        assert "--stick and --noise confusion exclude one another" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="exclude one another"):
        configure("tfbind8", stick=0.25, noise="confusion", confusion=path)
    data = Config(TFBind8Task(stick=0.1, noise="confusion", confusion=path)).to_dict()
    assert Config.from_dict(data).task.stick == 0.1
    assert isinstance(tfbind8_task(stick=0.1, noise="confusion", confusion=path).channel, Confusion)
    assert configure("tfbind8", noise="confusion", confusion=path).task.noise == "confusion"
