"""The listings of the source documents, run with their calls and shapes; one test per listing."""

from __future__ import annotations

import argparse
import inspect
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from stochflow.errors import UserError
from stochflow.generators import (
    MLP,
    GeneratorArgs,
    GeneratorBase,
    RolloutWorker,
    StochasticDBGFlowNetGenerator,
    StochasticKL2GFlowNetGenerator,
    StochasticKLGFlowNetGenerator,
    Tokenizer,
    calculate_num_modes,
)
from stochflow.learn.objectives import DetailedBalance
from stochflow.nets.policy import Policy

DNA = Tokenizer("ACGT")
LOG = [("ACGTAC", "ACGTAC", 0.9), ("ATGTAC", "ACGTAC", 0.4), ("TTGGGG", "TTGGGC", 0.7), ("ACCAAA", "ACGAAA", 0.2)]
CLASSES = [StochasticDBGFlowNetGenerator, StochasticKLGFlowNetGenerator, StochasticKL2GFlowNetGenerator]


def namespace(**more) -> argparse.Namespace:
    """The documents' args."""
    given = {"vocab_size": 4, "max_len": 6, "gen_learning_rate": 1e-3, "dynamics_lr": 1e-3, "gen_clip": 10.0}
    given |= {"dynamics_clip": 10.0, "gamma": 0.5, "device": "cpu", "gen_num_hidden": 16, "gen_num_layers": 2}
    given |= {
        "gen_partition_init": 50.0,
        "gen_output_coef": 1,
        "gen_do_explicit_Z": 0,
        "reward_exp_min": 1e-3,
        "stick": 0.25,
    }
    return argparse.Namespace(**given, **more)


def generator(cls=StochasticDBGFlowNetGenerator, **more):
    return cls(namespace(**more), DNA)


def one_hot_inputs(g):
    """`s`, `real_actions`, `inp_x`, `inp_thought` as every listing makes them."""
    strs, thought_strs, _ = zip(*LOG, strict=True)
    s = g.tokenizer.process(strs).to(g.device)
    thought_s = g.tokenizer.process(thought_strs).to(g.device)
    real_actions = s[:, 1:].clamp(0, g.num_tokens - 1).long().transpose(1, 0)
    inp_x = F.one_hot(s, num_classes=g.num_tokens + 1)[:, :, :-1].to(torch.float32)
    inp_thought = F.one_hot(thought_s[:, 1:], num_classes=g.num_tokens + 1)[:, :, :-1].to(torch.float32)
    return s, real_actions, inp_x, inp_thought


# 000-003: the class -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", CLASSES)
def test_every_name_that_a_listing_uses_on_self_is_there(cls):
    g = generator(cls, dynamics_off_pol=True)
    assert isinstance(g, GeneratorBase)
    assert isinstance(g, nn.Module)
    names = """args ce_loss compute_entropy device dynamics_buffer dynamics_clip dynamics_loss dynamics_off_pol dynamics_off_pol_rounds
    dynamics_opt dynamics_sample_size entropy_high entropy_low entropy_ratio forward_dynamics gamma get_dynamics_loss get_loss
    kl_divergence_loss ll_diff max_len model num_tokens opt out_coef pad_tok reward_exp_min stick tokenizer train_step""".split()
    for name in names:
        assert getattr(g, name) is not None, name
    assert (g.gamma, g.device, g.num_tokens, g.max_len, g.stick) == (0.5, "cpu", 4, 6, 0.25)
    assert isinstance(g.ce_loss, nn.CrossEntropyLoss)


def test_a_training_step_unpacks_into_two_losses_and_is_a_dict():
    found = generator().train_step({"bulk_trajs": LOG})
    loss, dynamics_loss = found
    assert loss == found["loss"]
    assert dynamics_loss == found["dynamics_loss"]
    assert 0 < dynamics_loss < 2
    assert dict(found).keys() >= {"loss", "dynamics_loss", "grad_norm", "log_z_learned"}


