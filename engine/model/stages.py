"""Which layers a pipeline stage holds. Imports no torch."""

from dataclasses import dataclass

from lineage.errors import BadInput


@dataclass(frozen=True)
class Stage:
    """A global position in the pipeline."""

    layers: range
    """Global numbers of its transformer layers."""
    is_first: bool = True
    """Holds the embedding."""
    is_last: bool = True
    """Holds the final layer norm and the output head."""


def whole_model(num_layers: int) -> Stage:
    """The one stage of a model that is not divided."""
    return Stage(range(num_layers))


def split_layers(num_layers: int, pp: int, chunks: int) -> list[Stage]:
    """Stages in pipeline order; stage = chunk · pp + rank.

    Layers are divided as evenly as they go, and where they do not, the earlier stages hold one more: the last stage has
    the output head to compute as well. Raises BadInput when there are fewer layers than stages.
    """
    stages = pp * chunks
    if num_layers < stages:
        raise BadInput(
            f"pp = {pp} with {chunks} chunk{'s' if chunks > 1 else ''} needs at least {stages} layers; "
            f"the model has {num_layers}"
        )
    each, extra = divmod(num_layers, stages)
    split, start = [], 0
    for stage in range(stages):
        count = each + (stage < extra)
        split.append(Stage(range(start, start + count), stage == 0, stage == stages - 1))
        start += count
    return split
