"""Evaluation of checkpoints by named protocols."""
