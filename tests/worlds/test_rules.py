"""Rules against their plain definitions: brute force on small alphabets, exact counts, uniform draws, no dead ends."""

from __future__ import annotations

import itertools
import math
import random
import re
import tempfile
import tomllib
from collections import Counter
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from stochflow.errors import UserError
from stochflow.worlds.check import check_env
from stochflow.worlds.rules import (
    GC,
    Allowed,
    Charge,
    EditBudget,
    Fixed,
    Forbidden,
    Homopolymer,
    Hydrophobicity,
    Length,
    Regex,
    Required,
    Rules,
)
from stochflow.worlds.rules.read import KINDS
from stochflow.worlds.rules.write import rules_text
from stochflow.worlds.strings import PROTEIN, Strings


def everything(alphabet: str, lengths: tuple[int, int]) -> list[str]:
    return ["".join(t) for n in range(lengths[0], lengths[1] + 1) for t in itertools.product(alphabet, repeat=n)]


def feasible(rules: Rules, alphabet: str, lengths: tuple[int, int]) -> list[str]:
    """By the plain definitions alone."""
    return [t for t in everything(alphabet, lengths) if all(rule.meets(t, alphabet) for rule in rules)]


DNA_RULES = {
    "gc": GC(0.4, 0.6),
    "gc in windows": GC(0.3, 0.7, 3),
    "gc in windows of one": GC(0.0, 0.0, 1),
    "forbidden": Forbidden("GGA"),
    "forbidden on both strands": Forbidden("GGA", strands="both"),
    "forbidden with codes": Forbidden(["RNY", "AAA"]),
    "forbidden overlapping": Forbidden(["ACA", "CAC", "CACG"]),
    "required": Required("ACG"),
    "required on both strands": Required("ACC", strands="both"),
    "required twice": Required(["AC", "GT"]),
    "required with codes": Required("SWS"),
    "prefix": Fixed(prefix="AC"),
    "suffix": Fixed(suffix="ACA"),
    "flanks that may overlap": Fixed(prefix="ACAC", suffix="ACAC"),
    "positions": Fixed(positions={2: "G", 5: "T"}),
    "allowed": Allowed("NRY[ACG].A"),
    "allowed later": Allowed("RR", at=4),
    "homopolymer": Homopolymer(2),
    "no repeats": Homopolymer(1),
    "substitutions": EditBudget("ACGTA", 2),
    "substitutions, some": EditBudget("ACGTA", 3, least=2),
    "no edit": EditBudget("ACGTA", 0),
    "edits": EditBudget("ACGTA", 2, indels=True),
    "edits of a short one": EditBudget("AC", 3, indels=True),
    "edits, some": EditBudget("AACCA", 3, indels=True, least=2),
    "length": Length(3, 5),
    "at least": Length(4),
    "regex": Regex("A(C|GT)*[^A]{1,3}"),
    "regex forbidden": Regex(".*(AC|CA){2}.*", forbid=True),
    "regex of the empty string": Regex("(AC?G{2,}|T{,2}|)+"),
}


@pytest.mark.parametrize("rule", DNA_RULES.values(), ids=DNA_RULES)
def test_each_rule_is_its_plain_definition(rule):
    rules, lengths = Rules(rule), (0, 6)
    wanted = feasible(rules, "ACGT", lengths)
    made = rules.compile("ACGT", lengths)
    assert made.count == len(wanted)
    assert made.total == sum(4**n for n in range(7))
    assert [t for t in everything("ACGT", lengths) if made.accepts(t)] == wanted
    assert all(made.broken(t) == [] for t in wanted[:50])
    assert made.texts() == sorted(wanted, key=lambda t: (len(t), t))
    assert made.texts(len(wanted) - 1) is None


