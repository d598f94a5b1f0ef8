"""Drawing under one condition: by its values or its number, and under values between those that were learned."""

from __future__ import annotations

import csv
import logging
from itertools import pairwise

import pytest
import torch

from stochflow import Exact, Linear, Slip, Strings, Task, train
from stochflow.cli.commands import main
from stochflow.errors import UserError
from stochflow.law.exact import Graph, exact_law, target_law
from stochflow.law.metrics import tv
from stochflow.runs.condition import meant
from stochflow.runs.experiment import open_run
from stochflow.runs.tasks import gc_task
from stochflow.scores.landscapes import Tempered
from stochflow.scores.oracles import Host
from stochflow.worlds.conditioned import Conditioned, Contexts


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "gc"
    train("gc", length=3, targets="0.2,0.5,0.8", betas="4,12", steps=2, batch=4, out=str(folder))
    return folder


@pytest.mark.parametrize(("words", "number"), [("0.5,12", "3"), ("3", "3"), ("0.2,4", "0")])
def test_a_condition_is_meant_by_its_values_or_its_number(run, words, number, tmp_path):
    out = tmp_path / "drawn.csv"
    assert main(["sample", str(run), "-n", "20", "--condition", words, "--out", str(out)]) == 0
    with out.open() as file:
        assert {row["condition"] for row in csv.DictReader(file)} == {number}


def test_without_one_all_conditions_are_drawn(run, tmp_path):
    out = tmp_path / "drawn.csv"
    assert main(["sample", str(run), "-n", "120", "--out", str(out)]) == 0
    with out.open() as file:
        assert {row["condition"] for row in csv.DictReader(file)} == set("012345")


@pytest.mark.parametrize("words", ["17", "warm", "0.5", "nan", "inf,4"])
def test_what_is_none_of_them_is_named(run, words, capsys):
    assert main(["sample", str(run), "-n", "2", "--condition", words]) == 2
    assert "is none of the run's 6 conditions (" in capsys.readouterr().err


@pytest.mark.parametrize("words", ["0.9,4", "0.5,3.9"])
def test_what_lies_outside_is_refused_with_the_range(run, words, capsys):
    assert main(["sample", str(run), "-n", "2", "--condition", words]) == 2
    assert "does not lie between them: they run from 0.2 to 0.8, 4 to 12" in capsys.readouterr().err


# values between the learned ones -----------------------------------------------------------------------------------


def test_gc_content_and_temperature_between_those_learned_are_scored_exactly(run, tmp_path, caplog):
    files = {p.name: p.read_bytes() for p in run.iterdir() if p.is_file()}
    out = tmp_path / "drawn.csv"
    assert main(["sample", str(run), "-n", "40", "--condition", "0.3,7", "--out", str(out)]) == 0
    assert [r.getMessage() for r in caplog.records if "was not among the 6 that were learned" in r.getMessage()]
    with out.open() as file:
        rows = list(csv.DictReader(file))
    assert len({row["sequence"] for row in rows}) > 3
    for row in rows:
        share = sum(letter in "GC" for letter in row["sequence"]) / 3
        assert float(row["score"]) == pytest.approx(1 - abs(share - 0.3), abs=1e-5)
        assert float(row["log_reward"]) == pytest.approx(7 * (1 - abs(share - 0.3)), abs=1e-5)
        assert row["condition"] == "0.3,7"
    assert {p.name: p.read_bytes() for p in run.iterdir() if p.is_file()} == files


def test_the_run_is_as_it_was_afterwards(run):
    experiment = open_run(run)
    table, learned = experiment.task.env.contexts, list(experiment.sample(20, condition="0.2,4"))
    half = experiment.sample(2, condition="0.3,7")
    next(half)  # nothing is changed between two rows either
    assert experiment.task.env.contexts is table
    assert experiment.task.env.rows == 6
    list(half)
    assert list(experiment.sample(20, condition="0.2,4")) == learned


class Preferred:
    """The share of A, and the share of letters unlike the one before, each times its weight."""

    on_device = True

    def __init__(self, env):
        self.env = env

    def weights(self, row):
        return self.env.contexts[row]

    def __call__(self, state):
        letters = state[..., 1:]
        share = (letters == 0).float().mean(-1)
        change = (letters[..., 1:] != letters[..., :-1]).float().mean(-1)
        return (self.weights(state[..., 0]) * torch.stack([share, change], -1)).sum(-1)


