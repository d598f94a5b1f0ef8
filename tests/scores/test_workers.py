"""Several workers answer as one does: the same scores in the same order, whatever dies in between, each kept as it comes."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from stochflow.errors import UserError
from stochflow.runs.experiment import open_run, train
from stochflow.scores import workers
from stochflow.scores.oracles import Cached
from stochflow.scores.workers import Remote, workers_of

sys.path.insert(0, str(Path(__file__).parent))  # workers import it by name
oracles = importlib.import_module("remote_oracles")
TEXTS = ["".join(t) for t in itertools.product("ACGT", repeat=6)][:: 4096 // 97]


@pytest.fixture
def closing():
    made: list[Remote] = []
    yield lambda oracle, count: made.append(Remote(oracles.oracle(oracle), count)) or made[-1]
    for remote in made:
        remote.close()


@pytest.mark.parametrize(
    ("word", "means"), [("", (0, False)), ("0", (0, False)), ("3", (3, False)), ("ray:2", (2, True))]
)
def test_the_word_names_workers_and_place(word, means):
    assert workers_of(word) == means
    assert workers_of("ray")[1]


@pytest.mark.parametrize("word", ["many", "ray:", "ray:x", "-1", "ray:0", "3:4", "1.5"])
def test_a_word_that_means_nothing_is_refused(word):
    with pytest.raises(UserError, match="--oracle-workers"):
        workers_of(word)


@pytest.mark.slow
def test_two_processes_answer_as_one_and_survive_one_that_dies(closing, tmp_path):
    local = oracles.oracle(oracles.plain).raw(TEXTS)
    note = tmp_path / "died"
    kept = tmp_path / "oracle.jsonl"
    remote = closing(oracles.DiesOnce(TEXTS[40], str(note)), 2)
    cached = Cached(remote, kept)
    assert cached.raw(TEXTS) == local  # bit for bit, in the order of the texts
    assert note.exists(), "no worker died, so nothing was shown"
    assert int(note.read_text()) != os.getpid()
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    assert {r["text"]: r["score"] for r in lines} == dict(zip(TEXTS, local, strict=True))
    assert len(lines) == len(TEXTS), "each answer is written once"
    assert cached.raw(TEXTS[::-1]) == local[::-1]
    assert remote.asked == len(TEXTS), "nothing is asked twice"


@pytest.mark.slow
def test_what_was_answered_is_kept_when_a_part_fails(closing, tmp_path, monkeypatch):
    kept = tmp_path / "oracle.jsonl"
    cached = Cached(closing(oracles.Fails(TEXTS[0]), 2), kept)
    with pytest.raises(UserError, match="no licence for AAAAAA"):
        cached.raw(TEXTS)
    answered = {json.loads(line)["text"] for line in kept.read_text().splitlines()}
    assert len(TEXTS) // 2 < len(answered) < len(TEXTS)
    monkeypatch.setattr(workers, "DEATHS", 1)  # each starts the workers again, which takes seconds
    always = closing(oracles.DiesAlways(), 1)
    with pytest.raises(UserError, match="worker process died 2 times"):
        always.raw(TEXTS[:2])


def test_an_oracle_that_cannot_travel_is_refused_in_words():
    with pytest.raises(UserError, match="module level, or name its task as module:function"):
        Remote(oracles.task().oracle, 2)


def test_what_is_no_oracle_over_texts_is_refused_in_words():
    with pytest.raises(UserError, match="Remote\\(Host\\(function, env\\)\\)"):
        Remote(oracles.plain, 2)


SCRIPT = """
import sys
from stochflow import Strings
from stochflow.errors import UserError
from stochflow.scores.oracles import Host
from stochflow.scores.workers import Remote

def count(texts):  # of a program without a file: another process cannot import it, Ray can be sent it
    return [1.0 + t.count("G") for t in texts]

remote = Remote(Host(count, Strings("ACGT", 4)), sys.argv[1])
try:
    remote.warm()
    print(remote.raw(["GGAA", "ACTT"]))
except UserError as error:
    print(error)
