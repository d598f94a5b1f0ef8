"""Thoughts: histories that are read causally, models that agree with themselves, and a state that holds its thoughts consistently."""

from __future__ import annotations

import pytest
import torch

from stochflow.engines.eager import Eager
from stochflow.engines.flat import FlatParameters
from stochflow.errors import UserError
from stochflow.law.exact import Graph, exact_law, flows, invert, target_law
from stochflow.law.exact_memory import memory_law
from stochflow.law.metrics import dynamics_report, tv
from stochflow.learn.buffer import Buffer
from stochflow.learn.evaluate import evaluate
from stochflow.learn.objectives import TrajectoryBalance
from stochflow.learn.rollout import rollout
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.noise.dynamics import Known, Neural, Tabular, remembered
from stochflow.noise.thought_state import Augmented, ThoughtState, augment
from stochflow.noise.thoughts import Attention, Flat, ThoughtDynamics, empty_history, extend_history
from stochflow.ops import NEG, masked_log_softmax
from stochflow.scores.oracles import Table
from stochflow.scores.rewards import Linear
from stochflow.training.sources import OnPolicy
from stochflow.training.trainer import NoiseTraining, Trainer
from stochflow.types import PolicyOut, Task
from stochflow.worlds.channels import Slip
from stochflow.worlds.check import check_env
from stochflow.worlds.check_task import check_channel
from stochflow.worlds.env import Channel
from stochflow.worlds.grid import Grid
from stochflow.worlds.memory import Fatigue, Regime
from stochflow.worlds.strings import Strings

READERS = {"attention": Attention(16, 2, 2), "flat": Flat(16, 1)}


def task_of(length: int = 3, channel: Channel | None = None) -> Task:
    env = Strings("ABC", length)
    gen = torch.Generator().manual_seed(1)
    return Task(
        env, channel or Fatigue(0.2, 0.6, 1.0), Table(env, 0.5 * torch.randn(3**length, generator=gen)), Linear()
    )


def sharp(module, times: float = 20.0):
    with torch.no_grad():
        module.head.weight.mul_(times)
    return module


# histories ----------------------------------------------------------------------------------------------------------------


def test_a_history_is_actions_and_moves_in_turn():
    state = torch.zeros(2, 5, dtype=torch.long)
    history = empty_history(3, 2, state)
    assert history.tolist() == [[7] * 4] * 2
    history = extend_history(3, history, torch.tensor([2, -1]), torch.tensor([0, 1]))
    assert history.tolist() == [[5, 0, 7, 7], [6, 1, 7, 7]]  # 3 + action, or 6 where it is unknown; then the move
    history = extend_history(3, history, torch.tensor([0, 1]), torch.tensor([2, 2]))
    assert history.tolist() == [[5, 0, 3, 2], [6, 1, 4, 2]]
    assert torch.equal(extend_history(3, history, torch.tensor([0, 1]), torch.tensor([2, 2])), history)


@pytest.mark.parametrize("min_length", [None, 1])
@pytest.mark.parametrize("reader", READERS)
@torch.no_grad()
def test_one_pass_over_a_trajectory_says_what_each_step_says_alone(reader, min_length):
    env = Strings("ABC", 4, min_length)
    task = Task(env, Fatigue(0.3, 0.3), lambda s: s[..., 0], Linear())
    dynamics = sharp(ThoughtDynamics(env, (0, 1), READERS[reader]))
    traj = rollout(task, Policy(env, MLP(8, 1), seeds=(0, 1)), 30)
    here, memory = traj.states[:-1], remembered(dynamics, traj)
    legal = env.real_moves(env.moves(here))
    action = traj.actions.clamp(max=env.tokens - 1)
    at_once = dynamics.log_probs(here, legal, action, memory)
    alone = torch.stack([dynamics.log_probs(here[t], legal[t], action[t], memory[t]) for t in range(env.horizon)])
    torch.testing.assert_close(at_once, alone, atol=1e-5, rtol=1e-5)
    assert float(at_once[legal].std()) > 0.3


@pytest.mark.parametrize("reader", READERS)
@torch.no_grad()
def test_the_prediction_at_t_is_blind_to_later_actions_and_moves(reader):
    env = Strings("ABC", 4)
    dynamics = sharp(ThoughtDynamics(env, (0,), READERS[reader]))
    traj = rollout(Task(env, Slip(0.5), None, Linear()), Policy(env, MLP(8, 1)), 40)
    other = traj._replace(actions=traj.actions.clone())
    other.actions[2] = (other.actions[2] + 1) % 3
    here = traj.states[:-1]
    legal, fixed = env.moves(here), torch.zeros_like(traj.actions)
    before = dynamics.log_probs(here, legal, fixed, remembered(dynamics, traj))
    after = dynamics.log_probs(here, legal, fixed, remembered(dynamics, other))
    assert torch.equal(before[:3], after[:3])  # up to step 2 the changed thought is not yet part of the past
    assert float((before[3] - after[3]).abs().mean()) > 1e-3


