"""The comparison with other libraries measures what it says, and the page on speed is what its committed results say."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from stochflow.law.exact import Graph, exact_law, law_from_log_pi, target_law
from stochflow.runs.tasks import grid_task, tfbind8_task
from stochflow.worlds.channels import Exact
from stochflow.worlds.grid import Grid
from stochflow.worlds.strings import Strings

ROOT = Path(__file__).parents[2]
PEERS, PAGE = ROOT / "benchmarks" / "peers", ROOT / "docs" / "speed.md"
RESULTS = ROOT / "benchmarks" / "results"


@pytest.fixture
def load(monkeypatch):
    """Modules of the benchmarks, which are scripts beside one another and no package."""
    monkeypatch.syspath_prepend(str(PEERS))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if str(ROOT / "benchmarks") in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]


def space_of(work, env, log_reward):
    graph = Graph(env)
    level = torch.empty(len(graph), dtype=torch.long)
    for depth, which in enumerate(graph.levels):
        level[which] = depth
    stop = -1 if env.stop is None else env.stop
    return graph, work.Space(graph.states.numpy(), graph.child.numpy(), level.numpy(), log_reward.numpy(), stop)


# the exact law that judges all three -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("env", [Grid(2, 8), Grid(3, 4), Strings("ACGT", 4), Strings("AB", 3, min_length=1)], ids=repr)
def test_the_law_in_numpy_is_the_exact_law(load, env):
    work = load("work")
    logits = torch.randn(Graph(env).mask.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 3
    graph, space = space_of(work, env, torch.where(Graph(env).terminal, 0.0, -torch.inf))
    exact = law_from_log_pi(graph, Exact(), torch.where(graph.mask, logits, -1e9))[0].numpy()
    assert np.abs(space.law(logits.numpy()) - exact).max() < 1e-12


def test_the_target_and_the_distance_to_it(load):
    work = load("work")
    task = grid_task(2, 8)
    target = target_law(Graph(task.env), task)
    graph, space = space_of(work, task.env, target.log_reward)
    assert np.abs(space.target - target.target.numpy()).max() < 1e-12
    logits = np.zeros(graph.mask.shape)
    assert space.tv(logits) == pytest.approx(0.5 * np.abs(space.law(logits) - target.target.numpy()).sum(), abs=1e-12)


def test_our_run_is_judged_by_its_averaged_policy_and_pays_the_shared_reward(load, tmp_path):
    work, ours = load("work"), load("run_stochflow")
    task = grid_task(2, 8)
    target = target_law(Graph(task.env), task)
    graph, space = space_of(work, task.env, target.log_reward)
    run = ours.Run({}, {"task": "grid2", "batch": 4, "device": "cpu", "threads": 1})
    assert len(run.train(3)) == 1
    assert run.steps == 3
    with run.trainer.averaged():
        exact = exact_law(graph, task.channel, run.made.policy)[0].numpy()
    assert np.abs(space.law(run.logits(space.states)) - exact).max() < 1e-6
    assert np.abs(run.log_rewards(space.states) - target.log_reward.numpy()).max() < 1e-6
    assert run.made.config.train.explore == 0.1  # its default, and its own cost


def test_sequences_are_listed_in_the_order_in_which_the_peers_look_them_up(load):
    """They find a string's reward at the number its letters make; that is the order of the finished states."""
    load("work")
    graph = Graph(tfbind8_task(stick=0.0).env)
    ends = graph.states[graph.terminal]
    assert torch.equal((ends * 4 ** torch.arange(7, -1, -1)).sum(1), torch.arange(4**8))


# the clock -------------------------------------------------------------------------------------------------------------------