class Own(Preferred):
    """The same with a table of its own; a row that it does not have is an IndexError."""

    def __init__(self, env):
        super().__init__(env)
        self.table = env.contexts.clone()

    def weights(self, row):
        return self.table[row]


class Clamped(Own):
    """A row that it does not have is the last one: no error, and another condition's score."""

    def weights(self, row):
        return self.table[row.clamp(max=len(self.table) - 1)]


class ByName(Preferred):
    """Weights by the values of the condition, of those learned alone."""

    def __init__(self, env):
        super().__init__(env)
        self.known = {tuple(values): values for values in env.contexts.tolist()}

    def weights(self, row):
        each = [self.known[tuple(values)] for values in self.env.contexts[row].flatten(0, -2).tolist()]
        return torch.tensor(each).view(*row.shape, 2)


PREFERENCES = ((0.0, 1.0), (0.25, 0.75), (0.5, 0.5), (0.75, 0.25), (1.0, 0.0))


def preferred(oracle=Preferred, letters: str = "AB") -> Task:
    env = Conditioned(Strings(letters, 4), torch.tensor(PREFERENCES))
    return Task(env, Exact(), oracle(env), Linear(5.0))


def test_the_law_under_an_unseen_preference_is_nearer_to_its_own_target_than_to_its_neighbours(tmp_path):
    task = preferred()
    train(task, objective="tb", steps=200, batch=32, hidden=32, lr=1e-2, out=str(tmp_path / "run"))
    experiment = open_run(tmp_path / "run", task)
    with torch.no_grad(), experiment.trainer.averaged(), task.env.with_row(torch.tensor([0.37, 0.63])) as row:
        law = exact_law(Graph(task.env, row), task.channel, experiment.policy)
        own, *others = (float(tv(law, target_law(Graph(task.env, r), task).target)) for r in (row, 1, 2))
    assert own < 0.04
    assert own < min(others) / 2


def drawn_under(task: Task, words: str, tmp_path) -> list[dict]:
    train(task, steps=1, batch=4, hidden=4, out=str(tmp_path / "run"))
    return list(open_run(tmp_path / "run", task).sample(12, condition=words))


def test_a_preference_between_those_learned_is_scored_by_an_oracle_that_reads_the_table(tmp_path, caplog):
    for row in drawn_under(preferred(), "0.37,0.63", tmp_path):
        text = row["sequence"]
        change = sum(a != b for a, b in pairwise(text)) / 3
        assert row["score"] == pytest.approx(0.37 * text.count("A") / 4 + 0.63 * change, abs=1e-5)
        assert row["condition"] == "0.37,0.63"
    assert not [r for r in caplog.records if "blank" in r.getMessage()]


@pytest.mark.parametrize("oracle", [Own, Clamped, ByName])
def test_what_an_oracle_cannot_score_is_left_blank(oracle, tmp_path, caplog, capsys):
    task = preferred(oracle)
    rows = drawn_under(task, "0.37,0.63", tmp_path)
    assert {(row["score"], row["log_reward"]) for row in rows} == {(None, None)}
    assert all(row["log_pf"] < 0 for row in rows)
    said = [r.getMessage() for r in caplog.records if "blank" in r.getMessage()]
    assert len(said) == 1
    assert "score and log_reward are left blank under 0.37,0.63: the oracle" in said[0]
    again = open_run(tmp_path / "run", task).sample(4, condition="0.25,0.75")
    assert all(row["score"] is not None and row["condition"] == 1 for row in again)


def test_texts_are_scored_whatever_the_condition_and_the_temperature_follows_it(tmp_path):
    env = Conditioned(Strings("AB", 3), torch.tensor([[1.0], [4.0]]))
    task = Task(env, Slip(0.1), Host(lambda texts: [float(t.count("A")) for t in texts], env), Tempered(env, 0))
    rows = drawn_under(task, "2.5", tmp_path)
    assert all(row["score"] == row["sequence"].count("A") for row in rows)
    assert all(row["log_reward"] == pytest.approx(2.5 * row["score"]) for row in rows)


