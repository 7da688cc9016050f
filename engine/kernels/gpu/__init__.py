"""Triton kernels for GPUs, checked under Triton's interpreter. None has run on a GPU yet."""
