"""`stochflow design`: from a laboratory's CSV to the next plate. Words to values here; the work is in `stochflow.design`."""

from __future__ import annotations

import csv
import dataclasses
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from stochflow.cli import design_noise
from stochflow.cli.complaints import parsed
from stochflow.cli.design_words import by_name, columns_of, noise_of
from stochflow.errors import UserError, did_you_mean, one_line
from stochflow.files.reading import shown

USAGE = """usage: stochflow design SUBCOMMAND ...

From measured sequences to the next plate, round after round, in a folder that survives.

  new CAMPAIGN       a campaign from a CSV of measured sequences
  propose CAMPAIGN   the next batch: CSV with wells, FASTA, and the reason for each design
  record CAMPAIGN    measured values of a batch, from a CSV
  status CAMPAIGN    where it stands
  report CAMPAIGN    one page to read and to hand on
  simulate CAMPAIGN  a dry run of several rounds on an oracle of your own
  noise PAIRS        a synthesiser's confusion table from ordered and sequenced strings

  stochflow design new plates --data lab.csv --value activity --maximise
  stochflow design propose plates --batch 96
  stochflow design record plates measured.csv
"""

Place = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(help="the campaign folder")]


@dataclass(frozen=True)
class New:
    """A campaign from a CSV of measured sequences."""

    campaign: Place
    data: Path
    """CSV of sequences and measured values (.csv or .csv.gz)"""
    sequence: str = ""
    """column of the sequences; guessed where one reading is possible"""
    value: tuple[str, ...] = ()
    """measured columns; guessed where one reading is possible"""
    maximise: tuple[str, ...] = ()
    """columns of which more is better; without names all that are not minimised"""
    minimise: tuple[str, ...] = ()
    """columns of which less is better; without names all"""
    weight: tuple[str, ...] = ()
    """how much a column counts among several, as NAME=NUMBER"""
    threshold: tuple[str, ...] = ()
    """what a design must reach, as NAME=NUMBER: at least this where more is better, else at most"""
    replicates: Literal["mean", "median"] = "mean"
    """how repeated values of one sequence become one"""
    alphabet: str = ""
    """all letters that sequences are spelt in; DNA, RNA and protein are told apart by themselves"""
    length: tuple[int, int] | None = None
    """shortest and longest design; by default as in the data"""
    wild_type: str = ""
    """the sequence that designs are compared with"""
    rules: Path | None = None
    """design rules (rules.toml)"""
    rules_approximate: bool = False
    """rules that are too many for exact look-ahead are checked by rejection"""
    noise: str = ""
    """what the synthesiser does: slip:0.1, neighbour:0.1, or a confusion table FILE.csv"""
    insertion: float = 0.0
    """chance that it inserts a letter, at each place"""
    deletion: float = 0.0
    """chance that it leaves a letter out"""
    seed: int = 0
    """seed of the campaign; each round has its own from it"""


@dataclass(frozen=True)
class Propose:
    """The next batch, as proposal.csv and proposal.fasta in the campaign's new round."""

    campaign: Place
    batch: int = 96
    """wells, controls and repeats included"""
    acquisition: Literal["gain", "ucb", "ei", "thompson", "greedy"] = "gain"
    """what makes a design worth measuring: expected gain in the mean of the best (as many as the batch has wells), upper confidence bound, expected improvement, a drawn model, the prediction"""
    kappa: float = 1.0
    """standard deviations that ucb adds to the prediction"""
    model: Literal["auto", "ensemble", "ridge", "gp", "forest"] = "auto"
    """auto takes the one with the smallest error on held-out groups"""
    sampler: Literal["auto", "exact", "gflownet", "search"] = "auto"
    """auto lists spaces of up to 131072 strings and trains a GFlowNet on larger ones"""
    min_distance: int | None = None
    """letters in which any two designs differ at least; by default as many as fill the batch, up to a fifth of the length"""
    max_distance: int | None = None
    """letters in which a design may differ from the nearest measured sequence; by default as far as the model was tested"""
    controls: str = ""
    """wells with known sequences, with commas between: wild-type,best"""
    replicate: int = 0
    """wells that measure the best known sequences again"""
    steps: int = 300
    """training steps of the GFlowNet"""
    preference: tuple[str, ...] = ()
    """what counts in this batch alone, as NAME=NUMBER for each of several columns; by default many mixtures around their weights"""
    seed: int | None = None
    """by default made of the campaign's and the round's number"""
    out: Path | None = None
    """also write the CSV here, and the FASTA beside it"""
    json: bool = False
    """print the designs as JSON"""