@pytest.mark.parametrize("off_policy", [False, True])
def test_train_step_of_the_listing_runs_line_by_line(off_policy):
    g = generator(dynamics_off_pol=off_policy, dynamics_off_pol_rounds=2)
    if off_policy:
        g.dynamics_buffer.push(LOG)
    before = [p.clone() for p in (*g.model.parameters(), *g.forward_dynamics.parameters())]
    for _ in range(2):
        loss, info = g.get_loss({"bulk_trajs": LOG})
        loss.backward()
        nn.utils.clip_grad_norm_(g.model.parameters(), g.args.gen_clip)
        g.opt.step()
        g.opt.zero_grad()
        assert all(p.grad is None for p in g.model.parameters())
        if g.dynamics_off_pol:
            for _ in range(g.dynamics_off_pol_rounds):
                dynamics_loss = g.get_dynamics_loss()
                dynamics_loss.backward()
                nn.utils.clip_grad_norm_(g.forward_dynamics.parameters(), g.dynamics_clip)
                g.dynamics_opt.step()
                g.dynamics_opt.zero_grad()
        else:
            dynamics_loss = info["forward_dynamics_loss"]
            dynamics_loss.backward()
            nn.utils.clip_grad_norm_(g.forward_dynamics.parameters(), g.dynamics_clip)
            g.dynamics_opt.step()
            g.dynamics_opt.zero_grad()
    after = (*g.model.parameters(), *g.forward_dynamics.parameters())
    assert sum(not torch.equal(a, b) for a, b in zip(before, after, strict=True)) >= len(before) - 2


def test_the_listings_loop_is_train_step():
    """opt and dynamics_opt by hand do what `train_step` does (which from the second step on takes averaged dynamics)."""
    one, other = generator(), generator()
    one.train_step({"bulk_trajs": LOG})
    loss, info = other.get_loss({"bulk_trajs": LOG})
    loss.backward()
    other.opt.step()
    other.opt.zero_grad()
    info["forward_dynamics_loss"].backward()
    other.dynamics_opt.step()
    other.dynamics_opt.zero_grad()
    assert one.trainer.steps_done == other.trainer.steps_done == 1
    for a, b in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


# 001, 003: forward_dynamics_model ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("model", ["neural", "tabular", "thought"])
def test_forward_dynamics_model_takes_the_listings_call(model):
    g = generator(dynamics_model=model)
    g.get_loss({"bulk_trajs": LOG})
    g.eval()  # a model that counts would count the same log again
    s, real_actions, inp_x, inp_thought = one_hot_inputs(g)
    lens = [len(i) for i in s]
    x = inp_x.reshape(len(s), -1)
    outs = g.forward_dynamics.forward_dynamics_model(x, inp_thought, None, return_all=True, lens=lens)
    outs = outs[:-1, :, :]
    assert outs.shape == (5, 4, 4)  # T - 1 steps, B strings, K letters
    loss = g.ce_loss(outs.reshape(-1, outs.shape[-1]), real_actions.reshape(-1))
    # the same cross-entropy as the generator's own, without the first letter, which the listing leaves out
    _, info = g.get_loss({"bulk_trajs": LOG})
    own = -info["forward_model_logits"][:, 1:].mean()
    if model != "thought":  # whose history the listing's call does not show in full: the first thought is cut off
        assert loss.item() == pytest.approx(own.item(), rel=1e-5)
    logits = outs.detach().log_softmax(-1)  # log-probabilities already
    assert torch.allclose(logits, outs, atol=1e-5)


def test_with_all_thoughts_the_root_transition_is_there():
    g = generator()
    _, info = g.get_loss({"bulk_trajs": LOG})
    s, _, inp_x, _ = one_hot_inputs(g)
    thoughts = F.one_hot(g.tokenizer.process([t for _, t, _ in LOG]), 5)[:, :, :-1].float()
    outs = g.forward_dynamics.forward_dynamics_model(inp_x, thoughts, None, return_all=True)[:-1]
    assert outs.shape == (6, 4, 4)
    assert torch.allclose(outs.gather(2, s.T.unsqueeze(2)).squeeze(2).T, info["forward_model_logits"], atol=1e-5)
    flat = g.forward_dynamics.forward_dynamics_model(inp_x.flatten(1), thoughts.flatten(1), None, return_all=True)[:-1]
    assert torch.equal(flat, outs)
    last = g.forward_dynamics.forward_dynamics_model(inp_x, thoughts)
    assert torch.allclose(last, outs[-1], atol=1e-6)
    for bad in ((inp_x, None, None), (inp_x[:, :3], thoughts, None), (inp_x, thoughts, torch.ones(1))):
        with pytest.raises(UserError, match=r"forward_dynamics_model|x has shape"):
            g.forward_dynamics.forward_dynamics_model(*bad, return_all=True)


