"""Microbatches of a run for one rank, in training and in validation."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch

from mlm_repro.data_pipeline.tokens.samples import known_tokens
from mlm_repro.engine.checkpoint.checkpoint import LENGTH, SAMPLES
from mlm_repro.engine.checkpoint.stream_memory import StreamMemory
from mlm_repro.engine.config import RunConfig
from mlm_repro.engine.data.batches import validation_text
from mlm_repro.engine.family import TokenFiles, family_of
from mlm_repro.engine.model.microbatch import PipelineInput, Recurrence, to_input
from mlm_repro.engine.parallel.mesh import ParallelMesh
from mlm_repro.engine.rng import Dropout

# Tokens of a validation microbatch. It keeps no activations, so the recipe's microbatch size does
# not bound it.
TOKENS_AT_ONCE = 8192


class TrainingInputs:
    """Source of this rank's training microbatches: the method `of` returns a list of them for an
    iteration, after which the caller calls `streams.commit` to renew the memory of the streams.
    Everything in the microbatches but this memory follows from the token files, the configuration
    and the iteration."""

    def __init__(
        self,
        config: RunConfig,
        iterations: int,
        parts: TokenFiles,
        tokenizer: Path | None,
        mesh: ParallelMesh,
    ) -> None:
        """Prepare the microbatches that the method `of` returns, for a training of `iterations`
        iterations on `parts`, token files with their weights. The attribute `streams` becomes an
        empty memory of streams. A BERT also reads `tokenizer`, the directory of the files'
        tokenizer; None stands for random tokens. Raises BadInput if a token file has no whole
        sample for the model or the tokenizer is missing, IntegrityFailure if it is damaged."""
        self._config = config
        self._mesh = mesh
        self._batches = family_of(config.model).training_order(config, parts, iterations, tokenizer)
        self.streams = StreamMemory(config.model, mesh)

    def of(self, iteration: int) -> list[PipelineInput]:
        """Return a list of this rank's microbatches of `iteration` (from 0) as PipelineInputs, with
        dropout keys if the model has dropout, and for a Transformer-XL with memory the memory of
        their streams. The caller calls `streams.commit` of this object after the iteration, which
        renews that memory.

        If `train.normalise` is "batch", each PipelineInput also has the mean number of targets of a
        microbatch of the global batch, by which its loss is divided, and the call is a collective
        over the data-parallel ranks. Raises IntegrityFailure for a token outside the vocabulary.
        """
        model = self._config.model
        train = self._config.train
        mesh = self._mesh
        inputs = [
            to_input(
                # Checked here: a divided embedding would take an unknown token for another rank's,
                # in silence.
                known_tokens(batch.tokens, model.vocab_size),
                mesh,
                Dropout(model.dropout, train.seed, iteration, batch.places)
                if model.dropout
                else None,
                self.streams.enter(batch.places),
                batch.pairs,
                batch.places,
            )
            for batch in self._batches.microbatches(iteration, mesh.dp.rank, mesh.dp.size)
        ]
        if train.normalise == "microbatch":
            return inputs
        # The divisor of the whole batch has to be known before its first backward pass.
        targets = torch.stack([(batch.targets >= 0).sum() for batch in inputs]).sum().double()
        # A mean per microbatch and not a sum: the step divides by the number of microbatches in
        # every case.
        mean = (mesh.dp.all_reduce(targets) / (len(inputs) * mesh.dp.size)).float()
        return [replace(batch, mean_targets=mean) for batch in inputs]


class ValidationSplit:
    """Sequences of the validation split, which the method `inputs` yields in microbatches: each
    alone or, for a model with memory, in streams of text that continue from microbatch to
    microbatch. The attribute `num_samples` is the number of sequences that a validation on the
    whole split takes; `probed` has the token ids of a checkpoint's probe, a tuple for each sample.
    The constructor raises BadInput if the split is too short."""

    def __init__(
        self, config: RunConfig, parts: TokenFiles, mesh: ParallelMesh, tokenizer: Path
    ) -> None:
        self.mesh = mesh
        self._vocab_size = config.model.vocab_size
        self.batch_size = max(TOKENS_AT_ONCE // config.model.seq_length, 1)
        self._order = order = family_of(config.model).validation_order(config, parts, tokenizer)
        self.num_samples = order.num_samples
        # The probe's samples come from the plain text whatever the family. They are at most a
        # sixteenth of an iteration's tokens, so that a checkpoint every ten iterations spends 0.2 %
        # of the time on their loss.
        length = config.model.seq_length
        affordable = config.train.global_batch_size * length // (16 * LENGTH)
        samples = min(max(affordable, 1), SAMPLES)
        text = validation_text(parts, length)
        rows = next(text.microbatches(samples, samples, 0, 1)).tokens[:, : LENGTH + 1]
        self.probed = tuple(map(tuple, rows.tolist()))

    def inputs(self, num_samples: int) -> Iterator[PipelineInput]:
        """Yield, as PipelineInputs, this rank's microbatches for a validation on the first
        `num_samples` sequences, or all if there are fewer, over all data-parallel ranks together; a
        Transformer-XL takes whole global batches, at least one. Its memory begins empty and is
        carried along each stream.

        Raises IntegrityFailure for a token outside the vocabulary.
        """
        dp = self.mesh.dp
        # Microbatches of the same streams have the same indices, by which their memory is found
        # again.
        carried: dict[tuple[int, ...], dict[int, torch.Tensor]] = {}
        for batch in self._order.microbatches(num_samples, self.batch_size, dp.rank, dp.size):
            states = carried.setdefault(batch.places, {})
            # One dict for both, because nothing is recomputed in validation.
            recurrence = Recurrence(states, states) if self._order.are_streams else None
            tokens = known_tokens(batch.tokens, self._vocab_size)
            yield to_input(tokens, self.mesh, recurrence=recurrence, pairs=batch.pairs)
