"""The training engine: one GPT-2 definition on a mesh of ranks, its optimizer, batches, checkpoints
and trainer."""
