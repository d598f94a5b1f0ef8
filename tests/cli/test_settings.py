"""Absurd settings of forecasts, campaigns, sweeps and samples: one sentence, and no folder is left behind."""

from __future__ import annotations

import json

import pytest

from stochflow.cli.commands import main

FORECAST = "--horizon 3 --network off --origins 0 --samples 5 --quiet"
SLIPS = """forecast s.csv --out new --samples 1000000000|forecast s.csv --out new --samples 90000000 --horizon 12|forecast s.csv --out new --seeds 10000000
    forecast s.csv --out new --hidden 10000000|forecast s.csv --out new --hidden 90000|forecast s.csv --out new --batch 1000000000
    forecast s.csv --out new --window 1000000000|forecast s.csv --out new --season 1000000000|forecast s.csv --out new --seed 99999999999999999999
    forecast s.csv --out new --lr inf|forecast s.csv --out new --stride 99999999999999999999|forecast s.csv --out new --beta inf
    sample fc -n 1000000000|sample fc -n 90000000|sample fc --seed 99999999999999999999|resume fc --steps 99999999999999999999
    design new new --data lab.csv --seed=-1|design new new --data lab.csv --length 5 99999999999|design new new --data lab.csv --insertion nan
    design new new --data lab.csv --insertion 5|design new new --data lab.csv --deletion=-1|design new new --data lab.csv --threshold activity=nan --value activity
    design propose camp --seed=-1|design propose camp --seed 99999999999999999999|design propose camp --steps 99999999999999999999
    sweep grid --grid lr=1e-3 --workers=-1 --out new|sweep grid --grid lr=1e-3 --workers 99999999 --out new|sweep grid --grid lr=1..2 --trials 99999999999 --out new
    train rna --structure (((...))) --oracle-workers 100000 --out new|train rna --structure (((...))) --oracle-workers 99999999999999999999 --out new
    train grid --side 3 --beside ga --out new|train grid --beside nosuch --out new|train grid --look 99999999999 --out new|train grid --look 90000000 --side 99 --ndim 9 --out new|train grid --children 99999999999 --search population --out new"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    place = tmp_path_factory.mktemp("settings")
    (place / "s.csv").write_text(
        "unique_id,ds,y\n" + "".join(f"a,{2000 + m // 12}-{m % 12 + 1:02d}-01,{m % 12}.5\n" for m in range(40))
    )
    (place / "lab.csv").write_text("sequence,activity\n" + "".join(f"{a}{b}A,{i * 7 % 11}.5\n" for i, (a, b) in enumerate((a, b) for a in "ACGT" for b in "ACGT")))  # fmt: skip
    assert main(["forecast", str(place / "s.csv"), "--out", str(place / "fc"), *FORECAST.split()]) == 0
    assert main(["design", "new", str(place / "camp"), "--data", str(place / "lab.csv")]) == 0
    return place


@pytest.mark.parametrize("words", [w.strip() for line in SLIPS.split("\n") for w in line.split("|")])
def test_absurd_settings_are_one_sentence(words, place, monkeypatch, capfd):
    monkeypatch.chdir(place)
    assert main(words.split()) == 2
    said = capfd.readouterr().err
    assert said.count("\n") == 1
    assert "inside" not in said
    assert not (place / "new").exists()


def test_too_many_cells_are_refused_before_they_are_listed(place, monkeypatch, capfd):
    monkeypatch.chdir(place)
    many = ",".join(str(i) for i in range(1, 400))
    words = ["sweep", "grid", "--grid", f"hidden={many}", f"batch={many}", f"steps={many}", "--out", "new"]
    assert main(words) == 2
    assert "63521199 cells" in capfd.readouterr().err


def test_a_campaigns_names_are_shown_without_escapes(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    rows = "".join(f"{a}{b}A,{i * 7 % 11}.5\n" for i, (a, b) in enumerate((a, b) for a in "ACGT" for b in "ACGT"))
    (tmp_path / "lab.csv").write_text("sequence,act\x1b[31mivity\n" + rows)
    for words in (["new", "c\x1b[31m", "--data", "lab.csv"], ["propose", "c\x1b[31m", "--batch", "3", "--model", "ridge"], ["status", "c\x1b[31m"], ["report", "c\x1b[31m"]):  # fmt: skip
        assert main(["design", *words]) == 0
    assert "\x1b" not in capfd.readouterr().out


def test_nothing_is_written_or_removed_behind_the_links_of_a_campaign(place, tmp_path, monkeypatch, capfd):
    """Once: `design new` emptied the folder that a link called `measured` led to."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "mine").write_text("mine")
    for name in ("measured", "sources", "rounds"):
        (tmp_path / "theirs").mkdir(exist_ok=True)
        (tmp_path / "theirs" / name).symlink_to(precious)
        assert main(["design", "new", str(tmp_path / "theirs"), "--data", str(place / "lab.csv")]) == 2
        assert "is a link" in capfd.readouterr().err
        assert [p.name for p in precious.iterdir()] == ["mine"]
        (tmp_path / "theirs" / name).unlink()