def test_the_fragment_of_ll_diff_gives_the_loss():
    """001: `ll_diff += ...`, line by line from the named tensors; the root is one more step and the end is at len - 1."""
    g = generator()
    loss, info = g.get_loss({"bulk_trajs": LOG})
    actions = g.tokenizer.process([t for _, t, _ in LOG]).unsqueeze(-1)
    pol_logits = info["pol_logits"].gather(2, actions).squeeze(2).T
    pol_back_logits = info["pol_back_logits"].gather(2, actions).squeeze(2).T
    log_flows, mask, r = info["log_flows"], info["mask"], torch.tensor([r for *_, r in LOG])
    ll_diff = torch.zeros(pol_logits.shape).to(g.device)
    ll_diff += log_flows.T[:-1]
    ll_diff += pol_logits
    ll_diff += info["forward_model_logits"].T
    log_flows = log_flows[:, 1:]
    r = r.clamp(min=g.reward_exp_min).log()
    r = r.unsqueeze(-1).repeat(1, log_flows.shape[1])
    lens = torch.tensor([len(s) for s, _, _ in LOG]).long()
    end_pos = lens - 1
    mask_for_backward = mask.clone().detach()
    mask_for_backward[torch.arange(end_pos.shape[0], device=g.device), end_pos] -= 1
    end_log_flow = mask_for_backward * log_flows + (1 - mask_for_backward) * r
    end_log_flow = end_log_flow.transpose(1, 0)
    assert torch.allclose(end_log_flow, info["end_log_flow"])
    ll_diff -= end_log_flow
    ll_diff -= pol_back_logits
    ll_diff *= mask.T
    assert torch.allclose(ll_diff, info["ll_diff"], atol=1e-4)
    assert loss.item() == pytest.approx(((ll_diff**2).sum() / mask.sum()).item(), rel=1e-4)


# 000-003: entropies, ratio, divergences ----------------------------------------------------------------------------------


def test_entropies_of_states_and_their_ratio():
    """001: `H_high = self.entropy_high(s)`, `H_low = self.entropy_low(s)`, `r_gamma = self.entropy_ratio(H_high, H_low)`."""
    g = generator(StochasticKL2GFlowNetGenerator)
    prefixes = ["A", "AC", "TTG", "GGGTA", ""]
    H_high, H_low = g.entropy_high(prefixes), g.entropy_low(prefixes)
    assert 0 <= H_low <= H_high <= 1
    r_gamma = g.entropy_ratio(H_high, H_low)
    assert 1 <= r_gamma <= 2  # 1 / gamma
    assert g.entropy_ratio(H_high=0.8, H_low=0.2).item() == pytest.approx(0.8 / (0.5 * 0.8 + 0.5 * 0.2), rel=1e-4)
    assert g.entropy_ratio(0.8, 0.2) == g.entropy_ratio(torch.tensor(0.8), torch.tensor(0.2))
    for bad in ((0.2, 0.8), (0.5, -0.1)):
        with pytest.raises(UserError, match="H_high >= H_low"):
            g.entropy_ratio(*bad)
    p = torch.tensor([[0.25] * 4, [1.0, 0, 0, 0]])
    assert g.compute_entropy(p).tolist() == pytest.approx([math.log(4), 0.0])
    with pytest.raises(UserError, match="at least one"):
        g.entropy_high([])


