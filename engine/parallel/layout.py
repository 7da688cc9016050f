"""Which rank is where: pure arithmetic. Imports no torch."""

from dataclasses import dataclass

from lineage.errors import BadInput


@dataclass(frozen=True)
class Layout:
    """Degrees of tensor, pipeline and data parallelism.

    Global rank = tp + TP·(dp + DP·pp): tensor-parallel neighbours are adjacent, then data, then pipeline
    (Megatron-LM v2, `mpu/initialize.py`).
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.tp * self.pp * self.dp

    def coordinates(self, rank: int) -> tuple[int, int, int]:
        """(tp, pp, dp) coordinates of a global rank."""
        return rank % self.tp, rank // (self.tp * self.dp), rank // self.tp % self.dp

    def rank(self, tp: int, pp: int, dp: int) -> int:
        """Global rank at the coordinates; the inverse of `coordinates`."""
        return tp + self.tp * (dp + self.dp * pp)


def fit_layout(
    world_size: int, tp: int, pp: int, num_heads: int, padded_vocab_size: int, batch_in_microbatches: int
) -> Layout:
    """The layout of `world_size` ranks with this tp and pp, all others data-parallel.

    Raises BadInput with the numbers that do not divide and the choices that would.
    """
    for size, what in ((num_heads, "attention heads"), (padded_vocab_size, "vocabulary rows"), (world_size, "ranks")):
        if size % tp:
            raise BadInput(f"tp = {tp} does not divide the {size} {what}; it can be {_divisors(size)}")
    if world_size % (tp * pp):
        raise BadInput(
            f"tp × pp = {tp} × {pp} does not divide the {world_size} ranks; with tp = {tp}, pp can be "
            f"{_divisors(world_size // tp)}"
        )
    dp = world_size // (tp * pp)
    if batch_in_microbatches % dp:
        raise BadInput(
            f"the global batch of {batch_in_microbatches} microbatches does not divide over {dp} data-parallel ranks; "
            f"their number can be {_divisors(batch_in_microbatches)}"
        )
    return Layout(tp=tp, pp=pp, dp=dp)


def _divisors(number: int) -> str:
    found = [n for n in range(1, min(number, 512) + 1) if number % n == 0]
    return ", ".join(str(n) for n in found)
