"""The order in which a model of each family is trained. Imports no torch."""

from collections.abc import Sequence
from pathlib import Path

from data_pipeline.tokens.token_file import TokenFile
from engine.batch_schedule import BatchSchedule
from engine.batches import TrainingBatches, TrainingStreams
from engine.config import RunConfig
from engine.pair_batches import PairSource, PairTrainingBatches, read_vocabulary


def training_batches(
    config: RunConfig, parts: Sequence[tuple[TokenFile, float]], iterations: int, tokenizer: Path | None
) -> TrainingBatches | TrainingStreams | PairTrainingBatches:
    """The model's microbatches of token files with their weights; a BERT needs the directory of their tokenizer."""
    train, model = config.train, config.model
    schedule = BatchSchedule(train)
    sizes = (model.seq_length, schedule, train.microbatch_size, iterations, train.seed)
    if model.family == "transformer-xl":
        return TrainingStreams(parts[0][0], *sizes)
    if model.family == "bert":
        source = PairSource(parts, read_vocabulary(tokenizer, model.text_vocab_size), model.seq_length, train.seed)
        return PairTrainingBatches(source, schedule, train.microbatch_size, iterations)
    return TrainingBatches(parts, *sizes)
