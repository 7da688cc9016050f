"""Token files; the tokenizer has a section of its own, because other stages count with it."""

from data_pipeline.stages.stage import Stage


class Tokenize(Stage):
    """Write token files, of each split if there are splits."""

    name = verb = "tokenize"
    after = "split"
    needs_tokenizer = True
