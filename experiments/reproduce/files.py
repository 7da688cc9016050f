"""Schema of summary.json of a reproduction. Imports no torch."""

import re
from typing import Annotated, Literal

from pydantic import Field

from mlm_repro.lineage.files import FileSchema
from mlm_repro.lineage.numbers import compact

LADDER = ("355m", "2.5b", "8.3b")
"""The models of the 2019 paper's Figure 6 and Table 3."""


class ModelShape(FileSchema):
    """A model's layers, hidden size, heads, sequence length, vocabulary and number of parameters,
    and of its training the iterations, the global batch size in sequences and the learning rate.
    None stands for an unknown value."""

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
        """Training tokens, iterations × global batch size × sequence length, per parameter; None if
        one of the four numbers is not known."""
        if not (self.iterations and self.global_batch_size and self.seq_length and self.parameters):
            return None
        return self.iterations * self.global_batch_size * self.seq_length / self.parameters


class ReproducedModel(FileSchema):
    """A published model and the model that was trained to reproduce it: `published` and `trained`
    are the ModelShape of each. The other fields but `name` are of the training: its run, seed,
    tokens, seconds, tokens per second and checkpoint. None, or an empty text for the run, stands
    for an unknown value."""

    name: Annotated[str, Field(pattern=r"^[^./\x00][^/\x00]*$")]
    """The published model's name, followed by the seed if it is not the recipe's. It can name a
    folder."""
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
        """The published model's name, such as `8.3b`: `name` without a seed."""
        return self.name.partition("-seed-")[0]

    @property
    def label(self) -> str:
        """The name under which readers see the trained model: with its size, such as `8.3b twin
        (446 k)`, or the published name alone if the trained model has the published size or an
        unknown one."""
        size = self.trained.parameters
        if size in (None, self.published.parameters):
            return self.series
        return f"{self.series} twin ({re.sub('(?=[kMB]$)', ' ', compact(float(f'{size:.3g}')))})"


class ReproductionSummary(FileSchema):
    """summary.json of a reproduction: the models that were run, the hardware, and the reason for
    this size."""

    target: str
    mode: Literal["scaled", "full"]
    reason: str = ""
    source: str = ""
    twin_rule: str = ""
    models: list[ReproducedModel] = Field(default_factory=list)
    hardware: str = ""
    commit: str = ""
    commands: dict[str, str] = Field(default_factory=dict)

    @property
    def labels(self) -> dict[str, str]:
        """Dict from the name of each published model in `models`, without a seed, to the name under
        which readers see the trained model, such as `8.3b` → `8.3b twin (446 k)`. Models that
        differ only in their seed share one entry."""
        return {model.series: model.label for model in self.models}

    @property
    def title(self) -> str:
        """The recipe's name with the size at which it was run: `Megatron-LM's 8.3b recipe at
        1/18,600 of its size`. If the two sizes are equal or one is unknown, the text ends in `its
        full size` for the mode `full` and in `a reduced size` for any other."""
        size = "its full size" if self.mode == "full" else "a reduced size"
        if sizes := self._sizes:
            size = f"1/{float(f'{sizes[0] / sizes[1]:.3g}'):,.0f} of its size"
        return f"Megatron-LM's {self.target} recipe at {size}"

    @property
    def limits(self) -> str:
        """A sentence on what models of this size can and cannot show, with the numbers of
        parameters of the target's model as trained here and as published; empty if the two are
        equal or one is unknown."""
        if not (sizes := self._sizes):
            return ""
        return (
            f"The largest model here has {sizes[1]:,} parameters, the paper's {sizes[0]:,}: it can"
            " show whether larger models end lower, not that published numbers are reached."
        )

    @property
    def _sizes(self) -> tuple[int, int] | None:
        """A pair of the numbers of parameters of the target's model, as published and as trained
        here; None if they are equal or one is unknown."""
        for model in self.models:
            theirs = model.published.parameters
            ours = model.trained.parameters
            if model.series == self.target and theirs and ours and theirs != ours:
                return theirs, ours
        return None
