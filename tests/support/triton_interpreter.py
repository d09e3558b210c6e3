"""Triton without a GPU."""

from __future__ import annotations

import os
from dataclasses import replace
from types import SimpleNamespace
from typing import Any


def use_interpreter() -> None:
    """Run Triton kernels under its interpreter. Call before anything imports triton."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language
    from triton.runtime import interpreter

    patch_tensor, patch_lang = interpreter._patch_lang_tensor, interpreter._patch_lang

    def patch_tensor_and_index(tensor: Any, scope: Any) -> None:
        """The interpreter's scalars are arrays of one element, which numpy 2.4 no longer takes for numbers: without
        this, no loop could end at a count read from memory."""
        patch_tensor(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    whole_language = SimpleNamespace(__globals__={"tl": triton.language, "core": triton.language.core})

    def patch_lang_once(function: Any) -> Any:
        """The interpreter puts its own functions into the language at each launch and, for nothing but a third of the
        time, once more at each call of a function by a kernel: into what that function's module sees of it."""
        return None if triton.language.static_print is print else patch_lang(whole_language)

    interpreter._patch_lang_tensor = patch_tensor_and_index
    interpreter._patch_lang = patch_lang_once
    # Sums and products are made once more in 64 bits, for an assertion that is off.
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=False)
