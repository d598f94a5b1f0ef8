"""The source documents' classes: their losses against formulas written here by hand, their layouts, and their doors."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, logsumexp
from scipy.stats import chisquare

from stochflow.errors import UserError
from stochflow.generators import (
    DeterministicDBGFlowNetGenerator,
    GeneratorArgs,
    LogBook,
    ReplayBuffer,
    RolloutWorker,
    StochasticDBGFlowNetGenerator,
    StochasticKL2GFlowNetGenerator,
    StochasticKL3GFlowNetGenerator,
    StochasticKLGFlowNetGenerator,
    Tokenizer,
    TrajectoryBalanceGFlowNetGenerator,
    calculate_num_modes,
    trajectories,
)
from stochflow.runs import folder as runs
from stochflow.scores.rewards import Power
from stochflow.worlds.channels import Slip

CLASSES = [
    StochasticDBGFlowNetGenerator,
    DeterministicDBGFlowNetGenerator,
    TrajectoryBalanceGFlowNetGenerator,
    StochasticKLGFlowNetGenerator,
    StochasticKL2GFlowNetGenerator,
    StochasticKL3GFlowNetGenerator,
]
DNA = Tokenizer("ACGT")
FIXED = [
    ("ACG", "ACG", 0.5),
    ("TTG", "TAG", 2.0),
    ("CAT", "CAC", 1e-9),
    ("ACT", "GCT", 1.5),
    ("ACC", "ACC", 0.9),
    ("ACA", "TCA", 0.2),
]
RAGGED = [
    ("ACG", "ACG", 0.5),
    ("T", "A", 2.0),
    ("CA", "CC", 1e-9),
    ("AC", "GC", 1.5),
    ("A", "A", 0.9),
    ("ACT", "ACT", 0.2),
]


def make(cls, ragged=False, **more):
    args = {
        "max_len": 3,
        "min_len": 1 if ragged else None,
        "gen_net": "mlp",
        "gen_num_hidden": 16,
        "seed": 4,
        "gamma": 0.25,
        "kl_weight": 0.7,
        **more,
    }
    return cls(GeneratorArgs(**args), DNA)


def batch(ragged=False):
    return {"bulk_trajs": RAGGED if ragged else FIXED}


# the formulas, once more and by hand --------------------------------------------------------------------------------


class ByHand:
    """Every quantity of method 2.5-2.10 from the raw network outputs, string by string, in numpy."""

    def __init__(self, gen, log):
        self.gen, self.log, self.K, self.L = gen, log, 4, gen.args.max_len
        self.min_len = gen.args.min_len
        self.floor = gen.args.reward_exp_min
        self.known = {s: math.log(max(r, self.floor)) for s, _, r in log}
        self.M = self.K + (self.min_len is not None)
        self.seen = np.zeros((self.K, self.K), bool)  # which thought has become which letter
        for s, thought, _ in log:
            for a, m in zip(thought, s, strict=True):
                self.seen[DNA.alphabet.index(a), DNA.alphabet.index(m)] = True
        silent = ~self.seen.any(1)
        self.seen[silent, silent] = True  # a thought nobody has had becomes itself
        self.steps = [self.string(*entry) for entry in log]

    def outputs(self, prefix):
        with torch.no_grad():
            x = self.gen.forward([prefix + "A" * (self.L - len(prefix))], [len(prefix)])[0].double().numpy()
        legal = np.array(
            [len(prefix) < self.L] * self.K + ([len(prefix) >= self.min_len] if self.min_len is not None else [])
        )
        log_pi = np.full(self.M, -np.inf)
        if legal.any():
            log_pi[legal] = log_softmax(x[: self.M][legal])
        back = np.full(self.K, -np.inf)  # letters alone: STOP is never noisy
        if prefix:
            possible = self.seen[:, DNA.alphabet.index(prefix[-1])]
            back[possible] = log_softmax(x[self.M : self.M + self.K][possible])
        return log_pi, back, x[-1], legal

    def channel(self, prefix):
        state = self.gen.env.initial((1, 1))
        state[0, 0, : len(prefix)] = DNA.process([prefix])[0] if prefix else torch.zeros(0, dtype=torch.long)
        with torch.no_grad():
            table = self.gen.forward_dynamics.net.logits(state)[0, 0].double().numpy()
        return log_softmax(np.where(self.seen, table[: self.K, : self.K], -np.inf), 1)

    def end_flow(self, prefix, ended):
        return self.known[prefix] if ended else self.outputs(prefix)[2]

    def string(self, s, thought, reward):
        rows = []
        for t in range(len(s)):
            log_pi, _, flow, legal = self.outputs(s[:t])
            a, m = DNA.alphabet.index(thought[t]), DNA.alphabet.index(s[t])
            back = self.outputs(s[: t + 1])[1][a]
            ended = len(s) == self.L and t + 1 == self.L
            rows.append(
                self.row(
                    s[:t],
                    flow,
                    log_pi,
                    legal,
                    log_pi[a],
                    self.channel(s[:t])[a, m],
                    self.end_flow(s[: t + 1], ended),
                    back,
                )
            )
        if len(s) < self.L:  # STOP: exact, and it ends in the reward
            log_pi, _, flow, legal = self.outputs(s)
            rows.append(self.row(s, flow, log_pi, legal, log_pi[-1], 0.0, self.known[s], 0.0))
        return rows

    def row(self, prefix, flow, log_pi, legal, pf, k, end, back):
        share = -(np.exp(log_pi[legal]) * log_pi[legal]).sum() / math.log(legal.sum())
        return {
            "prefix": prefix,
            "F": flow,
            "pf": pf,
            "k": k,
            "end": end,
            "pa": back,
            "H": share,
            "state": self.state(prefix, flow, log_pi),
        }

    def state(self, prefix, flow, log_pi):
        """KL + gap^2 / 2 at a state, or None where a child's flow is not in the log."""
        p = logsumexp(log_pi[: self.K, None] + self.channel(prefix), axis=0).clip(min=-1e9)  # 0 log 0 = 0
        onward = []
        for letter in DNA.alphabet:
            child = prefix + letter
            if len(child) == self.L:
                if child not in self.known:
                    return None
                onward.append(self.known[child])
            else:
                onward.append(self.outputs(child)[2])
        if self.min_len is not None and len(prefix) >= self.min_len:
            if prefix not in self.known:
                return None
            p, onward = np.append(p, log_pi[-1]), [*onward, self.known[prefix]]
        total = logsumexp(onward)
        return (np.exp(p) * (p - (np.array(onward) - total))).sum() + 0.5 * (flow - total) ** 2

    def every(self):
        return [row for rows in self.steps for row in rows]

    def r(self, *gammas):
        h = [row["H"] for row in self.every()]
        high, low = np.quantile(h, 0.75) + 1e-6, np.quantile(h, 0.25) + 1e-6
        return np.mean([high / (g * high + (1 - g) * low) for g in gammas])

    def sdb(self, with_k=True):
        return np.mean([(x["F"] + x["pf"] + with_k * x["k"] - x["end"] - x["pa"]) ** 2 for x in self.every()])

    def kl(self):
        found = [x["state"] for x in self.every() if x["state"] is not None]
        assert 0 < len(found) < len(self.every())  # some states of the log are known in full, and not all
        return np.mean(found)

    def trajectory(self):
        return np.array(
            [
                sum(x["pf"] + x["k"] - x["pa"] for x in rows) - self.known[s]
                for rows, (s, _, _) in zip(self.steps, self.log, strict=True)
            ]
        )


