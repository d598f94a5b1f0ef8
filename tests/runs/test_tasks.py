"""Tasks: from settings, from three flags of noise, and from the user's own function."""

from __future__ import annotations

import math
import sys
import textwrap

import pytest
import torch

from stochflow.errors import UserError
from stochflow.law.modes import tfbind8_modes
from stochflow.law.task_modes import mode_regions, task_modes
from stochflow.runs import tasks
from stochflow.runs.config import GridTask, TFBind8Task, UserTask
from stochflow.scores.data import tfbind8
from stochflow.scores.rewards import Linear
from stochflow.types import Task
from stochflow.worlds.channels import Confusion, Exact, Neighbour, Slip
from stochflow.worlds.grid import Corners, Grid
from stochflow.worlds.strings import Strings


def test_grid_log_reward_is_the_log_of_the_corners():
    task = tasks.build(GridTask(ndim=2, side=8, base=1e-5))
    states = task.env.all_states()
    log_reward = task.reward(task.oracle(states), states, None)
    assert torch.allclose(log_reward.exp(), Corners(8, 1e-5)(states), rtol=1e-5)
    assert float(log_reward.min()) == pytest.approx(
        math.log(1e-5), abs=1e-4
    )  # a small base is not lifted to some floor


def test_settings_reach_the_task():
    grid = tasks.build(GridTask(ndim=3, side=5, stick=0.5, noise="neighbour"))
    assert (grid.env.ndim, grid.env.side) == (3, 5)
    assert isinstance(grid.channel, Neighbour)
    assert grid.channel.alpha == 0.5
    tfbind = tasks.build(TFBind8Task(stick=0.1, beta=2.0, floor=1e-2, ramp=5.0, table="ARX_REF_R1"))
    assert isinstance(tfbind.channel, Slip)
    assert tfbind.channel.alpha == 0.1
    assert (tfbind.reward.beta, tfbind.reward.floor, tfbind.reward.ramp) == (2.0, 1e-2, 5.0)
    states = tfbind.env.all_states()[-65_536:]
    assert torch.equal(tfbind.oracle(states), torch.from_numpy(tfbind8("ARX_REF_R1")).float())


def test_defaults_agree_with_the_settings():
    """The keyword defaults of the builders are those of the dataclasses, so Python and the command line mean the same."""
    import inspect
    from dataclasses import asdict

    for builder, settings in ((tasks.grid_task, GridTask()), (tasks.tfbind8_task, TFBind8Task())):
        assert {n: p.default for n, p in inspect.signature(builder).parameters.items()} == asdict(settings)


def test_tfbind8_target():
    task = tasks.tfbind8_task()
    states = task.env.all_states()[-65_536:]
    log_reward = task.reward(task.oracle(states), states, None).double()
    assert float(log_reward.logsumexp(0)) == pytest.approx(9.1596, abs=5e-5)
    assert float(task.oracle(task.env.encode(["AGGTATCA"]))) == 1.0


def test_a_built_table_by_its_path(tmp_path):
    import numpy as np

    file = tmp_path / "own.npz"
    np.savez(file, scores=np.arange(65_536))
    task = tasks.tfbind8_task(table=str(file))
    assert task.oracle(task.env.encode(["AAAAAAAA", "TTTTTTTT"])).tolist() == [0.0, 1.0]


def test_the_simplified_landscape_is_a_table_too():
    task = tasks.tfbind8_task(table="simplified")
    assert float(task.oracle(task.env.encode(["CGCGCGCG"]))) == 1.0


# noise ----------------------------------------------------------------------------------------------------------


def write_table(path, rows):
    path.write_text("\n".join(",".join(str(x) for x in row) for row in rows))
    return str(path)


@pytest.mark.parametrize("noise", ["slip", "neighbour"])
def test_no_stick_is_exact(noise):
    assert isinstance(tasks.make_channel(Grid(2, 4), 0.0, noise), Exact)


def test_a_confusion_table_is_the_whole_law(tmp_path):
    file = write_table(tmp_path / "c.csv", [[0.9, 0.1], [0.3, 0.7]])
    env = Grid(2, 4)
    for stick in (0.0, 0.25):
        channel = tasks.make_channel(env, stick, "confusion", file)
        assert isinstance(channel, Confusion)
        state = env.initial((1,))
        legal = env.real_moves(env.moves(state))
        assert channel.log_probs(state, legal, torch.tensor([1])).exp()[0, :2].tolist() == pytest.approx(
            [0.3, 0.7], abs=1e-6
        )


