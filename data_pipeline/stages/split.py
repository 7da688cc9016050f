"""Training and validation documents: the paper's 29:1 random split."""

from pydantic import PositiveInt

from mlm_repro.data_pipeline.stages.stage import Stage


class SplitConfig(Stage):
    """Shuffle the documents and divide them into training and validation documents, by the ratio
    `train` : `valid`."""

    name = verb = "split"
    step = 5

    train: PositiveInt = 29
    valid: PositiveInt = 1
