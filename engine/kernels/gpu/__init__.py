"""Triton kernels for GPUs. Checked under Triton's interpreter; none has run on a GPU yet (`mlm-bench gpu`)."""
