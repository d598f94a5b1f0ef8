"""The report: one file that needs nothing from outside, with every panel filled and every axis named."""

from __future__ import annotations

import json
import re
import shlex
import sys
from html.parser import HTMLParser

import numpy as np
import pytest

from stochflow.cli import commands as cli
from stochflow.errors import UserError
from stochflow.law.modes import families
from stochflow.look.report import RunFiles, designs, page, write_report
from stochflow.look.report.designs import read_designs
from stochflow.runs.config import configure

VOID = {"meta", "link", "br", "img", "input", "hr", "path", "use", "rect", "image", "circle"}


class Checker(HTMLParser):
    """Reads a page as a browser would and notes what is wrong with it."""

    def __init__(self):
        super().__init__()
        self.open: list[str] = []
        self.faults: list[str] = []
        self.outside: list[str] = []
        self.ids: list[str] = []
        self.used: set[str] = set()
        self.figures: list[dict] = []
        self.text = ""
        self.scripts = 0

    def handle_starttag(self, tag, attrs):
        given = dict(attrs)
        self.scripts += tag == "script"
        for name in ("src", "href", "xlink:href", "action", "data", "poster", "srcset"):
            value = given.get(name)
            if value and value.startswith("#"):
                self.used.add(value[1:])
            elif value and not value.startswith("data:"):
                self.outside.append(value)
        for value in given.values():
            self.used |= set(re.findall(r"url\(#([^)]+)\)", value or ""))
        if "id" in given:
            self.ids.append(given["id"])
        if tag == "figure":
            self.figures.append({"class": given.get("class"), "svg": None, "marks": 0, "texts": [], "words": ""})
        if tag == "svg":
            self.figures[-1]["svg"] = given
        elif self.figures and self.figures[-1]["svg"] is not None and "svg" in self.open:
            self.figures[-1]["marks"] += tag in ("path", "use", "image")
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        if tag in VOID:
            return
        if not self.open or self.open.pop() != tag:
            self.faults.append(f"</{tag}> closes nothing at {self.getpos()}")

    def handle_data(self, data):
        self.text += data
        if self.figures and "text" in self.open:
            self.figures[-1]["texts"].append(data.strip())
        if self.figures and self.open and self.open[-1] == "figcaption":
            self.figures[-1]["words"] += data


def checked(text: str) -> Checker:
    """A page that holds together: what every report must fulfil."""
    seen = Checker()
    seen.feed(text)
    seen.close()
    assert text.startswith("<!doctype html>")
    assert seen.faults == []
    assert seen.open == []
    assert seen.outside == []
    assert not re.search(r"https?://|@import|url\((?!#)", text)
    assert len(seen.ids) == len(set(seen.ids))
    assert seen.used <= set(seen.ids)
    assert "prefers-color-scheme: dark" in text
    assert "@media print" in text
    assert 'name="viewport"' in text
    for figure in seen.figures:
        svg = figure["svg"]
        assert svg is not None, figure["class"]
        assert figure["marks"] > 5, figure["class"]
        assert svg["aria-label"]
        assert svg["data-x"], figure["class"]
        assert svg["data-y"], figure["class"]
        assert svg["data-x"] in figure["texts"]
        assert svg["data-y"] in figure["texts"]
        assert figure["words"].strip().endswith("."), figure["class"]
    # colours are the page's, so that they follow light and dark: nothing is drawn in a fixed black or in a marker colour
    pictures = "".join(re.findall(r"<svg.*?</svg>", text, re.DOTALL))
    assert not re.search(r"(stroke|fill): #000000", pictures)
    assert "var(--ink)" in pictures
    assert not re.search(r"#(010203|020304|030405|110011|220022)", text)
    return seen


def classes(seen):
    return [f["class"] for f in seen.figures]


def test_a_run_over_strings_has_every_panel(make_run):
    path = make_run()
    seen = checked(write_report([path]).read_text())
    wanted = [
        "scores",
        "scatter",
        "loss",
        "tv",
        "log_z",
        "modes",
        "entropy",
        "dynamics",
        "score",
        "logo",
        "logo-1",
        "logo-2",
        "logo-3",
    ]
    assert classes(seen)[: len(wanted)] == wanted
    assert seen.scripts == 0
    for words in (
        "none of the 12 diagnostics fired",
        "best achievable",
        "Median",
        "distance to a better one",
        "95 % bootstrap",
    ):
        assert words in seen.text
    assert not [p for p in path.iterdir() if p.suffix == ".tmp"]


