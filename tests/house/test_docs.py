"""What a newcomer reads is true: code runs, outputs are real, commands parse, links lead somewhere, figures are the committed ones."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import re
import runpy
import shlex
from pathlib import Path

import pytest
import tyro

from stochflow.cli import commands as cli
from stochflow.errors import UserError

ROOT = Path(__file__).parents[2]
README = ROOT / "README.md"
PAGES = [README, ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(r"^```([^\n]*)\n(.*?)^```", flags=re.S | re.M)


def blocks(page: Path, language: str) -> list[str]:
    return [body for kind, body in FENCE.findall(page.read_text()) if kind.strip() == language]


def run_elsewhere(page: Path) -> bool:
    """Whether another test file runs this page's code already."""
    others = [p.read_text() for p in (ROOT / "tests").rglob("test_*.py") if p != Path(__file__)]
    return any(page.name in text and "exec(" in text for text in others)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


# code ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_no_code_is_excused(page):
    kinds = {kind.strip() for kind, _ in FENCE.findall(page.read_text())}
    assert not {k for k in kinds if k.startswith("python") and k != "python"}, "every python block is run"


@pytest.mark.parametrize("page", [p for p in PAGES if blocks(p, "python") and not run_elsewhere(p)], ids=name_of)
def test_code_runs_and_prints_what_the_page_says(page, tmp_path, monkeypatch):
    """The blocks of a page in order, in one namespace. A text block right after a python block is its output."""
    monkeypatch.chdir(tmp_path)
    scope: dict = {"__name__": "page"}
    parts = [(kind.strip(), body) for kind, body in FENCE.findall(page.read_text())]
    compared = 0
    for i, (kind, body) in enumerate(parts):
        if kind != "python":
            continue
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(body, f"{page.name}, block {i}", "exec"), scope)
        printed = said.getvalue()
        if printed and i + 1 < len(parts) and parts[i + 1][0] == "text":
            assert_alike(printed, parts[i + 1][1])
            compared += 1
    if page == README:
        assert compared >= 1
        assert (
            cli.main(["sample", "runs/first", "-n", "5", "--out", "designs.csv"]) == 0
        )  # the folder is what the page says it is
        assert len(Path("designs.csv").read_text().splitlines()) == 6
        train, task = scope["train"], scope["gc_task"]
        assert train(task(length=3), steps=2, batch=4, out="own").summary["floor_tv"] is not None


NUMBER = re.compile(r"-?\d+\.?\d*(?:e-?\d+)?")


def assert_alike(printed: str, page: str) -> None:
    """The same words; figures of a learned law to 0.01, drawn objects in any order of luck."""
    got, want = printed.strip().splitlines(), page.strip().splitlines()
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert NUMBER.sub("#", a) == NUMBER.sub("#", b), f"printed {a!r}, the page says {b!r}"
        if "TV" in a or "Checked" in a:
            assert [float(x) for x in NUMBER.findall(a)] == pytest.approx(
                [float(x) for x in NUMBER.findall(b)], abs=0.01
            )


def test_the_examples_hold_what_the_readme_shows():
    """The README's objective and oracle stand in examples/ word for word; the environment there is the same, for any device."""
    shown = [line.strip() for body in blocks(README, "python") for line in body.splitlines()]
    for file in ("own_oracle.py", "own_objective.py"):
        core = [line.strip() for line in (ROOT / "examples" / file).read_text().splitlines()]
        kept = [
            line
            for line in core
            if line.startswith(
                ("def gc", "return [(t", "return strings_task", "needs =", "travelled", "return t.log_flow")
            )
        ]
        assert len(kept) >= 3
        for line in kept:
            assert any(line.split("  #")[0] == s.split("  #")[0] for s in shown), line


@pytest.mark.slow
@pytest.mark.parametrize(("file", "most"), [("own_oracle.py", 0.10), ("own_env.py", 0.03), ("own_objective.py", 0.05)])
def test_examples_run_and_learn(file, most, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(ROOT / "examples" / file), run_name="__main__")
    found = re.search(r"exact TV (\d\.\d+)", capsys.readouterr().out)
    assert found is not None
    assert float(found.group(1)) < most


