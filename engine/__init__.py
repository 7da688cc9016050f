"""The training engine: GPT-2 and other families on a mesh of ranks, with optimizer, batches,
checkpoints and trainer."""