@dataclass(frozen=True)
class Record:
    """Measured values; they join by the id or the sequence of proposal.csv."""

    campaign: Place
    measured: Annotated[
        Path, tyro.conf.Positional, tyro.conf.arg(help="CSV with id or sequence, and the measured columns")
    ]
    again: bool = False
    """record a file that was recorded before once more"""


@dataclass(frozen=True)
class Status:
    """Where the campaign stands."""

    campaign: Place
    json: bool = False
    """print one JSON object"""


@dataclass(frozen=True)
class Report:
    """One self-contained HTML page: designs, the batch, what the model knows, progress."""

    campaign: Place
    out: Path | None = None
    """file to write; by default report.html in the campaign"""


@dataclass(frozen=True)
class Simulate:
    """Play several rounds on an oracle of your own, in a copy of the campaign, beside random and genetic choices."""

    campaign: Place
    oracle: str
    """my_module:my_function, from a list of sequences to their values; never taken from the campaign's folder"""
    rounds: int = 5
    """rounds to play"""
    batch: int = 96
    """wells a round"""
    out: Path | None = None
    """folder of the dry run; by default CAMPAIGN-simulated"""
    acquisition: Literal["gain", "ucb", "ei", "thompson", "greedy"] = "gain"
    """as in propose"""
    model: Literal["auto", "ensemble", "ridge", "gp", "forest"] = "auto"
    """as in propose"""


def run(words: list[str]) -> int:
    """One subcommand; returns the exit code."""
    if not words or words[0] in ("-h", "--help"):
        print(USAGE)
        return 0 if words else 2
    if "--feedback" in words:
        raise UserError(
            "a plate is ordered as a whole, and no letter of it can be corrected while it is made: for a loop with feedback take stochflow train TASK --feedback"
        )
    known = {"new": _new, "propose": _propose, "record": _record, "status": _status}
    known |= {"report": _report, "simulate": _simulate, "noise": design_noise.run}
    if words[0] not in known:
        raise UserError(
            f"there is no `design {words[0]}`{did_you_mean(words[0], known)}: `stochflow design --help` lists what there is"
        )
    return known[words[0]](words[1:])


def _bare(words: list[str]) -> list[str]:
    """--maximise and --minimise without names mean every column."""
    found: list[str] = []
    for i, word in enumerate(words):
        word = {"--minimize": "--minimise", "--maximize": "--maximise"}.get(word, word)
        found.append(word)
        if word in ("--maximise", "--minimise") and (i + 1 == len(words) or words[i + 1].startswith("-")):
            found.append("*")
    return found


