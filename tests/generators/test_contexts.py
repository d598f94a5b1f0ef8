"""Thoughts, contexts and other trunks inside a generator: what is read, what changes, and that all of it learns."""

from __future__ import annotations

import math

import pytest
import torch

from stochflow.errors import UserError
from stochflow.generators import (
    GeneratorArgs,
    RolloutWorker,
    StochasticDBGFlowNetGenerator,
    StochasticKL2GFlowNetGenerator,
    StochasticKLGFlowNetGenerator,
    Tokenizer,
    TrajectoryBalanceGFlowNetGenerator,
    one_hot_contexts,
)
from stochflow.noise.thought_state import ThoughtState

DNA = Tokenizer("ACGT")
LOG = [("ACG", "ACG", 0.9), ("ATG", "ACG", 0.4), ("TTG", "TTC", 0.7), ("ACC", "ACG", 0.2)]


def make(cls=StochasticDBGFlowNetGenerator, **more):
    return cls(GeneratorArgs(**{"max_len": 3, "gen_num_hidden": 16, "gen_num_heads": 2, **more}), DNA)


@pytest.mark.parametrize("net", ["mlp", "lookup", "transformer", "gru", "lstm"])
@pytest.mark.parametrize("min_len", [None, 1])
def test_every_trunk_learns_and_reads_prefixes_alone(net, min_len):
    g = make(gen_net=net, min_len=min_len, gen_learning_rate=0.02)
    before = g.get_loss({"bulk_trajs": LOG})[0].item()
    for _ in range(40):
        g.train_step({"bulk_trajs": LOG})
    assert g.get_loss({"bulk_trajs": LOG})[0].item() < before / 2
    whole = g(["ACG", "ATG"], [1, 1])
    assert torch.allclose(whole[0], whole[1])
    assert len(g.sample(7)) == 7


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_positions_are_chosen_by_an_argument(positions):
    g = make(gen_net="transformer", gen_positions=positions)
    learned = [name for name, _ in g.model.named_parameters() if "place" in name]
    assert bool(learned) == (positions == "learned")
    out = g(["ACG", "CAG"], [2, 2])
    assert not torch.allclose(out[0], out[1])  # the same letters in another order
    with pytest.raises(UserError, match="gen_positions"):
        make(gen_positions="rotary")


@pytest.mark.parametrize("positions", ["learned", "sinusoidal"])
def test_the_transformer_of_the_noise_has_the_positions_that_were_asked_for(positions):
    """It reads the thoughts alone or beside a policy that does; where no transformer reads them, to ask is an error."""
    g = make(dynamics_model="thought", gen_positions=positions)
    learned = [name for name, _ in g.forward_dynamics.named_parameters() if "place" in name]
    assert bool(learned) == (positions == "learned")
    assert math.isfinite(g.train_step({"bulk_trajs": LOG})["loss"])
    if positions == "sinusoidal":
        for net in ("auto", "mlp", "gru"):
            with pytest.raises(UserError, match="no transformer"):
                make(gen_net=net, gen_positions=positions)


# thoughts ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("net", ["auto", "mlp"])
@pytest.mark.parametrize("model", ["neural", "thought"])
def test_with_thought_state_the_policy_reads_the_thoughts(net, model):
    g = make(TrajectoryBalanceGFlowNetGenerator, thought_state=True, gen_net=net, dynamics_model=model)
    assert isinstance(g.env, ThoughtState)
    state = g.env.initial((1, 2))
    for action in (torch.tensor([[0, 1]]), torch.tensor([[2, 2]])):
        state = g.env.step(state, action * 4 + 3)  # both became T, T
    assert torch.equal(g.env.text(state)[0, 0], g.env.text(state)[0, 1])
    forward = g.model(state).forward[0]
    assert not torch.allclose(forward[0], forward[1])  # the string is the same, the thoughts are not
    _loss, info = g.get_loss({"bulk_trajs": LOG})
    assert info["ll_diff"].shape == (6, 4)  # letters and thoughts, then the thoughts are forgotten again
    first = g.train_step({"bulk_trajs": LOG})["loss"]
    for _ in range(60):
        last = g.train_step({"bulk_trajs": LOG})["loss"]
    assert last < first / 2
    pairs = g.sample_thoughts(5)
    assert all(len(s) == len(t) == 3 for s, t in pairs)


def test_thoughts_of_a_log_make_the_trajectories_of_the_larger_world():
    g = make(thought_state=True)
    traj = g._read({"bulk_trajs": LOG}).trajectories
    assert g.env.decode(traj.states[3]) == [s for s, _, _ in LOG]
    assert DNA.decode(g.env.thoughts(traj.states[3])[0]) == [t for _, t, _ in LOG]
    assert bool((g.env.thoughts(traj.states[-1]) == 4).all())  # all forgotten
    assert bool(g.env.complete(traj.states[-1]).all())
    back = g.space.lower(traj)
    assert DNA.decode(back.moves[:, 0].T) == [s for s, _, _ in LOG]
    assert DNA.decode(back.actions[:, 0].T) == [t for _, t, _ in LOG]
    with pytest.raises(UserError, match="thoughts"):
        g(["AC"])
    with pytest.raises(UserError, match="fixed length"):
        make(thought_state=True, min_len=1)


