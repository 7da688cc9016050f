"""The command line: every mistake is one sentence and leaves nothing behind."""

import json
import os
import platform
import signal
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path

import pytest

from mlm_repro import data_pipeline
from mlm_repro.data_pipeline.stages import PAPER
from tests.commands import Command, Outcome
from tests.data_pipeline.conftest import leftovers, sentences, write_jsonl, write_recipe

RECIPES = Path(data_pipeline.__file__).parent / "recipes"
TEXTS = [sentences(20, seed) for seed in range(12)]


def assert_one_sentence(outcome: Outcome, code: int, *parts: str) -> None:
    assert outcome.code == code, outcome.err
    assert "Traceback" not in outcome.err
    errors = [line for line in outcome.err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1, outcome.err
    for part in parts:
        assert part in errors[0]
    assert leftovers(Path("runs")) == []


@pytest.mark.parametrize("recipe", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_shipped_recipes_resolve(cli: Command, recipe: Path) -> None:
    outcome = cli("run", recipe, "--dry-run", ends=0)
    text, _, digest = outcome.out.rstrip("\n").rpartition("\ndigest ")
    assert json.loads(text)["sources"]["names"]
    assert len(digest) == 64
    assert leftovers(Path()) == []
    assert cli("run", recipe, "--dry-run", "--workers", 2).out.endswith(f"digest {digest}\n")
    assert not cli("run", recipe, "--dry-run", "--set", "seed=9").out.endswith(f"digest {digest}\n")


def test_build_and_stats(cli: Command) -> None:
    write_jsonl(Path("a.jsonl"), TEXTS)
    write_recipe(Path("r.toml"), "jsonl:a.jsonl")
    outcome = cli("r.toml", ends=0)
    described = json.loads(Path("runs/small/dataset.json").read_text())
    last = outcome.out.splitlines()[-1]
    assert last.startswith(
        f"dataset {Path('runs', os.readlink('runs/small'))}: train 11 documents, "
    )
    assert f"{described['splits']['train']['tokens']:,} tokens" in last
    assert "warning: no decontamination against wikitext103" in outcome.err
    assert "already complete" in cli("run", "r.toml").err

    table = cli("stats", "runs/small").out
    assert (
        f"= train {described['splits']['train']['documents']:>10}".split()
        == table[table.index("= train") :].split()[:3]
    )
    assert "NOT searched for wikitext103 and lambada" in table


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("wikipeda", ("unknown source 'wikipeda'", "did you mean 'wikipedia'")),
        ("json:x.jsonl", ("did you mean 'jsonl:x.jsonl'",)),
        ("jsonl", ("needs a path",)),
        ("jsonl:", ("needs a path",)),
        ("jsonl:nowhere.jsonl", ("there is no file of that path",)),
        ("parquet:a.jsonl", ("a.jsonl cannot be read as parquet: ",)),
    ],
)
def test_wrong_sources(cli: Command, source: str, parts: tuple[str, ...]) -> None:
    write_jsonl(Path("a.jsonl"), TEXTS)
    assert_one_sentence(cli("run", write_recipe(Path("r.toml"), source)), 2, *parts)


def test_a_link_out_of_a_folder_is_not_followed(cli: Command) -> None:
    Path("texts/more").mkdir(parents=True)
    Path("texts/a.txt").write_text(TEXTS[0])
    Path("secret.txt").write_text("not named by anyone")
    Path("texts/more/b.txt").symlink_to(Path("texts/a.txt").resolve())
    assert cli("clean", "text:texts", "inside", "--workers", 1).code == 0
    Path("texts/c.txt").symlink_to(Path("secret.txt").resolve())
    outcome = cli("clean", "text:texts", "out", "--workers", 1)
    assert outcome.code == 2
    assert "texts/c.txt is a link out of the directory" in outcome.error
    Path("secret.txt").unlink()
    assert cli("clean", "text:texts", "out", "--workers", 1).error == outcome.error


@pytest.mark.parametrize(
    ("override", "parts"),
    [
        ("tokenizer.vocab_size=100", ("tokenizer.vocab_size",)),
        ('tokenizer.kind="gpt2"', ("vocab_size",)),
        (
            "decontaminate.test_sets=['wikitext']",
            ("unknown test set 'wikitext'", "did you mean 'wikitext2'"),
        ),
        ("name=../up", ("name",)),
        ("sources.names=[]", ("sources.names",)),
        ("tokenizer.vocab_size=60000", ("too small for a vocabulary of 60,000",)),
        ("length.min_tokens=100000", ("nothing is left of the corpus after the length stage",)),
        (
            'language.keep="fr"',
            ("nothing is left of the corpus after the language stage", "language en: 12"),
        ),
        ("sources.max_documents=1", ("needs two documents", "leave 1")),
    ],
)
def test_wrong_settings(cli: Command, override: str, parts: tuple[str, ...]) -> None:
    write_jsonl(Path("a.jsonl"), TEXTS)
    recipe = write_recipe(Path("r.toml"), "jsonl:a.jsonl")
    assert_one_sentence(cli("run", recipe, "--set", override), 2, *parts)