@pytest.mark.parametrize(
    "rule",
    [
        Charge(-1, 1),
        Charge(0.5, 2, histidine=0.5),
        Charge(1, 1, histidine=0.1),
        Charge(1, 2, histidine=0.5, step=0.25),
        Hydrophobicity(-0.5, 0.7),
        Hydrophobicity(-1, 0, step=0.5),
        Hydrophobicity(0, 0.2, scale={"K": 1, "D": -1, "H": 0.26, "A": 0}, step=0.05),
        Allowed("XBZJ"),
        Forbidden("KXK"),
    ],
    ids=str,
)
def test_each_rule_of_peptides_is_its_plain_definition(rule):
    alphabet = "KDHA" if not isinstance(rule, Allowed) else "KDELA"
    rules, lengths = Rules(rule), (1, 5)
    wanted = feasible(rules, alphabet, lengths)
    made = rules.compile(alphabet, lengths)
    assert made.count == len(wanted)
    assert {t for t in everything(alphabet, lengths) if made.accepts(t)} == set(wanted)


@pytest.mark.parametrize(
    "pattern",
    [
        "A(C|GT)*[^A]{1,3}",
        "(AC?G{2,}|T{,2}|)+",
        "(A+)+T",
        "((A|C)(G|T)){2}|.{3}",
        "[ACG]*T?.",
        "",
        "(?:AC|A)(C|)",
        "(A|AC)*(CA){0,2}",
    ],
)
def test_expressions_mean_what_they_mean_in_python(pattern):
    rule = Regex(pattern)
    for text in everything("ACGT", (0, 5)):
        assert rule.meets(text, "ACGT") == (re.fullmatch(pattern, text) is not None), text


def test_an_expression_is_matched_in_time_that_grows_with_the_text_alone():
    assert not Regex("(A+)+T").meets("A" * 300, "ACGT")  # exponential, where matching goes back


def test_edit_distance_is_the_usual_one():
    assert EditBudget("kitten", 9, indels=True).distance("sitting") == 3
    assert EditBudget("AC", 9, indels=True).distance("") == 2
    assert EditBudget("ACGT", 9).distance("ACG") == math.inf


def test_paths_are_not_strings():
    """Two edits lead to one string in many ways; the automaton has one path for each string."""
    made = Rules(EditBudget("AAAA", 2, indels=True)).compile("AC", (2, 6))
    assert made.count == len(feasible(made.rules, "AC", (2, 6)))


def test_rna_reads_its_own_codes_and_strand():
    rules = Rules(Forbidden("GGU", strands="both"), Allowed("NNNY"))
    made = rules.compile("ACGU", 4)
    assert made.count == len(feasible(rules, "ACGU", (4, 4)))
    assert not made.accepts("ACCC")  # ACC is GGU on the other strand
    assert not made.accepts("AAAA")


some_rules = st.lists(st.sampled_from(sorted(DNA_RULES)), min_size=1, max_size=4, unique=True)


@settings(max_examples=30, deadline=None)
@given(names=some_rules, least=st.integers(0, 5))
def test_any_combination_is_the_intersection(names, least):
    rules, lengths = Rules(*[DNA_RULES[n] for n in names]), (least, 5)
    if "window" in " ".join(names) and least == 0:
        lengths = (1, 5)
    wanted = feasible(rules, "ACGT", lengths)
    if not wanted or "allowed" in names:  # a pattern of six letters is refused by name
        with pytest.raises(UserError, match=r"no string of|at most 5"):
            rules.compile("ACGT", lengths)
        return
    made = rules.compile("ACGT", lengths)
    assert made.count == len(wanted)
    assert {t for t in everything("ACGT", lengths) if made.accepts(t)} == set(wanted)
    env = made.env()
    if wanted != [""]:
        found = check_env(env)
        beginnings = {t[:i] for t in wanted for i in range(len(t) + 1)}
        assert found.enumerated
        assert found.states == len(beginnings)


# drawing ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "alphabet", "lengths"),
    [
        (Rules(GC(0.4, 0.6), Forbidden("GGA", strands="both"), Homopolymer(2)), "ACGT", (5, 5)),
        (Rules(EditBudget("ACGTA", 2, indels=True), Length(4, 6)), "ACGT", (3, 7)),
        (Rules(Required("KD"), Charge(-1, 1)), "KDHA", (2, 5)),
        (Rules(), "ACG", (0, 4)),
    ],
    ids=["dna", "edits", "peptide", "no rule"],
)
def test_draws_are_uniform(rules, alphabet, lengths):
    made = rules.compile(alphabet, lengths)
    wanted = feasible(rules, alphabet, lengths)
    found = Counter(made.sample(40 * len(wanted), torch.Generator().manual_seed(1)))
    assert set(found) <= set(wanted)
    assert chisquare([found[t] for t in wanted]).pvalue > 1e-4