def by_hand(gen, log):
    h = ByHand(gen, log)
    log_z = gen.model.log_z(None).item()
    return {
        StochasticDBGFlowNetGenerator: lambda: h.sdb(),
        DeterministicDBGFlowNetGenerator: lambda: h.sdb(with_k=False),
        TrajectoryBalanceGFlowNetGenerator: lambda: np.mean((log_z + h.trajectory()) ** 2),
        StochasticKLGFlowNetGenerator: lambda: np.var(h.trajectory()),
        StochasticKL2GFlowNetGenerator: lambda: h.sdb() + 0.7 * h.r(0.25) * h.kl(),
        StochasticKL3GFlowNetGenerator: lambda: h.sdb() + 0.7 * h.r(0.25, 0.5, 0.75) * h.kl(),
    }[type(gen)]()


@pytest.mark.parametrize("ragged", [False, True], ids=["fixed", "ragged"])
@pytest.mark.parametrize("cls", CLASSES)
def test_loss_is_the_formula(cls, ragged):
    gen = make(cls, ragged, gen_partition_init=1.3)
    b = batch(ragged)
    if cls in (StochasticKL2GFlowNetGenerator, StochasticKL3GFlowNetGenerator):
        b = {
            "bulk_trajs": [*b["bulk_trajs"], ("ACA", "ACA", 0.3), ("ACC", "ACC", 0.4), ("ACT", "ACT", 1.5)]
        }  # all of AC's children
        b["bulk_trajs"] = list({s: (s, t, r) for s, t, r in b["bulk_trajs"]}.values())
    loss, _ = gen.get_loss(b)
    assert loss.item() == pytest.approx(by_hand(gen, b["bulk_trajs"]), rel=2e-5)
    assert gen.train_step(b)["loss"] == pytest.approx(loss.item(), rel=1e-6)  # what is trained is what was shown
    assert gen.train_step(b)["loss"] != pytest.approx(loss.item(), rel=1e-6)


