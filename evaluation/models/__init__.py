"""Finds the files of models that are scored, and loads other programs' models."""

WEIGHTS = ("*.safetensors", "pytorch_model*.bin", "*.gguf")
"""Patterns of weight files, in order of preference: a model is read from the first format that its
directory has."""