def test_draws_repeat_with_their_generator_and_reach_into_large_sets():
    made = Rules(GC(0.4, 0.6, 10), Homopolymer(3)).compile("ACGT", 60)
    one, two = (made.sample(200, torch.Generator().manual_seed(5)) for _ in range(2))
    assert one == two
    assert len(set(one)) == 200
    assert all(made.broken(t) == [] and made.accepts(t) for t in one)
    assert made.count > 10**30


def test_counts_are_exact_where_floats_are_not():
    """A closed form: strings of 200 letters with exactly k of G and C."""
    made = Rules(GC(0.5, 0.5)).compile("ACGT", 200)
    assert made.count == math.comb(200, 100) * 2**200
    assert made.total == 4**200
    assert made.summary() == f"{made.count:.1e} of 2.6e120 strings meet the rules".replace("e+", "e")


def test_counts_behind_each_move_are_those_of_the_strings():
    rules = Rules(GC(0.4, 0.6), Homopolymer(2))
    made = rules.compile("ACGT", (3, 5))
    wanted = feasible(rules, "ACGT", (3, 5))
    env = made.env()
    for beginning in ("", "A", "GC", "ACG", "ACGTA"):
        found = made.log_counts(env.encode([beginning or ""]) if beginning else env.initial((1,)))[0].exp()
        counts = [sum(t.startswith(beginning + a) for t in wanted) for a in "ACGT"] + [float(beginning in wanted)]
        assert found.tolist() == pytest.approx(counts, abs=1e-9)


# the environment --------------------------------------------------------------------------------------------------


def test_masks_have_no_dead_end_at_length_fifty():
    made = Rules(GC(0.4, 0.6, 10), Forbidden(["GAATTC", "GGTCTC"], "both"), Homopolymer(3)).compile("ACGT", 50)
    env = made.env()
    assert not check_env(env).enumerated
    state = env.initial((300,))
    dice = torch.Generator().manual_seed(0)
    for _ in range(50):
        legal = env.moves(state)
        assert bool(legal.any(1).all())
        state = env.step(state, torch.where(legal, torch.rand(legal.shape, generator=dice), -1.0).argmax(1))
    assert all(made.broken(t) == [] for t in env.decode(state))


def test_lengths_that_rules_shorten_and_the_first_states():
    made = Rules(Length(2, 3), Homopolymer(1)).compile("AB", (1, 6))
    env = made.env()
    assert env.horizon == 3
    assert env.state_dim == 6
    assert env.decode(env.all_states()) == ["", "A", "B", "AB", "BA", "ABA", "BAB"]
    assert env.count() == 7
    for steps in range(6):
        early = env.early_states(steps)
        assert len(early) == env.early_count(steps) == sum(len(t) < steps for t in env.decode(env.all_states()))
    assert torch.equal(env.index(env.all_states()), torch.arange(7))


def test_without_rules_it_is_plain_strings():
    assert type(Rules().compile("ACGT", 5).env()) is Strings
    assert Rules().compile("ACGT", (3, 5)).env().min_length == 3


def test_strings_of_length_hundred_with_few_edits_are_listed():
    """Numbers come from the automaton: there is no power of the alphabet in them that could overflow."""
    wild = "".join(np.random.default_rng(0).choice(list("ACGT"), 100))
    env = Rules(EditBudget(wild, 1)).compile("ACGT", 100).env()
    states = env.all_states()
    assert sum(env.complete(states)) == 301
    assert torch.equal(env.index(states), torch.arange(len(states)))
    assert len(set(env.decode(states))) == len(states)


