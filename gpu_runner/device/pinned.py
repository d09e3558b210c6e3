"""Memory of the host that a GPU's kernels read and write."""

from __future__ import annotations

import contextlib
import weakref

import torch

_PORTABLE, _MAPPED = 1, 2
"""Flags of cudaHostRegister."""


def register(owner: object, address: int, size: int) -> bool:
    """Pin memory, which `owner` keeps alive, until that is gone. False where it cannot be, as in a container that locks
    no memory."""
    runtime = torch.cuda.cudart()
    if int(runtime.cudaHostRegister(address, size, _PORTABLE | _MAPPED)) != 0:
        # The runtime keeps the failure for whoever asks next, and torch asks after each launch.
        with contextlib.suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        return False
    # before the memory goes: its addresses may be other memory's then, and a range is registered only once
    weakref.finalize(owner, runtime.cudaHostUnregister, address)
    return True