@pytest.mark.parametrize("reader", READERS)
@torch.no_grad()
def test_the_marginal_is_the_sum_over_actions(reader):
    task = task_of()
    env = task.env
    dynamics = sharp(ThoughtDynamics(env, (0, 1), READERS[reader]))
    traj = rollout(task, Policy(env, MLP(8, 1), seeds=(0, 1)), 10)
    here, memory = traj.states[:-1], remembered(dynamics, traj)
    legal = env.moves(here)
    log_pi = torch.randn(legal.shape).log_softmax(-1)
    slow = Channel.marginal(dynamics, here, legal, log_pi, memory)
    torch.testing.assert_close(dynamics.marginal(here, legal, log_pi, memory), slow, atol=1e-5, rtol=1e-5)


def test_the_flow_loss_does_not_train_the_dynamics():
    task = task_of()
    policy, dynamics = Policy(task.env, MLP(8, 1)), ThoughtDynamics(task.env, (0,), Attention(8, 2, 1))
    traj = rollout(task, policy, 8)
    terms = evaluate(task, policy, dynamics, traj, None, TrajectoryBalance().needs)
    TrajectoryBalance().residual(terms).square().sum().backward()
    assert all(p.grad is None for p in dynamics.parameters())
    assert any(p.grad is not None for p in policy.parameters())


def test_rows_that_nobody_executed_do_not_train_it():
    task = task_of()
    dynamics = ThoughtDynamics(task.env, (0,), Flat(8, 1))
    traj = rollout(task, Policy(task.env, MLP(8, 1)), 16)
    half = traj.real.clone()
    half[:, 8:] = False
    kept = type(traj)(*[x[:, :, :8] if x.dim() > 2 else x[:, :8] for x in traj])
    torch.testing.assert_close(dynamics.loss(traj._replace(real=half)), dynamics.loss(kept))


def test_seed_rows_of_the_dynamics_are_single_runs():
    task = task_of()
    both = ThoughtDynamics(task.env, (4, 9), Attention(8, 2, 1))
    traj = rollout(task, Policy(task.env, MLP(8, 1), seeds=(0, 1)), 12)
    for i, seed in enumerate((4, 9)):
        alone = ThoughtDynamics(task.env, (seed,), Attention(8, 2, 1))
        mine = type(traj)(*[x[:, i : i + 1] if x.dim() > 2 else x[i : i + 1] for x in traj])
        torch.testing.assert_close(alone.loss(mine)[0], both.loss(traj)[i])


@pytest.mark.parametrize("world", ["fixed", "variable", "thought_state"])
@pytest.mark.parametrize("reader", READERS)
@torch.no_grad()
def test_replay_keeps_whole_histories(reader, world):
    """Actions and moves of whole trajectories are kept, so what a reader of histories loses on replay is what it lost on the day."""
    task = (
        task_of(3)
        if world != "variable"
        else Task(Strings("ABC", 4, 1), Fatigue(0.3, 0.3), lambda s: s[..., 0], Linear())
    )
    dynamics = sharp(ThoughtDynamics(task.env, (0, 1), READERS[reader]))
    if world == "thought_state":
        task = augment(task)
        dynamics = Augmented(task.env, dynamics)
    traj = rollout(task, Policy(task.env, MLP(8, 1), seeds=(0, 1)), 40)
    buffer = Buffer(task.env, 40, seeds=2)
    buffer.add(traj)
    again = buffer.rebuild(torch.arange(40).expand(2, 40))
    torch.testing.assert_close(dynamics.loss(again), dynamics.loss(traj), atol=0, rtol=0)
    assert float(dynamics.loss(traj).min()) > 0.5


@pytest.mark.slow
def test_a_reader_of_thoughts_learns_from_replay():
    """A kernel of histories does not depend on who acted: old trajectories teach it as fresh ones do."""
    task = task_of(3)
    seeds = (0, 1)
    policy = Policy(task.env, MLP(16, 1), seeds=seeds)
    dynamics = ThoughtDynamics(task.env, seeds, Flat(32, 1))
    buffer = Buffer(task.env, 5000, seeds=2)
    trainer = Trainer(
        task,
        policy,
        dynamics,
        TrajectoryBalance(),
        OnPolicy(task, policy, 64),
        lr=2e-3,
        noise=NoiseTraining(3e-3, buffer=buffer, rounds=2, sample_size=128),
    )
    trainer.train(500)
    with trainer.averaged():
        fit = dynamics_report(task.env, dynamics, task.channel, rollout(task, policy, 4000))
    assert float(fit.kernel_tv.max()) < 0.03
    assert bool((fit.nll - fit.nll_true).abs().max() < 0.01)


