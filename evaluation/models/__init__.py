"""Finds the files of models that are scored, and loads other programs' models."""

WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.gguf")
"""Patterns of weight files. A model is read from the first format that it has."""