@pytest.mark.parametrize("ragged", [False, True], ids=["fixed", "ragged"])
def test_neighbours_differ_by_the_stated_term(ragged):
    """The same weights in each class: what one adds to the other is exactly what its name says."""
    full = {"bulk_trajs": [(s, s, r) for s, r in (("ACA", 0.3), ("ACC", 0.4), ("ACG", 0.5), ("ACT", 1.5))]}
    if ragged:
        full["bulk_trajs"] += [("AC", "GC", 0.7), ("T", "A", 0.9)]

    def published(cls, **more):  # with a head in all of them, so that all begin with the same weights
        form = {} if cls is DeterministicDBGFlowNetGenerator else {"gen_form": "published"}
        return make(cls, ragged, **form, **more)

    found = {cls: published(cls).get_loss(full) for cls in CLASSES}
    sdb, info = found[StochasticDBGFlowNetGenerator]
    _, det_info = found[DeterministicDBGFlowNetGenerator]
    mask = info["mask"].T
    gap = (info["ll_diff"] - det_info["ll_diff"]) * mask
    assert torch.allclose(gap, info["forward_model_logits"].T * mask, atol=1e-5)  # log P, and nothing else
    kl2, info2 = found[StochasticKL2GFlowNetGenerator]
    kl3, info3 = found[StochasticKL3GFlowNetGenerator]
    assert torch.equal(info2["ll_diff"], info["ll_diff"])
    added = (kl2 - sdb) / info2["r_gamma"]
    assert added.item() > 0
    assert ((kl3 - sdb) / info3["r_gamma"]).item() == pytest.approx(added.item(), rel=1e-5)
    assert info3["r_gamma"].item() == pytest.approx(
        np.mean(
            [
                published(StochasticKL2GFlowNetGenerator, gamma=g).get_loss(full)[1]["r_gamma"].item()
                for g in (0.25, 0.5, 0.75)
            ]
        )
    )
    plain = published(StochasticKL2GFlowNetGenerator, gamma=1.0).get_loss(full)[0]
    assert (plain - sdb).item() == pytest.approx(added.item(), rel=1e-5)  # gamma = 1 is the plain KL
    tb, kl1 = found[TrajectoryBalanceGFlowNetGenerator][0], found[StochasticKLGFlowNetGenerator][0]
    per_string = (found[TrajectoryBalanceGFlowNetGenerator][1]["ll_diff"] * mask).sum(0)
    residual = per_string - torch.tensor([math.log(max(r, 1e-3)) for *_, r in full["bulk_trajs"]])
    assert tb.item() == pytest.approx(residual.square().mean().item(), rel=1e-5)  # log Z starts at 0
    assert kl1.item() == pytest.approx(
        residual.var(unbiased=False).item(), rel=1e-5
    )  # the same, with the batch's own log Z


