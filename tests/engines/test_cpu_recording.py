"""Many iterations on the CPU in one call are those iterations, to the last digit, whoever helps and however many go together."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from stochflow.engines.numba import compiled as cpu_compiled
from stochflow.engines.numba import many as cpu_recording
from stochflow.engines.numba.compiled import Beside
from stochflow.learn.buffer import Buffer
from stochflow.learn.objectives import DetailedBalance, TrajectoryBalance
from stochflow.nets.lookup import Lookup
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.noise.dynamics import Known, Neural, Tabular
from stochflow.scores.oracles import Table
from stochflow.scores.rewards import Linear
from stochflow.training.sources import OnPolicy
from stochflow.training.trainer import Trainer
from stochflow.types import Task
from stochflow.worlds.channels import Exact, Neighbour, Slip
from stochflow.worlds.grid import Corners, Grid
from stochflow.worlds.strings import Strings

numba = pytest.importorskip("numba")

SMALL, TB = MLP(32, 2), TrajectoryBalance()
LETTERS = "".join(chr(0x100 + i) for i in range(30))  # a head of so many outputs is not kept turned
WORLDS = {
    "grid": lambda: Grid(2, 8),
    "cube": lambda: Grid(3, 5),
    "strings": lambda: Strings("ACGT", 5),
    "variable": lambda: Strings("ABC", 5, 2),
    "many letters": lambda: Strings(LETTERS, 3),
}
NOISES = {
    "exact": lambda env, seeds: (Exact(), Known(env, Exact())),
    "neural": lambda env, seeds: (Slip(0.3), Neural(env, range(seeds), hidden=16)),
    "known": lambda env, seeds: (Slip(0.3), Known(env, Slip(0.3))),
    "counted": lambda env, seeds: (Slip(0.3), Tabular(env, range(seeds))),
    "neighbour": lambda env, seeds: (Neighbour(0.3), Neural(env, range(seeds), hidden=16)),
}


@pytest.fixture(autouse=True)
def at_once(monkeypatch):
    """From the second iteration on, compiled here and now; the threads as they were, afterwards."""

    def look(self):
        self.loop.compile(self.kinds)
        return True

    monkeypatch.setattr(cpu_recording, "BEFORE", 1)
    monkeypatch.setattr(Beside, "look", look)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def trainer_of(world="grid", net=SMALL, seeds=1, batch=16, objective=TB, noise="exact", explore=0.1, **more) -> Trainer:
    env = WORLDS[world]()
    channel, dynamics = NOISES[noise](env, seeds)
    oracle = Corners(env.side, 0.01) if isinstance(env, Grid) else Table(env, torch.linspace(0.1, 1, env.count()))
    task = Task(env, channel, oracle, Linear(0.3))
    policy = Policy(env, net, seeds=range(seeds))
    torch.manual_seed(1)
    return Trainer(task, policy, dynamics, objective, OnPolicy(task, policy, batch, explore=explore), **more)


def assert_same(one: dict, other: dict) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert torch.equal(value, other[name]), name


def one_by_one(trainer: Trainer, steps: int, every: int = 20) -> dict:
    trainer._at_once = False
    trainer.train(steps, every)
    assert trainer._recording is None
    return trainer.state_dict()


@pytest.mark.parametrize("noise", ["exact", "neural"])
@pytest.mark.parametrize("objective", [TrajectoryBalance(), DetailedBalance()], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize(("net", "seeds", "batch"), [(MLP(32, 2), 1, 16), (Lookup(16, 2, 8), 3, 5)], ids=str)
@pytest.mark.parametrize("world", WORLDS)
def test_they_are_the_iterations_one_by_one(world, net, seeds, batch, objective, noise):
    """Weights, averages, moments, steps, figures, questions asked and the stream of random numbers; with the noted ones in between."""
    given = {"world": world, "net": net, "seeds": seeds, "batch": batch, "objective": objective, "noise": noise}
    if world == "many letters" and noise == "neural":
        pytest.skip("a model of the noise of so many letters learns by autograd")
    expected = one_by_one(trainer_of(**given), 45)
    trainer = trainer_of(**given)
    trainer.train(45, 20)
    assert trainer._recording is not None
    assert_same(trainer.state_dict(), expected)


@pytest.fixture
def all_help(monkeypatch):
    """With whatever there is to do, however little it is worth."""
    monkeypatch.setattr(cpu_recording, "WORTH", 1)
    monkeypatch.setattr(
        cpu_recording.Recording,
        "_crew",
        lambda self, many: torch.get_num_threads() if self.parts.room.shape[0] == 1 else 1,
    )


@pytest.mark.parametrize("noise", ["exact", "neural"])
@pytest.mark.parametrize(("threads", "seeds"), [(2, 1), (3, 1), (2, 3)])
@pytest.mark.parametrize("world", ["grid", "strings", "variable"])
def test_helpers_change_no_digit(world, threads, seeds, noise, all_help):
    expected = one_by_one(trainer_of(world, batch=33, seeds=seeds, noise=noise), 60)
    torch.set_num_threads(threads)
    trainer = trainer_of(world, batch=33, seeds=seeds, noise=noise)
    trainer.train(60, 20)
    assert_same(trainer.state_dict(), expected)


@pytest.mark.parametrize("seconds", [0.0002, 0.02])
def test_helpers_are_called_where_they_help(seconds, monkeypatch):
    """Both ways are tried, then the one that took less time, and now and then the other: things change. Whatever an iteration takes."""
    clock, passed, faster = [0.0], [], 2
    torch.set_num_threads(2)
    trainer = trainer_of("cube", net=MLP(256, 2))
    trainer.train(40, 20)
    recording = trainer._recording
    recording.took.clear()
    monkeypatch.setattr(cpu_recording, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    helped, in_parts = cpu_recording.helped, cpu_recording.in_parts

    def run(crew, work, given):
        before = trainer.policy_flat.adam_steps.item()
        passed.append(crew)
        work(*given)
        assert trainer.policy_flat.adam_steps.item() == before  # which is counted afterwards
        clock[0] += recording.now * seconds * (1 if crew == faster else 2)

    monkeypatch.setattr(cpu_recording, "helped", lambda *given: run(2, helped, given))
    monkeypatch.setattr(cpu_recording, "in_parts", lambda *given: run(1, in_parts, given))

    def go(calls):
        for _ in range(calls):
            recording.run(trainer.step.item(), recording.now, trainer._passed)

    go(40)
    assert passed[5:].count(2) > 29
    faster = 1
    go(80)
    assert passed[-30:].count(1) > 25


def test_nobody_is_woken_for_a_short_call(monkeypatch):
    torch.set_num_threads(2)
    monkeypatch.setattr(cpu_recording, "helped", None)
    monkeypatch.setattr(cpu_recording, "LONG", 1e9)
    trainer = trainer_of("cube", net=MLP(256, 2))
    trainer.train(40, 20)
    assert set(trainer._recording.took) == {1}


@pytest.mark.parametrize("most", [1, 2, 7, 64])
def test_how_many_go_together_does_not_show(most, monkeypatch):
    expected = one_by_one(trainer_of("variable", noise="neural"), 50, every=50)
    monkeypatch.setattr(cpu_recording, "MOST", most)
    trainer = trainer_of("variable", noise="neural")
    trainer.train(50, every=50)
    assert trainer._recording.most == most
    assert_same(trainer.state_dict(), expected)


def test_no_exploration_and_three_layers():
    given = {"net": MLP(16, 3), "explore": 0.0, "world": "cube"}
    expected, trainer = one_by_one(trainer_of(**given), 30), trainer_of(**given)
    trainer.train(30, 20)
    assert trainer._recording is not None
    assert_same(trainer.state_dict(), expected)


def test_a_run_goes_on_from_where_it_was_left():
    expected, first, second = (
        one_by_one(trainer_of(noise="neural"), 70),
        trainer_of(noise="neural"),
        trainer_of(noise="neural"),
    )
    first.train(33, 20)
    second.load_state_dict(first.state_dict())
    second.train(70, 20)
    found = second.state_dict()
    assert_same({k: v for k, v in found.items() if k != "stats"}, {k: v for k, v in expected.items() if k != "stats"})


def test_a_source_that_changes_its_batch_has_another_recording():
    found = []
    for go in (one_by_one, lambda trainer, steps: trainer.train(steps, 20)):
        trainer = trainer_of()
        go(trainer, 30)
        trainer.source.batch = 5
        go(trainer, 60)
        found.append(trainer.state_dict())
    assert_same(*found)
    assert trainer._recording.parts.room.batch == 5


def test_trajectories_that_somebody_keeps_stay_as_they_are_and_have_no_trace_any_more():
    trainer = trainer_of()
    trainer.train(10, 20)
    kept = trainer.act()
    before = [x.clone() for x in kept]
    assert trainer.source.trace_of(kept) is not None
    trainer.train(40, 20)
    assert trainer.source.trace_of(kept) is None
    assert all(torch.equal(one, other) for one, other in zip(kept, before, strict=True))


def test_a_run_that_is_asked_to_stop_stops():
    trainer = trainer_of()

    def stop(trainer: Trainer) -> None:
        trainer.stop_requested = True

    trainer.train(1000, 25, stop)
    assert trainer.steps_done == 25
    assert trainer.oracle_calls == 25 * 16


@pytest.mark.parametrize(
    "given",
    [{"noise": "known"}, {"noise": "counted"}, {"noise": "neighbour"}, {"noise": "neural", "dynamics_buffer": True}],
    ids=str,
)
def test_what_it_does_not_know_goes_one_by_one(given):
    if "dynamics_buffer" in given:
        given |= {"dynamics_buffer": Buffer(WORLDS["grid"](), 64, 1)}
    trainer = trainer_of(**given)
    trainer.train(30, 20)
    assert trainer._recording is None


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("which", ["judge", "teach", "blame"])
def test_a_loop_that_fails_is_heard_and_nobody_learns_from_it_or_waits_for_ever(which, threads, all_help):
    from stochflow.engines.numba import rounds as cpu_rounds

    @numba.njit(nogil=True, error_model="numpy")
    def judge(s, e, detailed, by_number, scale, world, begin, place, outs, way, log_k, paid, said, log_z, to_log_z):
        raise MemoryError

    @numba.njit(nogil=True, error_model="numpy")
    def teach(s, e, part, parts, few, count, inputs, slope, said, to_stages, to_biases):
        raise MemoryError

    @numba.njit(nogil=True, error_model="numpy")
    def blame(s, e, string, side, moves, states, actions, moved, teaches, model, thought, into, losses):
        raise MemoryError

    torch.set_num_threads(threads)
    trainer = trainer_of(noise="neural")
    trainer.train(40)
    made = trainer._recording
    if which == "judge":
        made.where[cpu_rounds.JUDGE] = cpu_rounds.address(judge, (0, 1, *made.balance.judge))
    elif which == "teach":
        made.where[cpu_rounds.TEACH] = cpu_rounds.address(teach, (0, 1, 0, 1, *made.balance.teach))
    else:
        made.where[cpu_rounds.BLAME] = cpu_rounds.address(blame, (0, 1, *made.noise.blame))
    before = trainer.state_dict()
    with pytest.raises(MemoryError):
        trainer.train(100)
    after = trainer.state_dict()
    changed = [
        name for name in before if name.startswith("policy.weight") and not torch.equal(before[name], after[name])
    ]
    assert bool(changed) == (which == "blame")  # the noise is learned last
    for name in before:
        if name != "random.cpu" and not (which == "blame" and name.startswith("policy.")):
            assert torch.equal(after[name], before[name]), name
    furthest = max(
        float((after[name] - before[name]).abs().max()) for name in before if name.startswith("policy.weight")
    )
    assert furthest < 0.005  # one step of Adam's, and no more


class Interrupted(Exception):
    """What somebody wants who does not wait."""


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("when", ["before", "after"])
def test_whoever_breaks_in_finds_everything_counted_and_nobody_at_work(when, threads, monkeypatch, all_help):
    """As a second Ctrl-C does, which is heard as soon as a compiled call is over, or before it begins."""
    torch.set_num_threads(threads)
    trainer = trainer_of(noise="neural")
    trainer.train(40)
    rounds = trainer._recording.rounds.rounds

    def broken(helps, *given):
        if when == "after" or helps:
            rounds(helps, *given)
        if not helps:
            raise Interrupted

    monkeypatch.setattr(trainer._recording.rounds, "rounds", broken)
    with pytest.raises(Interrupted):
        trainer.train(200, 200)
    many = trainer.steps_done - 40
    assert (many > 0) == (when == "after")
    found, expected = trainer.state_dict(), trainer_of(noise="neural")
    one_by_one(expected, 40)
    for _ in range(many):
        expected.iterate(False)
    wanted = expected.state_dict()
    if when == "before":  # what was drawn is gone
        del found["random.cpu"], wanted["random.cpu"]
    assert_same(found, wanted)


def test_where_no_thread_can_be_had_it_goes_without(monkeypatch, all_help):
    """As at the end of the interpreter, while a thread of somebody's still trains."""

    class Closed:
        def submit(self, *given):
            raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    expected = one_by_one(trainer_of(), 40)
    monkeypatch.setattr(cpu_compiled, "_threads", lambda process: Closed())
    torch.set_num_threads(2)
    trainer = trainer_of()
    trainer.train(40, 20)
    assert_same(trainer.state_dict(), expected)


