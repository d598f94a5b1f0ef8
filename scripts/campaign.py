"""Bad inputs and kills, many thousands of them: what docs/reliability.md counts.

    python scripts/campaign.py fuzz --cases 10000 --seed 0
    python scripts/campaign.py kills --count 1000 --seed 0
    python scripts/campaign.py disk
    python scripts/campaign.py page        # the tables of docs/reliability.md, from benchmarks/results/reliability.json

Everything runs in forked processes with a limit of time and memory, and each case is drawn from its own number, so that one
that fails can be repeated alone: `fuzz --only NUMBER`.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import io
import itertools
import json
import os
import platform
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "reliability.md"
RESULTS = ROOT / "benchmarks" / "results" / "reliability.json"
SECONDS, MEMORY = 30, 3 << 30  # a case may take this long, and this much memory beyond what is there before it
FINE = "fine"

# what is drawn ----------------------------------------------------------------------------------------------------

NUMBERS = "0 -1 1 -0.0 2.5 1e-320 1e300 1e999 inf -inf nan NaN 99999999999999999999999 -9223372036854775809 2147483648 0x10 1_0 ٣ ½ +1 1e".split()
WORDS = ["", " ", "x", "é", "\u202e", "\x1b[31mred", "a\nb", "a\tb", "=cmd|'/C x'!A0", "<script>alert(1)</script>", "'\"", "../..", "/dev/zero", "/", ".", "~", "null", "None", "true", "[]", "{}", "--", "-", "%s%n", "\udcff", "A" * 5000, "http://127.0.0.1:9/x", "$(touch mark)", "os:system", "a:b", ":", "::", "a.b.c:d", "__main__:x"]  # fmt: skip
FLAGS = """steps batch lr objective seed seeds device net hidden layers heads backward explore explore-tau clip subtb-lambda gamma kl-weight
    entropy-average replay replay-size dynamics dynamics-lr log-every eval-every save-every oracle-timeout oracle-retries threads engine stick
    noise confusion side ndim base length targets betas bits modes beta mode-seed out config track quiet json n format top unique min-distance
    simulate port every sied task trust saved help version""".split()
SMALL = "--steps 1 --batch 2 --hidden 4 --quiet".split()
TASKS = {"grid": ["--side", "3"], "gc": ["--length", "2"], "bits": ["--length", "8", "--modes", "2", "--net", "mlp"]}
OTHERS = {  # other folders that are harmed, and what is then done with them
    "design campaign": [["design", "status", "HERE"], ["design", "report", "HERE"], ["design", "propose", "HERE", "--batch", "4", "--model", "ridge"]],
    "forecast folder": [["report", "HERE"], ["sample", "HERE", "-n", "2"], ["compare", "HERE", "HERE"]],
    "sweep folder": [["sweep", "HERE", "--quiet", "--workers", "1"]],
}  # fmt: skip
FILES = ["config.json", "summary.json", "metrics.jsonl", "environment.json", "samples.csv", "samples.fasta", "law.npz", "checkpoints/best.safetensors", "checkpoints/step-00000002.safetensors"]  # fmt: skip


LAB = "sequence,activity\n" + "".join(
    f"{a}{b}{c}{a},{i * 37 % 19}.5\n" for i, (a, b, c) in enumerate(itertools.product("ACG", repeat=3))
)
SERIES = "unique_id,ds,y\n" + "".join(
    f"{n},{2000 + m // 12}-{m % 12 + 1:02d}-01,{m % 12 + m * 7 % 5}.5\n" for n in "ab" for m in range(40)
)
FORECAST = "--horizon 3 --network off --origins 2 --samples 20 --quiet".split()


class Case(NamedTuple):
    """One bad input."""

    kind: str
    what: str  # to be shown
    run: Callable[[], str]  # FINE, or what went wrong


def value(rng: random.Random) -> str:
    return rng.choice(NUMBERS if rng.random() < 0.5 else WORDS)


def harmed(content: bytes, rng: random.Random) -> bytes:
    """Bytes cut, flipped, doubled, replaced or swapped for other files' beginnings."""
    way = rng.randrange(8)
    at = rng.randrange(len(content) + 1)
    if way == 0:
        return content[:at]
    if way == 1:
        return content[:at] + rng.randbytes(rng.randrange(1, 40)) + content[at:]
    if way == 2:
        return rng.choice([b"", b"\0" * 100, b"[" * 3000, b"{}", b"null", b"[]", b"\xff\xfe", b"PK\x03\x04", b"\x93NUMPY", b"NaN\n", b"a,b\n1\n", b'{"step": 1}\n'])  # fmt: skip
    if way == 3:
        return content + content[at:]
    if way == 4:
        words = rng.choice(NUMBERS).encode()
        found = list(re.finditer(rb"\d+(\.\d+)?", content[:20000]))
        m = rng.choice(found) if found else None
        return content if m is None else content[: m.start()] + words + content[m.end() :]
    if way == 5:
        new = json.dumps(rng.choice(WORDS)).encode()
        found = list(re.finditer(rb'"[^"]*"', content[:20000]))
        m = rng.choice(found) if found else None
        return content if m is None else content[: m.start()] + new + content[m.end() :]
    new_content = bytearray(content)
    for _ in range(rng.randrange(1, 9) if content else 0):
        new_content[rng.randrange(len(new_content))] ^= 1 << rng.randrange(8)
    return bytes(new_content)


