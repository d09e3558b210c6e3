"""Host memory for KV pages: how many pages it has room for, and the memory itself."""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Callable

import numpy as np
import torch

from asyncengine.config import EngineConfig
from asyncengine.errors import StartupError
from gpu_runner.device.memory import TOKEN_ID_BYTES, gib, page_bytes
from gpu_runner.device.pinned import register
from gpu_runner.models.config import ModelConfig

USABLE_SHARE = 0.9
"""Of the memory that is available: the rest of the machine needs some, and what is pinned cannot be swapped out."""
PIECE_BYTES = 1 << 30
"""Pinned at a time, which takes some tenths of a second: who starts the engine wants to see it go on."""


def size_host_memory(config: EngineConfig, model: ModelConfig, dtype: torch.dtype, *, available_bytes: int) -> int:
    """Pages that `config.kv_host_memory_gib` has room for. Raises `StartupError` where it is not even one, or more than
    this machine can give."""
    asked, page = config.kv_host_memory_gib, page_bytes(model, dtype) + TOKEN_ID_BYTES
    if not asked:
        return 0
    size = int(asked * 2**30)
    usable = int(available_bytes * USABLE_SHARE)
    if size > usable:
        fits = usable // page * page / 2**30
        raise StartupError(
            f"kv_host_memory_gib {asked} is more than this machine can give: {gib(available_bytes)} of its memory are "
            f"available, of which {USABLE_SHARE:.0%} may be used; {int(fits * 100) / 100} would fit"
        )
    if size < page:
        raise StartupError(f"kv_host_memory_gib {asked} is less than one page of KV cache, which takes {page:,} bytes")
    return size // page


class HostMemory:
    """Zeroed memory, pinned for a GPU or plain, until nobody holds this object any more."""

    def __init__(self, size: int, *, pinned: bool, progress: Callable[[int, int], None]) -> None:
        """size: bytes. progress: bytes that are pinned, and in all. Raises `StartupError` where they cannot be."""
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):  # fewer pages to pin; and a child's copy would be of all
            with contextlib.suppress(AttributeError, OSError):  # systems without them do without
                memory.madvise(getattr(mmap, advice))
        array = np.frombuffer(memory, np.int32)
        self.words = torch.from_numpy(array)
        """[size / 4] int32."""
        if not pinned:
            return
        for begin in range(0, size, PIECE_BYTES):
            progress(begin, size)
            if not register(self, self.words.data_ptr() + begin, min(PIECE_BYTES, size - begin)):
                raise StartupError(
                    f"kv_host_memory_gib: {gib(size)} of memory cannot be pinned for the GPU, only {gib(begin)} could; "
                    "the limit of locked memory (ulimit -l), or of a container, may be too low"
                )
        progress(size, size)