@pytest.mark.slow
def test_the_picture_is_the_one_that_its_command_draws(tmp_path):
    """The figures in the picture's text are those the script computes; here on a smaller grid for the drawing itself."""
    drawn = runpy.run_path(str(ROOT / "examples" / "picture.py"))
    found = drawn["laws"](8, 0.25, 300)
    target, naive, learned = found.values()
    assert float((naive - target).abs().sum()) / 2 == pytest.approx(0.1475, abs=1e-3)
    assert float((learned - target).abs().sum()) / 2 < 0.04
    drawn["draw"](found, 8, 0.25, str(tmp_path / "small.png"))
    assert (tmp_path / "small.png").read_bytes()[:4] == b"\x89PNG"


# commands -----------------------------------------------------------------------------------------------------------


def commands(page: Path) -> list[list[str]]:
    """The `stochflow` command lines of a page's bash blocks, as words."""
    found = []
    for body in blocks(page, "bash"):
        for line in body.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|\|\||[|;>]", re.sub(r"\s#.*", "", line)):
                words = shlex.split(part, comments=True)
                while words and ("=" in words[0] and not words[0].startswith("-")):
                    words = words[1:]
                if words and Path(words[0]).name == "stochflow":
                    found.append(words[1:])
    return found


class Parsed(BaseException):
    """The flags were understood; nothing is run."""


@pytest.mark.parametrize("page", [p for p in PAGES if commands(p)], ids=name_of)
def test_every_command_line_parses(page, monkeypatch, capsys):
    real = tyro.cli

    def only_parse(*args, **kwargs):
        real(*args, **kwargs)
        raise Parsed

    monkeypatch.chdir(ROOT)  # examples.own_oracle:gc_task is found from here
    monkeypatch.setattr(tyro, "cli", only_parse)
    for words in commands(page):
        if "--config" in words:  # its file is the reader's
            continue
        try:
            code = cli._dispatch(words)
        except Parsed:
            code = 0
        except (UserError, SystemExit) as problem:
            pytest.fail(f"stochflow {shlex.join(words)}: {problem} {capsys.readouterr().err}")
        assert code == 0, f"stochflow {shlex.join(words)}"


def test_the_readme_names_every_command():
    shown = README.read_text()
    for usage in cli.COMMANDS:
        assert f"`stochflow {usage.split()[0]}" in shown, f"the README's table of commands lacks {usage}"


def test_the_plain_commands_are_what_make_runs():
    shown, recipe = README.read_text(), (ROOT / "Makefile").read_text()
    for line in re.findall(r"^\t(.*(?:pip install|stochflow train|pytest -n 2 -q)\s?.*)$", recipe, flags=re.M):
        plain = line.replace("$(BIN)", ".venv/bin").strip()
        if "not slow" not in plain:
            assert plain in shown, f"make runs {plain!r}, which the README does not spell out"


# links and figures --------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    text = FENCE.sub("", page.read_text())
    heads = re.findall(r"^#+ (.*)$", text, flags=re.M)
    slugs = {re.sub(r"[^\w\- ]", "", h.lower()).strip().replace(" ", "-") for h in heads}
    return slugs | set(re.findall(r'<a id="([^"]+)"', text))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page):
    text = FENCE.sub("", page.read_text())
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{name_of(page)} links to {target}"
        if anchor and there.suffix == ".md":
            assert anchor in anchors(there), f"{name_of(page)} links to {target}"


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_row_of_a_table_has_the_cells_of_its_head(page):
    """A bare bar in a cell, as in |p - q|, would begin the next one."""
    head = 0
    for line in FENCE.sub("", page.read_text()).splitlines():
        cells = len(re.findall(r"(?<!\\)\|", line)) if line.startswith("|") else 0
        assert not (head and cells) or cells == head, f"{name_of(page)}: {line[:100]}"
        head = cells


def test_every_page_is_on_the_map():
    index, site = (ROOT / "docs" / "index.md").read_text(), (ROOT / "zensical.toml").read_text()
    for page in (ROOT / "docs").rglob("*.md"):
        name = page.relative_to(ROOT / "docs").as_posix()
        assert name == "index.md" or f"]({name})" in index, f"docs/index.md does not list {name}"
        assert f'"{name}"' in site, f"the navigation in zensical.toml does not list {name}"


def test_the_table_of_the_readme_is_what_the_results_say():
    spec = importlib.util.spec_from_file_location("readme_table", ROOT / "benchmarks" / "readme_table.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    page = README.read_text()
    assert module.rendered(page) == page, "run `python benchmarks/readme_table.py`"
    assert page.count("| TFBind8 |") >= 3
