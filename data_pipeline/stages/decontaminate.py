"""Removal of test-set text by word n-grams (Megatron-LM tools/openwebtext/filter_ngrams.py)."""

from typing import Annotated, Literal

from pydantic import AfterValidator, PositiveInt

from mlm_repro.data_pipeline.stages.stage import Stage


def _check(names: tuple[str, ...]) -> tuple[str, ...]:
    from mlm_repro.data_pipeline.contamination.testsets import check_test_set_name

    for name in names:
        check_test_set_name(name)
    return names


TestSets = Annotated[tuple[str, ...], AfterValidator(_check)]


class DecontaminateConfig(Stage):
    """Cut the text of test sets out. Test-set text is recognised by its word n-grams."""

    name = verb = "decontaminate"
    step = 4

    test_sets: TestSets = ("wikitext103", "lambada")
    """Test sets whose text is removed: `wikitext103`, `wikitext103-valid`, `lambada`,
    `lambada-standard`, `jsonl:PATH` (the `text` of each line) or `text:PATH` (each line)."""
    ngram_words: PositiveInt = 13
    """Number of words in an n-gram."""
    min_ngram_words: PositiveInt = 8
    """A test passage of at least this many words but fewer than `ngram_words` is one n-gram as a
    whole."""
    frequent: PositiveInt | Literal["never"] = 10
    """An n-gram found this often in the corpus is a common phrase and is left in (Megatron-LM's
    rule); documents with such n-grams are listed in `left_in.jsonl`. `never` cuts every one."""
    margin_characters: PositiveInt = 200
    """Characters cut away on each side of a match, onwards to the next end of a sentence."""
    min_part_characters: PositiveInt = 200
    """A remaining part must be longer than this to be kept."""
    max_parts: PositiveInt = 10
    """A document cut into more parts than this is dropped."""
