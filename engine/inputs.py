"""The microbatches of a run as its model takes them: tokens, dropout keyed by place, and what a stream remembers."""

from collections.abc import Sequence
from pathlib import Path

from data_pipeline.tokens.token_file import TokenFile
from engine.config import RunConfig
from engine.parallel.mesh import ParallelMesh
from engine.pipeline.microbatch import PipelineInput, to_input
from engine.rng import Dropout
from engine.stream_memory import StreamMemory
from engine.training_order import training_batches


class TrainingInputs:
    """This rank's microbatches of every iteration, a pure function of seed and iteration but for streams' memory."""

    def __init__(
        self, config: RunConfig, iterations: int, parts: Sequence[tuple[TokenFile, float]], tokenizer: Path | None,
        mesh: ParallelMesh,
    ) -> None:  # fmt: skip
        """`parts` are token files with their weights; a BERT needs the directory of their tokenizer."""
        self._config, self._mesh = config, mesh
        self._batches = training_batches(config, parts, iterations, tokenizer)
        self.streams = StreamMemory(config.model, mesh)

    def of(self, iteration: int) -> list[PipelineInput]:
        """The microbatches of `iteration` (from 0), each after what its streams remember."""
        model, train, mesh = self._config.model, self._config.train, self._mesh
        return [
            to_input(
                batch.tokens,
                mesh,
                Dropout(model.dropout, train.seed, iteration, batch.places) if model.dropout else None,
                self.streams.enter(batch.places),
                batch.pairs,
                batch.places,
            )
            for batch in self._batches.microbatches(iteration, mesh.dp.rank, mesh.dp.size)
        ]
