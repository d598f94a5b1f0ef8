"""Oracles: what they answer, what they refuse, and how often they are asked."""

from __future__ import annotations

import json
import math
import sys
import threading
import time

import numpy as np
import pytest
import torch

from stochflow.errors import UserError
from stochflow.scores import oracles
from stochflow.scores.oracles import Cached, Command, Host, Patient, Table
from stochflow.worlds.grid import Grid
from stochflow.worlds.strings import Strings

DNA2 = Strings("ACGT", 2)


def gc(texts):
    return [sum(c in "GC" for c in t) / len(t) for t in texts]


def test_table_reads_each_states_own_score():
    env = Grid(2, 3)
    oracle = Table(env, torch.arange(9) * 0.5)
    states = env.all_states()
    assert torch.equal(oracle(states), torch.arange(9) * 0.5)
    shuffled = torch.randperm(9)
    assert torch.equal(
        oracle(states[shuffled].reshape(3, 3, 2)), (shuffled * 0.5).reshape(3, 3)
    )  # any leading dims, any order


def test_table_of_full_strings_is_the_base_k_number():
    oracle = Table(DNA2, range(16))
    assert oracle(DNA2.encode(["AA", "AC", "CA", "TT"])).tolist() == [0, 1, 4, 15]
    assert oracle(DNA2.encode(["AA"])).dtype == torch.float32


def test_table_never_gives_an_unfinished_string_a_neighbours_score():
    oracle = Table(DNA2, range(16))
    assert oracle(DNA2.initial((3,))).isnan().all()
    assert oracle(DNA2.all_states()[:5]).isnan().all()  # the empty string and the four of one letter


def test_table_moves_to_a_device_once():
    oracle = Table(DNA2, range(16))
    states = DNA2.encode(["GT"])
    oracle(states)
    (copy,) = oracle._table(states.device)
    oracle(states)
    assert oracle._table(states.device)[0] is copy


@pytest.mark.gpu
def test_table_can_be_captured():
    oracle = Table(DNA2, range(16))
    states = DNA2.encode(["GT", "AC"]).cuda()
    oracle(states)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = oracle(states)
    states.copy_(DNA2.encode(["TT", "CA"]))
    graph.replay()
    assert out.tolist() == [15, 4]


@pytest.mark.parametrize(
    ("scores", "words"),
    [
        (range(99), ["at most 21", "(99,)"]),
        ([[1.0, 2.0]], ["(1, 2)"]),
        ([0.0] * 15 + [math.nan], ["score 15", "nan"]),
        ([], ["(0,)"]),
    ],
)
def test_table_refuses_scores_that_do_not_fit(scores, words):
    with pytest.raises(UserError) as error:
        Table(DNA2, scores)
    assert all(word in str(error.value) for word in words)


def test_host_is_asked_once_a_batch_and_counts_objects():
    batches = []
    oracle = Host(lambda texts: batches.append(texts) or gc(texts), DNA2)
    states = DNA2.encode(["AA", "AC", "GC", "AC", "TT", "CG"]).reshape(2, 3, 2)
    assert oracle(states).tolist() == [[0.0, 0.5, 1.0], [0.5, 0.0, 1.0]]
    assert batches == [["AA", "AC", "GC", "AC", "TT", "CG"]]
    oracle(states[0])
    assert oracle.calls == 9  # six, then three: steps x batch and no more


@pytest.mark.parametrize(
    "answer",
    [lambda t: np.array(gc(t)), lambda t: torch.tensor(gc(t)), lambda t: (x for x in gc(t)), lambda t: [True, False]],
)
def test_host_takes_whatever_holds_numbers(answer):
    score = Host(answer, DNA2)(DNA2.encode(["GC", "AT"]))
    assert score.tolist() == [1.0, 0.0]
    assert score.dtype == torch.float32