def _new(words: list[str]) -> int:
    asked = parsed(New, _bare(words), prog="stochflow design new")
    from stochflow.design.campaign import About, Campaign

    columns, minimise = columns_of(asked)
    about = About(
        columns=columns,
        sequence=asked.sequence,
        minimise=minimise,
        alphabet=asked.alphabet,
        lengths=asked.length,
        wild_type=asked.wild_type,
        rules="" if asked.rules is None else str(asked.rules),
        rules_approximate=asked.rules_approximate,
        replicates=asked.replicates,
        noise=noise_of(asked, [c.name for c in columns]),
        seed=asked.seed,
    )
    made = Campaign.new(asked.campaign, asked.data, about)
    s, m = made.settings, made.measured()
    print(f"campaign: {shown(made.path)}")
    for note in made.notes:
        print(f"  {one_line(note)}")
    lengths = f"{s.min_length}" if s.min_length == s.max_length else f"{s.min_length} to {s.max_length}"
    print(f"  {len(m.sequences)} different sequences over {shown(s.alphabet)}, designs of length {lengths}")
    for c, column in enumerate(s.columns):
        found = made.best(m)[column.name]
        print(f"  {one_line(column.describe())}; best so far {found['value']:.4g} ({shown(found['sequence'], 60)})")
        repeated = int((m.counts[:, c] > 1).sum())
        if repeated:
            print(
                f"  {repeated} of them {'was' if repeated == 1 else 'were'} measured more than once (taken as their {s.replicates}): one measurement has a standard deviation of {m.noise[c]:.3g}"
            )
    if not asked.maximise and not asked.minimise:
        print("  more is taken as better: say --minimise where less is")
    if s.noise is not None:
        print(f"  the synthesiser errs: {s.noise.describe()}")
    print(f"next: stochflow design propose {shown(made.path)} --batch 96")
    return 0


def _propose(words: list[str]) -> int:
    asked = parsed(Propose, words, prog="stochflow design propose")
    from stochflow.design.campaign import Campaign, fasta
    from stochflow.design.page import expected_words, held_together
    from stochflow.design.settings import Ask
    from stochflow.design.store import as_csv, as_json, read_json

    names = {f.name for f in dataclasses.fields(Ask)}
    given = {k: v for k, v in vars(asked).items() if k in names}
    given["controls"] = tuple(c.strip() for c in asked.controls.split(",") if c.strip())
    campaign = Campaign.open(asked.campaign)
    columns = [c.name for c in campaign.settings.columns]
    given["preference"] = by_name("--preference", asked.preference, columns) or None
    rows = campaign.ask(asked.batch, Ask(**given))
    if asked.out is not None:
        from stochflow.runs.atomic import write_text

        write_text(asked.out, as_csv(rows).decode())
        write_text(asked.out.with_suffix(".fasta"), fasta(rows))
    if asked.json:
        print(as_json(rows).decode())
        return 0
    folder = campaign.store.rounds()[-1]
    for part in campaign.model_figures() or []:
        best = part["considered"][0]
        print(
            f"{shown(part['column'])}: {shown(part['chosen'])}, rank correlation {best['rank_correlation']:.2f} on held-out groups ({best['groups']} groups of {best['rows']} sequences)"
        )
        if held_together(part):
            print(f"  {held_together(part)}")
        for level, q in part["quantiles"].items():
            if q is None:
                print(f"  too few groups for a {float(level):.0%} interval, so none is given")
    for note in campaign.notes:
        print(one_line(note))
    said = expected_words(read_json(folder / "done.json"), [c.name for c in campaign.settings.columns]).strip()
    if said:
        print(one_line(said))
    print(f"{len(rows)} well{'s' if len(rows) > 1 else ''}:")
    for row in rows[:5]:
        print(one_line(f"  {row['well']:<4} {row['id']}  {shown(row['sequence'], 60)}  {row['reason']}"))
    if len(rows) > 5:
        print(f"  ... and {len(rows) - 5} more")
    print("written:")
    for name in ("proposal.csv", "proposal.fasta"):
        print(f"  {shown(folder / name)}")
    print(
        f"next: fill in the measured column beside the ids, then stochflow design record {shown(campaign.path)} FILE.csv"
    )
    return 0


def _record(words: list[str]) -> int:
    asked = parsed(Record, words, prog="stochflow design record")
    from stochflow.design.campaign import Campaign

    campaign = Campaign.open(asked.campaign)
    told = campaign.tell(asked.measured, asked.again)
    for sentence in told.sentences():
        print(one_line(sentence))
    for name, found in campaign.best().items():
        print(f"best {shown(name)} so far: {found['value']:.4g} ({shown(found['sequence'], 60)})")
    for entry in campaign.history():
        if entry["round"] not in told.rounds:
            continue
        for name, about in entry["columns"].items():
            for level in (80, 95):
                if f"covered{level}" in about:
                    print(
                        f"{shown(name)}, round {entry['round']}: {about[f'covered{level}']:.0%} of {about[f'covered{level}_of']} measured designs lay in their {level} % interval"
                    )
    return 0