@pytest.mark.timeout(60)
def test_a_lock_that_is_a_pipe_does_not_hang_a_campaign(place, tmp_path, capfd):
    import os
    import shutil

    camp = shutil.copytree(place / "camp", tmp_path / "camp")
    (camp / ".lock").unlink()
    os.mkfifo(camp / ".lock")
    assert main(["design", "propose", str(camp), "--batch", "3"]) == 2
    assert "regular file" in capfd.readouterr().err


def test_a_forecasts_outputs_replace_regular_files_alone(place, tmp_path, capfd):
    import shutil

    folder = shutil.copytree(place / "fc", tmp_path / "fc")
    precious = tmp_path / "precious"
    precious.write_text("mine")
    for name in ("forecasts.csv", "samples.npy", "report.html"):
        kept = (folder / name).read_bytes()
        (folder / name).unlink()
        (folder / name).symlink_to(precious)
        assert main(["resume", str(folder)]) == 2
        assert "regular file" in capfd.readouterr().err
        assert precious.read_text() == "mine"
        (folder / name).unlink()
        (folder / name).write_bytes(kept)
    (tmp_path / "link.csv").symlink_to(precious)
    for out in (tmp_path / "link.csv", "/dev/null"):
        assert main(["sample", str(folder), "-n", "2", "--out", str(out)]) == 2


def test_names_of_series_are_no_formulas_in_a_spreadsheet(place, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.csv").write_text((place / "s.csv").read_text().replace("\na,", "\n=cmd|'/C x'!A0,"))
    assert main(["forecast", "s.csv", "--out", "new", *FORECAST.replace("--origins 0", "--origins 1").split()]) == 0
    assert main(["sample", "new", "-n", "2", "--out", "drawn.csv"]) == 0
    for name in ("new/forecasts.csv", "new/windows.csv", "new/backtest.csv", "drawn.csv"):
        lines = (tmp_path / name).read_text().splitlines()
        assert len(lines) > 1
        assert not any(line.lstrip('"').startswith("=") for line in lines)
    assert main(["compare", "new", "new"]) == 0


@pytest.mark.parametrize("harm", ["[]", '{"a": [1]}', '{"chosen": 3}', '{"forecast": []}', "\ud800"], ids=ascii)
@pytest.mark.parametrize("name", ["config.json", "metrics.json", "windows.csv", "rivals.csv", "backtest.csv"])
def test_damaged_files_of_a_forecast_are_one_sentence_or_left_out(name, harm, place, tmp_path, capfd):
    import shutil

    folder = shutil.copytree(place / "fc", tmp_path / "fc")
    (folder / name).write_bytes(harm.encode("utf-8", "surrogatepass"))
    for words in (["report", str(folder)], ["compare", str(folder), str(folder)]):
        assert main(words) in (0, 2)
    said = capfd.readouterr().err
    assert "inside" not in said
    assert "Traceback" not in said


def test_a_stranger_asks_for_no_processes(tmp_path):
    """A folder's settings are held to the same limits as flags."""
    assert main(["train", "grid", "--side", "3", "--steps", "2", "--batch", "2", "--hidden", "4", "--quiet", "--out", str(tmp_path / "run")]) == 0  # fmt: skip
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    for name, value in (("look", 10**11), ("lag", 10**6), ("threads", 10**6)):
        (tmp_path / "run" / "config.json").write_text(json.dumps(config | {"train": config["train"] | {name: value}}))
        assert main(["resume", str(tmp_path / "run"), "--steps", "3"]) == 2
