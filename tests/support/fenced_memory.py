"""Tensors between fences: what is read or written beside them does not go unnoticed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

FENCE = 1024
POISON = 0xA5
"""Four of which are neither a token's id nor a sensible logit."""


class FencedMemory:
    """Hands out tensors with FENCE bytes of poison on both sides."""

    def __init__(self) -> None:
        self._inside: list[Tensor] = []
        self._around: list[Tensor] = []

    def copy(self, tensor: Tensor) -> Tensor:
        size = tensor.numel() * tensor.itemsize
        around = torch.full((FENCE + size + FENCE,), POISON, dtype=torch.uint8, device=tensor.device)
        inside = around[FENCE : FENCE + size].view(tensor.dtype).view(tensor.shape)
        inside.copy_(tensor)
        self._inside.append(inside)
        self._around.append(around)
        return inside

    def poisoned(self, tensor: Tensor) -> Tensor:
        """Of a tensor's shape, without its contents."""
        fenced = self.copy(tensor)
        fenced.view(-1).view(torch.uint8).fill_(POISON)
        return fenced

    def check(self) -> None:
        for around in self._around:
            fences = torch.cat([around[:FENCE], around[-FENCE:]])
            assert (fences == POISON).all(), "written beside a tensor"

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Within, no kernel that the interpreter runs may load from or store to anything else; elsewhere it watches
        nothing. Fences alone tell nothing of loads, nor of stores far away."""
        first = np.array(sorted(tensor.data_ptr() for tensor in self._inside), dtype=np.int64)
        size = {tensor.data_ptr(): tensor.numel() * tensor.itemsize for tensor in self._inside}
        end = first + np.array([size[address] for address in first.tolist()])

        def check(pointers: Any, mask: Any) -> None:
            address = pointers.data.astype(np.int64).ravel()[np.asarray(mask.data, dtype=bool).ravel()]
            width = pointers.get_element_ty().primitive_bitwidth // 8
            tensor = np.maximum(np.searchsorted(first, address, side="right") - 1, 0)
            outside = (address < first[tensor]) | (address + width > end[tensor])
            assert not outside.any(), f"{outside.sum()} of {outside.size} addresses are in no tensor"

        with patched_interpreter(check):
            yield
        self.check()


@contextmanager
def patched_interpreter(check: Any) -> Iterator[None]:
    from triton.runtime.interpreter import InterpreterBuilder

    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store
    add = InterpreterBuilder.create_atomic_rmw

    def checked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return load(self, pointers, mask, *rest)

    def checked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return store(self, pointers, value, mask, *rest)

    def checked_add(self: Any, operation: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        check(pointers, mask)
        return add(self, operation, pointers, value, mask, *rest)

    with (
        patch.object(InterpreterBuilder, "create_masked_load", checked_load),
        patch.object(InterpreterBuilder, "create_masked_store", checked_store),
        patch.object(InterpreterBuilder, "create_atomic_rmw", checked_add),
    ):
        yield
