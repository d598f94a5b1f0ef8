"""A damaged file of a run folder gets one sentence, and the rest of the folder is used."""

from __future__ import annotations

import json
import random
import shutil

import numpy as np
import pytest
import torch

from stochflow.cli.commands import main
from stochflow.errors import UserError
from stochflow.look.report.files import RunFiles
from stochflow.runs.folder import DamagedCheckpoint, Run, load_checkpoint, pack

QUICK = ["--steps", "6", "--batch", "4", "--hidden", "4", "--log-every", "2", "--eval-every", "4", "--quiet"]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole") / "run"
    assert main(["train", "gc", "--length", "2", "--seeds", "2", *QUICK, "--out", str(out)]) == 0
    return out


@pytest.fixture
def run(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "run")


COMMANDS = [["report"], ["compare", "run"], ["sample", "-n", "2"], ["eval"], ["eval", "--saved"], ["resume", "--steps", "8", "--quiet"]]  # fmt: skip
HARM = [b"", b"\xff\xfe\n", b"{\n{}\n", b"[" * 5000 + b"\n"]


@pytest.mark.parametrize("name", ["environment.json", "summary.json", "metrics.jsonl", "samples.csv", "law.npz"])
@pytest.mark.parametrize("harm", HARM, ids=lambda b: repr(b[:12]))
def test_a_damaged_file_is_named_and_the_rest_is_used(name, harm, run, monkeypatch, capfd, caplog):
    monkeypatch.chdir(run.parent)
    (run / name).write_bytes(harm)
    for command, *more in COMMANDS[:2]:  # what looks
        assert main([command, "run", *more]) == 0
    page = (run / "report.html").read_text()
    if harm and not (name == "samples.csv" and b"\xff" not in harm):
        assert name in caplog.text or name in page
    assert "Traceback" not in capfd.readouterr().err


def test_what_needs_tensors_goes_on_without_the_small_files(run, monkeypatch, capfd):
    monkeypatch.chdir(run.parent)
    for name in ("environment.json", "metrics.jsonl", "samples.csv", "summary.json"):
        (run / name).write_bytes(b"\xff{")
    for command, *more in [COMMANDS[2], COMMANDS[3], COMMANDS[5]]:
        assert main([command, "run", *more]) == 0
    assert json.loads((run / "environment.json").read_text())["threads"] == 1
    assert json.loads((run / "summary.json").read_text())["step"] == 8


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("metrics.jsonl", '"tv": ', '"tv": "<b>", "x": '),
        ("metrics.jsonl", '"loss": ', '"loss": {"a": 1}, "x": '),
        ("metrics.jsonl", '"seeds": {', '"seeds": {"tv": [1, 2, 3], '),
        ("metrics.jsonl", '"seeds": {', '"seeds": [1], "y": {'),
        ("summary.json", '"step": 6', '"step": 6, "tv_low": "a"'),
        ("summary.json", '"samples": ', '"samples": [], "x": '),
        ("environment.json", '"versions": {', '"versions": 3, "x": {'),
        ("environment.json", '"threads": 1', '"threads": 1e9'),
        ("samples.csv", "0.", "."),
        ("samples.csv", "design_0001,", "design_0001,,,,,,,,"),
    ],
)
def test_a_figure_of_another_kind_is_left_out(name, old, new, run, monkeypatch):
    monkeypatch.chdir(run.parent)
    text = (run / name).read_text()
    assert old in text
    (run / name).write_text(text.replace(old, new, 1))
    for command, *more in COMMANDS:
        assert main([command, "run", *more]) == 0, command


def test_a_law_whose_arrays_do_not_go_together_is_left_out(run, monkeypatch):
    monkeypatch.chdir(run.parent)
    with np.load(run / "law.npz") as file:
        law = dict(file)
    for harm in ({"log_prob": np.zeros((1, 3))}, {"score_law": np.zeros(3)}, {"log_reward": np.full(3, np.nan)}, {"score_edges": np.zeros(0)}, {"grid_law": np.zeros((2, 2, 2))}):  # fmt: skip
        np.savez(run / "law.npz", **law | harm)
        assert main(["report", "run"]) == 0
        assert "Left out" in (run / "report.html").read_text()