@pytest.mark.parametrize("ragged", [False, True], ids=["fixed", "ragged"])
@pytest.mark.parametrize("cls", CLASSES)
def test_info_has_the_documents_tensors_in_their_layout(cls, ragged):
    gen = make(cls, ragged)
    log = batch(ragged)["bulk_trajs"]
    _, info = gen.get_loss(batch(ragged))
    b, t, m = len(log), 3, 4 + ragged
    shapes = {
        "pol_logits": (b, t, m),
        "pol_back_logits": (b, t, m),
        "log_flows": (b, t + 1),
        "mask": (b, t),
        "forward_model_logits": (b, t),
        "end_log_flow": (t, b),
        "real_actions": (t, b),
        "ll_diff": (t, b),
        "r_gamma": (),
        "forward_dynamics_loss": (),
    }
    assert {k: tuple(info[k].shape) for k in shapes} == shapes
    alive = [len(s) + (len(s) < 3) for s, _, _ in log]
    assert info["mask"].sum(1).tolist() == alive
    for i, (s, thought, reward) in enumerate(log):
        for k, letter in enumerate(s):
            assert info["real_actions"][k, i].item() == DNA.alphabet.index(letter)
        assert info["end_log_flow"][alive[i] - 1, i].item() == pytest.approx(math.log(max(reward, 1e-3)), rel=1e-5)
        for k in range(alive[i] - 1):
            assert info["end_log_flow"][k, i] == info["log_flows"][i, k + 1]
        living = info["mask"][i].bool()
        assert torch.allclose(info["pol_logits"][i][living].exp().sum(-1), torch.ones(alive[i]), atol=1e-5)
        assert torch.allclose(info["pol_back_logits"][i][living].exp().sum(-1), torch.ones(alive[i]), atol=1e-5)
        actions = [DNA.alphabet.index(c) for c in thought] + [4] * (len(s) < 3)
        if cls in (StochasticDBGFlowNetGenerator, StochasticKL2GFlowNetGenerator, StochasticKL3GFlowNetGenerator):
            for k, a in enumerate(actions):  # the documents' own sum, term by term
                want = info["log_flows"][i, k] + info["pol_logits"][i, k, a] + info["forward_model_logits"][i, k]
                want = want - info["end_log_flow"][k, i] - info["pol_back_logits"][i, k, a]
                assert info["ll_diff"][k, i].item() == pytest.approx(want.item(), abs=1e-5)
    assert 1 <= info["r_gamma"].item() <= 4  # 1 / gamma
    assert info["forward_dynamics_loss"].item() == pytest.approx(gen.get_dynamics_loss().item())


@pytest.mark.parametrize("cls", CLASSES)
def test_flow_loss_leaves_the_dynamics_alone_and_the_dynamics_loss_the_policy(cls):
    gen = make(cls)
    loss, info = gen.get_loss(batch())
    flow = torch.autograd.grad(loss, list(gen.forward_dynamics.parameters()), allow_unused=True, retain_graph=True)
    assert all(g is None for g in flow)
    assert any(
        g is not None and float(g.abs().max()) > 0
        for g in torch.autograd.grad(loss, list(gen.model.parameters()), allow_unused=True)
    )
    fit = torch.autograd.grad(info["forward_dynamics_loss"], list(gen.forward_dynamics.parameters()), retain_graph=True)
    assert any(float(g.abs().max()) > 0 for g in fit)
    assert all(
        g is None
        for g in torch.autograd.grad(info["forward_dynamics_loss"], list(gen.model.parameters()), allow_unused=True)
    )


@pytest.mark.parametrize("cls", CLASSES)
def test_one_string_is_a_batch(cls):
    gen = make(cls)
    one = {"bulk_trajs": [("ACG", "ACG", 0.5)]}
    loss, _ = gen.get_loss(one)
    assert bool(loss.isfinite())
    found = gen.train_step(one)
    assert found["finite"] == 1
    assert all(math.isfinite(v) for v in found.values())


def test_kl_term_counts_only_states_whose_children_are_all_known():
    gen = make(StochasticKL2GFlowNetGenerator)
    sdb = make(StochasticDBGFlowNetGenerator)
    partial = {"bulk_trajs": [("ACA", "ACA", 0.3), ("ACC", "ACC", 0.4)]}
    hand = ByHand(gen, partial["bulk_trajs"])
    counted = [x["state"] for x in hand.every() if x["state"] is not None]
    assert len(counted) == 4  # the root and "A", twice each; "AC" has children without a reward
    loss, _ = gen.get_loss(partial)
    added = loss - sdb.get_loss(partial)[0]
    assert added.item() == pytest.approx(0.7 * hand.r(0.25) * np.mean(counted), rel=1e-4)
    rest = [("ACG", "ACG", 0.5), ("ACT", "ACT", 1.5)]
    gen.get_loss({"bulk_trajs": rest})  # now the log knows them all
    whole = [x["state"] for rows in ByHand(gen, [*partial["bulk_trajs"], *rest]).steps[:2] for x in rows]
    more = gen.get_loss(partial)[0] - sdb.get_loss(partial)[0]
    assert more.item() == pytest.approx(0.7 * hand.r(0.25) * np.mean(whole), rel=1e-4)


