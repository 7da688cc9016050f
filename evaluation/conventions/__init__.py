"""Conventions by which programs compute one number, a model that tells them apart, and the search
from a number to its convention."""