def test_beginnings_are_counted_exactly_where_they_are_many():
    """Two letters of three at each place after the first: a closed form that 64 bits do not hold."""
    env = Rules(Homopolymer(1)).compile("ABC", 100).env()
    assert env.count() == 1 + sum(3 * 2**n for n in range(100))


@pytest.mark.slow
def test_the_law_under_rules_is_learned():
    """The target of a task under rules is the reward on the strings that meet them, and training reaches it."""
    from stochflow import train
    from stochflow.runs.tasks import strings_task

    rules = Rules(GC(0.4, 0.6), Forbidden("GGA", strands="both"), Homopolymer(2))
    task = strings_task(
        lambda texts: [0.1 + t.count("G") + 2 * t.startswith("AC") for t in texts], "ACGT", 5, rules=rules
    )
    with tempfile.TemporaryDirectory() as folder:
        done = train(task, steps=600, batch=64, net="lookup", lr=5e-3, out=f"{folder}/run")
    assert done.summary["floor_tv"] == pytest.approx(0, abs=1e-9)
    assert done.summary["tv"] < 0.02


def test_rules_and_a_noisy_channel_are_refused_together():
    from stochflow.runs.tasks import strings_task
    from stochflow.worlds.channels import Slip

    with pytest.raises(UserError, match="put the noise after the order"):
        strings_task(lambda texts: [1.0] * len(texts), channel=Slip(0.1), rules=Rules(Homopolymer(3)))


# what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rules", "lengths", "words"),
    [
        (Rules(Fixed("AAAA"), Homopolymer(3), GC(0, 1)), 8, ["'begins with AAAA'", "'no letter more than 3 times in a row'"]),
        (Rules(Length(9, 12), GC(0.2, 0.8)), 8, ["the rule '9 to 12 letters'", "8 letters"]),
        (Rules(EditBudget("AAAAAAAA", 1), Required("GG"), Homopolymer(9)), 8, ["substitutions from AAAAAAAA'", "'with GG'"]),
        (
            Rules(Forbidden("A"), Forbidden("C"), GC(0, 0.5), Forbidden("T"), Homopolymer(99)),
            4,
            ["'without A'", "'without T'", "'GC 0 to 0.5'"],
        ),
    ],
    ids=["two", "one", "two of three", "three"],
)  # fmt: skip
def test_contradictions_are_named(rules, lengths, words):
    with pytest.raises(UserError) as refusal:
        rules.compile("ACGT", lengths)
    assert all(w in str(refusal.value) for w in words)
    assert str(refusal.value).count("'") == 2 * len([w for w in words if "'" in w])


def test_a_sum_that_multiplies_the_states_asks_for_a_larger_step():
    words = "'mean hydrophobicity .* multiplies [\\d,]+ joint states .*: give it a larger step, loosen it"
    with pytest.raises(UserError, match=words):
        Rules(Charge(1, 3), Hydrophobicity(-1, 0.5)).compile(PROTEIN, 90)
    assert Rules(Charge(1, 3), Hydrophobicity(-1, 0.5, step=1)).compile(PROTEIN, 90).exact


def test_too_many_states_are_refused_by_the_rule_that_multiplies_them():
    rules = Rules(GC(0.4, 0.6, 24), Homopolymer(3), Length(1, 50))
    with pytest.raises(UserError, match=r"'GC 0\.4 to 0\.6 in every 24 letters' needs 16,777,215 states"):
        rules.compile("ACGT", 50)
    mixed = Rules(GC(0.3, 0.7, 15), Homopolymer(4), Forbidden(["GAATTC", "GGTCTC"], "both"))
    with pytest.raises(UserError, match=r"15 letters' multiplies [\d,]+ joint states of the other rules to [\d,]+ at"):
        mixed.compile("ACGT", 50)


@pytest.mark.parametrize(
    "rule",
    [
        EditBudget("ACGT" * 12, 16, indels=True), Regex(".*A.{30}"), Regex("(.{0,900}A){3}"), Forbidden("A" + "N" * 40 + "T"), GC(0.3, 0.7, 10**9),
        Hydrophobicity(0, 1, scale={"A": 1.234567, "C": -0.765431, "G": 0, "T": 0}, step=1e-6),
    ],
    ids=["edits", "regex", "wide regex", "gapped motif", "window", "fine steps"],
)  # fmt: skip
def test_what_cannot_fit_is_refused_before_memory_is_taken(rule):
    with pytest.raises(UserError, match=r"by itself|holds such a window|to become an automaton"):
        Rules(rule).compile("ACGT", 50)