def test_what_the_log_never_showed_is_impossible_until_it_does():
    """Without noise P is the identity at once, the backward law has nothing to choose, and SDB is deterministic DB."""
    quiet = {"bulk_trajs": [("ACG", "ACG", 0.5), ("TTG", "TTG", 2.0)]}
    gen, det = make(StochasticDBGFlowNetGenerator, gen_form="published"), make(DeterministicDBGFlowNetGenerator)
    (loss, info), (plain, _) = gen.get_loss(quiet), det.get_loss(quiet)
    assert info["forward_model_logits"].abs().max().item() == 0
    assert loss.item() == plain.item()
    assert torch.equal(info["pol_back_logits"].exp().argmax(-1), info["real_actions"].T)
    _, info = gen.get_loss({"bulk_trajs": [("ACT", "ACG", 0.5)]})  # G became T, once
    assert info["forward_model_logits"][0].tolist()[:2] == [0, 0]
    assert info["forward_model_logits"][0, 2].item() < -0.1
    assert bool(info["ll_diff"].abs().max() < 100)


def test_a_string_measured_twice_has_the_geometric_mean():
    gen = make(StochasticDBGFlowNetGenerator)
    traj = trajectories(gen.env, DNA, [("ACG", "ACG", 0.5), ("ACG", "ACG", 2.0), ("TTT", "TTT", 0.0)])
    book = LogBook(gen.env, 1e-3)
    book.add(traj.states[-1], traj.score)
    assert book(gen.env.encode(["ACG", "TTT", "AAA"])).tolist() == pytest.approx([1.0, 1e-3, math.nan], nan_ok=True)
    assert book.known == pytest.approx({"ACG": 1.0, "TTT": 1e-3})
    copy = LogBook(gen.env, 1e-3)
    copy.load_state_dict(book.state_dict())
    assert copy.known == book.known


# args, tokenizer, log -------------------------------------------------------------------------------------------------


def test_a_namespace_does_as_well_and_what_no_generator_uses_is_refused():
    given = argparse.Namespace(gen_learning_rate=0.01, max_len=3, gamma=0.75, gen_output_coef=1)
    gen = StochasticKL2GFlowNetGenerator(given, DNA)
    assert gen.args == GeneratorArgs(gen_learning_rate=0.01, max_len=3, gamma=0.75)
    assert gen.trainer.policy_flat.lr == pytest.approx(0.01)
    assert GeneratorArgs.of(None) == GeneratorArgs()
    assert GeneratorArgs.of({"gammas": [0.5, 1.0]}).gammas == (0.5, 1.0)
    for name, value in (("wandb", "off"), ("gen_output_coef", 10), ("gen_do_explicit_Z", 1)):
        with pytest.raises(UserError, match=name):
            GeneratorArgs.of({name: value})
    with pytest.raises(UserError, match=r"did you mean .gen_num_hidden"):
        GeneratorArgs.of({"gen_num_hiden": 64})


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        ({"gamma": 0.0}, "gamma"),
        ({"gammas": (0.5, 2.0)}, "gamma"),
        ({"stick": 1.5}, "stick"),
        ({"max_len": 0}, "max_len"),
        ({"min_len": 9}, "min_len"),
        ({"reward_exp_min": 0.0}, "reward_exp_min"),
        ({"gen_clip": float("nan")}, "gen_clip"),
        ({"gen_net": "rnn"}, "gen_net"),
        ({"gen_form": "joined"}, "gen_form"),
        ({"thought_state": True, "context_width": 2}, "context_width"),
        ({"vocab_size": 5}, "vocab_size"),
        ({"device": "cuda:99"}, "CUDA|device"),
    ],
)
def test_impossible_settings_are_refused_by_name(bad, word):
    if bad.get("device") and torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(UserError, match=word):
        StochasticDBGFlowNetGenerator(GeneratorArgs(**bad), DNA)


