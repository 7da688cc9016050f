"""Iteration time and memory of a layout on a cluster, from the engine's own schedules and a cost
model.

Imports no torch.
"""