@pytest.mark.parametrize("cls", CLASSES)
def test_the_strings_of_a_batch_have_the_batchs_ratio(cls):
    """001, 003: `entropy_high(s)` of whole strings, as `tokenizer.process` gives them: the states on their way count."""
    g = generator(cls)
    with torch.no_grad():
        g.model.head.weight.mul_(30)  # states that differ in entropy
    s = one_hot_inputs(g)[0]
    r_gamma = g.entropy_ratio(g.entropy_high(s), g.entropy_low(s))
    assert r_gamma > 1.01
    assert r_gamma.item() == pytest.approx(g.get_loss({"bulk_trajs": LOG})[1]["r_gamma"].item(), rel=1e-5)
    assert torch.allclose(g.entropies(s[:, :2]), g.entropies(["AC", "AT", "TT", "AC"]))


def test_entropies_under_a_context():
    g = StochasticDBGFlowNetGenerator(GeneratorArgs(max_len=3, context_width=2, gen_num_hidden=16), DNA)
    one, two = torch.tensor([1.0, 0.0]), torch.tensor([0.0, 5.0])
    assert 0 <= g.entropy_low(["A", "ACG"], one) <= g.entropy_high(["A", "ACG"], one) <= 1
    assert not torch.allclose(g.entropies(["A", "C"], one), g.entropies(["A", "C"], two))
    with pytest.raises(UserError, match="no contexts"):
        g.entropy_high(["A"])


def test_the_divergence_is_one():
    """000-003: `kl_divergence_loss(forward_policy, backward_policy, r_gamma)`; log r is a constant, and shapes must agree."""
    g = generator(StochasticKL2GFlowNetGenerator)
    f, b = torch.rand(5, 4).softmax(-1), torch.rand(5, 4).softmax(-1)
    kl = (f * (f / b).log()).sum(-1).mean()
    assert g.kl_divergence_loss(f, b, 1.0).item() == pytest.approx(kl.item(), rel=1e-4)
    assert g.kl_divergence_loss(f, f).item() == pytest.approx(0, abs=1e-6)
    assert g.kl_divergence_loss(f, b, torch.tensor(1.5)).item() == pytest.approx(kl.item() - math.log(1.5), rel=1e-4)
    with pytest.raises(UserError, match="shapes"):
        g.kl_divergence_loss(f, b.T, 1.0)  # the listing's `.T`
    with pytest.raises(UserError, match="softmax"):
        g.kl_divergence_loss(torch.randn(5, 4), b, 1.0)
    steps, batch = torch.rand(7, 32, 4).softmax(-1), torch.rand(7, 32, 4).softmax(-1)
    ratio = 1 + torch.rand(32, 1)  # one for each string
    want = g.kl_divergence_loss(steps, batch) - ratio.log().mean()
    assert g.kl_divergence_loss(steps, batch, ratio).item() == pytest.approx(want.item(), rel=1e-4)
    for bad in (0.0, -1.0, torch.tensor([1.2, float("nan")])):
        with pytest.raises(UserError, match="r_gamma"):
            g.kl_divergence_loss(f, b, bad)


def test_dynamics_loss_is_finite_and_weighted_by_visits():
    g = generator(StochasticKL2GFlowNetGenerator)
    policy = torch.tensor([[0.25] * 4, [0.97, 0.01, 0.01, 0.01], [1.0, 0, 0, 0]])
    plain = g.dynamics_loss(policy, None, 1.2)
    assert bool(plain.isfinite())
    each = torch.stack([g.dynamics_loss(policy[i : i + 1], None, 1.2) for i in range(3)])
    assert plain.item() == pytest.approx(each.mean().item(), rel=1e-5)
    mu = torch.tensor([3.0, 1.0, 0.0])
    assert g.dynamics_loss(policy, mu, 1.2).item() == pytest.approx(((each * mu).sum() / 4).item(), rel=1e-5)
    ratios = torch.tensor([1.2, 1.5, 1.9])
    apart = torch.stack([g.dynamics_loss(policy[i : i + 1], None, ratios[i]) for i in range(3)])
    assert g.dynamics_loss(policy, mu, ratios).item() == pytest.approx(((apart * mu).sum() / 4).item(), rel=1e-5)
    assert bool(g.dynamics_loss(policy.expand(7, 3, 4), mu, torch.tensor([1.2])).isfinite())
    with pytest.raises(UserError, match="mu_pi"):
        g.dynamics_loss(policy, torch.tensor([-1.0, 0, 0]), 1.2)
    with pytest.raises(UserError, match="ll_diff"):
        g.ll_diff(state=None, next_state=None, action=None, reward=1.0)


