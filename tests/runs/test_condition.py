"""Drawing under one condition: by its values or its number, and only under that one."""

from __future__ import annotations

import csv

import pytest

from stochflow import train
from stochflow.cli.commands import main


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "gc"
    train("gc", length=3, targets="0.2,0.5,0.8", betas="4,12", steps=2, batch=4, out=str(folder))
    return folder


@pytest.mark.parametrize(("words", "number"), [("0.5,12", "3"), ("3", "3"), ("0.2,4", "0")])
def test_a_condition_is_meant_by_its_values_or_its_number(run, words, number, tmp_path):
    out = tmp_path / "drawn.csv"
    assert main(["sample", str(run), "-n", "20", "--condition", words, "--out", str(out)]) == 0
    with out.open() as file:
        assert {row["condition"] for row in csv.DictReader(file)} == {number}


def test_without_one_all_conditions_are_drawn(run, tmp_path):
    out = tmp_path / "drawn.csv"
    assert main(["sample", str(run), "-n", "120", "--out", str(out)]) == 0
    with out.open() as file:
        assert {row["condition"] for row in csv.DictReader(file)} == set("012345")


@pytest.mark.parametrize("words", ["0.3,4", "17", "warm", "0.5"])
def test_what_is_none_of_them_is_named(run, words, capsys):
    assert main(["sample", str(run), "-n", "2", "--condition", words]) == 2
    assert "is none of the run's 6 conditions" in capsys.readouterr().err
