"""Every filter does what its examples say, alone and as a verb; the list of stages of a recipe; the
split."""

import json
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlm_repro import data_pipeline
from mlm_repro.data_pipeline.config import DataConfig, VerbConfig
from mlm_repro.data_pipeline.document import Drop
from mlm_repro.data_pipeline.passes.gather import split
from mlm_repro.data_pipeline.stages import PAPER, STAGES, TEXT_FILTERS, TOKEN_FILTERS
from mlm_repro.data_pipeline.stages.clean import Clean
from mlm_repro.data_pipeline.stages.language import ENGLISH, Language
from mlm_repro.data_pipeline.stages.length import Length
from mlm_repro.data_pipeline.verbs import stage_verbs
from mlm_repro.lineage.config import load_config, override_config, parse_config, read_toml
from mlm_repro.lineage.errors import BadInput
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
    kept = [
        json.loads(line)["text"] for line in Path("out/shard-00000.jsonl").read_bytes().splitlines()
    ]
    assert (
        kept
        == [example.outcome for example in stage.examples if isinstance(example.outcome, str)]
        != []
    )
    entry = json.loads(Path("out/ledger.json").read_text())["stages"][-1]
    dropped = Counter(
        example.outcome.reason for example in stage.examples if isinstance(example.outcome, Drop)
    )
    assert entry["name"] == name
    assert (
        {reason: amount["documents"] for reason, amount in entry["dropped"].items()}
        == dropped
        != {}
    )


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


RECIPES = sorted((Path(data_pipeline.__file__).parent / "recipes").glob("*.toml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_a_shipped_recipe_names_its_stages(path: Path) -> None:
    recipe = load_config(path, DataConfig)
    assert list(recipe.stages) == read_toml(path)["stages"]
    assert recipe.model_dump().keys() & {stage.name for stage in STAGES} <= {*recipe.stages}
    assert {*recipe.stages} - {*PAPER} <= {"prose"}


def test_a_recipe_without_a_list_has_the_stages_of_the_paper() -> None:
    config = config_for("jsonl:a.jsonl")
    assert config.stages == (
        "clean",
        "language",
        "length",
        "deduplicate",
        "decontaminate",
        "split",
        "tokenize",
    )
    assert config == override_config(config, [f"stages={list(config.stages)}"])
    assert "stages" not in config.identity()


PLAIN = ["clean", "language", "length", "deduplicate", "decontaminate"]


@pytest.mark.parametrize(
    ("stages", "said"),
    [
        (
            ["lenght", "split", "tokenize"],
            "names 'lenght', which is not a stage; did you mean 'length'",
        ),
        (["clean", "language", "clean", "split", "tokenize"], "names 'clean' twice"),
        (["length", "clean", "split", "tokenize"], "cannot have 'length' before 'clean'"),
        (
            ["decontaminate", "deduplicate", "split", "tokenize"],
            "cannot have 'decontaminate' before 'deduplicate'",
        ),
        (["tokenize", "split"], "cannot have 'tokenize' before 'split'"),
        (PLAIN, "must end with split and tokenize"),
        ([*PLAIN, "tokenize"], "must end with split and tokenize"),
        ([], "must end with split and tokenize"),
        (
            ["clean", "split", "tokenize"],
            "there is a section 'language', and `stages` does not name it",
        ),
    ],
)
def test_a_list_that_cannot_be_done_is_one_sentence(stages: list[str], said: str) -> None:
    recipe = {"name": "a", "sources": {"names": ["jsonl:a.jsonl"]}, "language": {}}
    with pytest.raises(BadInput, match=said):
        parse_config(recipe | {"stages": stages}, DataConfig, "a.toml")


@given(st.permutations([stage.name for stage in STAGES]), st.integers(0, len(STAGES)))
def test_a_list_is_taken_if_no_stage_stands_before_one_of_an_earlier_step(
    names: list[str], count: int
) -> None:
    steps = {stage.name: stage.step for stage in STAGES}
    listed, values = names[:count], {"name": "a", "sources": {"names": ["jsonl:a.jsonl"]}}
    if [steps[name] for name in listed] == sorted(steps[name] for name in listed):
        config = VerbConfig.model_validate(values | {"stages": listed})
        assert VerbConfig.model_validate(config.model_dump()) == config
    else:
        with pytest.raises(ValueError, match="a build does"):
            VerbConfig.model_validate(values | {"stages": listed})


def test_the_verbs_that_are_read_from_the_source_are_those_of_the_stages() -> None:
    assert stage_verbs().keys() == {stage.verb for stage in STAGES}
    for stage in STAGES:
        # A docstring may break its first sentence between two lines.
        words = " ".join(str(stage.__doc__).split())
        assert words.startswith(stage_verbs()[stage.verb])
        assert stage.__module__.endswith(f".stages.{stage.name}"), (
            "a stage is found by the name of its file"
        )


@given(
    documents=st.integers(2, 2000),
    train=st.integers(1, 50),
    valid=st.integers(1, 50),
    seed=st.integers(0, 99),
)
def test_split_is_a_shuffled_partition_in_the_ratio(
    documents: int, train: int, valid: int, seed: int
) -> None:
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
