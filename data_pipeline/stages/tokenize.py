"""The stage `tokenize`: token files. The tokenizer has a section of its own, because other stages
count tokens too."""

from mlm_repro.data_pipeline.stages.stage import Stage


class Tokenize(Stage):
    """Write a token file for each split, or one if there are no splits."""

    name = verb = "tokenize"
    step = 6
    needs_tokenizer = True