def test_tokenizer_round_trip_and_padding():
    tokens = DNA.process(["ACGT", "T", [2, 1]])
    assert tokens.tolist() == [[0, 1, 2, 3], [3, 4, 4, 4], [2, 1, 4, 4]]
    assert DNA.decode(tokens) == ["ACGT", "T", "GC"]
    assert len(DNA) == 4
    with pytest.raises(UserError, match="'X' at position 1"):
        DNA.process(["AX"])
    with pytest.raises(UserError, match="token 4"):
        DNA.process([[4]])
    with pytest.raises(UserError, match="alphabet"):
        Tokenizer("AAB")


@pytest.mark.parametrize(
    ("log", "word"),
    [
        ([], "empty"),
        ([("ACG", "ACG")], "entry 0"),
        ([("ACG", "AC", 1.0)], "thought"),
        ([("ACGT", "ACGT", 1.0)], "max_len"),
        ([("AC", "AC", 1.0)], "min_len"),
        ([("ACG", "ACX", 1.0)], "'X'"),
        ([("ACG", "ACG", float("nan"))], "reward"),
    ],
)
def test_a_faulty_log_is_named(log, word):
    with pytest.raises(UserError, match=word):
        make(StochasticDBGFlowNetGenerator).get_loss({"bulk_trajs": log})
    with pytest.raises(UserError, match="bulk_trajs"):
        make(StochasticDBGFlowNetGenerator).get_loss({"trajs": log})


def test_tokens_and_texts_are_the_same_log():
    texts, _ = make(StochasticDBGFlowNetGenerator).get_loss(batch())
    numbers = [([*DNA.encode(s)], [*DNA.encode(t)], r) for s, t, r in FIXED]
    assert make(StochasticDBGFlowNetGenerator).get_loss({"bulk_trajs": numbers})[0].item() == texts.item()


def test_replay_buffer_gives_back_what_was_pushed():
    buffer = ReplayBuffer(3, DNA, capacity=4, min_len=1)
    with pytest.raises(UserError, match="empty"):
        buffer.sample(1)
    buffer.push(RAGGED[:3])
    assert len(buffer) == 3
    strings, thoughts, rewards = buffer.sample(200)
    assert {(s, t, round(r, 6)) for s, t, r in zip(strings, thoughts, rewards, strict=True)} == {
        (s, t, round(r, 6)) for s, t, r in RAGGED[:3]
    }
    buffer.push(RAGGED[3:])
    assert len(buffer) == 4  # the oldest have made room


def test_off_policy_dynamics_learn_from_the_buffer():
    gen = make(
        StochasticDBGFlowNetGenerator,
        dynamics_off_pol=True,
        dynamics_off_pol_rounds=2,
        dynamics_sample_size=8,
        dynamics_lr=0.02,
    )
    assert gen.get_loss(batch())[1]["forward_dynamics_loss"] is None
    with pytest.raises(UserError, match="buffer"):
        gen.get_dynamics_loss()
    before = [gen.train_step(batch())["dynamics_loss"] for _ in range(5)]
    after = [gen.train_step(batch())["dynamics_loss"] for _ in range(60)][-5:]
    assert len(gen.dynamics_buffer) == 65 * len(FIXED)
    assert np.mean(after) < np.mean(before) - 0.1
    assert gen.get_dynamics_loss().item() < 1.2
    with pytest.raises(UserError, match="no batch"):
        make(StochasticDBGFlowNetGenerator).get_dynamics_loss()


# sampling, saving -----------------------------------------------------------------------------------------------------


def test_forward_reads_prefixes():
    gen = make(StochasticDBGFlowNetGenerator)
    whole = gen(["ACG", "ATG"], [1, 1])
    assert whole.shape == (2, 2 * 4 + 1)
    assert torch.allclose(whole[0], whole[1])  # both are the prefix "A"
    assert torch.allclose(gen(DNA.process(["A"])), whole[:1])
    assert not torch.allclose(gen(["ACG"]), whole[:1])
    with pytest.raises(UserError, match="shape"):
        gen(["ACGT"])


