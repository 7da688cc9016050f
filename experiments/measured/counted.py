"""Counts: parameters of the published models as the engine builds them, and words and sub-words of
WikiText-103's test file, by which the 2019 paper normalises its perplexity.
"""

import math

from mlm_repro.data_pipeline.config import DataConfig
from mlm_repro.data_pipeline.contamination.decontaminate import UNKNOWN_WORD
from mlm_repro.data_pipeline.contamination.testsets import find_gpt2_vocabulary, find_test_set
from mlm_repro.data_pipeline.tokens.tokenizer import Tokenizer, padded_vocab_size
from mlm_repro.engine.config import ModelConfig
from mlm_repro.engine.inference import parameters_of
from mlm_repro.engine.run.resolved import read_run_config
from mlm_repro.evaluation.tasks.detokenize import detokenize_wikitext
from mlm_repro.evaluation.tasks.documents import count_original_tokens, read_official
from mlm_repro.evaluation.tasks.wikitext103 import TEST_FILE_SHA256
from mlm_repro.experiments.catalogue import Experiment
from mlm_repro.experiments.published import position, workload_rows
from mlm_repro.experiments.quantities import bert_of
from mlm_repro.experiments.sealed import Line, lines
from mlm_repro.experiments.simulator.measurements import workload_of
from mlm_repro.experiments.simulator.workload import checked_config
from mlm_repro.lineage.config import load_config
from mlm_repro.lineage.progress import Progress, announce
from mlm_repro.lineage.shipped import Shipped, find_file, model_file


def built_parameters(config: ModelConfig, part: str = "") -> int:
    """Return the number of parameters of the whole model, on all ranks together, or of its
    parameters whose names begin with `part`. The vocabulary is the padded one, but for a
    Transformer-XL with cutoffs the real one; a tied embedding counts once. The model is built
    without values."""
    return sum(
        math.prod(parameter.global_shape)
        for parameter in parameters_of(config)
        if parameter.name.startswith(part)
    )


def measure_built(experiment: Experiment) -> list[Line]:
    """Return a list of lines, dicts with a record's fields, two for each model that the experiment
    counts: the number of parameters of the model, and of its layers alone, in billions. The models
    are built without values. Prints the progress to standard error."""
    numbers = []
    for part in experiment.parts:
        rows = workload_rows(part.workloads)
        is_bert = "bert_parameters" in part.computed
        announce(f"{len(rows)} models, built without their values")
        with Progress(experiment.name, len(rows), "models") as progress:
            for row in rows:
                config = bert_of(row) if is_bert else checked_config(workload_of(row)).model
                values = {
                    "bert_parameters" if is_bert else "parameters": built_parameters(config) / 1e9,
                    "layer_parameters": built_parameters(config, "layers.") / 1e9,
                }
                numbers += lines(
                    values=values, note="counted in the built model", **position(part, row)
                )
                progress.advance()
    return numbers


def measure_transformer_xl() -> list[Line]:
    """Return a list of lines, dicts with a record's fields: the parameters of the small
    Transformer-XL with byte pairs, in millions, the percentage by which byte pairs lengthen
    WikiText-103, and the percentages of its words that are unknown.

    Lengths are counted in the validation file as it is, unknown words in the test file too. Files
    that this machine lacks are downloaded. Raises DataMissing if that fails.
    """
    text, test = (
        find_test_set(name).read_text(encoding="utf-8")
        for name in ("wikitext103-valid", "wikitext103")
    )
    tokenizer = Tokenizer.from_gpt2_files(*find_gpt2_vocabulary())
    longer = len(tokenizer.encode(text)) / count_original_tokens(text) - 1
    built = built_parameters(read_run_config(model_file("transformer-xl-75m")).model) / 1e6
    return (
        lines(
            "byte-pair encoding",
            {"sequence_length_percent": 100 * longer},
            note="counted in the validation file",
        )
        + lines(
            "small configuration, byte pairs",
            {"million_parameters": built},
            note="counted in the built model",
        )
        + lines("words of the validation file", {"unknown_words_percent": _unknown_percent(text)})
        + lines("words of the test file", {"unknown_words_percent": _unknown_percent(test)})
    )


def _unknown_percent(text: str) -> float:
    words = text.split()
    return 100 * words.count(UNKNOWN_WORD) / len(words)


def measure_recipe() -> list[Line]:
    """Return a list of two computed lines, dicts with a record's fields, on the 2019 recipe: the
    number of rows of the 8.3B model's embedding by the rule of padding, and the ratio of training
    to validation documents."""
    run = read_run_config(model_file("8.3b"))
    split = load_config(find_file("megatron-2019", Shipped.RECIPE), DataConfig).split
    size = run.model.vocab_size
    tp = run.parallel.tp
    return lines(
        f"GPT-2's vocabulary of {size}",
        {"padded_vocabulary": padded_vocab_size(size, tp=tp)},
        "computed",
        x=tp,
        note="by the rule of padding",
    ) + lines(
        "training documents for one of validation",
        {"split_ratio": split.train / split.valid},
        "computed",
        note="as the recipe megatron-2019 has it",
    )


def measure_words() -> list[Line]:
    """Return a list of lines, dicts with a record's fields: the words T_o of WikiText-103's test
    file, the sub-words T of its detokenized text without the first sub-word, and T / T_o (2019
    paper, Section 5.3). Raises DataMissing if a file is missing and cannot be downloaded,
    IntegrityFailure if the test file is not the official one, BadInput if the test file cannot be
    read, and BadInput or IntegrityFailure if GPT-2's vocabulary is damaged."""
    text = read_official(
        find_test_set("wikitext103"),
        TEST_FILE_SHA256,
        "the WikiText-103 test file wiki.test.tokens",
    )
    tokenizer = Tokenizer.from_gpt2_files(*find_gpt2_vocabulary())
    words = count_original_tokens(text)
    # The first sub-word is not predicted.
    predicted = len(tokenizer.encode(detokenize_wikitext(text))) - 1
    values = {
        "wikitext103_original_tokens": words,
        "wikitext103_bpe_tokens": predicted,
        "tokens_per_word": predicted / words,
    }
    return lines("WikiText-103 test", values, note="counted in the published test file")