@pytest.mark.parametrize(
    ("stick", "noise", "rows", "words"),
    [
        (1.5, "slip", None, ["1.5", "between 0 and 1"]),
        (-0.1, "neighbour", None, ["-0.1", "between 0 and 1"]),
        (math.nan, "slip", None, ["nan", "between 0 and 1"]),
        (0.1, "slipp", None, ["slipp", 'did you mean "slip"']),
        (0.1, "confusion", None, ["--confusion FILE.csv"]),
        (0.1, "slip", [[1, 0], [0, 1]], ["--noise confusion"]),
        (0.1, "confusion", [[1, 0, 0], [0, 1, 0], [0, 0, 1]], ["3 rows", "2 moves besides STOP"]),
        (0.1, "confusion", [[0.9, 0.2], [0, 1]], ["row 1 of 2", "1.1", "+0.1"]),
    ],
)
def test_impossible_noise_is_refused(tmp_path, stick, noise, rows, words):
    file = "" if rows is None else write_table(tmp_path / "c.csv", rows)
    with pytest.raises(UserError) as error:
        tasks.make_channel(Grid(2, 4), stick, noise, file)
    assert all(word in str(error.value) for word in words), str(error.value)


def test_a_missing_confusion_file_is_named():
    with pytest.raises(UserError, match=r"absent\.csv"):
        tasks.make_channel(Grid(2, 4), 0.1, "confusion", "absent.csv")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: tasks.grid_task(side=1), ["side 1", "--side 2"]),
        (lambda: tasks.grid_task(ndim=0), ["ndim = 0"]),
        (lambda: tasks.grid_task(base=0.0), ["base = 0.0", "above 0"]),
        (lambda: tasks.tfbind8_task(beta=-1.0), ["beta = -1.0"]),
        (lambda: tasks.tfbind8_task(floor=0.0), ["floor", "0.0"]),
        (lambda: tasks.tfbind8_task(table="SIX"), ["'SIX'", "SIX6_REF_R1"]),
        (lambda: tasks.build("grid"), ["'grid'", "GridTask"]),
        (lambda: tasks.strings_task(3), ["3", "cannot be called"]),
    ],
)
def test_impossible_settings_are_refused(make, words):
    with pytest.raises(UserError) as error:
        make()
    assert all(word in str(error.value) for word in words), str(error.value)


# modes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("wrong", [None, b"x", [], torch.zeros(0), float("nan"), 10**30], ids=repr)
@pytest.mark.parametrize(
    ("make", "name"),
    [(tasks.bits_task, n) for n in ("length", "bits", "modes", "beta", "mode_seed")]
    + [(tasks.gc_task, "targets"), (tasks.gc_task, "betas"), (tasks.tfbind8_task, "open_loop"), (tasks.load, "spec")],
)
def test_a_setting_of_another_kind_is_a_sentence(make, name, wrong):
    if make is tasks.load:
        with pytest.raises(UserError, match="spec is"):
            tasks.load(wrong)
        return
    with pytest.raises(UserError, match=name.partition("_")[0]):
        make(**{name: wrong})


@pytest.mark.parametrize(
    ("ndim", "side", "cells", "regions"), [(2, 8, 4, 4), (2, 32, 36, 4), (2, 64, 144, 4), (3, 8, 8, 8), (1, 32, 6, 2)]
)
def test_bright_cells_and_regions_of_the_grid(ndim, side, cells, regions):
    task = tasks.grid_task(ndim, side)
    at, region = task_modes(task), mode_regions(task)
    assert len(at) == cells
    states = task.env.all_states()[at]
    assert (task.oracle(states) > 2).all()
    assert task.oracle(task.env.all_states()).gt(2).sum() == cells
    assert region.unique().tolist() == list(range(regions))
    orthant = (2 * states > side - 1).long() @ 2 ** torch.arange(ndim)  # the bands lie inside the orthants
    assert len({(int(o), int(r)) for o, r in zip(orthant, region, strict=True)}) == regions


def test_modes_of_tfbind8_are_positions_among_all_states():
    task = tasks.tfbind8_task()
    at = task_modes(task)
    assert len(at) == 328
    first = len(task.env.all_states()) - 65_536
    assert sorted(at.tolist()) == sorted((tfbind8_modes() + first).tolist())
    best = task.env.encode(["AGGTATCA"])
    assert bool(task.oracle.modes(best))
    assert not bool(task.oracle.modes(task.env.encode(["AAAAAAAA"])))


