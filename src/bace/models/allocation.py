"""Memory that a process frees is kept for its next tensors.

glibc returns free memory at the end of its heap to the system, and the system hands out zeroed pages anew for the next
tensor. A pass through an encoder frees and takes memory in every layer: keeping it saves 5 to 16 % of the time
(docs/performance.md). The environment variable BACE_KEEP_MEMORY=0 leaves glibc as it is.
"""

import ctypes
import functools
import os
from typing import Any

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of malloc.h
KEPT = 2**30  # bytes of free memory at the end of the heap, beyond which it is returned
SINGLE = 2**25  # blocks of this size or more are outside of the heap and always returned; glibc's own maximum
SETTINGS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "GLIBC_TUNABLES")


@functools.cache
def keep_freed_memory() -> bool:
    """Tell glibc to keep freed memory, unless the environment has settings of its own. Returns whether it was told;
    other C libraries are left as they are."""
    library = glibc()
    if library is None or os.environ.get("BACE_KEEP_MEMORY") == "0" or any(name in os.environ for name in SETTINGS):
        return False
    return bool(library.mallopt(M_MMAP_THRESHOLD, SINGLE) and library.mallopt(M_TRIM_THRESHOLD, KEPT))


def return_freed_memory() -> None:
    """Return what is kept to the system, at the end of long work."""
    if keep_freed_memory() and (library := glibc()) is not None:
        library.malloc_trim(0)


def glibc() -> Any:
    """The C library, if it is glibc."""
    library = ctypes.CDLL(None) if os.name == "posix" else None
    return library if hasattr(library, "gnu_get_libc_version") and hasattr(library, "malloc_trim") else None