def boom(texts):
    raise ZeroDivisionError("no such fold")


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (lambda t: [0.5, math.nan], ["'AT'", "sample 1", "NaN"]),
        (lambda t: [math.inf, 0.5], ["'GC'", "sample 0", "inf"]),
        (lambda t: [0.5, -1e300], ["'AT'", "-1e+300"]),  # finite, but not in float32
        (lambda t: [0.5, None], ["'AT'", "no score", "every sequence"]),
        (lambda t: [{"GC": 1.0}[x] for x in t], ["'AT'", "no score", "every sequence"]),
        (lambda t: [{"GC": 1.0}.get(x) for x in t], ["'AT'", "no score"]),
        (lambda t: [0.5], ["1 scores for 2", "'GC'"]),
        (lambda t: np.ones((2, 3)), ["'GC'", "shape (3,)"]),
        (lambda t: np.ones((2, 1)), ["'GC'", "shape (1,)"]),
        (lambda t: ["high", "low"], ["'high'", "'GC'"]),
        (lambda t: None, ["'GC'", "NoneType"]),
        (boom, ["'GC'", "ZeroDivisionError", "no such fold"]),
    ],
)
def test_host_names_the_sample_and_the_value(fn, words):
    with pytest.raises(UserError) as error:
        Host(fn, DNA2)(DNA2.encode(["GC", "AT"]))
    message = str(error.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_host_chains_the_users_own_exception():
    with pytest.raises(UserError) as error:
        Host(boom, DNA2)(DNA2.encode(["GC"]))
    assert isinstance(error.value.__cause__, ZeroDivisionError)


def test_host_needs_an_environment_with_texts():
    with pytest.raises(UserError, match="state tensors"):
        Host(gc, Grid(2, 4))


def test_cached_asks_about_each_text_once():
    asked = []
    oracle = Cached(Host(lambda t: asked.extend(t) or gc(t), DNA2))
    first = oracle(DNA2.encode(["AA", "GC", "AA"]))
    second = oracle(DNA2.encode(["GC", "CA"]))
    assert first.tolist() == [0.0, 1.0, 0.0]
    assert second.tolist() == [1.0, 0.5]
    assert asked == ["AA", "GC", "CA"]
    assert (oracle.calls, oracle.hits) == (3, 2)


def test_cached_keeps_what_was_paid_for_when_a_sample_fails(tmp_path):
    file = tmp_path / "oracle.jsonl"
    known = {"AA": 0.25, "GC": 0.75}
    asked = []
    oracle = Cached(Host(lambda t: asked.extend(t) or [known.get(x) for x in t], DNA2), file)
    with pytest.raises(UserError, match="'TT'"):
        oracle(DNA2.encode(["AA", "TT", "GC"]))
    again = Cached(Host(boom, DNA2), file)  # a new process: the file speaks, the oracle is not needed
    assert again(DNA2.encode(["GC", "AA"])).tolist() == [0.75, 0.25]
    assert again.calls == 0
    known["TT"] = 0.5  # mended: only the missing one is asked for
    asked.clear()
    assert oracle(DNA2.encode(["AA", "TT", "GC"])).tolist() == [0.25, 0.5, 0.75]
    assert asked == ["TT"]
    assert [json.loads(line) for line in file.read_text().splitlines()][-1] == {"text": "TT", "score": 0.5}


def test_cached_survives_a_line_cut_short(tmp_path):
    file = tmp_path / "oracle.jsonl"
    file.write_text('{"text": "AA", "score": 0.25}\n{"text": "GC", "sco')
    oracle = Cached(Host(gc, DNA2), file)
    assert oracle(DNA2.encode(["AA", "GC"])).tolist() == [0.25, 1.0]
    assert [json.loads(line)["text"] for line in file.read_text().splitlines()] == ["AA", "GC"]


def test_cached_names_a_line_that_is_no_answer(tmp_path):
    file = tmp_path / "oracle.jsonl"
    file.write_text('{"text": "AA", "score": 0.25}\nhello\n')
    with pytest.raises(UserError, match="line 2"):
        Cached(Host(gc, DNA2), file)


def python(code):
    return f'"{sys.executable}" -c "{code}"'


def test_command_scores_by_lines():
    length = python("import sys; [print(line.count('G')) for line in sys.stdin]")
    oracle = Host(Command(length), DNA2)
    assert oracle(DNA2.encode(["GG", "AG", "TT"])).tolist() == [2.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("code", "words"),
    [
        ("import sys; sys.exit('out of licences')", ["status 1", "out of licences", "'GG'"]),
        ("print(1)", ["1 lines for 2"]),
        ("print(1); print('many')", ["'many'", "'AG'"]),
        ("print(1); print('nan')", ["'AG'", "NaN"]),
    ],
)
def test_command_says_what_went_wrong(code, words):
    with pytest.raises(UserError) as error:
        Host(Command(python(code)), DNA2)(DNA2.encode(["GG", "AG"]))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_command_refuses_sequences_that_are_not_lines():
    env = Strings("a\n", 2)
    with pytest.raises(UserError, match="line break"):
        Host(Command("cat"), env)(env.encode(["a\n"]))


# what is remembered ---------------------------------------------------------------------------------------------


def test_of_two_answers_in_a_file_the_first_is_taken(tmp_path):
    file = tmp_path / "oracle.jsonl"
    file.write_text('{"text": "AA", "score": 0.25}\n{"text": "AA", "score": 0.75}\n')
    assert Cached(Host(boom, DNA2), file)(DNA2.encode(["AA"])).tolist() == [0.25]


@pytest.mark.parametrize(
    "line", ['{"text": "AA", "score": NaN}', '{"text": "AA", "score": 1e300}', '{"text": 3, "score": 1}', "[]", ""]
)
def test_a_file_cannot_bring_in_what_an_oracle_may_not_say(tmp_path, line):
    file = tmp_path / "oracle.jsonl"
    file.write_text(line + "\n")
    with pytest.raises(UserError, match=r"line 1 of .*oracle.jsonl is not an oracle's answer"):
        Cached(Host(gc, DNA2), file)


def test_a_file_given_later_gets_what_is_known_and_gives_what_it_holds(tmp_path):
    file = tmp_path / "oracle.jsonl"
    file.write_text('{"text": "AA", "score": 0.25}\n')
    oracle = Cached(Host(gc, DNA2))
    oracle(DNA2.encode(["GC", "TT"]))
    oracle.keep_in(file)
    assert [json.loads(line)["text"] for line in file.read_text().splitlines()] == ["AA", "GC", "TT"]
    assert oracle(DNA2.encode(["AA", "GC"])).tolist() == [0.25, 1.0]
    assert oracle.calls == 2


def test_recalling_leaves_the_file_as_it_is(tmp_path):
    file = tmp_path / "oracle.jsonl"
    content = '{"text": "AA", "score": 0.25}\n{"text": "G'
    file.write_text(content)
    oracle = Cached(Host(gc, DNA2))
    assert oracle.recall(file) == len('{"text": "G')
    assert oracle(DNA2.encode(["AA", "GC"])).tolist() == [0.25, 1.0]
    assert file.read_text() == content


def test_a_cache_around_a_cache_keeps_both(tmp_path):
    inner = Cached(Host(gc, DNA2), tmp_path / "mine.jsonl")
    outer = Cached(inner, tmp_path / "runs.jsonl")
    outer(DNA2.encode(["GC", "GC", "AT"]))
    assert (tmp_path / "mine.jsonl").read_bytes() == (tmp_path / "runs.jsonl").read_bytes()
    assert (outer.calls, outer.hits, inner.hits) == (2, 1, 0)


def test_a_long_question_is_asked_and_kept_part_by_part(tmp_path):
    parts = []

    def tires(texts):
        parts.append(texts)
        if len(parts) == 3:
            raise TimeoutError("enough")
        return gc(texts)

    oracle = Cached(Host(tires, DNA2), tmp_path / "oracle.jsonl", at_most=2)
    states = DNA2.encode(["AA", "AC", "AA", "GC", "TT", "GG", "CC"])
    with pytest.raises(UserError, match="enough"):
        oracle(states)
    assert parts == [["AA", "AC"], ["GC", "TT"], ["GG", "CC"]]
    again = Cached(Host(tires, DNA2), tmp_path / "oracle.jsonl", at_most=2)
    assert again(states).tolist() == [0.0, 0.5, 0.0, 1.0, 0.0, 1.0, 1.0]
    assert parts[3:] == [["GG", "CC"]]


def test_what_comes_after_a_missing_answer_is_not_paid_for():
    asked = []
    oracle = Cached(Host(lambda t: asked.extend(t) or [None if x == "GC" else 1.0 for x in t], DNA2), at_most=2)
    with pytest.raises(UserError, match=r"sample 2, 'GC'"):
        oracle(DNA2.encode(["AA", "AC", "GC", "TT", "GG", "CC"]))
    assert asked == ["AA", "AC", "GC", "TT"]


def test_a_full_disk_leaves_whole_lines_and_says_so(tmp_path):
    """The system's own limit on the size of a file: what does not fit is cut in the middle of a line, as on a full disk."""
    resource = pytest.importorskip("resource")
    file = tmp_path / "oracle.jsonl"
    oracle = Cached(Host(gc, DNA2), file)
    oracle(DNA2.encode(["GC"]))
    before = file.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 40, limits[1]))
    try:
        with pytest.raises(UserError, match=r"answers cannot be kept in .*oracle.jsonl: .*free"):
            oracle(DNA2.encode(["AA", "AC", "AG"]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert file.read_bytes() == before
    again = Cached(Host(gc, DNA2), file)
    assert again(DNA2.encode(["GC", "CA"])).tolist() == [1.0, 0.5]
    assert len(file.read_text().splitlines()) == 2


# patience -------------------------------------------------------------------------------------------------------


class Flaky:
    """Fails `times` times, then answers; `how` it fails."""

    def __init__(self, times, how):
        self.left, self.how, self.asked, self.over = times, how, 0, threading.Event()

    def __call__(self, texts):
        self.asked += 1
        if self.left > 0:
            self.left -= 1
            if self.how == "raise":
                raise ConnectionError("the server is busy")
            self.over.wait(20)
        return gc(texts)


@pytest.fixture
def waits(monkeypatch):
    """The pauses between two tries, taken down and not slept."""
    seen = []
    monkeypatch.setattr(oracles, "time", type("Clock", (), {"sleep": staticmethod(seen.append)}))
    return seen


@pytest.mark.parametrize("how", ["raise", "hang"])
def test_a_patient_oracle_is_tried_again_after_longer_and_longer_pauses(how, waits):
    fn = Flaky(3, how)
    oracle = Patient(Host(fn, DNA2), timeout=0.05, retries=3, backoff=0.5)
    assert oracle(DNA2.encode(["GC", "AT"])).tolist() == [1.0, 0.0]
    assert waits == [0.5, 1.0, 2.0]
    assert (fn.asked, oracle.calls) == (4, 8)
    assert oracle(DNA2.encode(["CA"])).tolist() == [0.5]
    assert len(waits) == 3  # an answer costs no pause
    fn.over.set()


@pytest.mark.parametrize(
    ("how", "retries", "words"),
    [
        ("raise", 2, ["'GC'", "ConnectionError: the server is busy", "the last of 3 tries"]),
        ("raise", 0, ["'GC'", "ConnectionError: the server is busy"]),
        ("hang", 2, ["did not answer within 0.05 s, 3 times,", "batch of 2", "'GC'", "oracle_timeout"]),
        ("hang", 0, ["did not answer within 0.05 s on a batch of 2", "'GC'"]),
    ],
)
def test_patience_ends_with_one_clear_sentence(how, retries, words, waits):
    fn = Flaky(99, how)
    with pytest.raises(UserError) as error:
        Patient(Host(fn, DNA2), timeout=0.05, retries=retries)(DNA2.encode(["GC", "AT"]))
    fn.over.set()
    message = str(error.value)
    assert all(word in message for word in words), message
    assert "\n" not in message
    assert fn.asked == retries + 1 == len(waits) + 1


def test_without_a_timeout_there_is_no_thread():
    names = []
    Patient(Host(lambda t: names.append(threading.current_thread()) or gc(t), DNA2))(DNA2.encode(["GC"]))
    Patient(Host(lambda t: names.append(threading.current_thread()) or gc(t), DNA2), timeout=5)(DNA2.encode(["GC"]))
    assert names[0] is threading.main_thread() is not names[1]


def test_no_answer_is_an_answer_and_not_asked_for_again(waits):
    oracle = Patient(Host(lambda t: [math.nan] * len(t), DNA2), retries=5)
    with pytest.raises(UserError, match="NaN"):
        oracle(DNA2.encode(["GC"]))
    assert (oracle.calls, waits) == (1, [])


def test_only_what_is_not_known_is_tried_again(waits):
    fn = Flaky(0, "raise")
    oracle = Cached(Patient(Host(fn, DNA2), retries=1))
    oracle(DNA2.encode(["GC"]))
    fn.left = 1
    assert oracle(DNA2.encode(["GC", "CA"])).tolist() == [1.0, 0.5]
    assert oracle.calls == 3  # GC, then CA twice


@pytest.mark.parametrize("settings", [{"timeout": -1}, {"retries": -1}, {"backoff": -0.5}])
def test_patience_is_not_negative(settings):
    with pytest.raises(UserError, match="0 or more"):
        Patient(Host(gc, DNA2), **settings)


@pytest.mark.skipif(sys.platform == "win32", reason="a POSIX shell")
def test_a_command_that_hangs_is_ended_with_what_it_started():
    command = Command("sleep 60 | sleep 60")
    begun = time.monotonic()
    with pytest.raises(UserError, match=r"did not answer within 0\.2 s"):
        Patient(Host(command, DNA2), timeout=0.2, retries=0)(DNA2.encode(["GC"]))
    assert command._running.wait(timeout=10) == -9
    assert time.monotonic() - begun < 10


def test_a_missing_score_is_told_with_what_may_become_of_it():
    env = Strings("AC", 2)
    states = env.encode(["AA", "CC"])
    silent = Cached(Host(lambda texts: [None] * len(texts), env))
    with pytest.raises(UserError, match="train with --on-nan skip or floor"):
        silent(states)
    silent.on_nan = "floor"
    with pytest.raises(
        UserError, match="none of the 2 objects asked about has a score, so that there is no lowest one"
    ):
        silent(states)
    silent.on_nan = "skip"
    assert bool(silent(states).isnan().all())
