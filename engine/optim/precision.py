"""Torch's dtype for each precision, and the dynamic loss scale of fp16."""

from dataclasses import dataclass

import torch

from mlm_repro.engine.config import Precision

DTYPES: dict[Precision, torch.dtype] = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp16-pure": torch.float16,
}


@dataclass
class LossScaler:
    """Megatron-LM's dynamic loss scale, the field `scale`: doubles after `window` clean iterations
    in a row, halves on overflow, to 1 at the least.

    The first overflow of all, and the first after each growth, is tolerated (hysteresis 2); from
    then on every overflow halves until the next growth refills the tolerance (Megatron-LM v2,
    `optimizer/grad_scaler.py`).
    """

    scale: float = 2.0**32
    clean_iterations: int = 0
    """Number of iterations without overflow since the last overflow or growth."""
    tolerance: int = 2
    """Number of overflows up to and with the first that halves, counted down; at 0 or below every
    overflow halves."""

    # Megatron-LM's defaults of `--loss-scale-window`, `--hysteresis` and `--min-loss-scale`.
    window = 1000
    hysteresis = 2
    smallest = 1.0

    def update(self, overflow: bool) -> None:
        """Halve, double or keep the field `scale`, the loss scale, after an iteration; `overflow`
        is True if the iteration's gradient was not finite. An overflow halves it, to 1 at the
        least, but the first of all and the first after each growth are only counted; it grows,
        doubled, after each `window` (1000) iterations in a row without an overflow."""
        if overflow:
            self.clean_iterations = 0
            self.tolerance -= 1
            if self.tolerance <= 0:
                self.scale = max(self.scale / 2.0, self.smallest)
            return
        self.clean_iterations += 1
        if self.clean_iterations == self.window:
            self.clean_iterations = 0
            self.tolerance = self.hysteresis
            self.scale *= 2.0
