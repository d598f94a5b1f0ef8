"""The door through which files come in."""

from __future__ import annotations

import io
import json
import os
import time
import zipfile

import numpy as np
import pytest

from stochflow.files import reading
from stochflow.files.arrays import read_npz
from stochflow.files.reading import (
    Unreadable,
    one_line,
    parse_json,
    read_bytes,
    read_cells,
    read_json,
    read_json_lines,
    read_text,
    shown,
)


def test_only_regular_files_up_to_a_size_are_read(tmp_path):
    (tmp_path / "file").write_bytes(b"12345")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    assert read_bytes(tmp_path / "file", 5) == b"12345"
    for name, words in (("file", "larger than the 4 bytes"), ("pipe", "FIFO"), ("zero", "device"), (".", "folder"), ("no", "no file"), ("a\0b", "cannot be read")):  # fmt: skip
        with pytest.raises(Unreadable, match=words):
            read_bytes(tmp_path / name, 4)


def test_a_link_may_not_lead_out_of_a_run_folder(tmp_path):
    (tmp_path / "secret").write_text("{}")
    run = tmp_path / "run"
    run.mkdir()
    (run / "own").write_text("{}")
    (run / "out").symlink_to("../secret")
    (run / "within").symlink_to("own")
    assert read_json(run / "within") == {}
    assert read_json(run / "out", in_folder=False) == {}
    with pytest.raises(Unreadable, match="leads out"):
        read_json(run / "out")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ('{"a": NaN}', "NaN"),
        ('{"a": -Infinity}', "Infinity"),
        ('{"a": 1e999}', "too large"),
        ('{"a": 123456789012345678901234567890}', "64 bits"),
        ("9" * 5000, "64 bits"),
        ("[" * 40 + "]" * 40, "deeper"),
        ("[" * 100_000, "deeper"),
        ('{"a":\n\n tru}', "line 3"),
    ],
    ids=lambda x: str(x)[:12],
)
def test_json_is_finite_and_shallow(tmp_path, text, words):
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(Unreadable, match=words) as error:
        read_json(tmp_path / "x.json")
    assert "\n" not in str(error.value)
    assert "x.json" in str(error.value)


def test_brackets_in_strings_are_no_depth():
    assert parse_json(json.dumps({"a": "[" * 100, "b": '\\"[' * 50}), "x")["a"] == "[" * 100


def test_text_is_utf8(tmp_path):
    (tmp_path / "x").write_bytes(b"\xef\xbb\xbfa\r\nb\r")
    assert read_text(tmp_path / "x") == "a\nb\n"
    (tmp_path / "x").write_bytes(b"a\nb\xff")
    with pytest.raises(Unreadable, match="line 2"):
        read_text(tmp_path / "x")


def test_lines_that_are_whole_are_kept_and_gaps_are_named(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b'{"a": 1}\n{"a": \xff}\n\n{"a": NaN}\n{"a": 2}\n{"a": ')
    found = read_json_lines(tmp_path / "x.jsonl")
    assert found.records == [{"a": 1}, {"a": 2}]
    assert [("line 2" in g, "line 4" in g) for g in found.gaps] == [(True, False), (False, True)]


def test_a_message_is_one_line_without_escapes():
    assert one_line("a\nb\x1b[31m\x9bc\u2028d\u202e\ud800") == "a\\nb\\x1b[31m\\x9bc\\u2028d\\u202e\\ud800"
    assert one_line("ä β 序") == "ä β 序"
    assert len(shown("x" * 10_000)) < 250


def packed(**members: bytes) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        for name, content in members.items():
            file.writestr(name + ".npy", content)
    return out.getvalue()


def header(shape: str, descr: str = "<f8") -> bytes:
    text = f"{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    return b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"PK\x03\x04",
        packed(a=b""),
        packed(a=header("(400000000,)") + b"0" * 100),
        packed(a=header("(10, -1)") + b"0" * 100),
        packed(a=header("(2,)", "|O") + b"0" * 100),
        packed(a=header("(" * 60 + ")" * 60)),
        packed(a=bytes(600 << 20)),
    ],
    ids="empty cut short claims negative objects deep bomb".split(),
)
def test_an_array_is_not_allocated_before_its_header_is_checked(tmp_path, content):
    import resource

    (tmp_path / "x.npz").write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(Unreadable, match=r"x\.npz"):
        read_npz(tmp_path / "x.npz")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000  # kilobytes


def test_whole_arrays_come_back(tmp_path):
    arrays = {"a": np.arange(6.0).reshape(2, 3), "b": np.array(["x", "yz"]), "c": np.array(3)}
    np.savez_compressed(tmp_path / "x.npz", **arrays)
    found = read_npz(tmp_path / "x.npz")
    assert all(np.array_equal(found[k], v) for k, v in arrays.items())


def test_a_quote_that_never_ends_is_refused_in_linear_time():
    begun = time.process_time()
    with pytest.raises(Unreadable, match="not JSON"):
        parse_json('"' + '\\"' * 300_000, "x")
    assert time.process_time() - begun < 5


@pytest.mark.parametrize(
    "text", ["[" + "{}," * 12_000_000 + "{}]", '{"a": [' + '[""],' * 15_000_000 + "[]]}"], ids=["objects", "texts"]
)
def test_small_text_that_makes_large_objects_is_refused_with_its_size(text):
    with pytest.raises(Unreadable, match=r"reading x would take up to [\d.]+ GB of memory"):
        parse_json(text, "x")


def test_lines_and_cells_that_would_not_fit_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(reading, "free_memory", lambda: 100 << 20)
    (tmp_path / "x.jsonl").write_bytes(b'{"step":1}\n' * 500_000)
    with pytest.raises(Unreadable, match="of memory"):
        read_json_lines(tmp_path / "x.jsonl")
    (tmp_path / "x.csv").write_bytes(b"1,A\n" * 500_000)
    with pytest.raises(Unreadable, match="of memory"):
        read_cells(tmp_path / "x.csv")
    monkeypatch.undo()
    assert len(read_json_lines(tmp_path / "x.jsonl").records) == 500_000


def test_countless_gaps_are_counted(tmp_path):
    (tmp_path / "x.jsonl").write_bytes(b"?\n" * 5000 + b'{"a": 1}\n')
    found = read_json_lines(tmp_path / "x.jsonl")
    assert found.records == [{"a": 1}]
    assert len(found.gaps) == 101
    assert found.gaps[-1].endswith("4900 more lines that cannot be read")
