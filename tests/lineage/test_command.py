"""How a command ends: an exit code and one sentence, never a traceback."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mlm_repro.lineage.command import CommandLine
from tests.architecture.rooms import command_names
from tests.lineage.conftest import Start, ended

CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")

CODES = {
    "UserError": 2,
    "BadInput": 2,
    "Diverged": 3,
    "HardwareMissing": 4,
    "DataMissing": 5,
    "IntegrityFailure": 6,
    "Interrupted": 7,
}


@pytest.mark.parametrize(("name", "code"), CODES.items())
def test_each_error_has_its_exit_code_and_its_sentence(start: Start, name: str, code: int) -> None:
    assert ended(start("fail", name)) == (code, "", "error: one clear sentence\n")


@pytest.mark.parametrize("command", command_names())
def test_every_verb_takes_quiet_and_has_help_without_control_characters(
    command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # They make typer write colours into pipes.
    for variable in (
        "GITHUB_ACTIONS",
        "FORCE_COLOR",
        "PY_COLORS",
    ):
        monkeypatch.delenv(variable, raising=False)
    module, _ = command_names()[command].split(":")
    app = import_module(module).app
    assert isinstance(app, CommandLine)
    verbs = [
        str(each.name or each.callback.__name__.replace("_", "-"))
        for each in app.registered_commands
    ]
    assert verbs
    for verb in verbs:
        done = CliRunner().invoke(app, [verb, "--help"])
        assert (done.exit_code, "--quiet" in done.output) == (0, True), (
            f"{command} {verb}: {done.output}"
        )
        assert not CONTROL.search(done.output), f"{command} {verb}"


@pytest.mark.parametrize("arguments", [["--help"], ["run", "--help"], ["run"], ["--unknown"]])
def test_help_and_mistakes_have_no_control_characters_in_a_pipe(
    start: Start, arguments: list[str]
) -> None:
    _, out, err = ended(start(*arguments, GITHUB_ACTIONS="", FORCE_COLOR="", PY_COLORS=""))
    assert out or err
    assert not CONTROL.search(out + err)


def test_only_the_first_rank_speaks(start: Start) -> None:
    assert ended(start("fail", "DataMissing", RANK="1", WORLD_SIZE="2")) == (5, "", "")


@pytest.mark.parametrize(
    ("arguments", "code", "out"),
    [
        (["file.toml"], 0, "run file.toml\n"),
        (["file.toml", "--times", "2"], 0, "run file.toml run file.toml\n"),
        (["run", "run"], 0, "run run\n"),
        (["file.toml", "unexpected"], 2, ""),
        (["--unknown"], 2, ""),
        (["lines"], 2, ""),
    ],
)
def test_a_first_argument_that_is_no_verb_goes_to_the_default_verb(
    start: Start, arguments: list[str], code: int, out: str
) -> None:
    found, said, err = ended(start(*arguments))
    assert (found, said) == (code, out)
    assert "Traceback" not in err


def test_a_fault_is_one_sentence_and_its_traceback_a_file_if_asked_for(
    start: Start, tmp_path: Path
) -> None:
    code, out, err = ended(start("fault", "a word"))
    assert (code, out, err.count("\n")) == (70, "", 1)
    assert err.startswith(
        "error: a fault of this program, please report it: KeyError: 'a word'; `--debug` keeps"
    )
    code, _, err = ended(start("fault", "a word", "--debug", TMPDIR=str(tmp_path)))
    (file,) = tmp_path.glob("mlm-fault-*.txt")
    assert (code, err.count("\n")) == (70, 1)
    assert str(file) in err
    assert file.read_text(encoding="utf-8").rstrip().endswith("KeyError: 'a word'")


@pytest.mark.parametrize("of", ["fork", "python", "torch"])
def test_too_little_memory_is_no_fault_of_the_program(start: Start, of: str) -> None:
    code, _, err = ended(start("exhaust", of))
    assert (code, err.startswith("error: this machine has too little memory for the work: ")) == (
        4,
        True,
    ), err


def test_what_a_terminal_would_obey_is_shown_instead(start: Start) -> None:
    code, _, err = ended(start("refuse", "\x1b]0;title\x07 \u202e"))
    assert (code, err) == (2, "error: \\x1b]0;title\\x07 \\u202e is not to be had\n")


def test_what_is_no_text_is_refused(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ended(start("run", "a\udce9")) == (
        2,
        "",
        "error: a\\udce9 is not UTF-8 text: rename the file or folder, or type other text\n",
    )
    folder = tmp_path / "f\udce9"
    folder.mkdir()
    monkeypatch.chdir(folder)
    code, _, err = ended(start("run", "a"))
    assert (code, "is not UTF-8 text" in err) == (2, True)


WITHOUT_RIGHTS = (
    "setpriv",
    "--bounding-set=-dac_override,-dac_read_search",
    "--inh-caps=-dac_override",
)
UNKNOWN_USER = (
    "setpriv",
    "--reuid=54321",
    "--clear-groups",
    "--inh-caps=+dac_override",
    "--ambient-caps=+dac_override",
    "env",
    "-u",
    "HOME",
    "-u",
    "XDG_CACHE_HOME",
)


def as_another(
    prefix: Sequence[str], application: Path, verb: str, argument: object
) -> tuple[int, str]:
    """Exit code and standard error of the application, started as another user or as root without
    its rights."""
    if os.geteuid() == 0 and shutil.which("setpriv") is None:
        pytest.skip("root without setpriv can do anything")
    before = prefix if os.geteuid() == 0 else ()
    done = subprocess.run(
        [*before, sys.executable, str(application), verb, str(argument)],
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr


def test_a_place_that_cannot_be_used_is_named(application: Path, tmp_path: Path) -> None:
    lock = tmp_path / ".lock"
    lock.touch(0o000)
    said = f"error: {lock} cannot be used: Permission denied\n"
    assert as_another(WITHOUT_RIGHTS, application, "hold", tmp_path) == (2, said)
    lock.unlink()
    lock.symlink_to("/nowhere/lock")
    said = f"error: {lock} cannot be used: Too many levels of symbolic links\n"
    assert as_another(WITHOUT_RIGHTS, application, "hold", tmp_path) == (2, said)
    (tmp_path / "file").touch()
    code, error = as_another(WITHOUT_RIGHTS, application, "hold", tmp_path / "file")
    assert (code, error.startswith(f"error: {tmp_path}/file")) == (2, True)
    (tmp_path / "circle").symlink_to("circle")
    code, error = as_another(WITHOUT_RIGHTS, application, "hold", tmp_path / "circle" / "a")
    assert (code, error.count("\n"), "circle" in error) == (2, 1, True)


@pytest.mark.skipif(
    os.geteuid() != 0, reason="only root can be a user whom the system does not know"
)
def test_a_user_without_a_home_is_told(application: Path) -> None:
    said = "error: this user has no home directory: set HOME\n"
    assert as_another(UNKNOWN_USER, application, "cache", "scores") == (2, said)


def test_what_the_output_cannot_say_is_escaped(start: Start) -> None:
    assert ended(start("run", "日本 é", PYTHONIOENCODING="ascii")) == (
        0,
        "run \\u65e5\\u672c \\xe9\n",
        "",
    )


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_terminal_obeys_colours_alone(stream: str, application: Path) -> None:
    ours, theirs = os.openpty()
    word = "a\x1b]0;title\x07b\x1b[31mred\x1b[2J\x1b[0m\rc\u202ed"
    verb = "run" if stream == "stdout" else "warn"
    subprocess.run([sys.executable, str(application), verb, word], check=True, **{stream: theirs})
    os.close(theirs)
    shown = os.read(ours, 1000).decode()
    os.close(ours)
    assert shown == f"{verb} a\\x1b]0;title\\x07b\x1b[31mred\\x1b[2J\x1b[0m\\rc\\u202ed\r\n"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fail", "DataMissing"], {"error": "DataMissing", "exit_code": 5}),
        (["lines", "many"], {"error": "BadInput", "exit_code": 2}),
        (["fault", "a"], {"error": "Fault", "exit_code": 70}),
    ],
)
def test_an_error_is_a_line_of_json_if_asked_for(
    arguments: list[str], said: dict[str, object], start: Start
) -> None:
    code, out, err = ended(start(*arguments, "--json-errors"))
    found = json.loads(err)
    assert (code, out) == (said["exit_code"], "")
    assert found.pop("message")
    assert found == said
    assert ended(start("run", "a", "--json-errors")) == (0, "run a\n", "")


@pytest.mark.parametrize("options", [[], ["--swallow"], ["--finalizer"], ["--making-a-class"]])
def test_ctrl_c_ends_with_7_even_where_errors_are_outlived(
    start: Start, options: list[str]
) -> None:
    process = start("wait", *options)
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out.removeprefix("ready\n")) == (7, "")
    assert err.startswith("error: interrupted")
    assert err.count("\n") == 1


def test_a_stop_in_a_finalizer_comes_once_though_another_error_is_faster(start: Start) -> None:
    code, _, err = ended(start("late"))
    assert code == 7
    assert err.startswith("error: interrupted")
    assert err.count("\n") == 1