def test_more_edits_than_letters_are_no_rule():
    assert Rules(EditBudget("ACG", 10**9)).compile("ACGT", (1, 5)).count == 64
    with pytest.raises(UserError, match="no string of 3 letters"):
        Rules(EditBudget("ACG", 10**9, least=4)).compile("ACGT", 3)
    assert Rules(EditBudget("ACG", 10**9, indels=True)).compile("ACGT", (1, 5)).count == sum(4**n for n in range(1, 6))


def test_what_does_not_fit_may_be_checked_after_drawing():
    rules = Rules(GC(0.3, 0.7, 24), Homopolymer(3))
    made = rules.compile("ACGT", 30, approximate=True)
    assert not made.exact
    assert made.count is None
    assert made.left_out == (GC(0.3, 0.7, 24),)
    assert "no exact count" in made.summary()
    drawn = made.sample(30, torch.Generator().manual_seed(0))
    assert all(made.accepts(t) and made.broken(t) == [] for t in drawn)
    assert not made.accepts(
        "A" * 3 + "T" + "A" * 3 + "T" + "A" * 3 + "T" + "A" * 3 + "T" + "A" * 3 + "T" + "AATTATAATT"
    )
    narrow = Rules(GC(0.5, 0.5, 24), Required("GAATTCGAATTC"), GC(0.7, 0.7)).compile("ACGT", 30, approximate=True)
    with pytest.raises(UserError, match="too strict to be checked after drawing"):
        narrow.sample(1, torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GC(0.6, 0.4), "low <= high"),
        (lambda: GC(40, 60), "shares"),
        (lambda: Rules(GC(0.4, 0.6)).compile(PROTEIN, 5), "only DNA and RNA have a GC content"),
        (lambda: Rules(GC(0.4, 0.6, 9)).compile("ACGT", 5), "no string of at most 5 letters"),
        (lambda: Rules(Forbidden("gaa")).compile("ACGT", 5), r"did you mean 'G'\?"),
        (lambda: Rules(Forbidden("KD", strands="both")).compile(PROTEIN, 5), "only DNA and RNA have one"),
        (lambda: Forbidden("A", strands="two"), '"one" or "both"'),
        (lambda: Forbidden([]), "one motif or a list"),
        (lambda: Fixed(), "fixes nothing"),
        (lambda: Rules(Fixed("AC", positions={2: "G"})).compile("ACGT", 5), "position 2"),
        (lambda: Rules(Fixed(positions={9: "G"})).compile("ACGT", 5), "needs 9 letters"),
        (lambda: Rules(Fixed("AX")).compile("ACGT", 5), "'X' is not in the alphabet"),
        (lambda: Rules(Allowed("NN[AC")).compile("ACGT", 5), "add a ]"),
        (lambda: Rules(EditBudget("ACGX", 1)).compile("ACGT", 4), "'X' at position 4"),
        (lambda: EditBudget("ACGT", 1, least=2), "least <= most"),
        (lambda: Rules(Regex("A(C")).compile("ACGT", 4), r"a \( is not closed"),
        (lambda: Rules(Regex("^AC$")).compile("ACGT", 4), "the whole string is matched"),
        (lambda: Rules(Regex(r"\d")).compile("ACGT", 4), "understood are"),
        (lambda: Rules(Regex("(?=A)C")).compile("ACGT", 4), "look-around"),
        (lambda: Rules(Regex("(" * 60 + "A" + ")" * 60)).compile("ACGT", 4), "nested deeper than 50"),
        (lambda: Rules(Regex("(A{1000}){1000}")).compile("ACGT", 4), "unfolds into more than"),
        (lambda: Rules(Regex("A*?")).compile("ACGT", 4), "lazy"),
        (lambda: Rules(Regex("[A-G]")).compile("ACGT", 4), "one by one"),
        (lambda: Rules(Regex("A{3,1}")).compile("ACGT", 4), "at least 3 and at most 1"),
        (lambda: Rules(Regex("A{2000}")).compile("ACGT", 4), "at most 1000"),
        (lambda: Rules(Charge(0, 1)).compile("ACGT", 4), "peptides"),
        (lambda: Hydrophobicity(0, 1, scale="kyte"), "there is no scale"),
        (lambda: Rules(Hydrophobicity(0, 1, scale={"A": 1})).compile("AB", 4), "no value for 'B'"),
        (lambda: Rules("GC"), "is not a rule"),
        (lambda: Rules(GC()).compile("ACGT", (5, 3)), "shortest <= longest"),
        (lambda: Homopolymer(0), "1 or more"),
        (lambda: Length(4, 2), "least <= most"),
    ],
)
def test_what_makes_no_sense_is_refused_in_words(make, words):
    with pytest.raises(UserError, match=words):
        make()