remote.close()
"""


def of_a_program_without_a_file(workers: str, piped: bool = False) -> str:
    """What the script says, given to Python as a word or through standard input."""
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    words = [sys.executable, "-", workers] if piped else [sys.executable, "-c", SCRIPT, workers]
    done = subprocess.run(words, input=SCRIPT, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip()


@pytest.mark.slow
def test_an_oracle_that_a_worker_cannot_make_is_a_sentence_and_no_worker_that_died():
    said = of_a_program_without_a_file("2")
    assert said.startswith("a worker cannot make the oracle (AttributeError")
    assert "module" in said
    assert "\n" not in said
    said = of_a_program_without_a_file("2", piped=True)
    assert said.startswith("an oracle's worker process ended as it began")
    assert "\n" not in said


@pytest.mark.slow
def test_workers_end_where_what_asks_them_is_killed(tmp_path):
    """Each writes its number, and would wait for ever for the next question."""
    (tmp_path / "numbered.py").write_text(
        "import os, signal, sys, time\nfrom pathlib import Path\n"
        "from stochflow import Strings\nfrom stochflow.scores.oracles import Host\n"
        "from stochflow.scores.workers import Remote\n"
        "def score(texts):\n    Path(f'{os.getpid()}.pid').touch()\n    time.sleep(0.2)\n    return [1.0] * len(texts)\n"
        "if __name__ == '__main__':\n"
        "    Remote(Host(score, Strings('ACGT', 4)), 2).raw(['AAAA', 'CCCC', 'GGGG', 'TTTT'])\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    assert subprocess.run([sys.executable, "numbered.py"], cwd=tmp_path, env=env, timeout=100).returncode == -9
    numbers = [int(p.stem) for p in tmp_path.glob("*.pid")]
    assert numbers
    end = time.monotonic() + 20
    while any(alive(n) for n in numbers):
        assert time.monotonic() < end, f"{numbers} still wait"
        time.sleep(0.1)


def alive(number: int) -> bool:
    """Whether the process runs; one that has ended and that nobody has asked about yet does not."""
    try:
        os.kill(number, 0)
        return ") Z " not in Path(f"/proc/{number}/stat").read_text()
    except ProcessLookupError:
        return False
    except OSError:  # no /proc
        return True


@pytest.mark.slow
@pytest.mark.extra
def test_ray_is_sent_an_oracle_of_a_script():
    pytest.importorskip("ray")
    assert of_a_program_without_a_file("ray:2") == "[3.0, 1.0]"


@pytest.mark.slow
def test_a_run_with_workers_and_a_lag_learns_and_goes_on_exactly(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parent)
    settings = {"batch": 8, "steps": 12, "hidden": 8, "save_every": 6, "eval_every": 6, "log_every": 6}
    one = train("remote_oracles:task", out=tmp_path / "one", **settings)
    two = train("remote_oracles:task", out=tmp_path / "two", oracle_workers="2", **settings)
    assert [r["score"] for r in two.sample(20)] == [r["score"] for r in one.sample(20)]
    assert two.summary["tv"] == one.summary["tv"], "the same run, bit for bit"
    assert open_run(tmp_path / "two", "remote_oracles:task").trainer.steps_done == 12


@pytest.mark.slow
@pytest.mark.extra
def test_ray_answers_as_one_process_does_and_survives_a_worker_that_dies(closing, tmp_path):
    pytest.importorskip("ray")
    local = oracles.oracle(oracles.plain).raw(TEXTS)
    note = tmp_path / "died"
    kept = tmp_path / "oracle.jsonl"
    remote = closing(oracles.DiesOnce(TEXTS[40], str(note)), "ray:2")
    assert Cached(remote, kept).raw(TEXTS) == local
    assert note.exists(), "no worker died, so nothing was shown"
    assert len(kept.read_text().splitlines()) == len(TEXTS)
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"
    remote.close()
    slow = Remote(oracles.oracle(oracles.slow), "ray:2")
    slow.warm()
    begun = time.perf_counter()
    assert slow.raw(TEXTS[:40]) == local[:40]
    took = time.perf_counter() - begun
    slow.close()
    assert took < 40 * 0.05 / 1.5, f"two workers took {took:.2f} s for 2 s of oracle time"
