"""Measurements of speed, each a ratio obtained in one run on one machine. Modules import torch when they measure."""
