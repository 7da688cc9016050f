"""Every filter does what its examples say, alone and as a verb; the order of the stages; the split."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlm_repro.data_pipeline.document import Drop
from mlm_repro.data_pipeline.passes.gather import split
from mlm_repro.data_pipeline.stages import STAGES, TEXT_FILTERS, TOKEN_FILTERS, in_order
from mlm_repro.data_pipeline.stages.clean import Clean
from mlm_repro.data_pipeline.stages.language import ENGLISH, Language
from mlm_repro.data_pipeline.stages.length import Length
from mlm_repro.data_pipeline.stages.stage import Stage, TextFilter, TokenFilter
from mlm_repro.data_pipeline.verbs import stage_verbs
from mlm_repro.lineage.config import override_config
from tests.commands import Command
from tests.data_pipeline.builds import config_for
from tests.data_pipeline.conftest import write_jsonl


@pytest.mark.parametrize("name", TEXT_FILTERS)
def test_a_filter_of_texts_does_what_its_examples_say(name: str, cli: Command) -> None:
    stage = TEXT_FILTERS[name]
    for text, outcome, _ in stage.examples:
        assert stage().apply(text) == outcome
    assert "" in [example.text for example in stage.examples]
    write_jsonl(Path("a.jsonl"), [example.text for example in stage.examples])
    outcome = cli(stage.verb, "jsonl:a.jsonl", "out", "--workers", 1, ends=0)
    kept = [json.loads(line)["text"] for line in Path("out/shard-00000.jsonl").read_bytes().splitlines()]
    assert kept == [example.outcome for example in stage.examples if isinstance(example.outcome, str)] != []
    entry = json.loads(Path("out/ledger.json").read_text())["stages"][-1]
    dropped = Counter(example.outcome.reason for example in stage.examples if isinstance(example.outcome, Drop))
    assert entry["name"] == name
    assert {reason: amount["documents"] for reason, amount in entry["dropped"].items()} == dropped != {}


@pytest.mark.parametrize("name", TOKEN_FILTERS)
def test_a_filter_of_tokens_does_what_its_examples_say(name: str) -> None:
    stage = TOKEN_FILTERS[name]
    for text, outcome, tokens in stage.examples:
        assert stage().apply(text, tokens) == (None if outcome == text else outcome)
    assert {isinstance(example.outcome, Drop) for example in stage.examples} == {True, False}


def test_settings_change_what_filters_keep() -> None:
    assert Clean(normalization="NFKC").apply("x²") == "x2"
    assert Language(keep="de").apply(ENGLISH) == Drop("language en")
    assert Length(min_tokens=3).apply("text", 3) is None


def test_language_answers_the_same_every_time() -> None:
    assert len({Language().apply("Sint in te pro et a no in me") for _ in range(20)}) == 1


def test_stages_have_an_order_that_does_not_depend_on_that_of_their_files() -> None:
    config = config_for("jsonl:a.jsonl")
    assert config.stages == ("clean", "language", "length", "deduplicate", "decontaminate", "split", "tokenize")
    assert override_config(config, ["prose.min_words=9"]).stages[:4] == ("clean", "language", "prose", "length")
    assert in_order(STAGES[::-1]) == STAGES


def test_the_verbs_that_are_read_from_the_source_are_those_of_the_stages() -> None:
    assert stage_verbs().keys() == {stage.verb for stage in STAGES}
    for stage in STAGES:
        assert str(stage.__doc__).startswith(stage_verbs()[stage.verb])
    assert list(stage_verbs())[-2:] == ["split", "tokenize"]


def declare(base: type[Stage], name: str, after: str) -> type[Stage]:
    members: dict[str, Any] = {"name": name, "verb": name, "after": after, "examples": ()}
    return type(name.capitalize(), (base,), {**members, "__module__": __name__, "__doc__": "A stage."})


def test_a_new_filter_stands_behind_the_stage_that_it_names() -> None:
    new = [
        declare(TextFilter, "zeal", "clean"),
        declare(TextFilter, "abc", "zeal"),
        declare(TokenFilter, "less", "language"),
    ]
    names = [stage.name for stage in in_order([*STAGES, *new])]
    assert names[:7] == ["clean", "language", "prose", "zeal", "abc", "length", "less"]


def test_a_stage_that_cannot_stand_where_it_says_is_refused() -> None:
    with pytest.raises(ValueError, match="no stage is called cleen"):
        in_order([*STAGES, declare(TextFilter, "new", "cleen")])
    with pytest.raises(ValueError, match="new cannot follow length, which runs in a later step"):
        in_order([*STAGES, declare(TextFilter, "new", "length")])


@given(documents=st.integers(2, 2000), train=st.integers(1, 50), valid=st.integers(1, 50), seed=st.integers(0, 99))
def test_split_is_a_shuffled_partition_in_the_ratio(documents: int, train: int, valid: int, seed: int) -> None:
    left, right = split(documents, train, valid, seed)
    assert sorted([*left, *right]) == list(range(documents))
    assert len(left) >= 1
    assert len(right) >= 1
    assert abs(len(right) - documents * valid / (train + valid)) <= 1
    again = split(documents, train, valid, seed)
    assert np.array_equal(left, again[0])
    assert np.array_equal(right, again[1])


def test_split_depends_on_the_seed_alone() -> None:
    assert [part.tolist() for part in split(6, 2, 1, seed=1)] == [[2, 1, 4, 0], [3, 5]]
    assert not np.array_equal(split(600, seed=1)[0], split(600, seed=2)[0])
