"""Compares another program's model with ours: names, tolerances, first differing tensor."""
