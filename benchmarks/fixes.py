"""Findings of `mlm-verify layouts` before and after upstream's fixes of silent parallel faults."""

import io
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from datetime import date
from multiprocessing import Pipe, get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

from mlm_repro.lineage.atomic import write_text
from mlm_repro.lineage.config import Config, load_config
from mlm_repro.lineage.errors import BadInput, Diverged, UserError
from mlm_repro.verify.layouts import run_layouts
from mlm_repro.verify.subjects import Asked

CASES = Path(__file__).with_name("fixes.toml")
SECONDS = 400
SEED = 1234
PACKAGES = {
    "megatron": ("megatron_core", "megatron/core"),
    "torchtitan": ("torchtitan", "torchtitan"),
}
"""Name of each repository's package, and the package's folder in the repository, by the
repository's name here."""


class Edit(Config):
    """Change that an upstream fix made to one file, as three texts: the file's path in the
    package's tree, the passage as the fix wrote it (`now`), and the passage before it (`was`)."""

    file: str
    now: str
    was: str


class Case(Config):
    """A row of fixes.toml: an upstream commit that mends a silent fault, how `mlm-verify layouts`
    is asked to find that fault (`program`, `fields`, each a FIELD=VALUE, `layouts` and
    `microbatches`, 0 for the program's default), and in `named` the regular expression that the
    finding must match. The code after the fix is `tree`, a later commit, or without it `commit`
    itself. The faulty code is the parent of `commit` or, with `edits`, the code after the fix with
    the old lines put back. `why`, if not empty, explains a miss or an alarm after the fix."""

    name: str
    repository: Literal["megatron", "torchtitan"] = "megatron"
    commit: str
    number: str
    """Upstream's number of the pull or merge request, a text."""
    date: date
    title: str
    program: str = "megatron-core"
    """A program of `mlm-verify layouts`, or PATH.py:build, beside the table of cases."""
    fields: tuple[str, ...] = ()
    layouts: str
    microbatches: int = 0
    named: str
    """Regular expression that the sentence of a finding must match."""
    tree: str = ""
    """Later commit, which runs here, on which old lines are put back; by default the fix is
    compared with its parent."""
    edits: tuple[Edit, ...] = ()
    why: str = ""
    """Reason of a miss, or of an alarm after the fix."""


class Left(Config):
    """A published fault that the table of cases does not test: its source, its title and the
    reason."""

    where: str
    title: str
    why: str


class Cases(Config):
    """The content of fixes.toml: in `case` the cases that are tested, in `left` the published
    faults that are not."""

    case: tuple[Case, ...]
    left: tuple[Left, ...] = ()


class Said(Config):
    """The answer of `mlm-verify layouts` on one tree of source code. `state` is "finding" with the
    findings as `sentences`, "cannot run" with the reasons, or "silent" without sentences, if every
    layout ran without a finding; `seconds` is the time it took. With findings, the reasons of
    layouts that could not run are left out."""

    state: Literal["finding", "silent", "cannot run"]
    sentences: tuple[str, ...]
    """The findings, or the reasons why it cannot run; empty if it is silent."""
    seconds: float


class Row(Config):
    """Result of a case, a published fault of a package: in `before` and `after` the answers of
    `mlm-verify layouts`, each a Said, on the package's trees without the fault's fix and with it,
    and in `result` whether the fault was found. `named otherwise` means that there are findings
    before the fix, but that none has the words that the case expects; `cannot run` means that on
    one of the two trees a layout or all could not run, and none gave a finding."""

    name: str
    before: Said
    after: Said
    result: Literal["found", "named otherwise", "missed", "cannot run"]
    alarms: int
    """Number of findings of `mlm-verify layouts` on the tree after the fix."""


class Fixes(Config):
    """The record of `benchmarks fixes`: a row for each case that was run."""

    rows: tuple[Row, ...]