def test_a_run_on_a_grid_has_heat_maps_and_no_logos(make_run):
    seen = checked(write_report([make_run(task="grid", seeds=1)]).read_text())
    assert classes(seen)[:4] == ["law", "target", "scores", "scatter"]
    assert "dynamics" not in classes(seen)
    assert not [c for c in classes(seen) if c.startswith("logo")]
    assert "probability" in seen.figures[0]["texts"]  # of the colour bar


@pytest.mark.parametrize("side", [12, 40], ids=["cells", "picture"])
def test_large_and_one_dimensional_grids_are_drawn_too(make_run, side):
    path = make_run(task="grid", side=side)
    arrays = dict(np.load(path / "law.npz"))
    arrays["grid_target"] = np.full((side, side), 1 / side**2, dtype=np.float32)
    arrays["grid_law"] = np.stack([arrays["grid_target"]] * 3)
    np.savez(path / "law.npz", **arrays)
    checked(write_report([path]).read_text())
    arrays["grid_target"], arrays["grid_law"] = np.full((side, 1), 1 / side), np.full((3, side, 1), 1 / side)
    np.savez(path / "law.npz", **arrays)
    assert classes(checked(write_report([path]).read_text()))[:2] == ["law", "scores"]


def test_what_is_not_there_yet_leaves_no_empty_panel(make_run):
    path = make_run(done=False, lines=make_run.rows(steps=1000)[:3])
    seen = checked(write_report([path]).read_text())
    assert "step 300 of 1 000" in seen.text.replace("\u2009", " ")
    assert "law" not in classes(seen)
    assert "Best designs" not in seen.text
    nothing = make_run("nothing", done=False, lines=[])
    seen = checked_bare(write_report([nothing]).read_text())
    assert seen.figures == []
    assert "Nothing has been measured yet" in seen.text


def checked_bare(text):
    """As `checked`, of a page without figures."""
    seen = Checker()
    seen.feed(text)
    assert seen.faults == []
    assert seen.outside == []
    return seen


@pytest.mark.parametrize("harm", ["summary.json", "samples.csv", "law.npz", "environment.json"])
def test_a_damaged_file_costs_its_own_panel_alone(make_run, harm):
    path = make_run()
    (path / harm).write_bytes(b"\xff\x00 nothing that can be read {")
    assert {"loss", "tv"} <= set(classes(checked(write_report([path]).read_text())))


def test_a_law_that_would_be_unpickled_is_not_read(make_run):
    path = make_run()
    np.savez(path / "law.npz", score_law=np.array([{"a": 1}], dtype=object))
    assert RunFiles.read(path).law == {}


def test_several_runs_make_one_page(make_run, tmp_path):
    paths = [make_run("first"), make_run("second", task="grid")]
    where = write_report(paths, tmp_path / "both.html")
    seen = checked(where.read_text())
    assert {"run-1", "run-2"} <= set(seen.ids)
    assert {"first", "second"} <= set(re.findall(r"\w+", seen.text))


def test_findings_are_told_with_what_to_try(make_run):
    lines = make_run.rows()
    lines[-1]["finite"] = 0.0
    seen = checked(write_report([make_run(lines=lines)]).read_text())
    assert "1 of 12 diagnostics fired: gradient explosion" in seen.text
    assert "a smaller --lr (a tenth)" in seen.text


def test_names_are_escaped(make_run):
    path = make_run("<b>&amp;")
    assert "<b>&amp;</h1>" not in page([RunFiles.read(path)])


@pytest.mark.parametrize(
    ("task", "settings"),
    [
        ("tfbind8", {"stick": 0.5, "replay": 0.5, "replay_priority": True}),
        ("grid", {"side": 9, "objective": "tb", "lr": 1e-4}),
        ("grid", {}),
    ],
)
def test_the_command_repeats_the_run(make_run, task, settings):
    """Parsed again by the command line, it gives the very same configuration."""
    run = RunFiles.read(make_run(task=task, **settings))
    program, command, name, *flags = shlex.split(run.command())
    assert (program, command, name) == ("stochflow", "train", task)
    base = cli.Train(**cli.TASKS[name].train)
    asked = cli.parse_task("train", name, flags, [], base)
    assert (
        cli.as_config(name, asked.task, asked.train) == run.config == configure(task, seeds=3, steps=1000, **settings)
    )


def test_distances_and_modes_of_the_table(make_run):
    path = make_run(designs=0)
    (path / "samples.csv").write_text(
        "id,sequence,score,log_reward,log_pf\n"
        "design_0001,AAAAAAAA,1.0,0,-9\ndesign_0002,AAAAAAAC,0.9,-1,-9\ndesign_0003,CCCCCCCC,0.8,-2,-9\ndesign_0004,CCCCCCAA,0.7,-3,-9\n"
    )
    found = read_designs(RunFiles.read(path))
    assert [(d.distance, d.family) for d in found.rows] == [(None, 1), (1, 1), (7, 2), (2, 2)]
    assert [p.title for p in found.logos] == ["The 4 best designs", "Mode 1", "Mode 2"]


