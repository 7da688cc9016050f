"""The stage `tokenize`: token files. The tokenizer has a section of its own, because other stages
count tokens too."""

from mlm_repro.data_pipeline.stages.stage import Stage


class Tokenize(Stage):
    """Write a token file for each split, or one if there are no splits.

    It is the last stage of a build and has no settings. The class only declares it: `publish`
    writes the files, with the dataset's tokenizer and card. A build without this stage writes
    JSON lines instead.
    """

    name = verb = "tokenize"
    step = 6
    needs_tokenizer = True
