"""`stochflow doctor`: what the machine offers, which engine would run a task and why not a faster one, and the compiled code."""

from __future__ import annotations

import pytest
import torch

from stochflow.cli.commands import main
from stochflow.engines.choose import OPERATIONS, engines
from stochflow.engines.numba import cache


def page(capsys, *words: str) -> str:
    assert main(["doctor", *words]) == 0
    return capsys.readouterr().out


def plan(text: str) -> dict[str, tuple[str, list[str]]]:
    """The engine of each operation, and the reasons below it."""
    found: dict[str, tuple[str, list[str]]] = {}
    operation = ""
    for line in text.split("with these settings\n")[1].splitlines():
        if "not faster: " in line:
            found[operation][1].append(line.split("not faster: ")[1])
        else:
            operation, engine = line.split()
            found[operation] = engine, []
    return found


def test_it_names_versions_devices_engines_and_where_compiled_code_is(capsys):
    text = page(capsys)
    assert torch.__version__ in text
    assert " cores, " in text
    for name, engine in engines().items():
        why = engine.unavailable()
        assert f"{name:<12} {'available' if why is None else f'not available: {why}'}" in text
        assert all(row in text for row in engine.support)
    folder = cache.folder()
    assert folder is None or (str(folder) in text and "--clear-cache" in text)


def test_with_a_task_it_names_the_engine_of_each_operation_and_why_not_a_faster_one(capsys):
    found = plan(page(capsys, "tfbind8", "--stick", "0.25", "--net", "transformer", "--device", "cpu"))
    assert list(found) == list(OPERATIONS)
    assert found["walk"][0] == found["gradient"][0] == "eager"
    assert any("not a transformer" in reason for reason in found["gradient"][1])
    assert any("not a transformer" in reason for reason in found["walk"][1])


def test_the_reasons_of_the_slower_engines_are_those_of_the_gradient(capsys):
    found = plan(page(capsys, "grid", "--side", "4", "--objective", "tb", "--device", "cpu"))
    if engines()["numba"].unavailable() is None:
        assert {operation: engine for operation, (engine, _) in found.items() if operation != "noise"} == {
            "walk": "numba", "gradient": "numba", "update": "numba",
        }  # fmt: skip
    assert found["walk"][1] == found["gradient"][1] == found["update"][1] != []


def test_an_engine_that_does_not_fit_is_an_error(capsys):
    assert main(["doctor", "grid", "--objective", "subtb", "--engine", "numba"]) == 2
    assert "numba does not cover the objective SubTrajectoryBalance" in capsys.readouterr().err


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """Compiled code is kept here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    cache.folder.cache_clear()
    yield tmp_path
    monkeypatch.undo()
    cache.folder.cache_clear()


def test_clearing_deletes_all_compiled_code(elsewhere, capsys):
    folder = cache.folder()
    assert folder is not None
    for kept in (folder / "walk", folder.parent / "numba-of-before" / "walk"):
        kept.mkdir(parents=True)
        (kept / "loop.nbc").write_bytes(bytes(2**20))
    assert f"{folder} (2.0 MB)" in page(capsys)
    assert page(capsys, "--clear-cache") == "deleted 2.0 MB of compiled code\n"
    assert f"{folder} (0.0 MB)" in page(capsys)
