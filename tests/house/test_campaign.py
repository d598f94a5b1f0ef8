"""The fast part of the campaign: some of its cases, the corpus of what once went wrong, and readers under hypothesis."""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stochflow.cli.commands import main
from stochflow.errors import UserError
from stochflow.files.reading import parse_json, read_json_lines
from stochflow.runs.config import Config
from stochflow.runs.shapes import designs, figures

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reliability.md"


@pytest.fixture(scope="module")
def campaign():
    spec = importlib.util.spec_from_file_location("campaign", ROOT / "scripts" / "campaign.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["campaign"] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def place(campaign, tmp_path_factory):
    here = os.getcwd()
    place = tmp_path_factory.mktemp("campaign")
    os.chdir(place)
    campaign.prepare(place)
    yield place
    os.chdir(here)


@pytest.mark.parametrize("part", range(3))
def test_bad_inputs_are_handled(part, campaign, place):
    wrong = []
    for number in range(part * 40, part * 40 + 40):
        case = campaign.draw(number, 7, place)
        outcome = campaign.outcome_of(case)
        if outcome != campaign.FINE:
            wrong.append((number, case.kind, case.what[:200], outcome))
    assert wrong == []


def test_a_run_killed_at_a_write_ends_as_one_that_was_not(campaign, tmp_path, monkeypatch):
    import random

    monkeypatch.chdir(tmp_path)
    campaign.begin("grid", tmp_path / "whole")
    for seed in range(3):
        out = tmp_path / f"killed-{seed}"
        install = campaign.at_a_write(random.Random(seed), 40)

        def doomed(install=install, out=out):
            install()
            campaign.begin("grid", out)

        assert campaign._forked(doomed) != 0
        campaign.begin("grid", out)
        assert campaign.difference(out, tmp_path / "whole") is None


# each of these once gave a traceback, a hang, several lines, or nothing
CORPUS = """train grid --lr inf|train grid --threads 100000|train grid --seeds 10000000|train tfbind8 --ramp inf|train tfbind8 --beta 1e10
    train grid --side 99999999999999999999|train grid --confusion http://127.0.0.1:9/c.csv --noise confusion|train os:system|train a/b:c
    train grid --noise confusion --confusion /dev/zero|train grid --noise confusion --confusion .|sample no -n 0|eval /dev/null|report /dev/zero
    resume . --steps -3|compare . .|train --config /dev/zero|train --config .|train --config|floor grid --side|tasks x|doctor grid --side x
    forecast /dev/zero --out f|forecast . --out f|design new c --data /dev/zero --value x|design x|\x1b[31m|train \x1b[2J|eval a\nb""".split(
    "|"
)


@pytest.mark.parametrize("words", [w.strip() for line in CORPUS for w in line.split("\n    ")], ids=repr)
def test_the_corpus(words, campaign, place):
    assert campaign.command(words.split(" ")) == campaign.FINE


def quick(examples: int = 150):
    return settings(max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9), lambda x: st.lists(x, max_size=4) | st.dictionaries(st.text(max_size=9), x, max_size=4), max_leaves=12)  # fmt: skip


def told(function, *arguments):
    """What it returns, or None where it raised a sentence."""
    sentence = "said nothing"
    try:
        return function(*arguments)
    except UserError as error:
        sentence = str(error)
    assert sentence.strip()
    assert "\n" not in sentence
    return None


@quick()
@given(st.text() | JSON.map(json.dumps))
def test_any_text_is_json_or_one_sentence(text):
    told(parse_json, text, "x")


@quick()
@given(JSON)
def test_any_json_is_a_configuration_or_one_sentence(data):
    told(Config.from_dict, data)
    if isinstance(data, dict):
        told(Config.from_dict, {"task": {"name": "grid", **data}})
        told(Config.from_dict, {"task": {"name": "grid"}, "train": data})


@quick()
@given(st.dictionaries(st.sampled_from(["step", "tv", "loss", "seeds", "floor_kind", "x"]), JSON))
def test_figures_are_numbers_or_left_out(data):
    found = told(figures, data, "x")
    if found is not None:
        assert isinstance(found[0]["step"], int)
        assert all(found[0].get(k) is None or isinstance(found[0][k], (int, float)) for k in ("tv", "loss"))


@quick(60)
@given(st.binary(max_size=200))
def test_any_bytes_are_lines_with_gaps(tmp_path_factory, content):
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    path.write_bytes(content)
    found = told(read_json_lines, path, figures)
    assert found is not None
    assert all("\n" not in gap for gap in found.gaps)


@quick(60)
@given(st.lists(st.dictionaries(st.sampled_from(["id", "sequence", "state", "score", "log_pf"]), st.text(max_size=6))))
def test_any_rows_are_designs_or_gaps(rows):
    kept, gaps = designs(rows, "x")
    assert len(kept) + len(gaps) == len(rows)
    assert all(float(row["score"]) == float(row["score"]) for row in kept)


@quick(80)
@given(st.lists(st.text(max_size=12), min_size=1, max_size=4))
def test_any_words_after_a_command_are_told_in_one_sentence(campaign, words):
    assert campaign.command(["train", "grid", "--steps", "0", *words]) == campaign.FINE
    assert campaign.command(["eval", "no-such-run", *words]) == campaign.FINE


def test_the_page_shows_what_was_counted(campaign):
    results = json.loads(campaign.RESULTS.read_text())
    text = PAGE.read_text()
    shown = text[text.index("<!-- tables -->") : text.index("<!-- end of tables -->")]
    assert shown.strip().removeprefix("<!-- tables -->").strip() == campaign.tables(results)


def test_help_tells_the_exit_codes(capsys):
    assert main(["--help"]) == 0
    assert "130 interrupted" in capsys.readouterr().out
