"""Functions of the task files in this folder: Megatron-LM's texts and divisors."""

from typing import Any

from datasets import Dataset

from mlm_repro.data_pipeline.contamination.testsets import find_test_set
from mlm_repro.evaluation.tasks.cloze import split_last_word
from mlm_repro.evaluation.tasks.detokenize import detokenize_wikitext
from mlm_repro.evaluation.tasks.lambada import openai_passages
from mlm_repro.evaluation.tasks.wikitext103 import read_wikitext
from mlm_repro.lineage.atomic import JSON

Rows = dict[str, Dataset]


def wikitext103(**_: Any) -> Rows:
    """Return a dict with the split `test`: WikiText-103's test file as one row, with its whole
    `text`, detokenized, and in `words` the number of words that the file has as it is. Raises
    DataMissing if the file cannot be found or downloaded, IntegrityFailure for another file.
    Arguments are ignored."""
    text = read_wikitext("wikitext103", find_test_set("wikitext103"))
    return {
        "test": Dataset.from_list(
            [{"text": detokenize_wikitext(text.text), "words": text.num_original_tokens}]
        )
    }


def strided(row: JSON) -> JSON:
    """Return a dict with a row's text under `text` and the stride 32 under `stride`. The engine
    reads the text in windows of 32 new tokens if the model's context has 1024 tokens or more, and
    of proportionally fewer new tokens if the context is shorter."""
    return {"text": row["text"], "stride": 32}


def per_word(row: JSON, results: list[float]) -> dict[str, tuple[float, int]]:
    """Return two metrics by name, each as a pair of a summed log-probability and the number of
    words to divide it by: `word_perplexity`, and `adjusted_perplexity`, with one word less as in
    Megatron-LM's program. `results` has one number, the log-probability of the row's text; the row
    has its number of `words`."""
    return {
        "word_perplexity": (results[0], row["words"]),
        "adjusted_perplexity": (results[0], row["words"] - 1),
    }


def lambada(**_: Any) -> Rows:
    """Return a dict with the split `test`: OpenAI's passages, a row for each, cut as
    `--strict-lambada` does into its `context` and its last `word`. Raises DataMissing if the file
    cannot be found or downloaded, IntegrityFailure if it has other content. Arguments are
    ignored."""
    cut = map(split_last_word, openai_passages(find_test_set("lambada")))
    return {
        "test": Dataset.from_list([{"context": context, "word": word} for context, word in cut])
    }
