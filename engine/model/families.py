"""Which class a model's family is."""

from engine.model.gpt2 import GPT2
from engine.model.stage_model import StageModel

FAMILIES: dict[str, type[StageModel]] = {"gpt2": GPT2}
"""By the names of `model.family`."""
