"""Triton kernels for GPUs, checked under Triton's interpreter; `docs/gpu.md` says on which GPU they
have run."""