# 000-003: MLP(num_tokens=..., num_outputs=...), and another model ----------------------------------------------------------


def test_mlp_by_the_documents_arguments():
    """002: `MLP(num_tokens, num_outputs, num_hid, num_layers, max_len, dropout, partition_init, causal)`."""
    made = MLP(
        num_tokens=4, num_outputs=9, num_hid=8, num_layers=2, max_len=6, dropout=0, partition_init=50.0, causal=0
    )
    x = one_hot_inputs(generator())[2]
    every = made(x.reshape(4, -1), None, return_all=True)
    assert every.shape == (7, 4, 9)  # prefixes of 0 to 6 letters
    assert torch.allclose(made(x, None, lens=[3, 3, 3, 3]), every[3], atol=1e-6)
    assert torch.allclose(made(x), every[-1], atol=1e-6)
    for bad in ({"dropout": 0.5}, {"causal": True}):
        with pytest.raises(UserError, match="dropout"):
            MLP(4, 9, **bad)


def test_an_assigned_model_is_the_one_that_is_trained():
    g = generator()
    g.train_step({"bulk_trajs": LOG})
    mine = MLP(num_tokens=4, num_outputs=9, num_hid=8, num_layers=2, max_len=6)
    before = [p.clone() for p in mine.parameters()]
    g.model = mine
    assert math.isfinite(g.train_step({"bulk_trajs": LOG})["loss"])
    assert not any(torch.equal(a, b) for a, b in zip(before, mine.parameters(), strict=True))  # itself, not a copy
    assert g.trainer.policy is g.model
    assert any(p is mine.layers[0].weight for p in g.opt.param_groups[0]["params"])
    s, _, inp_x, _ = one_hot_inputs(g)
    assert torch.allclose(g(s)[:, :4], mine(inp_x)[:, :4], atol=1e-6)
    assert torch.allclose(g(s)[:, -1], mine(inp_x)[:, -1] + g.model.log_z(None)[0], atol=1e-5)
    g.model = Policy(g.env, seeds=[3])
    assert math.isfinite(g.train_step({"bulk_trajs": LOG})["loss"])
    for bad in (nn.Linear(3, 3), MLP(4, 8, max_len=6), MLP(4, 9, max_len=7), Policy(g.env, seeds=[0, 1]), None):
        with pytest.raises(UserError, match=r"model|num_outputs|MLP"):
            g.model = bad
    with pytest.raises(UserError, match="forward_dynamics"):
        g.forward_dynamics = nn.Linear(3, 3)


@pytest.mark.parametrize("form", ["joint", "head"])
def test_the_documents_network_learns(form):
    """Of strings of several lengths, too; with a head its backward outputs are the law of the thought."""
    torch.manual_seed(0)
    args = GeneratorArgs(max_len=3, min_len=1, gen_form=form, gen_learning_rate=0.01, gen_partition_init=0.0)
    g = StochasticDBGFlowNetGenerator(args, DNA)
    g.model = mine = MLP(num_tokens=4, num_outputs=11, num_hid=32, num_layers=2, max_len=3)
    log = [("ACG", "ACG", 2.0), ("ACG", "ATG", 2.0), ("T", "T", 1.0), ("GC", "GC", 0.5), ("CCC", "CCC", 0.25)]
    first = g.get_loss({"bulk_trajs": log})[0].item()
    back = mine.layers[-1].weight[5:10].clone()
    for _ in range(150):
        g.train_step({"bulk_trajs": log})
    assert g.get_loss({"bulk_trajs": log})[0].item() < first / 10
    assert torch.equal(back, mine.layers[-1].weight[5:10]) == (form == "joint")
    assert len(g.sample(5)) == 5


