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
    _make_types_once()


def _make_types_once() -> None:
    """What the interpreter works out for every value of a kernel depends on the value's type alone, and takes it more
    time than numpy takes for the values: a block's type, the shape that a tensor shows, numpy's name for a type, and
    that two blocks of one shape need no broadcast. Here each is worked out once."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    make_block, make_tensor = core.block_type.__init__, core.tensor.__init__
    broadcast, numpy_type = TritonSemantic.broadcast_impl_value, interpreter._get_np_dtype
    blocks: dict[Any, dict[str, Any]] = {}
    shapes: dict[tuple[int, ...], tuple[Any, Any]] = {}
    numpy_types: dict[str, Any] = {}

    def name_of(scalar: Any) -> Any:
        if isinstance(scalar, core.pointer_type):
            return name_of(scalar.element_ty), scalar.address_space, scalar.const
        return scalar.name

    def block_once(self: Any, element_ty: Any, shape: Any) -> None:
        key = name_of(element_ty), *(size.value if isinstance(size, core.constexpr) else size for size in shape)
        known = blocks.get(key)
        if known is None:
            make_block(self, element_ty, shape)
            blocks[key] = dict(vars(self))
        else:
            vars(self).update(known)

    def tensor_once(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape.values) if type.is_block() else ()
        known = shapes.get(sizes)
        if known is None:
            make_tensor(self, handle, type)
            shapes[sizes] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.shape, self.numel = known

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> Any:
        ours, theirs = lhs.type, rhs.type
        if ours.is_block() and theirs.is_block() and ours.shape.values == theirs.shape.values:
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def numpy_type_once(type: Any) -> Any:
        if isinstance(type, (core.block_type, core.pointer_type)):
            return numpy_type(type)
        known = numpy_types.get(type.name)
        if known is None:
            known = numpy_types[type.name] = numpy_type(type)
        return known

    core.block_type.__init__ = block_once
    core.tensor.__init__ = tensor_once
    TritonSemantic.broadcast_impl_value = broadcast_others
    interpreter._get_np_dtype = numpy_type_once