def test_every_language_is_kept_as_the_refusal_says(cli: Command) -> None:
    write_jsonl(Path("a.jsonl"), TEXTS)
    recipe = write_recipe(Path("r.toml"), "jsonl:a.jsonl")
    way = "to keep every language leave the stage out of `stages`"
    assert_one_sentence(cli("run", recipe, "--set", "language.keep=any"), 2, "'any'", way)
    stages = [name for name in PAPER if name != "language"]
    cli("run", recipe, "--set", f"stages={json.dumps(stages)}", ends=0)


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        (b"", ("the corpus is empty",)),
        (b'{"text": "  "}\n', ("nothing is left of the corpus after the clean stage", "empty: 1")),
    ],
)
def test_nothing_usable(cli: Command, content: bytes, parts: tuple[str, ...]) -> None:
    Path("a.jsonl").write_bytes(content)
    assert_one_sentence(cli("run", write_recipe(Path("r.toml"), "jsonl:a.jsonl")), 2, *parts)


def test_data_that_is_not_here(cli: Command) -> None:
    assert_one_sentence(
        cli("run", RECIPES / "megatron-2019.toml"), 5, "realnews and cc-stories", "jsonl:PATH"
    )
    recipe = write_recipe(Path("r.toml"), "wikipedia")
    assert_one_sentence(
        cli("run", recipe), 5, "hub cannot be reached for wikipedia", "offline_fallback"
    )
    write_jsonl(Path("a.jsonl"), TEXTS)
    Path("g.toml").write_text('name = "g"\n[sources]\nnames = ["jsonl:a.jsonl"]\n')
    assert_one_sentence(cli("run", "g.toml"), 5, "gpt2-bpe/vocab.json", "MLM_DATA_DIR")


def test_offline_fallback_is_named_in_the_dataset(cli: Command) -> None:
    write_jsonl(Path("a.jsonl"), TEXTS)
    recipe = write_recipe(Path("r.toml"), "wikipedia", "jsonl:a.jsonl", "openwebtext")
    settings = ("sources.offline_fallback=installed-docs", "sources.max_bytes=200000")
    outcome = cli("run", recipe, "--set", settings[0], "--set", settings[1], ends=0)
    assert "warning: installed-docs used in place of wikipedia and openwebtext" in outcome.err
    for name in ("dataset.json", "ledger.json"):
        source = json.loads(Path("runs/small", name).read_text())["source"]
        assert (
            "jsonl:a.jsonl -- installed-docs used in place of wikipedia and openwebtext" in source
        )
    packages = json.loads(Path("runs/small/dataset.json").read_text())["packages"]
    assert len(packages) > 3
    assert packages == {
        name: platform.python_version() if name == "python" else version(name) for name in packages
    }


def test_what_is_not_a_dataset(cli: Command) -> None:
    write_jsonl(Path("a.jsonl"), TEXTS)
    assert cli("run", write_recipe(Path("r.toml"), "jsonl:a.jsonl")).code == 0
    assert cli("stats", "nowhere", ends=2).err.startswith("error: ")
    Path("runs/small/COMPLETE").unlink()
    assert "not complete" in cli("stats", "runs/small", ends=6).err


def processes_in(directory: Path) -> list[str]:
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and Path(os.readlink(entry / "cwd")) == directory:
                found.append(entry.name)
        except OSError:
            continue
    return found


@pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize(
    ("stop", "code"), [(signal.SIGKILL, -9), (signal.SIGINT, 7), (signal.SIGTERM, 7)]
)
def test_stopped_run_leaves_no_process_and_goes_on(
    tmp_path: Path, stop: signal.Signals, code: int
) -> None:
    write_jsonl(tmp_path / "a.jsonl", [sentences(60, seed) for seed in range(250)])
    write_recipe(tmp_path / "r.toml", "jsonl:a.jsonl", extra="shard_bytes = 65536")
    command = [
        sys.executable,
        "-c",
        "from mlm_repro.data_pipeline.cli import main; main()",
        "run",
        "r.toml",
        "--workers",
        "2",
    ]
    environment = os.environ | {"HOME": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    with (tmp_path / "err").open("w") as errors:
        process = subprocess.Popen(
            command,
            cwd=tmp_path,
            env=environment,
            stderr=errors,
            stdout=errors,
            start_new_session=True,
        )
    deadline = time.monotonic() + 600
    while not list(tmp_path.glob("runs/small-*/.work/prepare/*/DONE")):
        assert time.monotonic() < deadline
        assert process.poll() is None, (tmp_path / "err").read_text()
        time.sleep(0.05)
    if stop is signal.SIGINT:
        os.killpg(process.pid, stop)
    else:
        process.send_signal(stop)
    assert process.wait(300) == code
    assert "Traceback" not in (tmp_path / "err").read_text()
    assert ("the same command continues" in (tmp_path / "err").read_text()) == (code == 7)
    while processes_in(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not list(tmp_path.glob("runs/*/COMPLETE"))
    subprocess.run(
        [*command[:-1], "1"], cwd=tmp_path, env=environment, check=True, capture_output=True
    )
    assert (tmp_path / "runs/small/COMPLETE").is_file()
    assert not (tmp_path / "runs/small/.work").exists()
