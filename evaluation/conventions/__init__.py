"""Conventions by which programs make a number, a model that tells them apart, and the way back from
a number."""