def test_the_worker_and_thoughts_learn_together():
    args = GeneratorArgs(
        max_len=3, thought_state=True, gen_num_hidden=16, gen_episodes_per_step=32, dynamics_model="thought"
    )
    worker = RolloutWorker(args, lambda strings: [0.2 + s.count("A") for s in strings], DNA)
    g = TrajectoryBalanceGFlowNetGenerator(args, DNA)
    for it in range(5):
        batch = worker.execute_train_episode_batch(g, it)
        assert math.isfinite(g.train_step(batch)["loss"])
    assert {len(s) for s, _, _ in batch["bulk_trajs"]} == {3}


# contexts ---------------------------------------------------------------------------------------------------------------


def test_contexts_change_the_law_without_another_network():
    """Rewards ask for A under one context and for T under the other; new values are new conditions for the same network."""
    torch.manual_seed(0)
    args = GeneratorArgs(
        max_len=2, context_width=2, gen_num_hidden=32, gen_episodes_per_step=64, gen_learning_rate=0.01, stick=0.0
    )
    g = StochasticDBGFlowNetGenerator(args, DNA)
    parameters = {id(p) for p in g.model.parameters()}
    worker = RolloutWorker(args, lambda strings: [1.0] * len(strings), DNA)
    contexts = one_hot_contexts([0, 1] * 32, 2)
    for _ in range(250):
        batch = worker.execute_train_episode_batch(g, contexts=contexts)
        wanted = ["A" if c == 0 else "T" for c in [0, 1] * 32]
        batch["bulk_trajs"] = [
            (s, t, 0.02 + s.count(w)) for (s, t, _), w in zip(batch["bulk_trajs"], wanted, strict=True)
        ]
        g.train_step(batch)
    assert {id(p) for p in g.model.parameters()} == parameters
    first, second = (g.sample(200, contexts=one_hot_contexts([c], 2)[0]) for c in (0, 1))
    assert sum(s.count("A") for s in first) > 220
    assert sum(s.count("T") for s in second) > 220
    between = g(["A"], contexts=torch.tensor([[0.5, 0.5]]))  # a real-valued condition that was never trained
    assert bool(between.isfinite().all())
    assert not torch.allclose(between, g(["A"], contexts=torch.tensor([[1.0, 0.0]])))


def test_the_variance_is_within_a_context():
    """Equal contexts are one condition, wherever they stand in a batch; of one string each there is no variance."""
    torch.manual_seed(0)
    g = make(StochasticKLGFlowNetGenerator, max_len=2, context_width=2, gen_num_hidden=32, gen_learning_rate=0.01)
    every = [a + b for a in "ACGT" for b in "ACGT"]
    log, contexts = [], []
    for _ in range(3):
        for s in every:  # the second condition pays 20 times as much for everything, which changes nothing but log Z
            log += [(s, s, 0.05 + s.count("A")), (s, s, 20 * (0.05 + s.count("T")))]
            contexts += [[1.0, 0.0], [0.0, 1.0]]
    assert g.train_step({"bulk_trajs": log, "contexts": contexts})["loss"] > 0.1
    for _ in range(250):
        g.train_step({"bulk_trajs": log, "contexts": contexts})
    assert g.get_loss({"bulk_trajs": log, "contexts": contexts})[0].item() < 0.02
    for letter, context in zip("AT", torch.eye(2), strict=True):
        drawn = "".join(g.sample(400, contexts=context))
        want = (
            (6 * 1.05 + 2 * 2.05) / (9 * 0.05 + 6 * 1.05 + 2.05) / 2
        )  # letters of strings with one and with two of them
        assert drawn.count(letter) / 800 == pytest.approx(want, abs=0.08)
    with pytest.raises(UserError, match="context of its own"):
        g.train_step({"bulk_trajs": log[:4], "contexts": torch.randn(4, 2)})


@pytest.mark.parametrize("cls", [StochasticDBGFlowNetGenerator, StochasticKL2GFlowNetGenerator])
@pytest.mark.parametrize("net", ["mlp", "transformer", "gru", "lstm"])
def test_every_trunk_takes_real_valued_contexts(cls, net):
    g = make(cls, context_width=3, gen_net=net)
    loss, info = g.get_loss({"bulk_trajs": LOG, "contexts": torch.randn(4, 3)})
    assert math.isfinite(loss.item())
    assert info["ll_diff"].shape == (3, 4)
    assert math.isfinite(g.train_step({"bulk_trajs": LOG, "contexts": torch.randn(3)})["loss"])  # one for all


@pytest.mark.parametrize(
    ("contexts", "word"),
    [
        (None, "no contexts"),
        (torch.zeros(4, 2), r"\[4, 3\]"),
        (torch.zeros(3, 3), r"\[4, 3\]"),
        (torch.full((4, 3), math.nan), "NaN"),
        (["a", "b", "c", "d"], "numbers"),
    ],
)
def test_contexts_of_another_shape_are_refused(contexts, word):
    g = make(context_width=3)
    batch = {"bulk_trajs": LOG} | ({} if contexts is None else {"contexts": contexts})
    with pytest.raises(UserError, match=word):
        g.get_loss(batch)
    with pytest.raises(UserError, match="context_width"):
        make().get_loss({"bulk_trajs": LOG, "contexts": torch.zeros(4, 3)})
    with pytest.raises(UserError, match="kinds"):
        one_hot_contexts([0, 2], 2)
