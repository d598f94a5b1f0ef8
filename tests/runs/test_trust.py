"""A folder is data: no code that a run folder names, or brings along, is run unless the user says so."""

from __future__ import annotations

import importlib.util
import json
import os
import py_compile
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from stochflow.cli.commands import main
from stochflow.errors import UserError
from stochflow.runs import tasks, trust
from stochflow.runs.config import Config, UserTask
from stochflow.runs.experiment import evaluate_run, open_run, resume, train
from stochflow.types import Task

OWN = '''
from stochflow import Task, strings_task

def make(length: int = 2) -> Task:
    """Strings of A and C."""
    return strings_task(lambda texts: [1.0 + t.count("A") for t in texts], "AC", length)

def unsaid(length: int = 2):
    return make(length)
'''
QUICK = ["--steps", "2", "--batch", "4", "--hidden", "4", "--quiet"]
NAMES = "own_task evil evil_pkg evil_pkg.inner hidden_task twin".split()


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A folder with the user's own module, the current one; its modules are forgotten afterwards."""
    (tmp_path / "own_task.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    yield tmp_path
    for name in NAMES:
        sys.modules.pop(name, None)


@pytest.fixture
def run(place):
    """A run of the user's own task, whose module is then forgotten as by another process."""
    assert main(["train", "own_task:make", *QUICK, "--out", "run"]) == 0
    sys.modules.pop("own_task")
    return place / "run"


def rename(run: Path, task: dict) -> None:
    """Another task in config.json, as a stranger would write it."""
    config = json.loads((run / "config.json").read_text())
    config["task"] = task
    (run / "config.json").write_text(json.dumps(config))


def planted(code: str) -> str:
    """A module that leaves a mark when it is imported."""
    return f"import pathlib; pathlib.Path({code!r}).touch()\n" + OWN


COMMANDS = [["sample", "run", "-n", "2"], ["eval", "run"], ["resume", "run", "--steps", "3"], ["train", "--config", "run/config.json", "--out", "new"]]  # fmt: skip


@pytest.mark.parametrize("words", COMMANDS, ids=lambda words: words[0])
def test_a_task_of_ones_own_is_named_again_or_trusted(run, words, capfd):
    (run.parent / "own_task.py").write_text(planted(str(run.parent / "mark")))
    assert main(words) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    for part in ("own_task.py", "make(length=2)", "--task own_task:make", "--trust", "has changed"):
        assert part in said
    assert not (run.parent / "mark").exists()
    assert "own_task" not in sys.modules
    assert main([*words, "--task", "own_task:other"]) == 2
    assert "--task own_task:other" in capfd.readouterr().err
    assert not (run.parent / "mark").exists()
    assert main([*words, "--task", "own_task:make"]) == 0
    assert (run.parent / "mark").exists()


def test_trust_shows_what_it_imports(run, capfd, caplog):
    capfd.readouterr()
    assert main(["eval", "run", "--trust", "--json"]) == 0
    assert json.loads(capfd.readouterr().out)["step"] == 2
    err = caplog.text
    assert str(run.parent / "own_task.py") in err
    assert "make(length=2)" in err
    assert "changed" not in err


@pytest.mark.parametrize(
    "task",
    [
        {"name": "os:system", "command": "touch mark"},
        {"name": "subprocess:getoutput", "cmd": "touch mark"},
        {"name": "subprocess:Popen", "args": ["touch", "mark"]},
        {"name": "builtins:exec", "source": "open('mark', 'w')"},
        {"name": "builtins:eval", "source": "open('mark', 'w')"},
        {"name": "pathlib:Path.touch", "self": "mark"},
        {"name": "shutil:copy", "src": "own_task.py", "dst": "mark"},
        {"name": "stochflow.runs.tasks:load", "spec": "own_task:make"},
        {"name": "own_task:unsaid", "length": 2},
        {"name": ".own_task:make"},
        {"name": "../run:make"},
        {"name": "a b:make"},
    ],
    ids=lambda task: task["name"],
)
def test_no_arbitrary_callable_is_ever_called(run, task, capfd):
    """Not even with --trust: only a function that says it returns a Task is called with arguments from a file."""
    rename(run, task)
    for words in COMMANDS:
        for more in ([], ["--trust"], ["--task", task["name"]]):
            assert main([*words, *more]) == 2
            said = capfd.readouterr().err
            assert "Traceback" not in said
            assert "stochflow: " in said
    assert not (run.parent / "mark").exists()


def test_python_asks_alike(run):
    with pytest.raises(UserError, match="task='own_task:make'"):
        open_run(run)
    with pytest.raises(UserError, match="--task"):
        evaluate_run(run)
    with pytest.raises(UserError, match="--task"):
        resume(run, 3)
    assert "own_task" not in sys.modules
    assert open_run(run, "own_task:make").trainer.steps_done == 2
    assert open_run(run, tasks.load("own_task:make")).trainer.steps_done == 2
    assert isinstance(resume(run, 3, task="own_task:make").experiment.task, Task)
    config = Config.from_dict(json.loads((run / "config.json").read_text()))
    with pytest.raises(UserError, match="named by a file"):
        train(config, out=run.parent / "new")
    with pytest.raises(UserError, match="named by a file"):
        tasks.build(config.task)


def test_shipped_tasks_need_no_word_and_take_no_other(place, capfd):
    assert main(["train", "grid", "--side", "3", *QUICK, "--out", "run"]) == 0
    assert main(["eval", "run"]) == 0
    assert main(["eval", "run", "--task", "grid"]) == 0
    capfd.readouterr()
    assert main(["eval", "run", "--task", "os:system"]) == 2
    assert "a run of the task grid" in capfd.readouterr().err


@pytest.mark.parametrize("words", [["report", "run"], ["compare", "run", "run"], ["eval", "run", "--saved", "--json"]])
def test_looking_needs_no_code(run, words, monkeypatch):
    def refuse(*_):
        raise AssertionError("code was looked for")

    monkeypatch.setattr(tasks, "find", refuse)
    monkeypatch.setattr(trust, "locate", refuse)
    rename(run, {"name": "os:system", "command": "touch mark"})
    assert main(words) == 0
    assert not (run.parent / "mark").exists()


def test_locating_imports_nothing_parents_included(place):
    (place / "evil_pkg").mkdir()
    (place / "evil_pkg" / "__init__.py").write_text(planted(str(place / "mark")))
    (place / "evil_pkg" / "inner.py").write_text(planted(str(place / "mark")))
    parts = trust.locate("evil_pkg.inner:make")
    assert [p.file for p in parts] == [str(place / "evil_pkg" / "__init__.py"), str(place / "evil_pkg" / "inner.py")]
    assert trust.locate("evil_pkg.other:make")[-1].file is None
    assert not (place / "mark").exists()
    assert not {"evil_pkg", "evil_pkg.inner"} & set(sys.modules)


def test_a_module_in_the_run_folder_is_never_imported(run, monkeypatch, capfd):
    for name in ("evil", "sitecustomize", "usercustomize", "numpy"):
        (run / f"{name}.py").write_text(planted(str(run.parent / "mark")))
    (run / "all.pth").write_text(f"import pathlib; pathlib.Path({str(run.parent / 'mark')!r}).touch()\n")
    (run.parent / "hidden_task.py").symlink_to(run / "evil.py")
    for name, where in (("evil:make", run), ("hidden_task:make", run.parent)):
        rename(run, {"name": name})
        monkeypatch.chdir(where)
        for more in (["--trust"], ["--task", name], []):
            assert main(["eval", str(run), *more]) == 2
            assert not (run.parent / "mark").exists()
    assert "within the run folder" in capfd.readouterr().err


COMMAND = "import sys; sys.path.pop(0)\nfrom stochflow.cli.commands import main\n"


@pytest.mark.parametrize("way", [["-m", "stochflow", "eval", "."], ["-c", COMMAND + "sys.exit(main(['resume', '.', '--steps', '3']))"]], ids=["python -m", "command"])  # fmt: skip
def test_the_working_directory_brings_no_code(place, way):
    """In another process, started in a hostile run folder as a user would: nothing that lies there is run."""
    assert main(["train", "grid", "--side", "3", *QUICK, "--out", "run"]) == 0
    run, mark = place / "run", place / "mark"
    for name in ("sitecustomize", "usercustomize", "numpy", "torch", "numba", "yaml", "tyro", "evil"):
        (run / f"{name}.py").write_text(planted(str(mark)))
    (run / "all.pth").write_text(f"import pathlib; pathlib.Path({str(mark)!r}).touch()\n")
    (run / ".numba_config.yaml").write_text("cache_locator_classes: evil.Locator\ncache_dir: ./kept\ndisable_jit: 1\n")
    (run / "matplotlibrc").write_text("backend: module://evil\ntext.usetex: True\n")
    done = subprocess.run([sys.executable, *way], cwd=run, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert not mark.exists()
    assert not (run / "kept").exists()
    assert json.loads((run / "environment.json").read_text())["engine"] == "numba"


def test_the_source_of_a_task_is_remembered(run, caplog):
    noted = json.loads((run / "environment.json").read_text())["task"]
    assert set(noted) == {"own_task", "own_task:make"}
    (run.parent / "own_task.py").write_text(OWN + "\n# a note\n")
    assert main(["eval", "run", "--task", "own_task:make"]) == 0
    assert "the source of own_task has changed" in caplog.text
    (run.parent / "own_task.py").write_text(OWN.replace("1.0 +", "2.0 +"))
    assert main(["eval", "run", "--task", "own_task:make"]) == 0
    assert "this function's source has changed" in caplog.text


SHELL = """
from stochflow import Strings, Task
from stochflow.scores.oracles import Command, Host
from stochflow.scores.rewards import Power
from stochflow.worlds.channels import Exact


def make(command: str = "awk '{ print length($0) }'") -> Task:
    env = Strings("AC", 3)
    return Task(env, Exact(), Host(Command(command), env), Power(1.0))
"""


def test_a_shell_command_in_a_folder_is_not_run_by_naming_its_task(place, capfd, caplog):
    (place / "shell_task.py").write_text(SHELL)
    words = "--steps 2 --batch 2 --hidden 4 --quiet --out shell".split()
    assert main(["train", "shell_task:make", "--command", "awk '{ print 1 + length($0) }'", *words]) == 0
    config = place / "shell" / "config.json"
    whole = config.read_text()
    mark = place / "mark"
    config.write_text(whole.replace("awk '{ print 1 +", f"touch {mark}; awk '{{ print 1 +"))
    capfd.readouterr()
    for command in (["resume", "shell", "--steps", "3", "--quiet"], ["eval", "shell"], ["sample", "shell", "-n", "2"]):
        assert main([*command, "--task", "shell_task:make"]) == 2
        assert "name a shell command" in capfd.readouterr().err
    assert main(["train", "--config", "shell/config.json", "--task", "shell_task:make", "--out", "other"]) == 2
    assert "name a shell command" in capfd.readouterr().err
    assert not mark.exists()
    config.write_text(whole)
    assert main(["resume", "shell", "--steps", "3", "--quiet", "--trust"]) == 0
    assert "awk" in caplog.text  # it was shown


def test_a_command_of_the_tasks_own_code_is_agreed_to_with_its_name(place):
    (place / "shell_task.py").write_text(SHELL)
    words = "--steps 2 --batch 2 --hidden 4 --quiet --out own".split()
    assert main(["train", "shell_task:make", *words]) == 0
    assert main(["resume", "own", "--steps", "3", "--quiet", "--task", "shell_task:make"]) == 0


def test_what_says_task_counts():
    def spec(code: str):
        space: dict = {"__name__": "their_module"}
        exec(textwrap.dedent(code), space)
        return space["f"]

    for code in (
        "from stochflow import Task\ndef f() -> Task: ...",
        "import stochflow\ndef f() -> 'stochflow.Task': ...",
        "from __future__ import annotations\nimport stochflow as sf\ndef f() -> sf.Task: ...",
        "from __future__ import annotations\ndef f() -> Task: ...",
    ):
        trust.refuse_any_callable(spec(code), "m:f")
    for code in (
        "def f(): ...",
        "def f() -> int: ...",
        "Task = int\ndef f() -> 'Task': ...",
        "class f: ...",
        "f = print",
    ):
        with pytest.raises(UserError):
            trust.refuse_any_callable(spec(code), "m:f")


def test_a_parameter_called_name_is_refused(place, capfd):
    (place / "twin.py").write_text("from stochflow import Task\ndef make(name: str = 'x') -> Task: ...\n")
    assert main(["train", "twin:make", "--out", "run"]) == 2
    assert '"name"' in capfd.readouterr().err
    with pytest.raises(UserError, match='"name"'):
        UserTask("twin:make", {"name": "x"})


@pytest.mark.parametrize("table", ["http://127.0.0.1:9/c.csv", "file:///etc/passwd", "ftp://127.0.0.1/c.csv"])
def test_no_setting_names_an_address(place, table, monkeypatch, capfd):
    import urllib.request

    monkeypatch.setattr(urllib.request, "urlopen", lambda *_, **__: pytest.fail("the network was asked"))
    assert main(["train", "grid", "--noise", "confusion", "--confusion", table, "--out", "run"]) == 2
    assert "address" in capfd.readouterr().err


def test_outputs_replace_regular_files_alone(place, capfd):
    assert main(["train", "grid", "--side", "3", *QUICK, "--out", "run"]) == 0
    precious = place / "precious"
    precious.write_text("mine")
    os.mkfifo(place / "pipe")
    (place / "link.csv").symlink_to(precious)
    for out in ("link.csv", "pipe", "/dev/null"):
        assert main(["sample", "run", "-n", "2", "--out", out]) == 2
        assert main(["compare", "run", "run", "--out", out]) == 2
        assert "regular file" in capfd.readouterr().err
    run = place / "run"
    for name in ("metrics.jsonl", "summary.json", "samples.csv", "law.npz", "config.json", "error.txt", ".lock"):
        before = (run / name).read_bytes() if (run / name).exists() else None
        (run / name).unlink(missing_ok=True)
        (run / name).symlink_to(precious)
        main(["resume", "run", "--steps", "4"])
        assert precious.read_text() == "mine"
        (run / name).unlink()
        if before is not None:
            (run / name).write_bytes(before)
    (run / "summary.json.tmp").symlink_to(precious)
    assert main(["resume", "run", "--steps", "6", "--quiet"]) == 0
    assert precious.read_text() == "mine"
    assert Path("/dev/null").is_char_device()


def test_a_folder_cannot_have_another_file_written(place, capfd, caplog):
    """`oracle_cache` names a file that is appended to: one that a folder names is never made, and never another kind of file."""
    task = tasks.strings_task(lambda texts: [1.0 + t.count("A") for t in texts], "AC", 3)
    train(task, out="run", steps=1, batch=2, hidden=4)
    config = json.loads((place / "run" / "config.json").read_text())
    precious = place / "precious"
    precious.write_text("export PATH=/bin")
    for name in ("precious", "new"):
        config["train"]["oracle_cache"] = str(place / name)
        (place / "run" / "config.json").write_text(json.dumps(config))
        if name == "new":
            resume("run", 4, task=task)
            assert "are not there and are left out" in caplog.text
        else:
            with pytest.raises(UserError, match="is not an oracle's answer"):
                resume("run", 3, task=task)
    assert precious.read_text() == "export PATH=/bin"
    assert not (place / "new").exists()


def test_nothing_beside_a_task_stands_in_for_an_installed_module(place):
    """In another process: the task is agreed to, what lies beside it under the names of libraries is not run."""
    assert main(["train", "own_task:make", *QUICK, "--out", "run"]) == 0
    for name in ("scipy", "numba", "safetensors", "rich", "pandas", "matplotlib"):
        (place / f"{name}.py").write_text(planted(str(place / "mark")))
    words = ["eval", "run", "--task", "own_task:make", "--json"]
    code = f"import sys; sys.path.pop(0)\nfrom stochflow.cli.commands import main\nsys.exit(main({words!r}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=place, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["step"] == 2
    assert not (place / "mark").exists()


def test_code_that_was_compiled_by_another_is_not_run(run):
    """What is shown and remembered is the source, and a file in __pycache__ may be compiled from any other."""
    place = run.parent
    (place / "other.py").write_text(planted(str(place / "mark")))
    kept = importlib.util.cache_from_source(str(place / "own_task.py"))
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(place / "other.py"), cfile=kept, invalidation_mode=mode)
    assert main(["eval", "run", "--task", "own_task:make"]) == 0
    assert not (place / "mark").exists()


def test_a_link_in_the_folder_is_in_the_folder(place, monkeypatch, capfd):
    (place / "elsewhere.py").write_text(planted(str(place / "mark")))
    there = place / "sent"
    there.mkdir()
    (there / "evil.py").symlink_to(place / "elsewhere.py")
    (there / "config.json").write_text(json.dumps({"task": {"name": "evil:make"}, "train": {}}))
    monkeypatch.chdir(there)
    for more in (["--task", "evil:make"], ["--trust"]):
        assert main(["train", "--config", "config.json", "--out", "new", *more]) == 2
        assert "within the run folder" in capfd.readouterr().err
    assert not (place / "mark").exists()