def test_a_reward_with_a_table_of_its_own_leaves_its_column_blank_alone(tmp_path, caplog):
    env = Conditioned(Strings("AB", 3), torch.tensor([[1.0], [4.0]]))
    betas = torch.tensor([1.0, 4.0])
    task = Task(
        env,
        Exact(),
        Host(lambda texts: [float(t.count("A")) for t in texts], env),
        lambda score, state, step=None: betas[state[..., 0]] * score,
    )
    rows = drawn_under(task, "2.5", tmp_path)
    assert all(row["score"] == row["sequence"].count("A") and row["log_reward"] is None for row in rows)
    assert "log_reward are left blank under 2.5: the reward" in caplog.text


def test_a_shortlist_needs_scores(tmp_path, capsys, monkeypatch):
    from stochflow.look.shortlist import shortlist

    rows = drawn_under(preferred(Own), "0.37,0.63", tmp_path)
    with pytest.raises(UserError, match="these objects have none"):
        list(shortlist(rows, top=3))


def test_orders_have_no_condition(run, capsys):
    assert main(["sample", str(run), "-n", "2", "--simulate", "3"]) == 2
    assert "this task has conditions" in capsys.readouterr().err


# what is meant ------------------------------------------------------------------------------------------------------


def with_table(table, channel=None) -> Task:
    return preferred()._replace(env=Conditioned(Strings("AB", 4), torch.tensor(table)), channel=channel or Exact())


def test_preferences_must_sum_to_what_the_learned_ones_sum_to():
    task = preferred()
    row, values = meant(task, "0.37,0.63")
    assert row == 5
    assert values.tolist() == pytest.approx([0.37, 0.63])
    with pytest.raises(UserError, match=r"each of them sum to 1, and these to 0\.9"):
        meant(task, "0.3,0.6")
    assert meant(with_table([[0.0, 1.0], [1.0, 1.0], [1.0, 0.0]]), "0.3,0.6")[0] == 3  # no sum is shared


def test_learned_values_come_first_then_a_number_then_values_between(caplog):
    task = with_table([[0.0], [2.0], [10.0]])
    assert meant(task, "2") == (1, None)
    assert "is taken for" not in caplog.text
    with caplog.at_level(logging.WARNING):
        assert meant(task, "1") == (1, None)
    assert "condition 1 is taken for the number of 2: write 1.0 for the value" in caplog.text
    row, values = meant(task, "1.0")
    assert (row, values.tolist()) == (3, [1.0])
    assert meant(task, "7")[0] == 3
    with pytest.raises(UserError, match="0 to 10"):
        meant(task, "10.5")


def test_where_nothing_lies_between_conditions_only_the_learned_ones_are_taken():
    whole = with_table([[0, 4], [2, 0]])  # whole numbers: kinds
    with pytest.raises(UserError, match=r"is none of the run's 2 conditions \(0,4; 2,0\)"):
        meant(whole, "1,2")

    class Other(Conditioned):
        pass

    other = preferred()
    other = other._replace(env=Other(other.env.inner, other.env.contexts))  # may have tables of its own
    with pytest.raises(UserError, match="is none of the run's 5 conditions"):
        meant(other, "0.37,0.63")

    class ByCondition(Exact):
        whole = True

    with pytest.raises(UserError, match="is none of the run's 5 conditions"):  # noise by the condition's number
        meant(preferred()._replace(channel=ByCondition()), "0.37,0.63")
    with pytest.raises(UserError, match="no conditions"):
        meant(Task(Strings("AB", 2), Exact(), None, Linear(1.0)), "1")


def test_one_more_row_is_gone_after_an_error():
    env = gc_task(length=2, targets="0.2,0.8", betas="4").env
    before = env.contexts

    def broken():
        with env.with_row(torch.tensor([0.5, 4.0])) as row:
            assert (row, env.rows, len(env.contexts)) == (2, 3, 3)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        broken()
    assert env.contexts is before
    assert env.rows == 2


def test_the_copies_of_the_learned_table_outlive_another_one():
    """A CUDA graph that was recorded before goes on reading them."""
    env = gc_task(length=2, targets="0.2,0.8", betas="4").env
    contexts = Contexts(env)
    learned = contexts(torch.device("cpu"))
    with env.with_row(torch.tensor([0.5, 4.0])):
        assert contexts(torch.device("cpu"))[2].tolist() == [0.5, 4.0]
    assert contexts(torch.device("cpu")) is learned