def test_broken_rules_are_said_in_words():
    made = Rules(GC(0.4, 0.6), Homopolymer(2)).compile("ACGT", (4, 6))
    assert made.broken("AAAA") == ["GC 0.4 to 0.6", "no letter more than 2 times in a row"]
    assert made.broken("ACG") == ["4 to 6 letters", "GC 0.4 to 0.6"]
    assert made.broken("ACGX") == ["letters of ACGT, not X"]
    assert made.broken("ACGT") == []
    assert not made.accepts("ACGX")


def test_the_sizes_of_the_page_are_those_that_are_built():
    page = (Path(__file__).parents[2] / "docs" / "rules.md").read_text().split("# How large it may become")[1]
    said = [int(n.replace(",", "")) for n in re.findall(r"^\|.*\| ([\d,]+) \|$", page, flags=re.M)]
    sites, wild = (
        [Homopolymer(4), Forbidden(["GAATTC", "GGTCTC"], "both")],
        "ACGTACGTAGCATGCTAGCTAGCATGCATCGATGCATGCATGCTAGCATG",
    )
    sets = [
        [GC(0.4, 0.6), *sites], [GC(0.4, 0.6, 10)], [GC(0.4, 0.6, 10), *sites], [GC(0.4, 0.6, 14), *sites], [GC(0.4, 0.6, 16)],
        [EditBudget(wild, 3, indels=True)], [EditBudget(wild, 5, indels=True)],
    ]  # fmt: skip
    peptides = [(Charge(1, 3), Hydrophobicity(-1, 0.5)), (Charge(1, 3), Hydrophobicity(-1, 0.5, step=0.5))]
    built = [Rules(*rules).compile("ACGT", 50).states for rules in sets]
    built += [Rules(*rules).compile(PROTEIN, length).states for rules, length in zip(peptides, (30, 50), strict=True)]
    assert built == said


# files ------------------------------------------------------------------------------------------------------------

FILE = """
[[gc]]
low = 0.4
high = 0.6

[[gc]]
low = 0.2
high = 0.8
window = 10

[forbidden]
motifs = ["GAATTC", "GGTCTC"]
strands = "both"

[required]
motifs = "TATA"

[fixed]
prefix = "ATG"
suffix = "TAA"
positions = { 10 = "A" }

[allowed]
pattern = "NNNRY"

[homopolymer]
longest = 4

[edits]
most = 3
indels = true

[length]
least = 20
most = 24

[regex]
pattern = "A.*"
"""


def test_a_file_says_the_same_as_values(tmp_path):
    path = tmp_path / "rules.toml"
    path.write_text(FILE)
    wild = "ATGACGTATAACGACGTGCTAA"
    wanted = Rules(
        GC(0.4, 0.6), GC(0.2, 0.8, 10), Forbidden(["GAATTC", "GGTCTC"], "both"), Required("TATA"),
        Fixed("ATG", "TAA", {10: "A"}), Allowed("NNNRY"), Homopolymer(4), EditBudget(wild, 3, True), Length(20, 24), Regex("A.*"),
    )  # fmt: skip
    assert Rules.read(path, wild_type=wild) == wanted
    made = Rules.read(path, wild).compile("ACGT", (18, 26))
    assert made.accepts(wild) == (made.broken(wild) == [])
    assert all(made.broken(t) == [] for t in made.sample(20, torch.Generator().manual_seed(0)))