def test_every_mode_is_drawn_or_named(make_run):
    """Nobody takes the logos shown for all the modes there are."""
    run = RunFiles.read(make_run(designs=40))
    found = read_designs(run)
    texts = [r["sequence"] for r in run.designs]
    heads, gap = families(texts, [float(r["score"]) for r in run.designs])
    members = [int((gap[:, heads].argmin(1) == k).sum()) for k in range(len(heads))]
    drawn = [k + 1 for k in range(len(heads)) if members[k] > 1]
    assert found.modes == len(heads) > 6
    assert [p.title for p in found.logos[1:]] == [f"Mode {k}" for k in drawn]
    for k in set(range(1, len(heads) + 1)) - set(drawn):
        assert f"{texts[heads[k - 1]]} (mode {k})" in found.note
    assert f"There are {len(heads)} among the 40 designs. " in page([run])


def test_more_modes_than_are_drawn_are_counted(make_run, monkeypatch):
    monkeypatch.setattr(designs, "FAMILIES", 2)
    found = read_designs(RunFiles.read(make_run(designs=40)))
    assert len(found.logos) == 3
    assert re.match(r"Logos of the 2 best of the \d+ modes with more than one design\.", found.note)


def test_a_run_that_was_taken_up_again_says_from_when_its_law_and_designs_are(make_run):
    path = make_run()
    assert 'class="note behind"' not in page([RunFiles.read(path)])
    config = json.loads((path / "config.json").read_text())
    config["train"]["steps"] = 2000
    (path / "config.json").write_text(json.dumps(config))
    text = page([RunFiles.read(path)])
    assert text.count("As it was at step 1\u2009000, where the run had ended before") == 2  # the law, the designs


def searched(make_run, name="run", **look):
    """A run over a space that is not listed, whose budget of 500 oracle calls ended it at step 400 of 1,000."""
    lines = [
        {k: v for k, v in r.items() if k not in ("tv", "excess_tv")} for r in make_run.rows(1, steps=400, every=100)
    ]
    lines[-1] |= {
        "samples": 25,
        "oracle_calls": 497,
        "top_asked": 0.8,
        "best_asked": 0.9,
        "tv": None,
        "modes": None,
    } | look
    return make_run(name, seeds=1, lines=lines, oracle_calls=500)


def test_a_run_whose_budget_ended_it_has_ended(make_run):
    path = searched(make_run)
    text = page([RunFiles.read(path)])
    assert "400 steps in 1 min 15 s, until its 500 oracle calls were spent" in text
    assert 'class="note behind"' not in text
    assert "mean of the 100 best asked" in text
    rows = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    with (path / "metrics.jsonl").open("a") as file:  # taken up again, with a larger budget
        file.write(json.dumps(rows[-2] | {"step": 500}) + "\n")
    assert not RunFiles.read(path).done
    assert not RunFiles.read(searched(make_run, "early", oracle_calls=300)).done


def test_strings_of_different_lengths_have_a_table_and_a_reason(make_run):
    path = make_run()
    (path / "samples.csv").write_text("id,sequence,score,log_reward,log_pf\nd1,AACG,1.0,0,-9\nd2,AAG,0.9,-1,-9\n")
    found = read_designs(RunFiles.read(path))
    assert [d.distance for d in found.rows] == [None, 1]
    assert found.logos == []
    assert "different lengths" in found.note


def test_without_logomaker_the_page_says_how_to_get_logos(make_run, monkeypatch):
    monkeypatch.setitem(sys.modules, "logomaker", None)
    assert "stochflow[bio]" in checked(write_report([make_run()]).read_text()).text


def test_a_log_of_a_million_steps_stays_a_small_page(make_run):
    lines = make_run.rows(seeds=2, steps=1_000_000, every=500)
    where = write_report([make_run(lines=lines, seeds=2)])
    assert where.stat().st_size < 1_500_000
    checked(where.read_text())


def test_what_is_no_run_or_cannot_be_written_is_told(make_run, tmp_path):
    with pytest.raises(UserError, match="does not exist"):
        write_report([tmp_path / "nowhere"])
    with pytest.raises(UserError, match="at least one run"):
        write_report([])
    with pytest.raises(UserError, match=r"cannot be written.*--out"):
        write_report([make_run()], tmp_path / "run" / "config.json" / "report.html")


def test_the_report_needs_no_torch(make_run):
    import subprocess

    code = f"import sys; from stochflow.look.report import write_report; write_report([{str(make_run())!r}]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "False", done.stderr
