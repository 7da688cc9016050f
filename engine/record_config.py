"""What a training run writes down beside its results, as frozen data. Imports no torch."""

from typing import Any, Literal

from pydantic import model_validator

from lineage.config import Config


class RecordConfig(Config):
    """What a run writes down beside its results; none of it changes them."""

    loggers: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    """Where the metrics go beside metrics.jsonl. Each name is that of the extra which brings the library."""
    noise_scale: bool = False
    """Also estimate the gradient noise scale, in samples, from the gradients of the data-parallel ranks and of them all
    (McCandlish et al. 2018); on one data-parallel rank there is nothing to compare."""

    @model_validator(mode="before")
    @classmethod
    def _read_former_key(cls, values: Any) -> Any:
        """`tensorboard`, true or false, is how configurations used to ask for the first of the loggers."""
        if not isinstance(values, dict) or "tensorboard" not in values:
            return values
        others = {key: value for key, value in values.items() if key != "tensorboard"}
        if values["tensorboard"] not in (True, False):
            raise ValueError(f"tensorboard = {values['tensorboard']!r} must be true or false")
        loggers = others.get("loggers", ())
        if values["tensorboard"] and isinstance(loggers, (list, tuple)) and "tensorboard" not in loggers:
            others["loggers"] = [*loggers, "tensorboard"]
        return others
