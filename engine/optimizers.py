"""The optimizers by name. Imports no torch, so that configurations can be checked without it."""

OPTIMIZERS = {
    "adam": "engine.optim.adam:FlatAdamW",
    "lamb": "engine.optim.adam:FlatLamb",
    "lamb-clamped": "engine.optim.adam:ClampedLamb",
}
"""module:class of each, by its name in `train.optimizer`."""