def test_a_law_that_would_take_minutes_to_draw_is_left_out(run, monkeypatch):
    """Zeros pack well: three kilobytes may hold a histogram of a million bars."""
    monkeypatch.chdir(run.parent)
    bars, cells = 10**6, 2000
    for law in (
        {"score_edges": np.linspace(0, 1, bars + 1), "score_law": np.zeros((1, bars)), "score_target": np.zeros(bars)},
        {"grid_law": np.zeros((1, cells, cells)), "grid_target": np.zeros((cells, cells))},
    ):
        np.savez_compressed(run / "law.npz", **law)
        found = RunFiles.read(run)
        assert not found.law
        assert len(found.gaps) == len(law)


def test_a_run_of_several_seeds_that_is_not_listed_has_no_gap(run):
    assert RunFiles.read(run).gaps == []
    assert {"score_law", "log_prob"} <= RunFiles.read(run).law.keys()


def test_designs_beyond_what_a_run_writes_are_left_out(run):
    """Their modes would take the square of their number in memory."""
    head, first, *_ = (run / "samples.csv").read_text().splitlines()
    (run / "samples.csv").write_text("\n".join([head, *[first] * 5000]) + "\n")
    found = RunFiles.read(run)
    assert len(found.designs) == 1000
    assert ["more than the 1000 rows" in gap for gap in found.gaps] == [True]


def test_what_is_left_out_stands_on_the_page(run, monkeypatch):
    monkeypatch.chdir(run.parent)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 7, "tv": <script>}\n{"step": 8}\n')
    assert main(["report", "run"]) == 0
    assert "Left out" in (run / "report.html").read_text()
    assert main(["compare", "run", "run"]) == 0
    assert "Left out" in (run.parent / "compare.html").read_text()


@pytest.mark.parametrize("harm", ["step nan", "step 5", "random of floats", "random of another length"])
def test_tensors_that_are_whole_and_mean_nothing_are_one_sentence(harm, run, monkeypatch, capfd):
    """A checkpoint made with intent, its checksum right."""
    monkeypatch.chdir(run.parent)
    for path in (run / "checkpoints").iterdir():
        found = load_checkpoint(path)
        tensors, scalars = dict(found.tensors), {k: found.scalars[k] for k in ("step", "best_so_far")}
        dice = tensors["random.cpu"]
        tensors |= {
            "step nan": {"step": tensors["step"] * torch.nan},
            "step 5": {"step": tensors["step"] * 0 + 5},
            "random of floats": {"random.cpu": dice.double()},
            "random of another length": {"random.cpu": dice[:7].clone()},
        }[harm]
        path.write_bytes(pack(tensors, scalars))
    for words in (["eval", "run"], ["sample", "run", "-n", "2"], ["resume", "run", "--steps", "8"]):
        capfd.readouterr()
        assert main(words) == 2
        assert "than its config.json says" in capfd.readouterr().err


def test_every_flipped_bit_of_a_checkpoint_is_noticed(tmp_path):
    """In the header, whose scalars have no tensor to stand for them, as in the data."""
    content = pack({"a": torch.arange(6.0).reshape(2, 3), "b": torch.zeros(2, 2)}, {"step": 12, "best_so_far": -1.25})
    path = tmp_path / "step-00000012.safetensors"
    chosen = range(len(content) * 8)
    accepted = []
    path.write_bytes(content)
    true = load_checkpoint(path)
    for bit in chosen:
        harmed = bytearray(content)
        harmed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(harmed)
        try:
            found = load_checkpoint(path)
        except (DamagedCheckpoint, ValueError):  # a newer format is refused by name
            continue
        same = found.scalars == true.scalars and all(torch.equal(found.tensors[k], t) for k, t in true.tensors.items())
        accepted.append((bit, same))
    assert [bit for bit, same in accepted if not same] == []