# the outcome --------------------------------------------------------------------------------------------------------


def command(words: list[str]) -> str:
    """Run one command in this process; FINE, or what a user would complain about."""
    from stochflow.cli.commands import main

    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(words)
    said = err.getvalue()
    lines = [line for line in said.split("\n") if line]
    if "Traceback" in said or code == 1:
        return f"inside: {lines[-1][:300] if lines else 'exit 1'}"
    if code not in (0, 2):
        return f"exit code {code}"
    if code == 2 and not said.strip():
        return "silent exit"
    if code == 2 and not all(line.startswith("stochflow: ") for line in lines):
        return f"not one sentence: {said[:300]!r}"
    if any(not c.isprintable() for c in said.replace("\n", "")):
        return f"control characters: {said[:300]!r}"
    return FINE


def call(function: Callable[[], Any]) -> str:
    """A call of Python: it returns, or raises a UserError of one line."""
    from stochflow.errors import UserError
    from stochflow.runs.folder import DamagedCheckpoint

    try:
        function()
    except (UserError, DamagedCheckpoint) as error:
        return FINE if str(error).strip() and "\n" not in str(error) else f"not one sentence: {str(error)[:300]!r}"
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"raw {type(error).__name__}: {str(error)[:200]} ({Path(where.filename).name}:{where.lineno})"
    return FINE


# the kinds --------------------------------------------------------------------------------------------------------


def a_command_line(rng: random.Random, place: Path) -> Case:
    """Wrong flags and values of every command."""
    name = rng.choice(list(TASKS))
    verb = rng.choices(["train", "floor", "sample", "eval", "report", "compare", "resume", "tasks", "doctor", "sweep", "design", "forecast", "other"], [8, 3, 3, 3, 1, 1, 2, 1, 1, 1, 3, 2, 1])[0]  # fmt: skip
    words = {
        "train": ["train", name, *TASKS[name], *SMALL, "--out", str(place / f"new-{rng.randrange(10**9)}")],
        "floor": ["floor", name, *TASKS[name]],
        "sample": ["sample", str(place / "run"), "-n", "2"],
        "eval": ["eval", str(place / "run"), "--saved"],
        "report": ["report", str(place / "no")],
        "compare": ["compare", str(place / "no"), str(place / "run")],
        "resume": ["resume", str(place / "run"), "--steps", "1"],
        "sweep": ["sweep", name, "--no-such", "1"],
        "design": ["design", rng.choice(["new", "propose", "record", "status", "report", "simulate", "noise", "x"]), str(place / f"campaign-{rng.randrange(9)}")],
        "forecast": ["forecast", str(place / "no.csv"), "--out", str(place / f"forecast-{rng.randrange(10**9)}")],
    }.get(verb, [verb if verb != "other" else value(rng)])  # fmt: skip
    for _ in range(rng.randrange(1, 4)):
        flag = f"--{rng.choice(FLAGS)}"
        if flag == "--out":  # nothing is written outside
            continue
        words += (
            [flag] if rng.random() < 0.15 else [flag, value(rng)] if rng.random() < 0.7 else [f"{flag}={value(rng)}"]
        )
    if rng.random() < 0.15:
        words.insert(rng.randrange(len(words) + 1), value(rng))
    return Case("command line", " ".join(words), lambda: command(words))


def a_damaged_folder(rng: random.Random, place: Path) -> Case:
    """A file of a run folder harmed, then looked at or used."""
    name = rng.choice([n for n in FILES if (place / "run" / n).exists()])
    words = rng.choices([["eval", "--saved", "--json"], ["sample", "-n", "2"], ["eval"], ["report"], ["resume", "--steps", "3", "--quiet"]], [6, 3, 1, 1, 1])[0]  # fmt: skip
    content = harmed((place / "run" / name).read_bytes(), rng)

    def run() -> str:
        with tempfile.TemporaryDirectory(dir=place) as folder:
            there = Path(shutil.copytree(place / "run", Path(folder) / "run"))
            (there / name).write_bytes(content)
            return command([words[0], str(there), *words[1:]])

    return Case("damaged run folder", f"{name}, {len(content)} bytes, {words[0]}", run)