@pytest.mark.slow
def test_only_a_reader_of_thoughts_learns_a_memory_of_thoughts():
    """Held-out kernel TV: the readers approach the truth, a table and a network of the state cannot."""
    task = task_of()
    env, policy = task.env, Policy(task.env, MLP(8, 1))
    models = {
        "table": Tabular(env),
        "state": Neural(env),
        "flat": ThoughtDynamics(env, reader=Flat()),
        "thought": ThoughtDynamics(env, reader=Attention(16, 2, 2)),
    }
    found = {}
    for name, model in models.items():
        flat = FlatParameters(model, 3e-3, 10.0) if name != "table" else None
        for step in range(400):
            traj = rollout(task, policy, 128)
            model.observe(traj)
            if flat is not None:
                flat.differentiate(model.loss(traj))
                Eager().update(flat, torch.tensor(float(step)), ends=False)
        found[name] = dynamics_report(env, model, task.channel, rollout(task, policy, 4000))
    for name in ("table", "state"):
        assert float(found[name].kernel_tv) > 0.06
    for name in ("flat", "thought"):
        assert float(found[name].kernel_tv) < 0.03
        assert (
            float(found[name].nll - found[name].nll_true) < 0.01 < float(found["state"].nll - found["state"].nll_true)
        )


# thoughts in the state ---------------------------------------------------------------------------------------------------------


def test_the_augmented_world_is_sound():
    task = task_of(2)
    world = augment(task)
    found = check_env(world.env)
    assert found.enumerated
    assert found.states == world.env.count() == (1 + 9 + 81) + 9 * (3 + 1)  # built with their thoughts, then forgetting
    check_channel(world.channel, world.env)


def test_objects_of_the_augmented_world_are_the_strings():
    task = task_of(2)
    world = augment(task)
    graph = Graph(world.env)
    ends = graph.states[graph.terminal]
    assert world.env.decode(ends) == [a + b for a in "ABC" for b in "ABC"]
    torch.testing.assert_close(target_law(graph, world).log_z, target_law(Graph(task.env), task).log_z)


class Lifted:
    """A policy of strings in the augmented world: it means (a, a) and does not look at its thoughts."""

    num_seeds = 2

    def __init__(self, env: ThoughtState, policy: Policy):
        self.env, self.policy = env, policy

    def __call__(self, state):
        log_pi = self.policy(self.env.text(state)).forward.double().log_softmax(-1)
        k = self.env.letters
        pairs = torch.where(torch.eye(k, dtype=torch.bool), log_pi.unsqueeze(-1), NEG).flatten(-2)
        return PolicyOut(torch.cat([pairs, torch.zeros_like(log_pi)], -1), pairs, None, pairs[..., 0])


@pytest.mark.parametrize("memory", ["fatigue", "regime", "none"])
def test_a_policy_of_states_has_one_law_in_both_worlds(memory):
    """Two ways through the same noise: (state, memory) pairs, and the tree of thoughts."""
    env = Strings("ABC", 3)
    channel = {
        "fatigue": Fatigue(0.2, 0.6, 1.0),
        "regime": Regime(env, [Slip(0.1), Slip(0.8)], 0.9),
        "none": Slip(0.3),
    }[memory]
    task = task_of(3, channel)
    world = augment(task)
    policy = sharp(Policy(env, MLP(8, 1), seeds=(0, 1)))
    graph, small = Graph(world.env), Graph(env)
    law = exact_law(graph, world.channel, Lifted(world.env, policy))
    torch.testing.assert_close(
        law[:, graph.terminal], memory_law(small, channel, policy).law[:, small.terminal], atol=1e-7, rtol=0
    )