def test_samples_follow_the_policy_through_the_noise():
    gen = make(StochasticDBGFlowNetGenerator, ragged=True)
    drawn = gen.sample(50)
    assert len(drawn) == 50
    assert all(1 <= len(s) <= 3 and set(s) <= set("ACGT") for s in drawn)
    pairs = gen.sample_thoughts(2000, Slip(0.4))
    assert all(len(s) == len(t) for s, t in pairs)
    letters = [(a, b) for s, t in pairs for a, b in zip(s, t, strict=True)]
    missed = sum(a != b for a, b in letters)
    assert chisquare([missed, len(letters) - missed], [0.3 * len(letters), 0.7 * len(letters)]).pvalue > 1e-4


@pytest.mark.parametrize("cls", [StochasticDBGFlowNetGenerator, StochasticKL2GFlowNetGenerator])
def test_a_saved_generator_goes_on_as_if_it_had_never_stopped(tmp_path, cls):
    gen = make(cls, entropy_average=0.9)
    for _ in range(3):
        gen.train_step(batch())
    file = gen.save(tmp_path / "generator.safetensors")
    noise = torch.get_rng_state()
    other = cls.load(file)
    assert torch.equal(torch.get_rng_state(), noise)
    assert other.args == gen.args
    assert other.trainer.steps_done == 3
    assert other.book.known == gen.book.known
    mine, its = gen.train_step(batch()), other.train_step(batch())
    assert mine == its
    assert all(torch.equal(a, b) for a, b in zip(gen.parameters(), other.parameters(), strict=True))
    with pytest.raises(UserError, match=cls.__name__):
        DeterministicDBGFlowNetGenerator.load(file)


def test_a_file_of_an_earlier_version_is_read_as_the_published_form(tmp_path):
    """Files from before there was a choice hold a head, and no word about form, trunk or model of the noise."""
    gen = make(StochasticDBGFlowNetGenerator, gen_form="published")
    gen.train_step(batch())
    found = runs.load_checkpoint(gen.save(tmp_path / "new.safetensors"))
    of_then = ("max_len", "gen_num_hidden", "gen_num_layers", "seed", "gamma", "kl_weight", "gen_learning_rate")
    args = {name: found.scalars["args"][name] for name in of_then}
    tensors = {name: x for name, x in found.tensors.items() if name != "book.exponent"}
    (tmp_path / "old.safetensors").write_bytes(runs.pack(tensors, {**found.scalars, "args": args}))
    again = StochasticDBGFlowNetGenerator.load(tmp_path / "old.safetensors")
    assert again.args.gen_form == "published"
    assert again.train_step(batch())["loss"] == pytest.approx(gen.train_step(batch())["loss"], rel=1e-6)


# the worker -----------------------------------------------------------------------------------------------------------


def worker(**more):
    calls = []

    def oracle(strings):
        calls.append(len(strings))
        return [s.count("A") / 3 for s in strings]

    return RolloutWorker(GeneratorArgs(max_len=3, **{"random_action_prob": 0.001, **more}), oracle, DNA), calls


def test_l2r_is_the_documents_table_and_the_engines_power():
    w, _ = worker(reward_exp=3.0, exp_ramping_factor=3.0)
    for t, exponent in ((0, 1.0), (3, 2.0), (27, 2.8), (100, 2.9417), (1000, 2.994)):
        assert w.l2r(0.5, t) == pytest.approx(0.5**exponent, rel=1e-3)
        assert math.log(w.l2r(0.5, t)) == pytest.approx(
            float(Power(3.0, 1e-3, 3.0)(torch.tensor(0.5), None, t)), rel=1e-6
        )
    constant, _ = worker(reward_exp=3.0, exp_ramping_factor=0.0)
    assert constant.l2r(0.5) == pytest.approx(0.125)
    assert constant.l2r(-1.0) == 0


