"""Promises the package makes as a whole: its names, its start-up, its metadata."""

from __future__ import annotations

import ast
import importlib
import json
import re
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

import stochflow

ROOT = Path(__file__).parents[2]

NAMES = """Env Enumerable Channel Exact Slip Neighbour Confusion Grid Strings Task Power Linear Policy Known Tabular Neural rollout
    backward_rollout evaluate TrajectoryBalance DetailedBalance SubTrajectoryBalance LogVariance FlowKL Buffer Trainer check_env check_channel
    check_oracle Transformer strings_task grid_task tfbind8_task exact_law floor train UserError""".split()


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_public_names_are_these():
    assert sorted(stochflow.__all__) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_public_name_is_there(name):
    found = getattr(stochflow, name)
    home = importlib.import_module(f"stochflow.{stochflow._HOME[name]}")
    assert found is getattr(home, name)
    assert callable(found)


def test_no_public_name_is_also_a_module():
    """`stochflow.rollout` is a function, whichever modules were imported before: nothing of that name can hide it."""
    package = Path(stochflow.__file__).parent
    modules = {p.stem for p in package.glob("*.py")} | {p.name for p in package.iterdir() if p.is_dir()}
    assert modules & set(stochflow.__all__) == set()


FLAT = {"__init__", "__main__", "errors", "types", "ops", "quickstart", "entropy"}


def test_nothing_else_lies_flat_and_every_package_says_its_job():
    package = Path(stochflow.__file__).parent
    assert {p.stem for p in package.glob("*.py")} == FLAT
    folders = {p.parent for p in package.rglob("*.py")} - {package}
    for folder in folders:
        doc = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
        assert doc, f"{folder} does not say its one job"


def test_every_package_stands_in_the_table_of_rooms_and_in_the_layers():
    package = Path(stochflow.__file__).parent
    rooms = (ROOT / "docs" / "architecture.md").read_text().split("## Rooms")[1].split("\n## ")[0]
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = " ".join(settings["tool"]["importlinter"]["contracts"][0]["layers"])
    for folder in (p.parent.name for p in package.glob("*/__init__.py")):
        assert f"`{folder}/`" in rooms, folder
        assert re.search(rf"\b{folder}\b", layers), folder


def test_a_wheel_holds_every_kernel_and_data_file(tmp_path):
    """Installed elsewhere, the package has what it has here."""
    source = tmp_path / "source"
    source.mkdir()
    for name in ("src", "pyproject.toml", "README.md", "LICENSE"):
        found = ROOT / name
        copy = shutil.copytree if found.is_dir() else shutil.copy
        copy(found, source / name)
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(tmp_path), str(source)],
        check=True,
        capture_output=True,
        timeout=300,
    )
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = {
        p.relative_to(ROOT / "src").as_posix()
        for p in (ROOT / "src" / "stochflow").rglob("*")
        if p.is_file() and "__pycache__" not in p.parts
    }
    assert any(name.endswith(".cu") for name in wanted)
    assert wanted - held == set()


def sources():
    """Every module of the package: its path in the package, and its syntax tree."""
    package = Path(stochflow.__file__).parent
    for path in sorted(package.rglob("*.py")):
        yield path.relative_to(package).as_posix(), ast.parse(path.read_text())


def test_no_function_takes_more_than_eight_parameters():
    """What belongs together is a value; `self` is not counted, nor are settings that stand as fields of a dataclass."""
    found = {}
    for name, tree in sources():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                given = [a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
                found[f"{name}:{node.name}"] = len([a for a in given if a not in ("self", "cls")])
    assert {name: count for name, count in found.items() if count > 8} == {}


def test_only_engines_know_engines():
    """All others know the interface: what is asked for, who is chosen, the flat parameters, what is recorded."""
    known = {"base", "choose", "capture", "flat"}
    allowed = {"cli/doctor.py": {"numba"}}  # where compiled code is kept
    for name, tree in sources():
        if name.startswith("engines/"):
            continue
        imported = [n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)]
        parts = {m.split(".")[2] for m in imported if m.startswith("stochflow.engines.")}
        assert parts - known <= allowed.get(name, set()), name


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="nonsense"):
        _ = stochflow.nonsense


HEAVY = ("torch", "numpy", "scipy", "matplotlib", "pandas")


@pytest.mark.parametrize(
    "words",
    [["--help"], ["train", "--help"], ["train", "grid", "--help"], ["resume", "--help"], ["tasks"], []],
    ids=" ".join,
)
def test_help_answers_at_once_and_without_torch(words):
    code = (
        "import sys, time, io, contextlib, json; begun = time.perf_counter()\n"
        "import stochflow\n"
        "from stochflow.cli.commands import main\n"
        "with contextlib.redirect_stdout(io.StringIO()) as out:\n"
        f"    code = main({words!r})\n"
        f"print(json.dumps([code, len(out.getvalue()), [m for m in {HEAVY!r} if m in sys.modules]]))"
    )
    begun = time.perf_counter()
    code_, length, heavy = json.loads(python(code))
    assert (code_, heavy) == (0, [])
    assert length > 100
    assert time.perf_counter() - begun < 5  # under one second alone; CI shares its cores


def test_the_engine_needs_torch_numpy_and_scipy_alone():
    """Importing the core brings in nothing that an extra, the command line or a picture needs."""
    core = (
        "types ops worlds.env worlds.channels worlds.grid worlds.strings worlds.check scores.oracles scores.rewards nets.policy "
        "noise.dynamics learn.rollout learn.evaluate learn.objectives learn.buffer engines.choose engines.eager law.exact "
        "law.floors law.metrics law.modes training.trainer runs.folder runs.tasks"
    )
    code = f"import sys\nfor m in {core.split()!r}: __import__('stochflow.' + m)\nprint([m for m in ('tyro','matplotlib','pandas','Bio','rapidfuzz','safetensors','logomaker') if m in sys.modules])"
    assert python(code).strip() == "[]"


def test_version_is_said_once_and_the_same_everywhere():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["version"] == stochflow.__version__ == metadata.version("stochflow")
    assert f"version: {stochflow.__version__}" in (ROOT / "CITATION.cff").read_text()
    newest = (ROOT / "CHANGELOG.md").read_text().split("\n## ")[1]
    assert newest.startswith(f"[{stochflow.__version__}]") or (
        newest.startswith("[Unreleased]") and stochflow.__version__ in newest
    )


def test_every_dependency_of_the_tested_set_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and not line.startswith("#")]
    pinned = {re.split("==", line)[0].lower().replace("_", "-") for line in lines}
    assert all(
        re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line) for line in lines
    )  # exact, and no local version
    wanted = [*project["dependencies"], *[d for extra in project["optional-dependencies"].values() for d in extra]]
    names = {re.match(r"[A-Za-z0-9._-]+", d).group().lower().replace("_", "-") for d in wanted}
    assert names - pinned == set()
    assert "torch==2.13.0" in lines


def test_the_package_is_typed():
    assert (Path(stochflow.__file__).parent / "py.typed").exists()


def test_ci_runs_the_two_commands_and_nothing_hidden():
    lines = [line for line in (ROOT / ".ci" / "run").read_text().splitlines() if line and not line.startswith("#")]
    assert lines == ["set -euo pipefail", 'cd "$(dirname "$0")/.."', "make lint", "make test"]