@pytest.mark.parametrize("when", range(10, 31, 5))
@pytest.mark.parametrize("at_once", [True, False])
def test_whoever_stops_misses_no_line_of_the_log(when, at_once, monkeypatch):
    trainer, logged = trainer_of(), []
    trainer._at_once = at_once
    passed, iterate = trainer._passed, trainer.iterate

    def stop():
        trainer.stop_requested = trainer.steps_done >= when

    monkeypatch.setattr(trainer, "_passed", lambda many: (passed(many), stop()))
    monkeypatch.setattr(trainer, "iterate", lambda note=True: (iterate(note), stop()))
    trainer.train(1000, 10, lambda t: logged.append(t.steps_done))
    assert when <= trainer.steps_done < when + 12
    assert logged == list(range(10, trainer.steps_done + 1, 10))


def other_channel(trainer):
    trainer.source.task = trainer.task._replace(channel=Slip(0.4))


def with_buffer(trainer):
    trainer.dynamics_buffer = Buffer(trainer.task.env, 64, 1)


CHANGES = {
    "objective": lambda t: setattr(t, "objective", DetailedBalance()),
    "channel": other_channel,
    "buffer": with_buffer,
    "clip": lambda t: setattr(t.policy_flat, "clip", 1e-3),
    "explore": lambda t: setattr(t.source, "explore", 0.7),
    "no exploration": lambda t: setattr(t.source, "explore", 0.0),
    "step": lambda t: t.step.fill_(5000.0),
    "temper": lambda t: setattr(t.source, "temper", lambda: torch.tensor(2.0)),
    "kernel": lambda t: setattr(t.source, "kernel", False),
    "traces": lambda t: setattr(t.source, "traces", False),
    "source": lambda t: setattr(t, "source", OnPolicy(t.task, t.policy, 16, explore=0.1)),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_somebody_changes_is_changed(change):
    found = []
    for at_once in (True, False):
        trainer = trainer_of("variable", noise="neural")
        trainer._at_once = at_once
        trainer.train(40, 20)
        CHANGES[change](trainer)
        trainer.train(80, 20)
        found.append(trainer.state_dict())
    assert_same(*found)


def test_nobody_waits_long_for_it_to_stop(monkeypatch):
    monkeypatch.setattr(cpu_recording, "SECONDS", 0.0)
    trainer, many = trainer_of(), []
    passed = trainer._passed
    monkeypatch.setattr(trainer, "_passed", lambda n: (passed(n), many.append(n)))
    trainer.train(40)
    assert set(many) == {1}


def test_it_is_compiled_beside_and_read_from_the_disk(tmp_path):
    """Until it is there, iterations go one by one; whoever comes later finds it."""
    (tmp_path / "some_loop.py").write_text("import numba\n\n@numba.njit(cache=True)\ndef loop(x):\n    return x + 1\n")
    code = f"""
import sys, time
sys.path.insert(0, {str(tmp_path)!r})
from some_loop import loop
from stochflow.engines.numba.compiled import Beside
made = Beside(loop, (1.5,))
found, until = [made.look()], time.monotonic() + 60
while not made.look() and time.monotonic() < until:
    time.sleep(0.02)
assert loop(1.5) == 2.5
print(found[0], made.ready, sum(loop.stats.cache_misses.values()), made.process is None)
"""
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    said = [
        subprocess.run([sys.executable, "-c", code], check=True, env=env, capture_output=True, text=True).stdout
        for _ in range(2)
    ]
    assert said == ["False True 0 False\n", "True True 0 True\n"]


class Never:
    """What a process is that goes on for ever, or has failed."""

    def __init__(self, code):
        self.poll = lambda: code


@pytest.mark.parametrize("code", [None, 1])
def test_iterations_go_one_by_one_where_nothing_comes_of_it(code, monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.setattr(cpu_recording, "BEFORE", 1)
    monkeypatch.setattr(Beside, "_load", lambda self: False)
    monkeypatch.setattr(Beside, "_start", lambda self: Never(code))
    expected, trainer = (
        one_by_one(trainer_of(net=MLP(8, 4)), 50),
        trainer_of(net=MLP(8, 4)),
    )  # nobody has compiled it for four layers
    begun = time.monotonic()
    trainer.train(50, 20)
    assert time.monotonic() - begun < 60
    assert not trainer._recording.compiled.ready
    assert_same(trainer.state_dict(), expected)


def test_random_numbers_of_many_walks_are_those_of_one_after_the_other():
    from stochflow.engines.numba import walk as cpu_walk

    for world, noise in (("grid", "exact"), ("grid", "neural"), ("strings", "neural"), ("strings", "exact")):
        trainer = trainer_of(world, noise=noise)
        trainer.act()
        room, found, after = trainer.source.trace.room, [], []
        for together in (True, False):
            torch.manual_seed(5)
            drawn = []
            for many in (3,) if together else (1, 1, 1):
                chance, then = cpu_walk.draw(trainer.task, room, [0.1] * many, many)
                if then is not None:
                    torch.default_generator.manual_seed(then)
                drawn.append(chance.drawn)
            found.append(np.concatenate(drawn))
            after.append(torch.rand(3))
        assert np.array_equal(*found)
        assert torch.equal(*after)
