"""Which class a model's family is."""

from engine.model.bert import BERT
from engine.model.gpt2 import GPT2
from engine.model.stage_model import StageModel
from engine.model.transformer_xl import TransformerXL

FAMILIES: dict[str, type[StageModel]] = {"gpt2": GPT2, "bert": BERT, "transformer-xl": TransformerXL}
"""By the names of `model.family`."""
