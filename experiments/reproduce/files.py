"""Schema of summary.json of a reproduction. Imports no torch."""

from typing import Annotated, Literal

from pydantic import Field

from mlm_repro.lineage.files import FileSchema

LADDER = ("355m", "2.5b", "8.3b")
"""The models of the 2019 paper's Figure 6 and Table 3."""


class ModelShape(FileSchema):
    """A model's shape and size, and the length and learning rate of its training."""

    num_layers: int | None = None
    hidden_size: int | None = None
    num_heads: int | None = None
    seq_length: int | None = None
    vocab_size: int | None = None
    iterations: int | None = None
    global_batch_size: int | None = None
    learning_rate: float | None = None
    parameters: int | None = None

    @property
    def tokens_per_parameter(self) -> float | None:
        """Training tokens per parameter; None if the length or the size is not known."""
        if not (self.iterations and self.global_batch_size and self.seq_length and self.parameters):
            return None
        return self.iterations * self.global_batch_size * self.seq_length / self.parameters


class ReproducedModel(FileSchema):
    """A published model and the model that was trained in its name."""

    name: Annotated[str, Field(pattern=r"^[^./\x00][^/\x00]*$")]
    """The published model's name, and the seed if it is not the recipe's. A folder has this name."""
    run: str = ""
    published: ModelShape = ModelShape()
    trained: ModelShape = ModelShape()
    seed: int | None = None
    tokens: int | None = None
    train_seconds: float | None = None
    tokens_per_second: float | None = None
    checkpoint_digest: str | None = None

    @property
    def series(self) -> str:
        """The published model's name."""
        return self.name.partition("-seed-")[0]


class ReproductionSummary(FileSchema):
    """summary.json of a reproduction: what was run, on what hardware, and why at this size."""

    target: str
    mode: Literal["scaled", "full"]
    reason: str = ""
    source: str = ""
    twin_rule: str = ""
    models: list[ReproducedModel] = Field(default_factory=list)
    hardware: str = ""
    commit: str = ""
    commands: dict[str, str] = Field(default_factory=dict)
