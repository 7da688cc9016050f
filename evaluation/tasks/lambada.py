"""LAMBADA's test files. `lambada` alone is Megatron's `--strict-lambada` accuracy on OpenAI's file.

OpenAI's file keeps case, punctuation and newlines. Megatron's instructions call it "processed", its
paper "unprocessed"; the lower-cased, tokenised LAMBADA of the original authors is another test with
other numbers.
"""

from functools import partial
from pathlib import Path

from mlm_repro.data_pipeline.contamination.testsets import TEST_SETS
from mlm_repro.evaluation.protocol import Encoder, SourceText
from mlm_repro.evaluation.tasks.cloze import (
    LAST_TOKEN,
    LM_EVAL,
    STOP_WORD_FILTER,
    STRICT,
    ClozeRule,
    ClozeTask,
)
from mlm_repro.evaluation.tasks.documents import read_official
from mlm_repro.lineage.atomic import parse_json


def openai_passages(path: Path) -> list[str]:
    """Return a list of the passages in OpenAI's LAMBADA file at `path`, in order. Raises
    IntegrityFailure for a file of other content, BadInput for one that cannot be read."""
    text = read_official(
        path, TEST_SETS["lambada"].sha256, "OpenAI's LAMBADA test file lambada_test.jsonl"
    )
    return [str(parse_json(line)["text"]) for line in text.split("\n") if line]


def openai_lambada(
    name: str, path: Path, tokenizer: Encoder, context: int, rule: ClozeRule = STRICT
) -> ClozeTask:
    """Return the ClozeTask of predicting the last words of the passages in OpenAI's file at `path`,
    the text of lm-evaluation-harness's `lambada_openai`. `rule` says what the target is and when a
    prediction of it is right, by default `STRICT`, Megatron's. `name` is the task's; a passage
    longer than `context` inputs loses its beginning. Raises IntegrityFailure for a file of other
    content, BadInput for one that cannot be read."""
    source = SourceText(name, "LAMBADA test file (OpenAI)", TEST_SETS["lambada"].sha256)
    return ClozeTask(source, openai_passages(path), rule, tokenizer, context)


lm_eval_lambada = partial(openai_lambada, rule=LM_EVAL)
last_token_lambada = partial(openai_lambada, rule=LAST_TOKEN)
stop_word_lambada = partial(openai_lambada, rule=STOP_WORD_FILTER)


def standard_lambada(name: str, path: Path, tokenizer: Encoder, context: int) -> ClozeTask:
    """Return the ClozeTask of predicting the last words of the original authors' passages, which
    are lower-cased and tokenised, by the rule `STRICT`, Megatron's. `path` is their file, one
    passage a line; `name` is the task's; a passage longer than `context` inputs loses its
    beginning. Raises IntegrityFailure for a file of other content, BadInput for one that cannot be
    read, or if no input is left before a passage's target."""
    source = SourceText(
        name, "LAMBADA test file (original plain text)", TEST_SETS["lambada-standard"].sha256
    )
    text = read_official(
        path, source.digest, "the original LAMBADA test file lambada_test_plain_text.txt"
    )
    return ClozeTask(
        source, [line for line in text.split("\n") if line], STRICT, tokenizer, context
    )
