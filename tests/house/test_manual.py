"""The manual is whole: pages made from code are current, tutorials run as notebooks, the built site fetches nothing and every link leads somewhere."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def script(name: str) -> dict:
    return runpy.run_path(str(ROOT / "scripts" / name), run_name="script")


def test_the_reference_is_what_the_code_says():
    """In a process of its own: the width of help is read when the parser is imported."""
    code = (
        "import runpy; made = runpy.run_path('scripts/reference.py', run_name='script');"
        "stale = [n for n, make in made['PAGES'].items() if (made['DOCS'] / n).read_text() != make()]; print(stale)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", f"run `python scripts/reference.py`: {done.stdout} {done.stderr[-500:]}"


def test_the_reference_holds_every_public_name_and_every_subcommand():
    import stochflow
    from stochflow.cli import design

    page = (ROOT / "docs/reference/api.md").read_text().splitlines()
    for name, home in stochflow._HOME.items():
        assert f"::: stochflow.{home}.{name}" in page, name
    commands = (ROOT / "docs/reference/commands.md").read_text()
    for name in re.findall(r"^  (\w+) [A-Z]+ ", design.USAGE, flags=re.M):
        assert f"usage: stochflow design {name} " in commands, name
    assert commands.count("--subtb-lambda") == 1, "the flags of training stand once"


def test_every_key_that_a_run_writes_down_stands_on_the_page_of_metrics(tmp_path):
    from stochflow import strings_task, train

    small = {"steps": 4, "batch": 8, "hidden": 8, "eval_every": 2, "log_every": 2}
    long = {"search": "population", "children": 4, "replay": 0.25, "replay_rank": True, "oracle_calls": 60, "seeds": 2}
    task = strings_task(lambda texts: [0.1 + t.count("G") for t in texts], "ACGT", 24)
    runs = [
        train("grid", side=3, stick=0.2, seeds=2, out=tmp_path / "a", **small),
        train("tfbind8", stick=0.2, objective="sgfn-kl", out=tmp_path / "b", **small),
        train("gc", length=3, out=tmp_path / "c", **small),
        train(task, out=tmp_path / "d", **small, **long),
    ]
    page = (ROOT / "docs/reference/metrics.md").read_text()
    written = {key for run in runs for key in run.summary}
    for run in runs:
        for line in (run.path / "metrics.jsonl").read_text().splitlines():
            written |= json.loads(line).keys()
    assert len(written) > 60
    named = {key for key in written if f"| `{key}` |" in page}
    ends = {key for key in written - named if re.sub("_(low|high)$", "", key) in named}
    assert written - named - ends <= {"seconds"}, "`time` says what it is"


def test_the_tables_of_scaling_are_the_committed_ones():
    module = runpy.run_path(str(ROOT / "benchmarks" / "scaling.py"), run_name="script")
    page = module["PAGE"].read_text()
    assert module["rendered"](page) == page, "run `python benchmarks/scaling.py --render`"
    assert "| 2 processes |" in page


def test_how_to_has_an_answer_for_each_of_its_questions():
    index = (ROOT / "docs/how-to/index.md").read_text()
    asked = re.findall(r"\[([^\]]+)\]\((\w+)\.md#", index)
    assert len(asked) >= 30
    for question, page in asked:
        assert f"## {question}\n" in (ROOT / f"docs/how-to/{page}.md").read_text(), question


def test_pictures_fetch_nothing_and_those_of_the_manual_are_named_and_drawn_for_light_and_dark():
    for path in (ROOT / "docs/img").glob("*.svg"):
        assert not re.search(r"(href|src)=\"https?:|url\(http", path.read_text()), path.name
    for name in script("pictures.py")["PICTURES"]:
        text = (ROOT / f"docs/img/{name}.svg").read_text()
        assert "aria-label" in text
        words = re.findall(r"<text [^>]*?fill: (#[0-9a-f]{6})", text)
        assert words
        assert all("#30" < colour < "#f0" for colour in words), f"{name}: letters of {set(words)}"


def test_a_notebook_holds_the_code_of_its_page(tmp_path):
    pytest.importorskip("jupytext")
    made = script("notebooks.py")
    for path, name in zip(made["main"](tmp_path), made["pages"](), strict=True):
        cells = json.loads(path.read_text())["cells"]
        code = ["".join(c["source"]).strip() for c in cells if c["cell_type"] == "code"]
        blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs" / name).read_text(), flags=re.S | re.M)
        assert code == [b.strip() for b in blocks], name


@pytest.mark.slow
@pytest.mark.parametrize("name", script("notebooks.py")["pages"]())
def test_the_notebook_of_a_tutorial_runs(name, tmp_path, monkeypatch):
    """Anywhere, from what is in the file alone."""
    pytest.importorskip("jupytext")
    text = script("notebooks.py")["notebook"](ROOT / "docs" / name)
    monkeypatch.chdir(tmp_path)
    scope: dict = {"__name__": "__main__"}
    code = ["".join(c["source"]) for c in json.loads(text)["cells"] if c["cell_type"] == "code"]
    assert code
    for cell in code:
        exec(cell, scope)


def test_a_notebook_needs_no_file_beside_it():
    pytest.importorskip("jupytext")
    made = script("notebooks.py")
    for name in made["pages"]():
        for cell in json.loads(made["notebook"](ROOT / "docs" / name))["cells"]:
            if cell["cell_type"] == "markdown":
                text = re.sub(r"^```.*?^```", "", "".join(cell["source"]), flags=re.S | re.M)
                for target in re.findall(r"\]\(([^)\s]+)\)", text):
                    kept = target.removeprefix("attachment:")
                    assert kept in cell.get("attachments", {}) or target.startswith("http"), f"{name}: {target}"


@pytest.mark.slow
@pytest.mark.extra
def test_the_site_is_built_offline_and_every_link_leads_somewhere():
    pytest.importorskip("zensical")
    pytest.importorskip("mkdocstrings")
    env = {
        **os.environ,
        "http_proxy": "http://127.0.0.1:9",
        "https_proxy": "http://127.0.0.1:9",
    }  # nothing answers there
    done = subprocess.run(
        [sys.executable, "scripts/build_site.py"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    site = ROOT / "build" / "site"
    assert "trajectory balance" in (site / "search.json").read_text().lower()
    reference = (site / "reference" / "api.html").read_text()
    assert "strings_task" in reference
    assert "<blockquote>" not in reference, "an example outside of `Examples:` is taken for quotations"
    for name in script("notebooks.py")["pages"]():
        stem = Path(name).stem
        assert (site / "notebooks" / f"{stem}.ipynb").exists()
        assert f'download="{stem}.ipynb"' in (site / name).with_suffix(".html").read_text(), name
