"""Training and validation documents: the paper's 29:1 random split."""

from pydantic import PositiveInt

from mlm_repro.data_pipeline.stages.stage import Stage


class SplitConfig(Stage):
    """Shuffle, and part training from validation documents. Shares of training and validation
    documents."""

    name = verb = "split"
    step = 5

    train: PositiveInt = 29
    valid: PositiveInt = 1