class Toy:
    """A library whose iterations take exactly 2 ms of a clock that the test moves."""

    parameters = 7

    def __init__(self, clock, space=None, arrives=(100,)):
        self.clock, self.space, self.arrives, self.seed, self.steps = clock, space, arrives, 0, 0

    def train(self, steps):
        self.steps += steps
        self.clock[0] += 0.002 * steps
        return [100.0 / self.steps]

    def restart(self, seed):
        self.seed, self.steps = seed, 0

    def logits(self, states):
        self.clock[0] += 5.0  # looking is slow, and not on the clock
        good = self.steps >= self.arrives[self.seed]
        return (
            np.array([[0.0, 0.0], [0.0, 0.0], [0.0, 0.0]]) if good else np.array([[9.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
        )

    def length(self):
        return 4.0

    def memory(self):
        return 123


@pytest.fixture
def clock(load, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(load("work").time, "perf_counter", lambda: now[0])
    return now


def test_an_iteration_is_timed_over_five_windows(load, clock):
    work = load("work")
    run = Toy(clock)
    found = work.speed(run, {"budget": 1.0, "batch": 16, "warm": 50}, 0.0)
    assert found["ms"] == found["ms_low"] == found["ms_high"] == 2.0
    assert found["trajectories_a_second"] == 8000
    assert found["first_s"] == 0.002
    assert found["iterations"] == run.steps >= 550  # a budget of one second after fifty to warm up
    assert found["loss_first"] == pytest.approx(100 / 3)
    assert found["loss_last"] < 0.25
    assert found["memory"] == 123


def two_ends(work):
    """Two objects, equally wanted."""
    child = np.array([[1, 2], [-1, -1], [-1, -1]])
    return work.Space(np.arange(3)[:, None], child, np.array([0, 1, 1]), np.array([-np.inf, 0.0, 0.0]), -1)


def test_time_to_a_law_leaves_out_what_looking_takes(load, clock):
    work = load("work")
    found = work.until_each(Toy(clock), two_ends(work), {"tv": 0.05, "most": 10.0, "tv_seeds": 1})
    assert found["reached"] == 1
    assert 100 <= found["iterations"] <= 115
    assert found["seconds"] == pytest.approx(0.002 * (found["iterations"] - 5), abs=1e-3)  # five to warm up


def test_a_seed_that_never_arrives_counts_as_the_longest(load, clock):
    work = load("work")
    spec = {"tv": 0.05, "most": 0.5, "tv_seeds": 3}
    most = work.until_each(Toy(clock, arrives=(100, 10**9, 60)), two_ends(work), spec)
    assert most["reached"] == 2
    assert 100 <= most["iterations"] <= 115  # the median of 60, 100 and never
    few = work.until_each(Toy(clock, arrives=(10**9, 10**9, 60)), two_ends(work), spec)
    assert few["seconds"] is None
    assert few["iterations"] is None


SERVER = """
import sys, time; sys.path.insert(0, {path!r})
import work
def make(tables, spec):
    if spec["batch"] == 1: raise ValueError("a bad day")
    if spec["batch"] == 2: time.sleep(30)
    class Run:
        parameters, steps = 1, 0
        def train(self, n): self.steps += n; return [1.0] * n
        def memory(self): return 2**40
        def length(self): return 1.0
        def log_rewards(self, x): print("noise on standard output"); return x[:, 0] + 0.5
    return Run()
work.serve(make, lambda: {{"toy": "1"}})
"""


def test_a_library_answers_and_one_that_fails_says_why(tmp_path):
    np.savez(tmp_path / "toy.npz", objects=np.arange(4)[:, None], log_rewards=np.arange(4.0))
    common = {"task": "toy", "device": "cpu", "folder": str(tmp_path), "budget": 0.0}
    asked = [{**common, "batch": b, "limit": 1} for b in (1, 2, 3)]
    script = SERVER.format(path=str(PEERS))
    told = subprocess.run(
        [sys.executable, "-c", script],
        input="".join(json.dumps(q) + "\n" for q in asked),
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    ready, bad, late, good = map(json.loads, told)
    assert ready == {"ready": True, "versions": {"toy": "1"}}
    assert bad == {"error": "ValueError: a bad day"}
    assert late == {"error": "not finished within 1 s"}
    assert good["reward_error"] == 0.5  # a library that pays otherwise is found out
    assert good["parameters"] == 1


def test_a_stand_in_is_imported_but_not_called(load):
    script = f"""
import sys; sys.path.insert(0, {str(PEERS)!r})
import standin
assert standin.install(["json", "no_such_package"]) == ["no_such_package"]
import json; assert json.loads("1") == 1
from no_such_package.inner import Thing
class Mine(Thing): pass
def f(x: Thing | None = None, y: Thing[int] = None): pass
try: Thing()
except RuntimeError as problem: print(problem)
"""
    told = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "a stand-in for a package that is not installed was called"


# the page --------------------------------------------------------------------------------------------------------------------


def row(ms, **more):
    base = {
        "ms": ms,
        "processor_ms": ms,
        "trajectories_a_second": 8000,
        "memory": 2**21,
        "parameters": 1000,
        "iterations": 50,
        "length": 7.5,
    }
    return base | {"loss_first": 4.0, "loss_last": 0.5, "first_s": 1.5} | more


FOUND = {
    "date": "2026-01-02",
    "commit": "abc",
    "device": "cuda",
    "hardware": "a machine",
    "versions": {"stochflow": {"stochflow": "1", "torch": "2"}, "gfnx": {"gfnx": "3"}},
    "import_s": {"stochflow": 2.0, "gfnx": 3.0},
    "settings": {
        "objective": "TB",
        "hidden": 256,
        "layers": 2,
        "lr": 0.001,
        "precision": "float32",
        "windows": 5,
        "stochflow": {},
    },
    "speed": [
        {"task": "grid2", "batch": 16, "stochflow": row(0.5), "torchgfn": {"error": "it rained"}, "gfnx": row(2.0)}
    ],
    "noise": [],
    "seeds": [{"task": "grid2", "batch": 16, "seeds": 8, "stochflow": row(0.6)}],
    "tv": [
        {
            "task": "grid2",
            "batch": 16,
            "tv": 0.05,
            "most": 9,
            "stochflow": {"reached": 3, "seconds": 1.25, "iterations": 400, "runs": [{}] * 3},
            "gfnx": {"reached": 1, "seconds": None, "iterations": None, "runs": [{}] * 3},
        }
    ],
}


def test_tables_say_what_was_found_and_what_was_not(load):
    tables = load("speed_tables")
    page = tables.peers(FOUND)
    assert "| grid 2-D, side 8 | 16 | 0.500 | – | 2.00 | – | 4.0 | 8,000 |" in page
    assert "Not measured (it rained): torchgfn on grid 2-D, side 8, batch 16." in page
    assert (
        "a machine; stochflow 1, torch 2; gfnx 3; TB, 256 x 2 MLP, Adam 0.001, float32; median of 5 windows; 2026-01-02, commit abc"
        in page
    )
    assert "| grid 2-D, side 8 | 16 | 8 | 0.500 | 0.600 | 1.20 |" in tables.seeds(FOUND)
    alone = {"task": "grid2", "batch": 16, "seeds": 1, "stochflow": row(0.4)}  # over the same stretch of learning
    assert tables.seeds(FOUND | {"seeds": [alone, *FOUND["seeds"]]}).splitlines()[2:] == [
        "| grid 2-D, side 8 | 16 | 8 | 0.400 | 0.600 | 1.50 |"
    ]
    assert "| grid 2-D, side 8 | 16 | 0.05 | 1.25 (400; 3 of 3) | – | not in 9 (1 of 3) |" in tables.arrival(FOUND)
    assert "| grid 2-D, side 8 | 16 | 1,000, 50, 7.5, 4 → 0.5 | – |" in tables.learns(FOUND)
    assert "| grid 2-D, side 8 | 16 | 2.00 | – | 2.00 |" in tables.memory(FOUND)
    assert "| stochflow | 2.0 | 1.5 | 3.5 |" in tables.start(FOUND)


def test_growth_is_told_with_what_stays(load):
    tables = load("speed_tables")
    base = {"versions": {"torch": "2"}, "hardware": "a machine"}
    grown = {"task": "bits", "batch": 64, "horizon": 120, "moves": 2, "ms": 12.34, "peak_mib": 100.0}
    assert "| horizon | alphabet 2, batch 64 | 120 | 12.3 | 100 |" in tables.growth(base | {"horizon": [grown]})
    many = {
        "task": "grid",
        "ndim": 7,
        "side": 10,
        "states": 10**7,
        "graph_s": 20.0,
        "law_s": 30.0,
        "peak_mib": 2000.0,
        "bytes_a_state": 200,
    }
    assert "| grid 7-D, side 10 | 10,000,000 | 20.0 | 30.0 | 2,000 | 200 |" in tables.states(base | {"states": [many]})


def test_a_profile_names_the_kernels_of_the_house(load):
    tables = load("speed_tables")
    row = {
        "task": "a task",
        "compiled": False,
        "longest_us": {"walk": 21.5, "void at::native::index<1>": 20.0, "_back": 6.8},
    }
    rows = [row | {"kernel": False, "kernels": 203, "ms": 0.419}, row | {"kernel": True, "kernels": 15, "ms": 0.06}]
    page = tables.profiled_gpu({"rows": rows, "versions": {"torch": "2"}, "hardware": "a chip"})
    assert "| a task | 203 | 15 | 0.419 | 0.0600 | `walk` 22, `_back` 7 |" in page


def test_the_page_is_rendered_from_the_committed_results(load):
    if not PAGE.exists():
        pytest.skip("docs/speed.md is not written yet")
    tables, page = load("speed_tables"), PAGE.read_text()
    assert re.findall(r"<!-- ([a-z0-9-]+) -->\n", page.replace("<!-- end -->\n", ""))
    assert tables.render(page) == page


def test_committed_comparisons_are_fair():
    """Every library paid the same rewards, and those that were timed had networks of one size and learned."""
    for file in RESULTS.glob("speed_*.json"):
        found = json.loads(file.read_text())
        for kind in ("speed", "tv"):
            for row in found.get(kind, []):
                answers = {n: row[n] for n in ("stochflow", "torchgfn", "gfnx") if n in row and "error" not in row[n]}
                assert all(a["reward_error"] < 1e-4 for a in answers.values()), (file.name, row["task"])
                if not answers:
                    continue
                sizes = [a["parameters"] for a in answers.values()]
                assert max(sizes) < 1.02 * min(sizes), (file.name, row["task"])


def test_every_piece_can_still_be_switched_off(load):
    """What the table of pieces says was measured by replacing text that the sources still hold."""
    pieces = load("pieces")
    for piece in pieces.PIECES:
        assert piece.rows.split()
        assert pieces.lines(piece) >= 0
        for file, text, other in piece.edits:
            held = (ROOT / "src" / "stochflow" / file).read_text().replace(*pieces.ALWAYS[1:])
            assert text in held, piece.name
            assert text != other
    names = {piece.name for piece in pieces.PIECES}
    for file in RESULTS.glob("pieces_*.json"):
        assert {row["name"] for row in json.loads(file.read_text())["pieces"]} <= names