def _status(words: list[str]) -> int:
    asked = parsed(Status, words, prog="stochflow design status")
    from stochflow.design.campaign import Campaign

    campaign = Campaign.open(asked.campaign)
    history, pending, failed = campaign.history(), campaign.pending(), campaign.failed()
    if asked.json:
        from stochflow.design.store import as_json

        print(as_json({"rounds": history, "pending": pending, "failed": failed, "best": campaign.best()}).decode())
        return 0
    print(
        f"{shown(campaign.path)}: {_many(len(campaign.measured().sequences), 'sequence')} measured, {_many(len(history) - 1, 'round')} proposed"
    )
    writer = csv.writer(sys.stdout, delimiter="\t", lineterminator="\n")
    writer.writerow(
        ["round", "proposed", "measured", "failed", *[f"best {shown(c.name)}" for c in campaign.settings.columns]]
    )
    for entry in history:
        best = []
        for column in campaign.settings.columns:
            values = entry["columns"][column.name]["values"]
            best.append(f"{max(values, key=lambda v: column.sign * v):.4g}" if values else "-")
        writer.writerow([entry["round"], entry["proposed"], entry["measured"], entry["failed"], *best])
    if pending:
        print(f"{_many(len(pending), 'proposed design')} {'have' if len(pending) > 1 else 'has'} no value yet")
    if failed:
        print(f"{_many(len(failed), 'sequence')} failed and {'are' if len(failed) > 1 else 'is'} not proposed again")
    return 0


def _many(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _report(words: list[str]) -> int:
    asked = parsed(Report, words, prog="stochflow design report")
    from stochflow.design.campaign import Campaign
    from stochflow.design.page import write_page

    print(shown(write_page(Campaign.open(asked.campaign), asked.out)))
    return 0


def _simulate(words: list[str]) -> int:
    asked = parsed(Simulate, words, prog="stochflow design simulate")
    from stochflow.design.campaign import Campaign
    from stochflow.design.page import write_page
    from stochflow.design.settings import Ask
    from stochflow.design.simulate import TOP, simulate
    from stochflow.runs.tasks import find

    if ":" not in asked.oracle:
        raise UserError(f"--oracle {asked.oracle!r} names no function: write it as my_module:my_function")
    campaign = Campaign.open(asked.campaign)
    out = asked.out or asked.campaign.with_name(asked.campaign.name + "-simulated")
    how = Ask(batch=asked.batch, acquisition=asked.acquisition, model=asked.model)
    oracle, empty = find(asked.oracle), not out.exists() or (out.is_dir() and not any(out.iterdir()))
    try:
        done = simulate(campaign, oracle, out, asked.rounds, how)
    except (UserError, KeyboardInterrupt) as problem:
        raise type(problem)(f"{str(problem) or 'interrupted'}{_left_behind(out) if empty else ''}") from problem
    print(f"mean of the {TOP} best values after each round (0: the first data)")
    for name, curve in done.curves.items():
        print(f"  {name:<18} " + "  ".join(f"{v:.4g}" for v in curve))
    print(f"dry run: {shown(done.campaign.path)}")
    print(f"page: {shown(write_page(done.campaign))}")
    return 0


def _left_behind(out: Path) -> str:
    """What a dry run that broke off leaves: the rounds that it played, of which the sentence is; or nothing."""
    if not out.is_dir():
        return ""
    if any((out / "rounds").glob("*")):
        return f"; what was played so far is in {shown(out)} (`stochflow design status {shown(out)}`): play again into another --out, or remove it"
    shutil.rmtree(out)
    return ""