def a_damaged_campaign(rng: random.Random, place: Path) -> Case:
    """A file of a campaign, a forecast or a sweep harmed, then looked at or used."""
    kind = rng.choice(list(OTHERS))
    name = rng.choice([str(p.relative_to(place / kind)) for p in sorted((place / kind).rglob("*")) if p.is_file() and p.name != ".lock"])  # fmt: skip
    words = rng.choice(OTHERS[kind])
    content = harmed((place / kind / name).read_bytes(), rng)

    def run() -> str:
        with tempfile.TemporaryDirectory(dir=place) as folder:
            there = Path(shutil.copytree(place / kind, Path(folder) / kind))
            (there / name).write_bytes(content)
            return command([str(there) if w == "HERE" else w for w in words])

    return Case(f"damaged {kind}", f"{name}, {len(content)} bytes, {' '.join(words)}", run)


def a_checkpoint(rng: random.Random, place: Path) -> Case:
    """A checkpoint harmed: it is damaged, or it is what it was."""
    import torch

    from stochflow.runs.folder import DamagedCheckpoint, load_checkpoint

    path = place / "run" / "checkpoints" / "step-00000002.safetensors"
    true = load_checkpoint(path)
    content = path.read_bytes()
    header = 8 + int.from_bytes(content[:8], "little")
    bit = rng.randrange((header if rng.random() < 0.5 else len(content)) * 8)
    new = bytearray(content)
    new[bit // 8] ^= 1 << bit % 8
    if rng.random() < 0.3:
        new = bytearray(harmed(content, rng))

    def run() -> str:
        file = place / f"harmed-{os.getpid()}.safetensors"
        file.write_bytes(new)
        try:
            found = load_checkpoint(file)
        except (DamagedCheckpoint, ValueError) as error:
            return FINE if str(error) else "no words"
        same = found.scalars == true.scalars and found.tensors.keys() == true.tensors.keys()
        return FINE if same and all(torch.equal(found.tensors[k], t) for k, t in true.tensors.items()) else "accepted"

    return Case("damaged checkpoint", f"bit {bit}", run)


def a_reader(rng: random.Random, place: Path) -> Case:
    """The readers of files that a user gives."""
    from stochflow.files.arrays import read_npz
    from stochflow.files.reading import read_json, read_json_lines
    from stochflow.runs.config import Config
    from stochflow.scores.data import tfbind8
    from stochflow.scores.oracles import Cached, Host
    from stochflow.worlds.channels import Confusion
    from stochflow.worlds.rules import Rules
    from stochflow.worlds.strings import Strings

    env = Strings("AC", 2)
    frame = "unique_id,ds,y\n" + "".join(f"a,2020-{m:02d}-01,{m}.5\n" for m in range(1, 13))
    whole: dict[str, tuple[bytes, Callable[[Path], Any]]] = {
        "table.csv": (b"A,C\n0.9,0.1\n0.2,0.8\n", lambda p: Confusion(str(p))),
        "rules.toml": (b'[gc]\nleast = 0.4\nmost = 0.6\n[forbidden]\nmotifs = ["GAATTC"]\n', lambda p: Rules.read(str(p))),
        "config.json": ((place / "run" / "config.json").read_bytes(), lambda p: read_json(p, Config.from_dict)),
        "law.npz": ((place / "run" / "law.npz").read_bytes(), read_npz),
        "metrics.jsonl": ((place / "run" / "metrics.jsonl").read_bytes(), read_json_lines),
        "tfbind.npz": ((place / "run" / "law.npz").read_bytes(), lambda p: tfbind8(str(p))),
        "oracle.jsonl": (b'{"text": "AA", "score": 1.0}\n{"text": "AC", "score": 2}\n', lambda p: Cached(Host(len, env), p)),
        "series.csv": (frame.encode(), _series),
        "lab.csv": (b"sequence,activity\nACGT,1.0\nACGA,2.0\nACCA,0.5\n", _measured),
    }  # fmt: skip
    name = rng.choice(list(whole))
    content, read = whole[name]
    new = harmed(content, rng)
    for _ in range(rng.randrange(3)):
        new = harmed(new, rng)

    def run() -> str:
        path = place / f"{os.getpid()}-{name}"
        path.write_bytes(new)
        return call(lambda: read(path))

    return Case(f"reader of {name}", repr(new[:120]), run)


def _series(path: Path) -> Any:
    from stochflow.forecast.frame import read_csv

    return read_csv(str(path))


def _measured(path: Path) -> Any:
    from stochflow.cli.commands import main

    out = path.with_suffix(".campaign")
    shutil.rmtree(out, ignore_errors=True)
    err = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        code = main(["design", "new", str(out), "--data", str(path), "--value", "activity", "--maximise"])
    said = err.getvalue()
    if code not in (0, 2) or "Traceback" in said or (code == 2 and (not said.strip() or said.count("\n") != 1)):
        raise RuntimeError(f"exit {code}: {said[:200]!r}")


def a_configuration(rng: random.Random, place: Path) -> Case:
    """A configuration whose keys and values are somebody else's."""
    from stochflow.runs.config import Config

    data = json.loads((place / "run" / "config.json").read_text())
    odd = [None, True, [], {}, "x", 0, -1, 10**30, float("nan"), float("inf"), 1e300, "", "\x1b[2J", ["a"], {"name": "os:system"}]  # fmt: skip
    for _ in range(rng.randrange(1, 4)):
        part = rng.choice([data, data["train"], data["task"]])
        if isinstance(part, dict):
            part[rng.choice([*part, "nonsense", "name", "format"])] = copy.deepcopy(rng.choice(odd))
        if not isinstance(data.get("train"), dict) or not isinstance(data.get("task"), dict):
            break
    return Case("configuration", json.dumps(data)[:200], lambda: call(lambda: Config.from_dict(data)))


def a_call(rng: random.Random, place: Path) -> Case:
    """Wrong arguments from Python."""
    import stochflow as sf
    from stochflow.runs.experiment import evaluate_run, open_run, resume

    odd = rng.choice(
        [None, -1, 0, 2.5, float("nan"), float("inf"), "x", [], {}, object(), 10**30, True, b"x", ("a",), "\x1b[31m"]
    )
    run = place / "run"
    calls: dict[str, Callable[[], Any]] = {
        "train(odd)": lambda: sf.train(odd, out=place / "never", steps=1),
        "train(batch=)": lambda: sf.train(
            "grid", side=3, batch=odd, steps=1, out=place / "never-0" / str(rng.random())
        ),
        "train(side=)": lambda: sf.train("grid", side=odd, steps=0, out=place / "never"),
        "train(lr=)": lambda: sf.train("grid", side=3, lr=odd, steps=-1, out=place / "never"),
        "train(seeds=)": lambda: sf.train("grid", side=3, seeds=odd, steps=0, out=place / "never"),
        "train(nonsense=)": lambda: sf.train("grid", nonsense=odd, out=place / "never"),
        "open_run(task=)": lambda: open_run(run, task=odd) if isinstance(odd, str) else None,
        "open_run(device=)": lambda: open_run(run, device=odd),
        "open_run(path)": lambda: open_run(odd if isinstance(odd, str) else "no"),
        "evaluate_run(path)": lambda: evaluate_run(place / "no"),
        "resume(steps=)": lambda: resume(run, steps=-3),
        "Slip": lambda: sf.Slip(odd),
        "Neighbour": lambda: sf.Neighbour(odd),
        "Strings(alphabet)": lambda: sf.Strings(odd, 3) if isinstance(odd, str) else None,
        "Strings(length)": lambda: sf.Strings("ACGT", odd),
        "Grid(ndim)": lambda: sf.Grid(odd, 3),
        "Grid(side)": lambda: sf.Grid(2, odd),
        "Power(beta)": lambda: sf.Power(odd),
        "strings_task(oracle)": lambda: sf.strings_task(odd, "ACGT", 2),
    }
    name = rng.choice(list(calls))
    return Case("call from Python", f"{name} {odd!r}", lambda: call(calls[name]))


KINDS = [
    (a_command_line, 25),
    (a_damaged_folder, 10),
    (a_damaged_campaign, 6),
    (a_checkpoint, 14),
    (a_reader, 25),
    (a_configuration, 12),
    (a_call, 8),
]


def draw(number: int, seed: int, place: Path) -> Case:
    rng = random.Random(f"{seed} {number}")
    kind = rng.choices([k for k, _ in KINDS], [w for _, w in KINDS])[0]
    return kind(rng, place)


# fuzzing ----------------------------------------------------------------------------------------------------------


def prepare(place: Path) -> None:
    """A small whole run, which the cases harm; what is imported late is imported now, before there are limits."""
    import logging

    logging.disable(logging.CRITICAL)
    if command(["train", "grid", "--side", "3", "--steps", "2", "--batch", "2", "--hidden", "4", "--quiet", "--engine", "eager", "--out", str(place / "run")]) != FINE:  # fmt: skip
        raise SystemExit("the run that is to be harmed could not be made")
    command(["report", str(place / "run")])
    command(["sample", str(place / "run"), "-n", "2"])
    (place / "lab.csv").write_text(LAB)
    (place / "series.csv").write_text(SERIES)
    for words in (
        ["design", "new", str(place / "design campaign"), "--data", str(place / "lab.csv"), "--value", "activity"],
        ["design", "propose", str(place / "design campaign"), "--batch", "4", "--model", "ridge"],
        ["forecast", str(place / "series.csv"), "--out", str(place / "forecast folder"), *FORECAST],
        ["sweep", "grid", *TASKS["grid"], *SMALL[:-1], "--grid", "lr=1e-3,3e-3", "--workers", "1", "--quiet", "--out", str(place / "sweep folder")],
    ):  # fmt: skip
        if (said := command(words)) != FINE:
            raise SystemExit(f"what is to be harmed could not be made: {' '.join(words)}: {said}")
    logging.disable(logging.NOTSET)


class _Slow(BaseException):
    """A case ran out of time."""


def _out_of_time(*_: object) -> None:
    raise _Slow


def outcome_of(case: Case, seconds: int = SECONDS) -> str:
    """The outcome of one case in this process."""
    signal.signal(signal.SIGALRM, _out_of_time)
    signal.alarm(seconds)
    try:
        return case.run()
    except _Slow:
        return f"hang: more than {seconds} s"
    except MemoryError:
        return "memory: more than it may take"
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        return f"raw {type(error).__name__}: {str(error)[:200]} ({Path(where.filename).name}:{where.lineno})"
    finally:
        signal.alarm(0)


def fuzz(cases: int, seed: int, together: int = 40) -> dict[str, Any]:
    """Outcomes of so many cases; `together` of them share a forked process."""
    begun, counts, bad = time.monotonic(), collections.Counter[str](), []
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        place = Path(folder)
        os.chdir(place)
        prepare(place)
        for first in range(0, cases, together):
            numbers = range(first, min(first + together, cases))
            done = _in_child(list(numbers), seed, place)
            slow = [number for number, _, _, outcome in done if outcome.startswith("hang")]
            if slow:  # on a busy machine a small training is slow too: what hangs does so again, alone and for longer
                done = [d for d in done if d[0] not in slow] + [d for n in slow for d in _in_child([n], seed, place, 4 * SECONDS)]  # fmt: skip
            for number, kind, what, outcome in done:
                counts[kind] += 1
                if outcome != FINE:
                    bad.append({"case": number, "kind": kind, "what": what[:300], "outcome": outcome})
                    print(f"{number}: {kind}: {outcome} <- {what[:160]!r}", flush=True)
            for left in place.iterdir():
                if left.name not in ("run", "lab.csv", "series.csv", *OTHERS):
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
    return {"cases": sum(counts.values()), "seed": seed, "kinds": dict(sorted(counts.items())), "bad": bad, "seconds": round(time.monotonic() - begun)}  # fmt: skip


def _in_child(numbers: list[int], seed: int, place: Path, seconds: int = SECONDS) -> list[tuple[int, str, str, str]]:
    """The cases one after the other in a forked process; one that kills it is named, and the rest go on in another."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
            with os.fdopen(writing, "w", errors="backslashreplace") as out:
                for number in numbers:
                    try:
                        case = draw(number, seed, place)
                    except Exception:
                        case = Case("drawing", traceback.format_exc()[-300:], lambda: "it could not be drawn")
                    out.write(json.dumps([number, case.kind, case.what, None]) + "\n")
                    out.flush()
                    out.write(json.dumps([number, case.kind, case.what, outcome_of(case, seconds)]) + "\n")
                    out.flush()
        finally:
            os._exit(0)
    os.close(writing)
    found: dict[int, tuple[int, str, str, str]] = {}
    pending: Any = None
    timer_end = time.monotonic() + seconds * len(numbers)
    with os.fdopen(reading) as lines:
        for line in lines:
            number, kind, what, outcome = json.loads(line)
            if outcome is None:
                pending = (number, kind, what)
            else:
                found[number], pending = (number, kind, what, outcome), None
            if time.monotonic() > timer_end:
                os.kill(child, signal.SIGKILL)
    status = os.waitpid(child, 0)[1]
    if pending is not None:
        found[pending[0]] = (*pending, f"killed its process (status {status})")
    if not found:  # it did not even begin: the first is named, so that this ends
        found[numbers[0]] = (numbers[0], "drawing", "", f"killed its process (status {status})")
    rest = [n for n in numbers if n not in found]
    return [*found.values(), *(_in_child(rest, seed, place, seconds) if rest else [])]


# kills ------------------------------------------------------------------------------------------------------------

OWN = """
from stochflow import Slip, Task, strings_task

def score(texts):
    return [0.1 + t.count("G") for t in texts]

def design(length: int = 4) -> Task:
    return strings_task(score, "ACGT", length, channel=Slip(0.2))
"""
STEPS = 12
QUICK = {"steps": STEPS, "batch": 4, "hidden": 4, "log_every": 2, "eval_every": 4, "save_every": 3, "engine": "eager"}
RUNS: dict[str, tuple[str, dict[str, Any]]] = {
    "grid": ("grid", {"side": 3, "stick": 0.2, "dynamics": "known"}),
    "learned noise": ("gc", {"length": 2, "seeds": 2}),
    "replay": ("bits", {"length": 8, "modes": 2, "net": "mlp", "objective": "tb", "replay": 0.5, "replay_size": 20}),
    "Python oracle": ("campaign_task:design", {}),
    "Python oracle, replay": ("campaign_task:design", {"replay": 0.5, "replay_size": 20, "objective": "tb"}),
}


DESIGNS, FORECASTS = "design campaign", "forecast"


def begin(name: str, folder: Path) -> None:
    """What a user does who finds it dead: go on with it, or start it again where it had not even begun."""
    from stochflow import train
    from stochflow.runs.experiment import resume
    from stochflow.runs.folder import is_run

    if name == DESIGNS:
        return rounds(folder)
    if name == FORECASTS:
        return forecast(folder)
    task, settings = RUNS[name]
    if is_run(folder):
        resume(folder, task=task)
    else:
        train(task, out=folder, **QUICK, **settings)
    return None


def rounds(folder: Path) -> None:
    """A campaign of two rounds, gone on with from wherever it is."""
    from stochflow.design.campaign import Campaign
    from stochflow.design.settings import Ask

    if not (folder / "campaign.json").exists():
        Campaign.new(folder, "lab.csv")
    made = Campaign.open(folder)
    for number in (1, 2):
        if len(made.store.rounds()) < number:
            made.ask(4, Ask(model="ridge"))
        if len(made.store.recordings()) <= number:
            designs = [row["sequence"] for row in made.store.proposal(made.store.rounds()[number - 1])]
            made.tell([{"sequence": s, "activity": float(s.count("G"))} for s in designs])


def forecast(folder: Path) -> None:
    """A forecast, which is there whole or not at all."""
    from stochflow.forecast.command import forecast_command, is_forecast
    from stochflow.forecast.config import Forecast

    if not is_forecast(folder):
        settings = Forecast(horizon=3, network="on", origins=1, samples=20, steps=4, seeds=1, hidden=8, window=8)
        forecast_command(settings, "series.csv", folder)


def _forked(work: Callable[[], None], dies: Callable[[int], None] | None = None) -> int:
    """Run in a forked process, silently; its wait status."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, 2)
            work()
            code = 0
        finally:
            os._exit(code)
    if dies is not None:
        dies(child)
    return os.waitpid(child, 0)[1]


def difference(folder: Path, reference: Path) -> str | None:
    """What differs between two runs, None where nothing does: tensors, headers, log, designs, files."""
    import torch

    from stochflow.runs.folder import Run, load_checkpoint

    if not (reference / "checkpoints").exists():
        return _other_bytes(folder, reference)

    def held(run: Path) -> list[str]:  # a run that was stopped between two checkpoints keeps one of that moment
        older = {p.name for p in Run.open(run).checkpoints()[1:]}
        return sorted(str(p.relative_to(run)) for p in run.rglob("*") if p.name not in older)

    names = held(reference)
    if held(folder) != names:
        return f"other files: {sorted({*held(folder)} ^ {*names})}"
    for name in (n for n in names if n.endswith(".safetensors")):
        a, b = load_checkpoint(folder / name), load_checkpoint(reference / name)
        if a.scalars != b.scalars:
            return f"{name}: header"
        if a.tensors.keys() != b.tensors.keys() or not all(torch.equal(a.tensors[k], t) for k, t in b.tensors.items()):
            return f"{name}: tensors"
    # what a Python oracle was asked before it died is paid for: its count may be ahead of the steps that are done again
    aside = {"time", "oracle_calls"} if (reference / "oracle.jsonl").exists() else {"time"}
    logs = [
        [{k: v for k, v in r.items() if k not in aside} for r in Run.open(f).metrics()] for f in (folder, reference)
    ]
    if logs[0] != logs[1]:
        other = [(a.get("step"), k) for a, b in zip(*logs, strict=False) for k in {*a, *b} if a.get(k) != b.get(k)]
        return f"metrics.jsonl: {len(logs[0])} lines for {len(logs[1])}, {other[:3]}"
    same = ["samples.csv", *(["oracle.jsonl"] if (reference / "oracle.jsonl").exists() else [])]
    return next((n for n in same if sorted((folder / n).read_bytes().split(b"\n")) != sorted((reference / n).read_bytes().split(b"\n"))), None)  # fmt: skip


def _other_bytes(folder: Path, reference: Path) -> str | None:
    """The first file that two campaigns or forecasts do not share, pictures left out."""

    def held(place: Path) -> dict[str, bytes]:
        return {
            str(p.relative_to(place)): p.read_bytes()
            for p in sorted(place.rglob("*"))
            if p.is_file() and p.name != ".lock" and p.suffix not in (".png", ".html")
        }

    a, b = held(folder), held(reference)
    return next((name for name in sorted({*a, *b}) if a.get(name) != b.get(name)), None)


def at_a_write(rng: random.Random, passes: int) -> Callable[[], None]:
    """From now on this process dies just before one of its first `passes` syncs, renames, removals and truncations."""
    fatal, count = rng.randrange(passes), [0]

    def dying(real: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            count[0] += 1
            if count[0] > fatal:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return called

    return partial(_wrap_writes, dying)


def _wrap_writes(wrapped: Callable[[Any], Any]) -> None:
    for name in ("replace", "rename", "fsync", "unlink", "truncate"):
        setattr(os, name, wrapped(getattr(os, name)))


def writes_of(name: str, folder: Path) -> int:
    """How often a run that nobody kills syncs, renames, removes and truncates; it is left in `folder`."""
    note = folder.with_name("writes")

    def counted(real: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            with note.open("ab") as file:
                file.write(b".")
            return real(*args, **kwargs)

        return called

    def work() -> None:
        _wrap_writes(counted)
        begin(name, folder)

    note.write_bytes(b"")
    if _forked(work):
        raise SystemExit(f"{name} does not run at all")
    return note.stat().st_size


def kills(count: int, seed: int, minutes: float) -> dict[str, Any]:
    """Kill runs and take them up again, until one ends: each end is compared with that of a run that nobody killed."""
    begun, ways, bad, done, finished = time.monotonic(), collections.Counter[str](), [], 0, 0
    kinds = collections.Counter[str]()
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        place = Path(folder)
        os.chdir(place)
        (place / "campaign_task.py").write_text(OWN)
        prepare(place)
        names = [*RUNS, DESIGNS, FORECASTS]
        spans: dict[str, float] = {}
        writes: dict[str, int] = {}
        (place / "whole").mkdir()
        for name in names:
            writes[name] = writes_of(name, place / "whole" / name)
            start = time.monotonic()
            if _forked(partial(begin, name, place / "again")):
                raise SystemExit(f"{name} does not run a second time")
            spans[name] = time.monotonic() - start
            if found := difference(place / "again", place / "whole" / name):
                raise SystemExit(f"{name} is not the same twice: {found}")
            shutil.rmtree(place / "again")
        while done < count and time.monotonic() - begun < minutes * 60:
            rng = random.Random(f"{seed} {finished}")  # of the run: one that was quicker than its death is not tried again
            name = rng.choice(names)
            out = place / "killed"
            for _ in range(rng.randrange(1, 4)):  # one run may die several times
                way, status = one_death(name, out, rng, spans[name], writes[name])
                if status == 0:
                    break  # it has ended: there is nothing left to kill
                ways[way] += 1
                kinds[name] += 1
                done += 1
            if _forked(partial(begin, name, out)) != 0:
                bad.append({"run": name, "case": finished, "what": "could not be taken up again"})
            elif found := difference(out, place / "whole" / name):
                bad.append({"run": name, "case": finished, "what": found})
            if bad and bad[-1]["case"] == finished:
                print(bad[-1], flush=True)
            finished += 1
            for left in (out, *place.glob(".killed-*")):  # a forecast's unfinished folders
                shutil.rmtree(left, ignore_errors=True)
    return {"kills": done, "runs": finished, "seed": seed, "ways": dict(sorted(ways.items())), "kinds": dict(sorted(kinds.items())), "bad": bad, "seconds": round(time.monotonic() - begun)}  # fmt: skip


def one_death(name: str, out: Path, rng: random.Random, span: float, writes: int) -> tuple[str, int]:
    """Begin or go on with a run and kill it, in one way or another; the way, and its wait status (0: it was quicker)."""
    way = rng.choice(["at a write", "at a write", "SIGKILL", "SIGTERM", "SIGINT", "SIGINT twice"])
    if way != "at a write":
        after = rng.random() * span
        return way, _forked(partial(begin, name, out), lambda child: _strike(child, way, after))
    install = at_a_write(rng, writes)

    def doomed() -> None:
        install()
        begin(name, out)

    return way, _forked(doomed)


def _strike(child: int, way: str, after: float) -> None:
    time.sleep(after)
    with contextlib.suppress(ProcessLookupError):
        if way == "SIGKILL":
            os.kill(child, signal.SIGKILL)
        elif way == "SIGTERM":
            os.kill(child, signal.SIGTERM)
        else:
            os.kill(child, signal.SIGINT)
            if way == "SIGINT twice":
                time.sleep(0.02)
                os.kill(child, signal.SIGINT)


# full disks -------------------------------------------------------------------------------------------------------


def disk(seed: int) -> dict[str, Any]:
    """Runs on a tmpfs with little room, then with enough: each ends as if there had always been room. Needs root to mount."""
    bad, tried = [], 0
    with tempfile.TemporaryDirectory(prefix="campaign-") as folder:
        place = Path(folder)
        os.chdir(place)
        (place / "campaign_task.py").write_text(OWN)
        prepare(place)
        small = place / "small"
        small.mkdir()
        for name in [*RUNS, DESIGNS, FORECASTS]:
            _forked(partial(begin, name, place / "whole" / name))
            for pages in random.Random(seed).sample(range(1, 40), 8):
                made = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={pages * 4096}", "none", str(small)], capture_output=True, text=True)  # fmt: skip
                if made.returncode:
                    return {"cases": tried, "bad": bad, "note": f"no tmpfs could be mounted: {made.stderr.strip()}"}
                try:
                    _forked(partial(begin, name, small / "run"))
                    subprocess.run(["mount", "-o", "remount,size=64m", str(small)], check=True)
                    tried += 1
                    if _forked(partial(begin, name, small / "run")):
                        bad.append({"run": name, "pages": pages, "what": "could not be taken up again"})
                    elif found := difference(small / "run", place / "whole" / name):
                        bad.append({"run": name, "pages": pages, "what": found})
                finally:
                    subprocess.run(["umount", str(small)], check=True)
    return {"cases": tried, "seed": seed, "bad": bad}


# the page ---------------------------------------------------------------------------------------------------------


def tables(results: dict[str, Any]) -> str:
    """The two tables of docs/reliability.md."""
    fuzzed, killed, full, machine = (results.get(part) for part in ("fuzz", "kills", "disk", "machine"))
    rows: list[str] = []
    if fuzzed:
        wrong = collections.Counter(b["kind"] for b in fuzzed["bad"])
        rows += ["| bad inputs | tried | handled | not handled |", "| --- | --- | --- | --- |"]
        rows += [f"| {kind} | {n:,} | {n - wrong[kind]:,} | {wrong[kind]:,} |" for kind, n in fuzzed["kinds"].items()]
        all_wrong = len(fuzzed["bad"])
        rows += [f"| **all** | **{fuzzed['cases']:,}** | **{fuzzed['cases'] - all_wrong:,}** | **{all_wrong:,}** |"]
        found = collections.Counter(b["outcome"][:70] for b in fuzzed["bad"])
        rows += ["", "Not handled: " + "; ".join(f"{n} x {what.strip()}" for what, n in found.most_common()) + "."] if found else []  # fmt: skip
        rows += [fuzzed["note"]] if fuzzed.get("note") else []
        rows += [""]
    if killed:
        rows += ["| killed | times |", "| --- | --- |", *[f"| {way} | {n:,} |" for way, n in killed["ways"].items()]]
        rows += [f"| **all** | **{killed['kills']:,}** |", ""]
        if kinds := killed.get("kinds"):
            rows += ["| of them while it made | times |", "| --- | --- |", *[f"| {name} | {n:,} |" for name, n in kinds.items()], ""]  # fmt: skip
        ends = f"{killed['runs']:,} runs died these deaths; {len(killed['bad'])} of them ended otherwise than a run that nobody killed."
        rows += [" ".join(filter(None, (ends, killed.get("note")))), ""]
    if full:
        note = f" ({full['note']})" if full.get("note") else ""
        rows += [f"Full disks: {full['cases']} runs met one; {len(full['bad'])} of them ended otherwise than with room{note}.", ""]  # fmt: skip
    seeds = sorted({part["seed"] for part in (fuzzed, killed, full) if part and "seed" in part})
    if machine:
        rows += [f"Taken on {machine['machine']}, Python {machine['python']}, torch {machine['torch']}, with seed {', '.join(map(str, seeds))}."]  # fmt: skip
    return "\n".join(rows)


def keep(part: str, found: dict[str, Any]) -> None:
    import torch

    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    results[part] = found
    results["machine"] = {"machine": f"{platform.machine()}, {os.cpu_count()} cores", "python": platform.python_version(), "torch": torch.__version__}  # fmt: skip
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("part", choices=["fuzz", "kills", "disk", "page"])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=120.0, help="of kills")
    parser.add_argument("--only", type=int, help="repeat one case of the fuzz, in this process")
    asked = parser.parse_args()
    sys.setswitchinterval(0.005)
    if asked.part == "page":
        text, found = PAGE.read_text(), tables(json.loads(RESULTS.read_text()))
        begin_, end = "<!-- tables -->\n", "<!-- end of tables -->"
        first, last = text.index(begin_) + len(begin_), text.index(end)
        PAGE.write_text(f"{text[:first]}\n{found}\n\n{text[last:]}")
        return 0
    if asked.only is not None:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            prepare(Path(folder))
            case = draw(asked.only, asked.seed, Path(folder))
            print(case.kind, repr(case.what))
            print(outcome_of(case))
        return 0
    parts = {"fuzz": lambda: fuzz(asked.cases, asked.seed), "kills": lambda: kills(asked.count, asked.seed, asked.minutes), "disk": lambda: disk(asked.seed)}  # fmt: skip
    found = parts[asked.part]()
    keep(asked.part, found)
    print(json.dumps({k: v for k, v in found.items() if k != "bad"}), f"{len(found['bad'])} bad")
    return 1 if found["bad"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
