"""A synthesiser's noise from pairs: counts where lengths agree, all alignments where they do not."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy.stats import binomtest

from stochflow.cli.commands import main
from stochflow.errors import UserError
from stochflow.worlds.channels import Slip
from stochflow.worlds.confusion import read_table
from stochflow.worlds.pairs import _Counts, _expected, estimate, read_pairs
from stochflow.worlds.synthesis import Synthesis

ROUGH = [[0.94, 0.03, 0.02, 0.01], [0.02, 0.95, 0.01, 0.02], [0.05, 0.0, 0.9, 0.05], [0.0, 0.0, 0.08, 0.92]]


def pairs(made: Synthesis, count: int, length: int, seed: int = 0) -> tuple[list[str], list[str]]:
    dice = np.random.default_rng(seed)
    orders = ["".join(dice.choice(list(made.alphabet), length)) for _ in range(count)]
    return orders, [made.make([x], 1, seed * 100_003 + i)[0][0] for i, x in enumerate(orders)]


def test_where_lengths_agree_it_counts_letters():
    found = estimate(["ACGT", "AACC", "GGTT"], ["ACGA", "ATCC", "GGTT"])
    assert found.table.tolist() == [[2 / 3, 0, 0, 1 / 3], [0, 1, 0, 0], [0, 0, 1, 0], [1 / 3, 0, 0, 2 / 3]]
    assert found.counts.tolist() == [3, 3, 3, 3]
    assert found.insertion.value == found.deletion.value == 0
    wanted = binomtest(1, 3).proportion_ci(0.95, method="exact")
    assert (float(found.low[0, 3]), float(found.high[0, 3])) == pytest.approx((wanted.low, wanted.high))
    assert float(found.low[1, 0]) == 0
    assert float(found.high[1, 1]) == 1
    assert found.deletion.high == pytest.approx(binomtest(0, 12).proportion_ci(0.95, method="exact").high)


def test_expected_counts_are_those_of_every_way():
    """Every way in which a string can have come about, listed: each cycle makes a letter or none, and one more or none."""
    made = Synthesis("ACGT", ROUGH, 0.1, 0.2)
    order, seen = "ACA", "AGA"
    kept, deleted, inserted, total = np.zeros((4, 4)), 0.0, 0.0, 0.0
    one = [("", "")] + [(a, "") for a in "ACGT"] + [("", b) for b in "ACGT"] + [(a, b) for a in "ACGT" for b in "ACGT"]
    for way in itertools.product(one, repeat=3):
        if "".join(a + b for a, b in way) != seen:
            continue
        p = 1.0
        for x, (a, b) in zip(order, way, strict=True):
            p *= 0.8 * ROUGH["ACGT".index(x)]["ACGT".index(a)] if a else 0.2
            p *= 0.1 / 4 if b else 0.9
        total += p
        for x, (a, b) in zip(order, way, strict=True):
            deleted += p * (not a)
            inserted += p * bool(b)
            if a:
                kept["ACGT".index(x), "ACGT".index(a)] += p
    from collections import Counter

    found = _expected(made, Counter({(order, seen): 2}))
    assert isinstance(found, _Counts)
    assert found.log_likelihood == pytest.approx(2 * np.log(total))
    assert found.deleted == pytest.approx(2 * deleted / total)
    assert found.inserted == pytest.approx(2 * inserted / total)
    assert found.kept == pytest.approx(2 * kept / total)
    assert found.cycles == 6


def test_it_finds_the_noise_that_made_the_pairs():
    truth = Synthesis("ACGT", ROUGH, 0.02, 0.04)
    ordered, sequenced = pairs(truth, 400, 30)
    assert len({len(y) for y in sequenced}) > 3
    found = estimate(ordered, sequenced)
    assert found.low.sub(1e-9).le(truth.table).logical_and(found.high.add(1e-9).ge(truth.table)).sum() >= 14  # of 16
    assert found.insertion.low < 0.02 < found.insertion.high
    assert found.deletion.low < 0.04 < found.deletion.high
    assert found.log_likelihood >= float(truth.log_probs(ordered, sequenced).mean()) - 1e-9  # it is the maximum
    assert found.log_likelihood == pytest.approx(float(found.synthesis().log_probs(ordered, sequenced).mean()))


def test_the_intervals_cover_what_they_say():
    """Clopper and Pearson's cover at least their level; here 95 % of 16 numbers in 40 experiments."""
    truth = Synthesis("ACGT", Slip(0.1))
    inside = 0
    for seed in range(40):
        found = estimate(*pairs(truth, 20, 10, seed))
        inside += int(((found.low <= truth.table) & (truth.table <= found.high)).sum())
    assert inside >= 0.95 * 640 - 3 * (640 * 0.05 * 0.95) ** 0.5