@pytest.mark.parametrize("seed", range(3))
def test_a_cut_or_scrambled_checkpoint_is_damaged_and_nothing_else(tmp_path, seed):
    rng = random.Random(seed)
    content = pack({"a": torch.arange(60.0)}, {"step": 1})
    path = tmp_path / "x.safetensors"
    for _ in range(200):
        harmed = bytearray(content[: rng.randrange(len(content))] if rng.random() < 0.3 else content)
        for _ in range(rng.randrange(1, 20) if harmed else 0):
            harmed[rng.randrange(len(harmed))] = rng.randrange(256)
        if harmed == content:
            continue
        path.write_bytes(harmed)
        with pytest.raises((DamagedCheckpoint, ValueError)):
            load_checkpoint(path)


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4], "data_offsets": [0, 10**15]},
        {"dtype": "F32", "shape": [-4], "data_offsets": [0, 16]},
        {"dtype": "XXL", "shape": [4], "data_offsets": [0, 16]},
        {"dtype": "F32", "shape": [4]},
        {"dtype": "F32", "shape": [2**62] * 100_000, "data_offsets": [0, 16]},
        3,
    ],
    ids=lambda entry: str(entry)[:60],
)
def test_a_header_that_does_not_fit_its_file_is_refused_before_anything_is_allocated(tmp_path, entry):
    header = json.dumps({"a": entry, "__metadata__": {"stochflow": '{"format": 1, "step": 1}'}}).encode()
    path = tmp_path / "x.safetensors"
    for length in (len(header), 2**62, 0):
        path.write_bytes(length.to_bytes(8, "little") + header + bytes(16))
        with pytest.raises(DamagedCheckpoint):
            load_checkpoint(path)


def test_the_header_is_the_same_however_a_run_ended(run, tmp_path, monkeypatch):
    """Stopped after its final look, a run that is taken up again has the header of one that was not."""
    from stochflow.runs.session import Session

    with monkeypatch.context() as patch:
        patch.setattr(Session, "_write_law", lambda self: (_ for _ in ()).throw(KeyboardInterrupt("now")))
        words = ["train", "gc", "--length", "2", "--seeds", "2", *QUICK, "--out", str(tmp_path / "cut")]
        assert main(words) == 130
    assert main(["resume", str(tmp_path / "cut"), "--quiet"]) == 0
    for name in ("step-00000006.safetensors", "best.safetensors"):
        a, b = (load_checkpoint(p / "checkpoints" / name) for p in (run, tmp_path / "cut"))
        assert a.scalars == b.scalars
        assert all(torch.equal(a.tensors[k], t) for k, t in b.tensors.items())


def test_other_versions_and_lost_lines_are_noted(run, caplog):
    noted = json.loads((run / "environment.json").read_text())
    noted["versions"]["torch"] = "1.0"
    (run / "environment.json").write_text(json.dumps(noted))
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text(lines[0] + lines[2])
    assert main(["resume", str(run), "--steps", "8", "--quiet"]) == 0
    assert "begun with torch 1.0" in caplog.text
    assert "lacks 1 line between steps 4 and 4" in caplog.text


def test_metrics_are_on_the_disk_before_the_checkpoint_that_follows_them(whole, tmp_path, monkeypatch):
    import os

    from stochflow.runs import folder

    order = []
    real = os.fsync
    monkeypatch.setattr(folder.os, "fsync", lambda n: (order.append(os.readlink(f"/proc/self/fd/{n}")), real(n)))
    with Run.open(shutil.copytree(whole, tmp_path / "run"), write=True) as run:
        run.save(7, {"a": torch.zeros(1)})
    names = [p.rpartition("/")[2] for p in order]
    assert names[:2] == ["metrics.jsonl", "step-00000007.safetensors.tmp"]


def test_a_log_that_cannot_be_read_at_all_is_not_replaced_by_an_empty_one(run, monkeypatch, capfd):
    from stochflow.files import reading

    before = (run / "metrics.jsonl").read_bytes()
    with Run.open(run, write=True) as opened:
        monkeypatch.setattr(reading, "SMALL", 10)
        monkeypatch.setattr(reading, "free_memory", lambda: 1000)
        assert opened.metrics() == []
        with pytest.raises(UserError, match="of memory"):
            opened.truncate_metrics(4)
    assert (run / "metrics.jsonl").read_bytes() == before


def test_nothing_is_removed_or_written_behind_a_link(run, tmp_path, capfd):
    """Once: `resume` removed every *.tmp from the folder that `checkpoints` led to, before it refused to write there."""
    elsewhere = shutil.copytree(run / "checkpoints", tmp_path / "elsewhere")
    (elsewhere / "mine.tmp").write_text("mine")
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").symlink_to(elsewhere)
    before = sorted(p.name for p in elsewhere.iterdir())
    assert main(["resume", str(run), "--steps", "8"]) == 2
    assert "is a link" in capfd.readouterr().err
    assert sorted(p.name for p in elsewhere.iterdir()) == before
