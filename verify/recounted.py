"""Sums and counts that a run states, added up and counted again from what they are of. Imports no torch."""

import math
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from data_pipeline.contamination.testsets import find_test_set
from data_pipeline.files import LEDGER, DataCard, Ledger
from data_pipeline.tokens.token_file import TokenFile
from data_pipeline.tokens.tokenizer import Tokenizer
from engine.config import RunConfig
from engine.costs import parameter_count, tokens_trained
from engine.data.batch_schedule import BatchSchedule
from engine.run.files import METRICS, SUMMARY, read_metrics, read_summary
from evaluation.heldout import heldout_cloze, heldout_perplexity
from evaluation.schema import ClozeResult, PerplexityResult
from evaluation.tasks import TASKS
from evaluation.uncertainty import mean_standard_error, ratio_standard_error
from experiments.benchmark import AGAINST
from lineage.atomic import parse_json
from lineage.errors import DataMissing
from lineage.files import read_object
from reports.engines import read_engines

STAND_INS: dict[str, Callable[..., Any]] = {"heldout-perplexity": heldout_perplexity, "heldout-cloze": heldout_cloze}
SPACES = 4
"""Most spaces between two articles, which are words of the text and of no article."""
SAMPLED_DOCUMENTS = 64
SAME = 1e-9
"""Relative tolerance of a number that is computed again from rounded ones or on another processor."""


def of_ledger(ledger: Ledger) -> Iterator[str]:
    """Differences between what stages took in, kept and dropped, and what the splits have."""
    for stage in ledger.stages:
        if stage.documents_in != stage.documents_out + sum(amount.documents for amount in stage.dropped.values()):
            yield f"{LEDGER}: the stage {stage.name} did not keep or drop every document that came in"
    for before, after in pairwise(ledger.stages):
        if before.documents_out != after.documents_in:
            yield f"{LEDGER}: the stage {after.name} took in other documents than {before.name} kept"
    last, splits = ledger.stages[-1], ledger.splits.values()
    if splits and (last.documents_out, last.bytes_out) != (
        sum(x.documents for x in splits),
        sum(x.bytes or 0 for x in splits),
    ):
        yield f"{LEDGER}: its splits do not add up to what was kept"


def of_dataset(run: Path, card: DataCard) -> Iterator[str]:
    """Differences between a data card and its token files, documents and tokenizer."""
    tokenizer = Tokenizer.load(run / "tokenizer")
    if (tokenizer.digest, tokenizer.vocab_size) != (card.tokenizer.digest, card.vocab_size):
        yield f"the tokenizer of {run.name} is not the one of its data card"
    for name, split in card.splits.items():
        tokens, documents = TokenFile(run / split.prefix), run / "documents" / f"{name}.jsonl"
        counted = (len(tokens.document_index) - 1, len(tokens.tokens))
        if counted != (split.documents, split.tokens):
            yield f"{split.prefix} of {run.name} does not have the documents and tokens of its data card"
        if not documents.is_file():
            continue
        with documents.open("rb") as file:
            texts = [parse_json(line)["text"] for line in file]
        if (len(texts), sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)) != (
            split.documents,
            split.bytes,
        ):
            yield f"{documents.name} of {run.name} does not have the documents and bytes of its data card"
            continue
        for place in np.linspace(0, len(texts) - 1, min(len(texts), SAMPLED_DOCUMENTS), dtype=int):
            first, end = tokens.document_index[place : place + 2]
            if np.concatenate([tokens[each] for each in range(first, end)]).tolist()[:-1] != tokenizer.encode(
                texts[place]
            ):
                yield f"document {place} of {split.prefix} of {run.name} does not have the tokens of its text"


def of_overlap(path: Path) -> Iterator[str]:
    """Differences between the shares of test sets that a corpus contains and the counts of their documents."""
    for name, measured in read_object(path)["test_sets"].items():
        ngrams, present = (sum(column) for column in zip(*measured["documents"], strict=True))
        share = 100 * present / ngrams if ngrams else 0.0
        if (measured["occurrences"]["ngrams"], measured["occurrences"]["found"]) != (ngrams, present):
            yield f"{path.name}: the n-grams of {name} are not those of its documents"
        if not math.isclose(measured["percent"], share, rel_tol=SAME):
            yield f"{path.name} says {measured['percent']} % of {name}; its documents give {share}"


def of_training(run: Path, config: RunConfig) -> Iterator[str]:
    """Differences between a training's summary and metrics and what its configuration makes of them."""
    summary, schedule = read_summary(run), BatchSchedule(config.train)
    said = (summary.iterations, summary.tokens, summary.parameters)
    due = (config.train.iterations, tokens_trained(config.model, config.train), parameter_count(config.model))
    if said != due or summary.seed not in (None, config.train.seed):
        yield f"{SUMMARY} of {run.name} says {said} iterations, tokens and parameters; its configuration gives {due}"
    if abs(summary.tokens / summary.tokens_per_second - summary.train_seconds) > 0.01 + 0.001 * summary.train_seconds:
        yield f"{SUMMARY} of {run.name} has a rate that is not its tokens over its seconds"
    for line in read_metrics(run):
        if line["kind"] == "train" and line.get("samples") not in (None, schedule.samples_before(line["iteration"])):
            yield f"{METRICS} of {run.name} has other samples at {line['iteration']} than its schedule"
            return