def test_deletions_alone_leave_no_trace_of_other_errors():
    """The start of the search has errors of every kind; those that no pair shows are gone at its end."""
    found = estimate(["ACGTACGT"] * 9, ["ACGTACGT"] * 6 + ["ACGTCGT"] * 3)
    assert found.deletion.value == pytest.approx(3 / 72)
    assert found.insertion.value == 0
    assert torch.equal(found.table, torch.eye(4, dtype=torch.float64))
    assert "none seen" in str(found)


def test_pairs_with_unread_letters_are_left_out_and_counted():
    found = estimate(["ACGT"] * 3, ["ACGT", "ANGT", "ACGA"])
    assert (found.pairs, found.left_out) == (2, 1)


@pytest.mark.parametrize(
    ("ordered", "sequenced", "words"),
    [
        (["AC"], ["AC", "AC"], "1 ordered and 2 sequenced"),
        (["AX"], ["AC"], "pair 1 orders 'AX'"),
        (["ACG"], ["ACG"], "no pair orders the letter T"),
        (["ACGT"], ["NNNN"], "none of 1 pairs"),
    ],
)
def test_what_makes_no_sense_is_refused(ordered, sequenced, words):
    with pytest.raises(UserError, match=words):
        estimate(ordered, sequenced)


def test_from_file_to_file(tmp_path, capsys):
    source, out = tmp_path / "pairs.csv", tmp_path / "noise.csv"
    truth = Synthesis("ACGT", ROUGH, 0.02, 0.02)
    ordered, sequenced = pairs(truth, 60, 20)
    source.write_text(
        "well,ordered,sequenced\n"
        + "".join(f"{i},{x},{y}\n" for i, (x, y) in enumerate(zip(ordered, sequenced, strict=True)))
    )
    assert main(["design", "noise", str(source), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "from 60 pairs" in said
    assert "insertions a letter: 0.0" in said
    assert "made as ordered" in said
    found = estimate(ordered, sequenced)
    assert torch.allclose(torch.tensor(read_table(out, "TGCA").rows, dtype=torch.float64).flip(0, 1), found.table)
    assert main(["design", "noise", str(source), "--json"]) == 0
    assert '"log_likelihood"' in capsys.readouterr().out


def test_the_alphabet_is_told_by_what_was_ordered(tmp_path, capsys):
    source = tmp_path / "pairs.csv"
    source.write_text(
        "ordered,sequenced\n" + "".join(f"{t},{t}\n" for t in ("MKLVW", "GGHEC", "NQSTY", "AFIDR", "PPPKK"))
    )
    assert main(["design", "noise", str(source), "--json"]) == 0
    assert '"alphabet": "ACDEFGHIKLMNPQRSTVWY"' in capsys.readouterr().out
    source.write_text("ordered,sequenced\nACGU,ACGU\nACGT,ACGT\n")
    assert main(["design", "noise", str(source)]) == 2
    assert "what pair 1 orders is RNA (ACGU) and what pair 2 orders is DNA" in capsys.readouterr().err


def test_columns_are_found_or_named(tmp_path):
    path = tmp_path / "pairs.csv"
    path.write_text("design,read\nACGT,AC-T\nacgt,ACGT\n")
    assert read_pairs(path) == (["ACGT", "ACGT"], ["ACT", "ACGT"])
    path.write_text("id,plan,result\n1,ACGT,ACCT\n")
    with pytest.raises(UserError, match='no column "ordered" but id, plan, result: name the right one with --ordered'):
        read_pairs(path)
    assert read_pairs(path, "plan", "result") == (["ACGT"], ["ACCT"])
    path.write_text("Read,Design\nACCT,ACGT\n")
    assert read_pairs(path) == (["ACGT"], ["ACCT"])
    path.write_text("well,observed,expected\nA1,ACCT,ACGT\n")
    assert read_pairs(path) == (["ACGT"], ["ACCT"])
    path.write_text("mine,ordered\nACCT,ACGT\n")
    assert read_pairs(path) == (["ACGT"], ["ACCT"])
    path.write_bytes("\ufeffSequenced;Ordered\r\nACT;ACGT\r\n".encode())
    assert read_pairs(path) == (["ACGT"], ["ACT"])
    path.write_text("ordered,sequenced\nACGT\n")
    with pytest.raises(UserError, match="line 2"):
        read_pairs(path)
    path.write_text("ordered,sequenced\n")
    with pytest.raises(UserError, match="no pairs"):
        read_pairs(path)
