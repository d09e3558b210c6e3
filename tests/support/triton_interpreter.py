"""Triton without a GPU."""

from __future__ import annotations

import os
from typing import Any


def use_interpreter() -> None:
    """Run Triton kernels under its interpreter. Call before anything imports triton."""
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.runtime import interpreter

    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        """The interpreter's scalars are arrays of one element, which numpy 2.4 no longer takes for numbers: without
        this, no loop could end at a count read from memory."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_tensor_and_index