def test_peptide_rules_of_a_file():
    data = {"charge": {"low": 0, "high": 5, "histidine": 0.1}, "hydrophobicity": {"low": -1, "high": 1.5, "step": 0.5}}
    assert Rules.parse(data) == Rules(Charge(0, 5, histidine=0.1), Hydrophobicity(-1, 1.5, step=0.5))
    own = {"hydrophobicity": {"low": 0, "high": 1, "scale": {"A": 1.5, "B": -1}}}
    assert Rules.parse(own) == Rules(Hydrophobicity(0, 1, scale={"A": 1.5, "B": -1}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[cg]\nlow = 0.4", r'\[cg\] is no rule \(did you mean "gc"\?\)'),
        ("[gc]\nlow = 0.4\nhi = 0.6", r'"hi" is not a setting \(did you mean "high"\?\)'),
        ("[gc]\nlow = '0.4'", "must be a number"),
        ("[gc]\nlow = 40\nhigh = 60", "shares"),
        ("[edits]\nmost = 2", "add wild_type"),
        ("[homopolymer]", "needs longest"),
        ("[length]\nleast = 2.5", "whole number"),
        ("[forbidden]\nmotifs = [1]", "text"),
        ("gc = 4", "a table of settings"),
        ("[gc\nlow = 1", "are not TOML"),
        ("[fixed]\npositions = { x = 'A' }", "counted from 1"),
        ("[charge]\nlow = 0", "needs high"),
    ],
)
def test_a_file_that_is_wrong_says_where(tmp_path, text, words):
    path = tmp_path / "rules.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=words) as refusal:
        Rules.read(path)
    assert str(path) in str(refusal.value)


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(UserError, match="there is no file"):
        Rules.read(tmp_path / "none.toml")


ODD = [
    0, 1, -1, 3, 0.4, 0.6, 1e9, 10**12, math.nan, math.inf, True, "", "A", "ACGT", "both", "NNRY", "[AC]", "(A|C)*", "A{2,3}", "*", "[",
    "\\", "é", "a", [], ["A"], ["A", 1], [""], {}, {"1": "A"}, {"0": "A"}, {"3": "XX"}, {"A": 1.0}, None, "kyte-doolittle",
]  # fmt: skip


def test_whatever_a_file_holds_is_compiled_or_refused_in_one_sentence():
    dice = random.Random(4)
    compiled = 0
    for _ in range(4000):
        data = {}
        for kind in dice.sample(sorted(KINDS), dice.randint(1, 2)):
            data[kind] = {f.name: dice.choice(ODD) for f in fields(KINDS[kind]) if dice.random() < 0.6}
        alphabet, lengths = dice.choice(["ACGT", PROTEIN, "01"]), dice.choice([1, 4, (2, 6), (0, 3)])
        said, made = "", None
        try:
            made = Rules.parse(data, "ACGT").compile(alphabet, lengths)
        except UserError as refusal:
            said = str(refusal)
        assert "\n" not in said
        if made is not None:
            compiled += 1
            assert all(made.broken(t) == [] for t in made.sample(2, torch.Generator().manual_seed(0)))
    assert compiled > 20


def test_rules_are_written_as_they_are_read():
    written = Rules(
        *DNA_RULES.values(),
        GC(0.4, 0.6, 5), Fixed("AC", "GT", {4: "A"}), Forbidden(["GAATTC", 'A[CG]"'], "both"), Regex('A.*|"\\\\é', forbid=True),
        EditBudget("ACGT", 2, indels=True, least=1), Length(3), Charge(-0.5, 1e-6, histidine=0.1),
        Hydrophobicity(-1, 2, scale={"A": 1.5, "C": -2}, step=0.5),
    )  # fmt: skip
    assert set(Rules.parse(tomllib.loads(rules_text(written)))) == set(written)