def test_unknown_modes_are_none():
    task = tasks.strings_task(lambda texts: [1.0] * len(texts))
    assert task_modes(task) is None
    assert mode_regions(task) is None


# the user's own -------------------------------------------------------------------------------------------------


def test_strings_task_wraps_any_function():
    task = tasks.strings_task(lambda texts: [t.count("G") / 4 for t in texts], "ACGT", 4)
    assert isinstance(task, Task)
    assert isinstance(task.env, Strings)
    assert isinstance(task.channel, Exact)
    states = task.env.encode(["GGGG", "GGAA"])
    assert task.reward(task.oracle(states), states, None).exp().tolist() == pytest.approx([1.0, 0.5])
    assert task.oracle.calls == 2


def test_strings_task_takes_lengths_noise_and_reward():
    task = tasks.strings_task(
        lambda t: [-float(len(x)) for x in t], "01", 5, min_length=1, channel=Slip(0.5), reward=Linear(2.0)
    )
    assert task.env.stop == 2
    assert isinstance(task.channel, Slip)
    states = task.env.encode(["01", "01101"])
    assert task.reward(task.oracle(states), states, None).tolist() == [-4.0, -10.0]


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A folder with a user's modules, the current one, and nothing of them left behind."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    (tmp_path / "my_pkg").mkdir()
    (tmp_path / "my_pkg" / "__init__.py").write_text("")
    (tmp_path / "my_pkg" / "designs.py").write_text(
        textwrap.dedent("""
            from stochflow.runs.tasks import strings_task

            def gc_content(length: int = 4, weight: float = 1.0):
                return strings_task(lambda texts: [weight * sum(c in "GC" for c in t) / len(t) for t in texts], "ACGT", length)

            def needs(length):
                return gc_content(length)

            def not_a_task():
                return 3

            def broken():
                return 1 / 0

            number = 3
        """)
    )
    (tmp_path / "wants_more.py").write_text("import a_package_nobody_has\n")
    (tmp_path / "bad_syntax.py").write_text("def f(:\n")
    yield
    for name in ("my_pkg", "my_pkg.designs", "wants_more", "bad_syntax"):
        sys.modules.pop(name, None)


def test_load_calls_the_users_function(module):
    task = tasks.load("my_pkg.designs:gc_content", length=6)
    assert task.env.length == 6
    assert task.oracle(task.env.encode(["GGGAAA"])).tolist() == [0.5]
    assert tasks.load("my_pkg.designs:needs", length=3).env.length == 3
    assert tasks.build(UserTask("my_pkg.designs:gc_content", {"length": 7})).env.length == 7


@pytest.mark.parametrize(
    ("spec", "kwargs", "words"),
    [
        ("gc_content", {}, ["'gc_content'", "package.module:function"]),
        ("my_pkg.designs:", {}, ["package.module:function"]),
        ("my_pgk.designs:gc_content", {}, ["no module", "'my_pgk'"]),
        ("my_pkg.desings:gc_content", {}, ["no module", "'my_pkg.desings'"]),
        ("wants_more:f", {}, ["'a_package_nobody_has'", "not installed"]),
        ("bad_syntax:f", {}, ["bad_syntax", "SyntaxError"]),
        ("my_pkg.designs:gc_contnet", {}, ["'gc_contnet'", 'did you mean "gc_content"']),
        ("my_pkg.designs:number", {}, ["no function 'number'"]),
        ("my_pkg.designs:gc_content", {"lenght": 3}, ["'lenght'", 'did you mean "length"']),
        ("my_pkg.designs:needs", {}, ["needs length"]),
        ("my_pkg.designs:not_a_task", {}, ["returned int", "Task"]),
        ("my_pkg.designs:broken", {}, ["ZeroDivisionError"]),
        ("my_pkg.designs:gc_content", {"length": 0}, ["length 0"]),
    ],
)
def test_load_says_what_is_wrong(module, spec, kwargs, words):
    with pytest.raises(UserError) as error:
        tasks.load(spec, **kwargs)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("header", ["", "A,C\n"])
def test_a_confusion_table_may_have_a_line_of_names(tmp_path, header):
    (tmp_path / "t.csv").write_text(header + "0.9,0.1\n0.2,0.8\n")
    assert Confusion(str(tmp_path / "t.csv")).table.tolist() == [[0.9, 0.1], [0.2, 0.8]]
    (tmp_path / "t.csv").write_text(header + "0.9,0.1\n0.2,much\n")
    with pytest.raises(UserError, match=r"'much' in row 2, column 2 is no number"):
        Confusion(str(tmp_path / "t.csv"))