@torch.no_grad()
def test_the_augmented_channel_is_the_same_step_by_step_and_along():
    task = task_of()
    world = augment(task)
    env = world.env
    learned = Augmented(env, sharp(ThoughtDynamics(task.env, (0, 1), Attention(8, 2, 1))))
    traj = rollout(world, Policy(env, MLP(8, 1), seeds=(0, 1)), 20)
    here = traj.states[:-1]
    legal = env.moves(here)
    log_pi = masked_log_softmax(torch.randn(legal.shape), legal)
    for channel in (world.channel, learned):
        along = channel.log_probs(here, legal, traj.actions)
        alone = torch.stack([channel.log_probs(here[t], legal[t], traj.actions[t]) for t in range(env.horizon)])
        torch.testing.assert_close(along[legal], alone[legal], atol=1e-5, rtol=1e-5)
        assert torch.equal(
            traj.moves[: env.length] // 3, traj.actions[: env.length] // 3
        )  # what was meant is never misremembered
        slow = Channel.marginal(channel, here, legal, log_pi)
        torch.testing.assert_close(channel.marginal(here, legal, log_pi)[legal], slow[legal], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_what_the_inner_model_learns_from_is_what_the_inner_world_did():
    task = task_of()
    world = augment(task)
    policy = Policy(world.env, MLP(8, 1))
    traj = rollout(world, policy, 500)
    inner = world.channel.strings_only(traj)
    state = task.env.initial((1, 500))
    for t in range(task.env.horizon):
        assert torch.equal(inner.states[t], state)
        state = task.env.step(state, inner.moves[t])
    assert torch.equal(inner.states[-1], traj.states[-1][..., : task.env.length])
    overruled = (inner.moves[0] != inner.actions[0]).float().mean()
    assert abs(float(overruled) - 0.2 * 2 / 3) < 0.06  # a fresh world slips with 0.2, and a third of that is unseen


def test_balance_in_the_augmented_world_needs_the_backward_policy():
    """With a uniform P_B every history of a string would have to be equally likely: no policy does that. So P_B is learned."""
    task = task_of(2)
    world = augment(task)
    graph = Graph(world.env)
    log_flow, log_q = flows(graph, target_law(graph, world).log_reward)
    _, feasible = invert(graph, world.channel, log_q)
    assert not bool(feasible[graph.root])
    assert float(log_flow[graph.root]) == pytest.approx(target_law(graph, world).log_z)


@pytest.mark.slow
def test_a_kernel_of_histories_misleads_a_balance_of_states_and_not_one_of_histories():
    """With the true law of histories: TV far from 0 for pi(a|s), near 0 where thoughts belong to the state; a kernel of states is near 0."""
    task = task_of(2, Fatigue(0.4, 0.6, 1.0))
    env = task.env

    def train(world: Task, dynamics) -> Trainer:
        torch.manual_seed(0)
        policy = Policy(world.env, MLP(32, 2), seeds=(0, 1))
        trainer = Trainer(
            world,
            policy,
            dynamics,
            TrajectoryBalance(),
            OnPolicy(world, policy, 128),
            lr=5e-3,
            noise=NoiseTraining(5e-3),
        )
        trainer.train(400)
        return trainer

    graph = Graph(env)
    wanted = target_law(graph, task).target
    found = {}
    for name, dynamics in {"history": Known(env, task.channel), "state": Neural(env, (0, 1))}.items():
        trainer = train(task, dynamics)
        with trainer.averaged():
            found[name] = tv(memory_law(graph, task.channel, trainer.policy).law, wanted)
    world = augment(task)
    trainer = train(world, Augmented(world.env, Known(env, task.channel)))
    wide = Graph(world.env)
    with trainer.averaged():
        found["thought_state"] = tv(exact_law(wide, world.channel, trainer.policy), target_law(wide, world).target)
    assert float(found["history"].min()) > 0.025
    assert float(found["state"].max()) < 0.015
    assert float(found["thought_state"].max()) < 0.015


def test_what_cannot_hold_thoughts_says_so():
    for env in (Grid(2, 4), Strings("ABC", 3, 1)):
        with pytest.raises(UserError, match=r"strings of fixed length only.*thought_state"):
            ThoughtState(env)


def test_memory_of_thoughts_in_the_state_is_said_before_it_is_held(monkeypatch):
    """The look-up table of all histories is refused with its size; a batch that does not fit is refused before it is made."""
    from stochflow.errors import UserError
    from stochflow.runs.build import Experiment
    from stochflow.runs.config import configure

    with pytest.raises(UserError, match=r"6,012,932,369 states .* GB in training: use --net transformer"):
        Experiment(configure("tfbind8", thought_state=True))
    many = configure("tfbind8", thought_state=True, net="transformer", batch=10_000_000, objective="tb")
    with pytest.raises(UserError, match=r"holds about .* GB, and this machine has .* smaller --batch"):
        Experiment(many)
    few = Experiment(
        configure(
            "tfbind8", thought_state=True, net="transformer", batch=4, hidden=16, objective="tb", dynamics="thought"
        )
    )
    few.trainer.train(2)
    assert bool(few.trainer.stats["finite"].all())