def test_an_assigned_model_is_kept_and_given_again(tmp_path):
    g = generator()
    g.model = MLP(num_tokens=4, num_outputs=9, num_hid=8, num_layers=1, max_len=6)
    for _ in range(2):
        g.train_step({"bulk_trajs": LOG})
    file = g.save(tmp_path / "own.safetensors")
    with pytest.raises(UserError, match=r"load\(path, model=\.\.\.\)"):
        StochasticDBGFlowNetGenerator.load(file)
    mine = MLP(num_tokens=4, num_outputs=9, num_hid=8, num_layers=1, max_len=6)
    again = StochasticDBGFlowNetGenerator.load(file, model=mine)
    assert again.train_step({"bulk_trajs": LOG}) == g.train_step({"bulk_trajs": LOG})
    with pytest.raises(UserError, match="another shape"):
        StochasticDBGFlowNetGenerator.load(file, model=MLP(4, 9, num_hid=16, num_layers=1, max_len=6))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("objective", None),
        ("dynamics_buffer", None),
        ("gamma", 0.1),
        ("stick", 0.5),
        ("opt", None),
        ("device", "cuda"),
        ("out_coef", 10),
    ],
)
def test_what_would_be_ignored_is_an_error(name, value):
    with pytest.raises(UserError, match=name):
        setattr(generator(), name, value)


def test_every_argument_of_the_args_is_used():
    """A field that no code reads would be ignored in silence."""
    import stochflow.generators as room

    source = "".join(inspect.getsource(m) for m in vars(room).values() if inspect.ismodule(m))
    source += "".join(inspect.getsource(c) for c in vars(room).values() if inspect.isclass(c))
    for name in GeneratorArgs.__dataclass_fields__:
        assert source.count(name) >= 2, name


# 001: worker, modes; 002: time series --------------------------------------------------------------------------------------


def test_the_rollout_listing():
    """001: rewards of a rollout by `l2r`, the oracle once per batch, `visited` with (string, thought, reward, score)."""
    args = GeneratorArgs(max_len=6, gen_episodes_per_step=8, reward_exp=3.0, exp_ramping_factor=3.0)
    worker = RolloutWorker(args, lambda strings: [0.1 + s.count("A") / 6 for s in strings], DNA)
    g = StochasticDBGFlowNetGenerator(args, DNA)
    batch = worker.execute_train_episode_batch(g, it=3)
    assert (worker.reward_exp, worker.exp_ramping_factor) == (3.0, 3.0)
    assert len(worker.final_states) == len(batch["visited"]) == 8
    for string, thought, reward, score in batch["visited"]:
        assert len(string) == len(thought) == 6
        assert reward == pytest.approx(worker.l2r(score, 3))
    loss, dynamics_loss = g.train_step(batch)
    assert math.isfinite(loss + dynamics_loss)


def test_the_modes_listing():
    assert calculate_num_modes(["abc", "abd", "xyz", "xzy", "abc"], distance_threshold=2) == 2


def test_a_batch_of_a_time_series_is_refused_with_the_way_to_go():
    with pytest.raises(UserError, match=r"bulk_trajs.*SeriesGenerator"):
        generator().get_loss({"time_series": torch.zeros(2, 10, 3), "real_actions": torch.zeros(2, 10)})


@pytest.mark.parametrize("form", ["joint", "marginal", "head", "published"])
def test_the_form_is_chosen_in_the_args(form):
    g = generator(gen_form=form)
    assert isinstance(g.objective, DetailedBalance)
    assert g.objective.form.name == form
    assert g.model.back_action == (form in ("head", "published"))
    assert math.isfinite(g.train_step({"bulk_trajs": LOG})["loss"])


def test_joint_and_marginal_are_one_computation():
    joint, marginal = generator(gen_form="joint"), generator(gen_form="marginal")
    for _ in range(3):
        assert joint.train_step({"bulk_trajs": LOG}) == marginal.train_step({"bulk_trajs": LOG})
