"""Names and texts from a stranger's folder, on the terminal and on pages."""

from __future__ import annotations

import json
import threading
import urllib.request

import pytest

from stochflow.cli.commands import main
from stochflow.look.watch import Watcher

NAMES = [
    "[/foo]",
    "[link=http://x]y[/link]",
    "\x1b[31mred\x07",
    "$\\frac{",
    "$a$",
    "\ud800",
    "\u202eabc",
    "<script>alert(1)</script>",
]


def printable(text: str) -> bool:
    return all(c.isprintable() or c == "\n" for c in text)


@pytest.mark.parametrize("name", NAMES, ids=ascii)
def test_labels_of_any_text_are_compared(name, make_run, tmp_path, monkeypatch, capfd):
    """Once: rich took square brackets for markup, matplotlib dollars for formulas, and UTF-8 refused half characters."""
    monkeypatch.chdir(tmp_path)
    for run, table in (("one", "t.csv"), ("two", name)):
        path = make_run(run, noise="confusion", confusion="t.csv")
        config = json.loads((path / "config.json").read_text())
        config["task"]["confusion"] = table
        (path / "config.json").write_text(json.dumps(config))
    assert main(["compare", "one", "two"]) == 0
    assert main(["report", "two"]) == 0
    said = capfd.readouterr()
    assert printable(said.out + said.err)
    for page in ("compare.html", "two/report.html"):
        assert "<script>alert" not in (tmp_path / page).read_text()


def test_saved_figures_are_shown_without_escapes(make_run, capfd):
    run = make_run()
    for text in NAMES:
        found = json.loads((run / "summary.json").read_text())
        found |= {"floor_kind": text, "floor_reason": text, "caution": text, "law": text, "modes": 3, "modes_all": text}
        for tv in (None, 0.1):
            (run / "summary.json").write_text(json.dumps(found | {"floor_tv": tv}))
            assert main(["eval", str(run), "--saved"]) == 0
    assert printable(capfd.readouterr().out)


def test_half_characters_do_not_stop_the_live_page(make_run):
    run = make_run()
    config = json.loads((run / "config.json").read_text())
    config["chosen"] = config["task"]["table"] = "\ud800"
    (run / "config.json").write_text(json.dumps(config))
    with Watcher(run) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with urllib.request.urlopen(server.url) as answer:
            assert "\\ud800" in answer.read().decode()
        server.shutdown()


@pytest.mark.parametrize("port", ["-1", "65536", "999999999999"])
def test_a_port_that_cannot_be_is_one_sentence(port, make_run, capfd):
    assert main(["watch", str(make_run()), "--port", port]) == 2
    assert "--port" in capfd.readouterr().err


@pytest.mark.parametrize("every", ["0", "-1", "1000000000000"])
def test_a_page_that_never_looks_again_or_always_is_refused(every, make_run, capfd):
    """A browser takes a wait of more than 2^31 milliseconds for none at all."""
    assert main(["watch", str(make_run()), "--every", every]) == 2
    assert "--every" in capfd.readouterr().err