def test_worker_asks_the_oracle_once_a_batch_and_makes_a_log_to_train_on():
    w, calls = worker(gen_episodes_per_step=20, stick=0.25)
    gen = make(StochasticDBGFlowNetGenerator)
    made = w.execute_train_episode_batch(gen, it=3)
    assert calls == [20]
    assert len(made["bulk_trajs"]) == len(made["visited"]) == 20
    for (s, t, r), (s2, t2, r2, score) in zip(made["bulk_trajs"], made["visited"], strict=True):
        assert (s, t, r) == (s2, t2, r2)
        assert score == pytest.approx(s.count("A") / 3)
        assert r == pytest.approx(score**2.0)
    assert gen.train_step(made)["finite"] == 1
    with pytest.raises(UserError, match="Tokenizer"):
        RolloutWorker(w.args, w.oracle, Tokenizer("ACGU")).rollout(gen, 2)


def test_stick_is_the_rate_at_which_the_world_does_not_listen():
    gen = make(StochasticDBGFlowNetGenerator)
    exact, _ = worker(stick=0.0)
    assert all(s == t for s, t, _ in exact.rollout(gen, 100))
    noisy, _ = worker(stick=0.5)
    letters = [(a, b) for s, t, _ in noisy.rollout(gen, 3000) for a, b in zip(s, t, strict=True)]
    missed = sum(a != b for a, b in letters)
    want = 0.5 * 3 / 4
    assert chisquare([missed, len(letters) - missed], [want * len(letters), (1 - want) * len(letters)]).pvalue > 1e-4


def test_temperature_and_random_actions_do_what_they_say():
    gen = make(StochasticDBGFlowNetGenerator)
    with torch.no_grad():
        gen.model.head.bias[..., 0] = 3.0
    p = gen([""], [0])[0, :4].detach().double()

    def first_letters(**more):
        w, _ = worker(stick=0.0, **more)
        drawn = w.rollout(gen, 6000)
        return np.array([sum(t[0] == c for _, t, _ in drawn) for c in "ACGT"])

    for temperature in (1.0, 2.0):
        want = (p / temperature).softmax(0).numpy() * 6000
        assert chisquare(first_letters(temperature=temperature, random_action_prob=0.0), want).pvalue > 1e-4
    want = (0.5 * p.softmax(0) + 0.125).numpy() * 6000
    assert chisquare(first_letters(random_action_prob=0.5), want).pvalue > 1e-4


def test_entropy_exploration_flattens_by_the_ratio_of_earlier_rollouts():
    gen = make(StochasticDBGFlowNetGenerator)
    w, _ = worker(stick=0.0, random_action_prob=0.0, entropy_exploration=True, gamma=0.25)
    assert float(w._temper()) == 1  # nothing is known yet
    with torch.no_grad():
        gen.model.trunk.layers[0].weight.mul_(30)  # states that differ in entropy
        gen.model.head.weight.mul_(30)
    w.rollout(gen, 500)
    assert 1.05 < float(w._temper()) <= 4


def test_modes_by_the_documents_name():
    assert calculate_num_modes(["abc", "abd", "xyz", "xzy", "abc"]) == 2


def test_the_pages_examples_run_as_written(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs/source-documents.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, re.S)
    assert len(blocks) == 2
    monkeypatch.chdir(tmp_path)
    for block in blocks:
        exec(compile(block, "docs/source-documents.md", "exec"), {})
    assert (tmp_path / "generator.safetensors").exists()


def test_a_held_out_batch_is_looked_at_and_not_learned_from():
    made = StochasticKL2GFlowNetGenerator(GeneratorArgs(max_len=2), DNA)
    made.get_loss({"bulk_trajs": [("AC", "AC", 1.0)]})
    before = {k: v.clone() for k, v in made.state_dict().items()}
    made.eval()
    made.get_loss({"bulk_trajs": [("GT", "GG", 5.0)]})
    after = made.state_dict()
    assert all(torch.equal(before[k], after[k]) for k in before)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda g: g.forward(torch.tensor([[9, 9]])), "tokens from 9 to 9"),
        (lambda g: g.forward(["AC"], [5]), "lens is"),
        (lambda g: g.get_loss({"bulk_trajs": [("AC", "AC", None)]}), "reward of string 0 is None"),
        (lambda g: g.get_loss({"bulk_trajs": [("AC", None, 1.0)]}), "thought string 0 is None"),
    ],
)
def test_what_a_laboratory_may_leave_out_is_named(call, words):
    with pytest.raises(UserError, match=words):
        call(StochasticDBGFlowNetGenerator(GeneratorArgs(max_len=2), DNA))
