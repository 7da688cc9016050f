"""The validation split as a model's inputs."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from data_pipeline.tokens.token_file import TokenFile
from engine.batches import ValidationBatches, ValidationStreams
from engine.config import RunConfig
from engine.pair_batches import PairSource, PairValidationBatches, read_vocabulary
from engine.parallel.mesh import ParallelMesh
from engine.pipeline.microbatch import PipelineInput, Recurrence, to_input
from engine.probe import SAMPLES, choose_samples

TOKENS_AT_ONCE = 8192


class ValidationSplit:
    """Sequences of the validation split, each alone, or for a model with memory in streams that read on.

    A BERT's are sentence pairs with masks that stay the same.
    """

    def __init__(
        self, config: RunConfig, parts: Sequence[tuple[TokenFile, float]], mesh: ParallelMesh, tokenizer: Path
    ) -> None:
        model, train = config.model, config.train
        self.mesh, self.batch_size = mesh, max(TOKENS_AT_ONCE // model.seq_length, 1)
        sequences = ValidationBatches(parts, model.seq_length)
        self.probed = choose_samples(next(sequences.batches(SAMPLES, SAMPLES, 0, 1)).tolist())
        self._batches: ValidationBatches | ValidationStreams | PairValidationBatches = sequences
        if model.family == "transformer-xl":
            sizes = (model.seq_length, train.global_batch_size, train.microbatch_size)
            self._batches = ValidationStreams(parts[0][0], *sizes)
        elif model.family == "bert":
            vocabulary = read_vocabulary(tokenizer, model.text_vocab_size)
            self._batches = PairValidationBatches(PairSource(parts, vocabulary, model.seq_length, train.seed))

    @property
    def num_samples(self) -> int:
        """Sequences of the split."""
        return self._batches.num_samples

    def inputs(self, num_samples: int) -> Iterator[PipelineInput]:
        """This rank's share of about `num_samples` sequences; what comes later in a stream has a memory of it."""
        dp = self.mesh.dp
        if isinstance(self._batches, ValidationBatches):
            for tokens in self._batches.batches(num_samples, self.batch_size, dp.rank, dp.size):
                yield to_input(tokens, self.mesh)
            return
        if isinstance(self._batches, PairValidationBatches):
            for batch in self._batches.microbatches(num_samples, self.batch_size, dp.rank, dp.size):
                yield to_input(batch.tokens, self.mesh, pairs=batch.pairs)
            return
        carried: dict[tuple[int, ...], dict[int, torch.Tensor]] = {}
        for batch in self._batches.microbatches(num_samples, dp.rank, dp.size):
            states = carried.setdefault(batch.places, {})
            yield to_input(batch.tokens, self.mesh, recurrence=Recurrence(states, states))
