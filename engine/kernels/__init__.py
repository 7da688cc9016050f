"""Kernels: a reference in plain torch each, and faster implementations for CPUs and GPUs."""