def of_engines(run: Path) -> Iterator[str]:
    """Differences between the curves of two engines and what is said of them."""
    result = read_engines(run)
    for case in (case for case in result.cases if case.series):
        mine, theirs, apart, allowed = (np.array(series.samples) for series in case.series)
        if not np.array_equal(np.abs(mine - theirs), apart):
            yield f"{AGAINST} of {run.name}: the differences of the {case.name} are not those of its curves"
        share = np.divide(apart, allowed, out=np.where(apart > 0, np.inf, 0.0), where=allowed > 0).max()
        if not math.isclose(share, case.ratios[0].value, rel_tol=1e-9) and case.ratios[0].value < share:
            yield f"{AGAINST} of {run.name}: the share of the tolerance in the {case.name} is not that of its curves"
    beyond = [ratio.name for case in result.cases for ratio in case.ratios if not ratio.is_reached]
    if len(beyond) != len(result.disagreements):
        yield f"{AGAINST} of {run.name} names {len(result.disagreements)} disagreements and has {len(beyond)}"


def follows(result: PerplexityResult | ClozeResult) -> dict[str, float]:
    """Numbers of an evaluation that follow from others in it."""
    if isinstance(result, ClozeResult):
        return _cloze_follows(result)
    share = result.normaliser / result.num_original_tokens
    nll, blocks = result.loss_per_token * result.num_scored_tokens, result.blocks
    scored = np.array([block.nll for block in blocks])
    weights = np.array([block.num_original_tokens * block.num_scored / block.num_targets for block in blocks])
    size = nll / math.log(2) / share
    given: dict[str, float] = {
        "num_scored_tokens": sum(block.num_scored for block in blocks),
        "loss_per_token": math.fsum(scored) / result.num_scored_tokens,
        "normaliser": result.num_original_tokens * result.num_scored_tokens / (result.num_tokens - 1),
        "token_ratio": (result.num_tokens - 1) / (result.num_original_tokens - 1),
        "perplexity": math.exp(nll / result.normaliser),
        "subword_perplexity": math.exp(result.loss_per_token),
        "original_token_perplexity": math.exp(nll / result.normaliser),
        "lm_eval_word_perplexity": math.exp(nll / (result.num_lm_eval_words * share)),
        "bits_per_byte": size / round(size / result.bits_per_byte),  # of a whole number of bytes
    }
    if (spread := ratio_standard_error(scored, weights)) is not None:
        given["log_perplexity_standard_error"] = spread * weights.sum() / result.normaliser
    words, targets = sum(block.num_original_tokens for block in blocks), sum(block.num_targets for block in blocks)
    most = words + result.num_tokens - 1 - targets + SPACES * (len(blocks) + 2)
    least = words - (len(blocks) - 1) - SAME * words  # where no spaces part two blocks, their words meet
    given["num_original_tokens"] = min(max(result.num_original_tokens, least), most)
    return given


def _cloze_follows(result: ClozeResult) -> dict[str, float]:
    accuracy = result.num_correct / result.num_examples
    given: dict[str, float] = {
        "accuracy": accuracy,
        "standard_error": math.sqrt(accuracy * (1 - accuracy) / max(1, result.num_examples - 1)),
    }
    if result.examples:
        losses = np.array([loss for loss, _ in result.examples])
        given |= {
            "num_examples": len(losses),
            "num_correct": sum(correct for _, correct in result.examples),
            "perplexity": math.exp(math.fsum(losses) / len(losses)),
        }
        if (spread := mean_standard_error(losses)) is not None:
            given["perplexity_standard_error"] = given["perplexity"] * spread
    return given


def counts(result: PerplexityResult | ClozeResult, dataset: Path, context: int, limit: int | None) -> dict[str, float]:
    """Numbers of an evaluation that its text and the dataset's tokenizer give.

    Raises DataMissing if the text is not here.
    """
    tokenizer = Tokenizer.load(dataset / "tokenizer")
    if result.task in STAND_INS:
        task = STAND_INS[result.task](dataset, tokenizer, context, "")
    else:
        protocol = TASKS[result.task]
        task = protocol.build(result.task, find_test_set(protocol.test_set), tokenizer, context)
    part = task.limited(limit)
    if part.source.digest != result.data_digest:
        raise DataMissing(f"the text of {result.task}")
    given = part.counts | {"num_scored_tokens": sum(request.num_scored for request in part.requests)}
    if isinstance(result, ClozeResult):
        return {**given, "num_examples": len(part.requests)}
    blocks = {(block.title, block.num_targets, block.num_original_tokens) for block in part.stream.blocks}
    if not blocks.issuperset((block.title, block.num_targets, block.num_original_tokens) for block in result.blocks):
        given["num_tokens"] = -1
    bits = result.loss_per_token * (result.num_tokens - 1) / math.log(2) / part.running_text.num_bytes
    return {**given, "num_windows": len(part.requests), "bits_per_byte": bits}
