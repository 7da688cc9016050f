"""Comparison of another program's model with this engine's: names, tolerances, first differing
tensor."""
