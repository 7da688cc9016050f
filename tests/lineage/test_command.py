"""How a command ends: an exit code and one sentence, never a traceback."""

import signal

import pytest

from tests.lineage.conftest import Start

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
    process = start("fail", name)
    out, err = process.communicate(timeout=600)
    assert (process.returncode, out, err) == (code, "", "error: one clear sentence\n")


def test_only_the_first_rank_speaks(start: Start) -> None:
    process = start("fail", "DataMissing", RANK="1")
    assert process.communicate(timeout=600) == ("", "")
    assert process.returncode == 5


@pytest.mark.parametrize(
    ("arguments", "code", "out"),
    [
        (["file.toml"], 0, "run file.toml\n"),
        (["file.toml", "--times", "2"], 0, "run file.toml run file.toml\n"),
        (["run", "file.toml"], 0, "run file.toml\n"),
        (["run", "run"], 0, "run run\n"),
        (["file.toml", "unexpected"], 2, ""),
        (["--unknown"], 2, ""),
        (["lines"], 2, ""),
    ],
)
def test_a_first_argument_that_is_no_verb_goes_to_the_default_verb(
    start: Start, arguments: list[str], code: int, out: str
) -> None:
    process = start(*arguments)
    found, err = process.communicate(timeout=600)
    assert (process.returncode, found) == (code, out)
    assert "Traceback" not in err


def test_help_is_about_the_whole_command(start: Start) -> None:
    process = start("--help")
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0
    assert all(verb in out for verb in ("run", "fail", "lines"))
    assert err == ""


@pytest.mark.parametrize("options", [[], ["--swallow"]])
def test_ctrl_c_ends_with_7_even_where_errors_are_outlived(start: Start, options: list[str]) -> None:
    process = start("wait", *options)
    assert process.stdout
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert (process.returncode, out) == (7, "")
    assert err.startswith("error: interrupted")
    assert err.count("\n") == 1


@pytest.mark.parametrize("count", [3, 200_000])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_reader_that_leaves_is_no_reason_to_complain(start: Start, count: int, unbuffered: str) -> None:
    process = start("lines", count, PYTHONUNBUFFERED=unbuffered)
    assert process.stdout
    assert process.stderr
    process.stdout.close()
    assert process.stderr.read() == ""
    assert process.wait(timeout=600) in (0, 1)
