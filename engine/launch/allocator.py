"""Keeps glibc from handing large buffers back to the system each iteration, the largest cost of training on a CPU."""

import ctypes
import platform

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4


def keep_large_buffers() -> None:
    """Serve every allocation from a heap that is not trimmed. Call before torch is imported; elsewhere a no-op."""
    if platform.libc_ver()[0] != "glibc":
        return
    libc = ctypes.CDLL(None)
    libc.mallopt(M_MMAP_MAX, 0)
    libc.mallopt(M_TRIM_THRESHOLD, 2**31 - 1)
    libc.mallopt(M_TOP_PAD, 64 * 2**20)
