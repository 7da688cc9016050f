"""Filters of the user's own code: named in a recipe, run by every process, their code in the
identity."""

import json
from pathlib import Path

import pytest

from mlm_repro.data_pipeline import stages
from tests.commands import Command, call
from tests.data_pipeline.conftest import sentences, write_jsonl, write_recipe

CODE = '''
from mlm_repro.data_pipeline.document import Drop
from mlm_repro.data_pipeline.stages.stage import TextFilter, TokenFilter

class Letters(TextFilter):
    """Keep what has few of a letter."""

    letter: str = "z"

    def apply(self, text: str) -> str | Drop:
        return Drop("a rare letter") if self.letter in text else text.replace("river", "RIVER")

class Even(TokenFilter):
    """Keep an even number of tokens."""

    def apply(self, text: str, tokens: int) -> Drop | None:
        return Drop("odd") if tokens % 2 else None

class Nothing:
    pass
'''
LIST = (
    'stages = ["clean", "own_{0}:Letters", "length", "own_{0}:Even", "deduplicate", "split",'
    ' "tokenize"]'
)


def test_own_stages_drop_change_and_count(tmp_path: Path) -> None:
    texts = [sentences(30, seed) for seed in range(60)]
    texts[3] += " A puzzle."
    write_jsonl(tmp_path / "a.jsonl", texts)
    (tmp_path / "own_a.py").write_text(CODE)
    write_recipe(
        tmp_path / "r.toml", "jsonl:a.jsonl", extra=f"shard_bytes = 65536\n{LIST.format('a')}"
    )
    for workers, runs in ((1, "one"), (2, "two")):
        made = call(
            {},
            "mlm-data",
            "run",
            "r.toml",
            "--runs",
            runs,
            "--workers",
            workers,
            folder=tmp_path,
            ends=0,
        )
        assert "dataset" in made.out
    kept = [
        json.loads(line)["text"] for line in (tmp_path / "one/small/documents/train.jsonl").open()
    ]
    assert any("RIVER" in text for text in kept)
    assert not any("river" in text or "z" in text for text in kept)
    ledger = {
        each["name"]: each
        for each in json.loads((tmp_path / "one/small/ledger.json").read_text())["stages"]
    }
    expected = sum("z" in text for text in texts)
    assert ledger["own_a:Letters"]["dropped"]["a rare letter"]["documents"] == expected > 0
    even = ledger["own_a:Even"]
    assert even["documents_out"] + even["dropped"]["odd"]["documents"] == even["documents_in"]
    names = [(tmp_path / runs / "small").resolve().name for runs in ("one", "two")]
    assert names[0] == names[1]
    call({}, "mlm-verify", "run", "one/small", folder=tmp_path, ends=0)
    for code, is_same in ((CODE, True), (CODE.replace("tokens % 2", "tokens % 3"), False)):
        (tmp_path / "own_a.py").write_text(code)
        call({}, "mlm-data", "run", "r.toml", "--runs", "one", folder=tmp_path, ends=0)
        assert ((tmp_path / "one/small").resolve().name == names[0]) == is_same
    ledger = {
        each["name"]: each
        for each in json.loads((tmp_path / "one/small/ledger.json").read_text())["stages"]
    }
    assert ledger["own_a:Even"]["dropped"]["odd"] != even["dropped"]["odd"], (
        "what the last build kept is not of use"
    )


@pytest.mark.parametrize(
    ("stage", "said"),
    [
        (
            "nowhere:Letters",
            "the own stage 'nowhere:Letters' cannot be used: No module named 'nowhere'",
        ),
        (
            "own_b:Absent",
            "the own stage 'own_b:Absent' cannot be used: module 'own_b' has no attribute",
        ),
        (
            "own_b:Nothing",
            "the own stage 'own_b:Nothing' cannot be used: the class is neither a TextFilter"
            " nor a TokenFilter",
        ),
    ],
)
def test_what_is_no_filter_is_one_sentence(stage: str, said: str, cli: Command) -> None:
    Path("own_b.py").write_text(CODE)
    write_recipe(
        Path("r.toml"), "jsonl:a.jsonl", extra=f'stages = ["{stage}", "split", "tokenize"]'
    )
    assert said in cli("run", "r.toml", ends=2).error


def test_a_package_counts_with_all_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "own_c").mkdir()
    for name, text in (("__init__", ""), ("filters", CODE), ("words", "WORDS = 1\n")):
        (tmp_path / f"own_c/{name}.py").write_text(text)
    before = stages.own_code(["own_c.filters:Letters", "clean"])
    assert before.keys() == {"own_c.filters:Letters: code"}
    (tmp_path / "own_c/words.py").write_text("WORDS = 2\n")
    after = stages.own_code(["own_c.filters:Letters"])
    assert after.keys() == before.keys()
    assert after != before
