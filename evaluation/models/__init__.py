"""Models that are scored: where their files lie, and how those of other programs are loaded."""

WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.gguf")
"""Files of weights, of which the first format that a model has is read."""