def measure(
    clones: Mapping[str, Path], only: Sequence[str], record: Path | None, cases: Path = CASES
) -> Fixes:
    """Run the cases of the table `cases`, a TOML file, whose repository, `megatron` or
    `torchtitan`, has a clone's path in `clones`: all of them if `only` is empty, else the ones that
    it names. Print a line for each, then one that counts all rows, and return the Fixes. Rows that
    the JSON file `record` has for cases of the table are kept and not run again, also if `only`
    does not name them; `record`, if given, is written after each case.

    Raises BadInput for an invalid table, an unknown case, a directory that is no repository, a
    repository that lacks a commit, or a tree that lacks the lines of an edit; ValueError for a
    damaged `record`; Diverged if a tree after its fix gives a finding and its case has no `why`.
    """
    table = {case.name: case for case in load_config(cases, Cases).case}
    if unknown := [name for name in only if name not in table]:
        raise BadInput(f"there is no case {unknown[0]!r}; there are {', '.join(table)}")
    before = (
        json.loads(record.read_text(encoding="utf-8"))
        if record and record.exists()
        else {"rows": []}
    )
    rows = {row.name: row for row in Fixes.model_validate(before).rows if row.name in table}
    with tempfile.TemporaryDirectory() as folder:
        for name, case in table.items():
            if case.repository not in clones or name in rows or (only and name not in only):
                continue
            rows[name] = row = examine(clones[case.repository], case, cases.parent, Path(folder))
            first = next(iter(row.before.sentences), "nothing")
            print(
                f"{name}: {row.result}, {row.alarms} alarms after the fix; before it: {first}",
                flush=True,
            )
            if record:
                ordered = Fixes(
                    rows=tuple(rows[case_name] for case_name in table if case_name in rows)
                )
                write_text(record, ordered.model_dump_json(indent=1) + "\n")
    counts = [row.result for row in rows.values()]
    counted = ", ".join(f"{counts.count(result)} {result}" for result in dict.fromkeys(counts))
    print(
        f"{len(rows)} of {len(table)} cases: {counted}; {sum(row.alarms for row in rows.values())}"
        " alarms after the fix"
    )
    if alarms := [name for name, row in rows.items() if row.alarms and not table[name].why]:
        raise Diverged(
            f"{alarms[0]}: the tree after the fix gives a finding, and the case has no `why`: find"
            " the reason and write it there, in the table of cases; the finding is"
            f" {rows[alarms[0]].after.sentences[0]}"
        )
    return Fixes(rows=tuple(rows.values()))


def examine(clone: Path, case: Case, beside: Path, folder: Path) -> Row:
    """Run `mlm-verify layouts` as a case asks, on the package before its fix and after it, and
    return the case's Row. The package's trees are extracted from `clone`, a git repository, into
    `folder` unless they are there. A case with edits gets a copy with the old lines, `folder`/NAME,
    which must not exist. `beside` is the folder of programs that a case names by path. Raises
    BadInput if git fails or if old lines cannot be put back."""
    healthy = extract(clone, case.repository, case.tree or case.commit, folder)
    if case.edits:
        faulty = folder / case.name
        # Links as they are: one may lead out of the package, to a file that is not extracted.
        shutil.copytree(healthy, faulty, symlinks=True)
        put_back(faulty, case.edits)
    else:
        faulty = extract(clone, case.repository, f"{case.commit}^", folder)
    before = ask(faulty, case, beside)
    after = ask(healthy, case, beside)
    result: Literal["found", "named otherwise", "missed", "cannot run"] = "missed"
    if "cannot run" in (before.state, after.state):
        result = "cannot run"
    elif before.state == "finding":
        named = any(re.search(case.named, sentence) for sentence in before.sentences)
        result = "found" if named else "named otherwise"
    alarms = len(after.sentences) if after.state == "finding" else 0
    return Row(name=case.name, before=before, after=after, result=result, alarms=alarms)


