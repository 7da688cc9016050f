"""Families of models beside GPT-2, a folder each, loaded by `engine.family`."""
