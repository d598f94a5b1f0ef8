"""The captured iteration is the eager one. Needs a CUDA device."""

from __future__ import annotations

import pytest
import torch

from stochflow.runs.config import configure
from stochflow.runs.experiment import Experiment
from stochflow.types import Trajectories

pytestmark = pytest.mark.gpu


def make(capture: bool, **settings) -> Experiment:
    made = Experiment(configure("tfbind8", device="cuda", batch=64, seeds=2, hidden=16, **settings))
    made.trainer.iteration = made.trainer.iteration._replace(capture=capture)
    return made


def fix_trajectories(made: Experiment) -> None:
    """Every iteration learns from the same batch, so that eager and captured can be compared number by number."""
    torch.manual_seed(3)
    fresh = made.trainer.score(made.trainer.act())
    batch = Trajectories(*[x.clone() for x in fresh])
    made.trainer.source.act = lambda step: batch  # type: ignore[method-assign]


def gradients(
    made: Experiment, begun: dict[str, torch.Tensor], note: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """The second iteration's gradient of policy and dynamics: the first one that is replayed.

    All go on from the weights of whoever was first (`begun`): log Z starts where its gradient is zero, and of what rounding leaves of
    that Adam makes a full step, in either direction.
    """
    made.trainer.iterate(note=False)
    if not begun:
        begun.update(made.trainer.state_dict())
    made.trainer.load_state_dict(begun)
    made.trainer.iterate(note)
    policy, dynamics = made.trainer.policy_flat, made.trainer.dynamics_flat
    return policy.values.grad.clone(), dynamics.values.grad.clone()


def assert_near(found: torch.Tensor, want: torch.Tensor) -> None:
    """To 1e-6 of its length."""
    assert float((found - want).norm()) <= 1e-6 * float(want.norm()) + 1e-9


@pytest.mark.parametrize("objective", ["db", "tb", "flow-kl"])
def test_captured_and_eager_agree_on_fixed_trajectories(objective):
    found, begun = [], {}
    for capture in (False, True):
        made = make(capture, objective=objective)
        fix_trajectories(made)
        found.append(gradients(made, begun))
    for eager, captured in zip(*found, strict=True):
        assert_near(captured, eager)


def test_random_numbers_differ_from_replay_to_replay():
    made = make(True)
    made.trainer.train(3)
    scores = []
    for _ in range(4):
        made.trainer.train(made.trainer.steps_done + 1)
        scores.append(float(made.trainer.stats["mean_score"][0]))
    assert len(set(scores)) == 4


@pytest.mark.parametrize("hidden", [16, 64])
def test_a_saved_run_goes_on_with_the_random_numbers_that_it_would_have_had(hidden):
    """Those of torch's generator, and those of a kernel, which a network of that width has."""
    first, second = (
        Experiment(configure("tfbind8", device="cuda", batch=64, objective="tb", stick=0.0, hidden=hidden)).trainer
        for _ in range(2)
    )
    first.train(5)
    kept = first.state_dict()
    first.train(6)
    second.load_state_dict(kept)
    second.train(6)
    assert (second.source.traces is not None) == (hidden == 64)
    assert torch.equal(first.stats["mean_score"], second.stats["mean_score"])


def test_a_replay_ends_the_use_of_a_trace():
    trainer = Experiment(
        configure("tfbind8", device="cuda", batch=64, objective="tb", stick=0.0, net="mlp", hidden=64)
    ).trainer
    trainer.train(5)
    walk = trainer.source.walk(trainer.step)
    walk = walk._replace(trajectories=trainer.score(walk.trajectories))
    trainer.train(8)
    with pytest.raises(RuntimeError, match="walk again"):
        trainer.learn(walk)


def test_a_second_trainer_in_one_process_replays():
    for _ in range(3):
        made = make(True)
        made.trainer.train(30)
        assert float(made.trainer.stats["finite"].min()) == 1.0


def test_iterations_with_and_without_figures_are_the_same_iterations():
    """Two recordings share their memory; which of them is replayed changes nothing but what is noted."""
    found, begun = [], {}
    for note in (False, True):
        made = make(True)
        fix_trajectories(made)
        found.append(gradients(made, begun, note)[0])
    assert_near(found[1], found[0])


def test_compiled_and_eager_agree_on_fixed_trajectories():
    found, begun = [], {}
    for compiled in (False, True):
        made = make(True, compile=compiled)
        made.trainer.source.steps = None  # compiled steps draw other random numbers
        fix_trajectories(made)
        found.append(gradients(made, begun))
    for plain, fast in zip(*found, strict=True):
        assert float((fast - plain).norm()) <= 1e-5 * float(plain.norm()) + 1e-9  # fused sums round differently
