"""Longer strings: bit sequences with known modes, GC content on demand, peptides, RNA; and how memory grows with length."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from stochflow.errors import UserError
from stochflow.law.exact import Graph, target_law
from stochflow.law.task_modes import task_modes
from stochflow.learn.evaluate import evaluate
from stochflow.learn.objectives import TrajectoryBalance
from stochflow.learn.rollout import rollout
from stochflow.nets.mlp import MLP
from stochflow.nets.policy import Policy
from stochflow.nets.transformer import Transformer
from stochflow.noise.dynamics import Known
from stochflow.runs.tasks import bits_task, gc_task, peptide_task, rna_task
from stochflow.scores.landscapes import (
    BitModes,
    GCContent,
    PeptideProxy,
    RNAFold,
    bit_alphabet,
    peptide_features,
    peptides,
)
from stochflow.scores.rewards import Linear
from stochflow.types import Task, World
from stochflow.worlds.channels import Slip
from stochflow.worlds.check import check_env
from stochflow.worlds.check_task import check_oracle
from stochflow.worlds.conditioned import Conditioned
from stochflow.worlds.strings import Strings

ROOT = Path(__file__).parents[2]

# bits ----------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [1, 2, 4, 6, 8, 10])
def test_bit_sequences_of_120(bits):
    task = bits_task(bits=bits)
    env, oracle = task.env, task.oracle
    assert env.length * bits == 120
    assert env.tokens == 2**bits == len(set(bit_alphabet(bits)))
    assert oracle.mode_bits.shape == (60, 120)
    assert len(oracle.mode_bits.unique(dim=0)) == 60
    place = 2 ** torch.arange(bits - 1, -1, -1)
    modes = (oracle.mode_bits.view(60, env.length, bits) * place).sum(-1)
    assert torch.equal(oracle.unpack(modes), oracle.mode_bits)
    assert torch.equal(oracle(modes), torch.ones(60))
    assert oracle.modes(modes).all()
    assert oracle.found(modes[:7], 0) == 7


def test_the_score_is_the_hamming_distance_to_the_nearest_mode():
    task = bits_task(length=16, bits=2, modes=5)
    state = torch.randint(4, (50, 8))
    bits = task.oracle.unpack(state)
    want = torch.tensor([[int((a != b).sum()) for b in task.oracle.mode_bits] for a in bits]).min(1).values
    torch.testing.assert_close(task.oracle(state), 1 - want / 16)
    torch.testing.assert_close(task.reward(task.oracle(state), state, None), (16 - want).float(), atol=1e-5, rtol=0)
    one_off = task.env.encode(task.env.decode(state))
    assert torch.equal(one_off, state)


def test_modes_of_a_small_bit_world_are_listed():
    task = bits_task(length=8, bits=2)
    assert len(task.oracle.mode_bits) == 5  # one byte has five words, however many modes are asked for
    at = task_modes(task)
    texts = task.env.decode(task.env.all_states()[at])
    words = {
        "".join(str(int(w[i : i + 2], 2)) for i in range(0, 8, 2))
        for w in ("00000000", "11111111", "11110000", "00001111", "00111100")
    }
    assert set(texts) == words
    check_oracle(task)


def test_the_same_modes_every_time():
    env = Strings(bit_alphabet(4), 30)
    assert torch.equal(BitModes(env, 4, 60, 3).mode_bits, BitModes(env, 4, 60, 3).mode_bits)
    assert not torch.equal(BitModes(env, 4, 60, 3).mode_bits, BitModes(env, 4, 60, 4).mode_bits)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: bits_task(length=121), "multiple of 8"),
        (lambda: bits_task(length=16, bits=3), "multiple of 8 and of bits = 3"),
        (lambda: bits_task(length=128), "from 8 to 120"),
        (lambda: bits_task(bits=11), "1 to 10 bits"),
        (lambda: bits_task(modes=0), "1 or more"),
        (lambda: bits_task(beta=0.0), "above 0"),
        (lambda: gc_task(targets="0.2,high"), "numbers with commas"),
        (lambda: gc_task(targets="1.2"), "between 0 and 1"),
        (lambda: gc_task(betas="-1"), "at least 0"),
        (lambda: GCContent(Conditioned(Strings("ACGT", 4), torch.zeros(2, 3))), "3 wide: give two columns"),
        (lambda: peptide_task(min_length=51), "between 0 and length = 50"),
        (lambda: PeptideProxy(Strings("ACGT", 8)), "build it with peptide_task"),
        (lambda: RNAFold("((..)"), "1 brackets that are not closed"),
        (lambda: RNAFold("(x)"), "position 1"),
        (lambda: RNAFold("())("), "position 2"),
    ],
)
def test_what_cannot_be_built_is_named(make, words):
    with pytest.raises(UserError, match=words):
        make()


# a condition ---------------------------------------------------------------------------------------------------------------


def test_gc_content_and_temperature_are_those_of_the_row():
    task = gc_task(length=4, targets="0.25,1", betas="2,5")
    env = task.env
    assert env.contexts.tolist() == [[0.25, 2.0], [0.25, 5.0], [1.0, 2.0], [1.0, 5.0]]
    check_env(env)
    text = env.inner.encode(["AAAA", "GATA", "GCGC"])
    for row, (target, beta) in enumerate(env.contexts.tolist()):
        state = torch.cat([torch.full((3, 1), row), text], 1)
        score = task.oracle(state)
        torch.testing.assert_close(score, 1 - (torch.tensor([0.0, 0.25, 1.0]) - target).abs())
        torch.testing.assert_close(task.reward(score, state, None), beta * score)


def test_each_row_has_its_own_partition_function():
    task = gc_task(length=3, targets="0,0.5", betas="1,6")
    for row, (target, beta) in enumerate(task.env.contexts.tolist()):
        rewards = []
        for text in itertools.product("ACGT", repeat=3):
            share = sum(c in "GC" for c in text) / 3
            rewards.append(beta * (1 - abs(share - target)))
        want = float(torch.tensor(rewards, dtype=torch.float64).logsumexp(0))
        assert target_law(Graph(task.env, row), task).log_z == pytest.approx(want, abs=1e-5)


# peptides --------------------------------------------------------------------------------------------------------------------


def test_the_shipped_peptides_are_what_the_page_says():
    sequences, active = peptides()
    assert len(sequences) == len(active) == 4346
    assert int(active.sum()) == 2266
    assert sequences == sorted(set(sequences))
    assert all(8 <= len(s) <= 50 for s in sequences)
    page = (ROOT / "src/stochflow/scores/data/README.md").read_text()
    import hashlib

    for name in ("peptides.npz", "peptide_proxy.npz"):
        assert hashlib.sha256((ROOT / "src/stochflow/scores/data" / name).read_bytes()).hexdigest() in page


def test_the_proxy_tells_the_two_sets_apart():
    task = peptide_task(min_length=8)
    sequences, active = peptides()
    score = task.oracle(task.env.encode(sequences)).numpy()
    assert ((score >= 0) & (score <= 1)).all()
    order = np.argsort(score)
    rank = np.empty(len(score))
    rank[order] = np.arange(1, len(score) + 1)
    n = int(active.sum())
    auc = (rank[active].sum() - n * (n + 1) / 2) / (n * (len(score) - n))
    assert auc > 0.9  # on what it was trained on; the page says what it does on families it has not seen
    check_oracle(task)


def test_peptide_features_are_shares():
    env = Strings("ACDEFGHIKLMNPQRSTVWY", 50, 1)
    x = peptide_features(env.encode(["AACA"]), 20)[0]
    assert x[:20].tolist() == pytest.approx([3.0, 1.0] + [0.0] * 18)  # 4 times the shares 3/4, 1/4
    pairs = x[20:420].view(20, 20)
    assert pairs[:2, :2].flatten().tolist() == pytest.approx([20 / 3, 20 / 3, 20 / 3, 0.0])
    assert float(pairs.sum()) == pytest.approx(20.0)
    assert float(x[-1]) == pytest.approx(4 / 50)


def test_peptides_of_mixed_lengths_are_built_in_one_batch():
    task = peptide_task()
    policy = Policy(task.env, Transformer(16, 2, 1))
    with torch.no_grad():
        policy.head.bias[..., 20] = 1.0
    traj = rollout(task, policy, 64)
    size = task.env.lengths(traj.states[-1])
    assert int(size.min()) >= 10
    assert len(size.unique()) > 5
    assert torch.isfinite(task.oracle(traj.states[-1])).all()


def test_the_build_script_reads_only_what_it_knows(tmp_path):
    spec = importlib.util.spec_from_file_location("build_peptides", ROOT / "scripts" / "build_peptides.py")
    script = importlib.util.module_from_spec(spec)
    before = list(sys.path)
    try:
        spec.loader.exec_module(script)
    finally:
        sys.path[:] = before
    (tmp_path / "wrong.whl").write_bytes(b"no wheel")
    with pytest.raises(SystemExit, match=r"not modlamp 4.3.3"):
        script.read(tmp_path / "wrong.whl")
    assert script.auc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([False, False, True, True])) == pytest.approx(0.75)


# RNA -------------------------------------------------------------------------------------------------------------------------


@pytest.mark.extra
def test_rna_folds_into_its_structure():
    pytest.importorskip("RNA")
    task = rna_task(structure="((((....))))")
    good, bad = task.env.encode(["GCGCAAAAGCGC"]), task.env.encode(["AAAAAAAAAAAA"])
    assert float(task.oracle(good)) > 0.9
    assert float(task.oracle(bad)) < 0.5
    calls = task.oracle.calls
    task.oracle(torch.cat([good, bad, good]))
    assert task.oracle.calls == calls == 2  # each sequence is folded once
    assert task.oracle.hits >= 3


@pytest.mark.extra
def test_the_score_is_the_expected_share_of_right_bases():
    """Beside the base-pair probabilities themselves."""
    RNA = pytest.importorskip("RNA")
    structure, text = "(((...)))..", "GCAAAAUGCAA"
    fold = RNA.fold_compound(text)
    fold.pf()
    pair = torch.tensor(fold.bpp(), dtype=torch.float64)[1:, 1:]
    pair = pair + pair.T
    table = RNA.ptable(structure)[1:]
    right = [float(pair[i, j - 1]) if j else 1 - float(pair[i].sum()) for i, j in enumerate(table)]
    assert RNAFold(structure)([text])[0] == pytest.approx(sum(right) / len(right), abs=1e-4)


def test_without_viennarna_the_remedy_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "RNA", None)
    with pytest.raises(UserError, match=r"pip install 'stochflow\[rna\]'"):
        rna_task()


# memory ----------------------------------------------------------------------------------------------------------------------


def kept(net, length: int) -> int:
    """Bytes that autograd holds for one batch of 4."""
    env = Strings("ACGT", length)
    task = Task(env, Slip(0.1), lambda s: s[..., 0], Linear())
    policy, dynamics = Policy(env, net), Known(env, task.channel)
    traj = rollout(task, policy, 4)
    seen = {}

    def note(x):
        if not isinstance(x, torch.nn.Parameter):
            seen[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        terms = evaluate(task, policy, dynamics, traj, None, TrajectoryBalance().needs)
        TrajectoryBalance().loss(terms, World(task, policy, dynamics, traj, None, lambda s, w: None)).sum()
    return sum(seen.values())


def test_training_memory_of_the_transformer_is_linear_in_length():
    sizes = {n: kept(Transformer(16, 2, 1), n) for n in (15, 30, 60, 120)}
    for n in (15, 30, 60):
        assert sizes[2 * n] / sizes[n] < 2.1
    assert kept(MLP(16, 1), 120) / kept(MLP(16, 1), 60) < 2.1  # narrow: its first layer is a running sum
    assert (
        kept(MLP(128, 1), 120) / kept(MLP(128, 1), 60) > 2.1
    )  # wide for its strings: fed whole padded strings, one a prefix


def test_replay_is_linear_in_length():
    from stochflow.learn.buffer import Buffer

    def size(n: int) -> int:
        return sum(b.numel() * b.element_size() for b in Buffer(Strings("ACGT", n), 1000).buffers())

    assert size(120) / size(60) < 2
    assert size(120) / 1000 < 500  # bytes per trajectory: a million strings of 120 are half a gigabyte