def extract(clone: Path, repository: str, commit: str, folder: Path) -> Path:
    """Write the package of the repository called `repository`, a key of PACKAGES, as the git clone
    `clone` has it at a commit, into the directory of `folder` that is named after the commit's
    first ten or more digits, unless it is there; return the path of that directory. Metadata give
    the commit as the package's release. `folder` must exist. Raises BadInput if git or tar
    fails."""
    name, package = PACKAGES[repository]
    release = _git(clone, "rev-parse", "--short=10", commit).decode().strip()
    if not (directory := folder / release).exists():
        directory.mkdir()
        _run(["tar", "-x"], directory, _git(clone, "archive", release, package))
        facts = directory / f"{name}-0.dist-info" / "METADATA"
        facts.parent.mkdir()
        facts.write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: 0+{release}\n", encoding="utf-8"
        )
    return directory


def put_back(directory: Path, edits: Sequence[Edit]) -> None:
    """Replace, in the files below `directory`, the lines that a fix wrote, `now` of each edit, by
    the old ones, `was`. Raises BadInput unless the new lines stand exactly once in their file;
    earlier edits are then already made."""
    for edit in edits:
        text = (path := directory / edit.file).read_text(encoding="utf-8")
        if text.count(edit.now) != 1:
            raise BadInput(
                f"{edit.file} must have the lines of the fix once, and has them"
                f" {text.count(edit.now)} times: {edit.now.strip()}; mend `now` of this edit in the"
                " table of cases"
            )
        path.write_text(text.replace(edit.now, edit.was), encoding="utf-8")


def ask(tree: Path, case: Case, beside: Path) -> Said:
    """Run `mlm-verify layouts` as a case asks, on the package below the directory `tree`, and
    return the answer as a Said: its state is "finding", "silent" or "cannot run", the last also if
    the command takes more than 400 seconds or ends without an answer, and its sentences are the
    findings or the reasons, with TREE for the path. `beside` is the folder of programs that a case
    names by path. The command runs in a process of its own, which alone imports the package."""
    start = time.monotonic()
    receive, send = Pipe(duplex=False)
    child = get_context("fork").Process(target=_answer, args=(tree, case, beside, send))
    child.start()
    send.close()
    try:
        state, sentences = (
            receive.recv()
            if receive.poll(SECONDS)
            else ("cannot run", [f"no answer in {SECONDS} s"])
        )
    except EOFError:
        state = "cannot run"
        sentences = ["it ended without an answer"]
    child.kill()
    child.join()
    shown = [sentence.replace(str(tree), "TREE") for sentence in sentences]
    seconds = round(time.monotonic() - start, 1)
    return Said.model_validate({"state": state, "sentences": shown, "seconds": seconds})


def _answer(tree: Path, case: Case, beside: Path, send: Connection) -> None:
    """Run `mlm-verify layouts` as a case asks, on the package below the directory `tree`, with
    programs named by path from the folder `beside`, and send one pair (state, list of sentences)
    through `send`: `finding` with the findings alone, if there are any; else `cannot run` with the
    reasons, if a layout or all could not run; else `silent` with no sentence. Any error but a
    UserError is passed on, and nothing is sent. For a process of its own: its imports, stdout and
    stderr are changed."""
    sys.path.insert(0, str(tree))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    program = str(beside / case.program) if ".py:" in case.program else case.program
    try:
        with redirect_stdout(io.StringIO()):
            report = run_layouts(Asked(program, case.fields, case.microbatches), case.layouts, SEED)
    except UserError as error:
        send.send(("cannot run", [str(error)]))
    else:
        reasons = [f"{layout} cannot run: {why}" for layout, why in report.cannot_run.items()]
        state = "finding" if report.findings else "cannot run" if reasons else "silent"
        send.send((state, [*map(str, report.findings)] or reasons))


def _git(clone: Path, *arguments: str) -> bytes:
    """Run git with the arguments in the directory `clone` and return its standard output as bytes.
    Raises BadInput with git's own last line if it fails."""
    return _run(["git", *arguments], clone)


def _run(command: Sequence[str], directory: Path, given: bytes = b"") -> bytes:
    done = subprocess.run(command, cwd=directory, input=given, capture_output=True, check=False)
    if done.returncode:
        last = (done.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"])[
            -1
        ]
        raise BadInput(
            f"{' '.join(command[:2])} failed in the directory {directory.name}: {last}; if the"
            " clone lacks a commit, fetch it"
        )
    return done.stdout
