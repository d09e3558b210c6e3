"""The matchers of all rows, by slot, and the shared memory where they leave their masks."""

from __future__ import annotations

import mmap
from collections.abc import Sequence

import numpy as np
from llguidance import LLExecutor, LLMatcher
from numpy.typing import NDArray

from asyncengine.sampling import Structured
from gpu_runner.grammar.child.compiler import Compiler, GrammarError, check

Int32 = NDArray[np.int32]
FEW_ROWS = 8
"""Up to so many are quicker done one after the other than handed to threads."""


class Masks:
    """Follows the rows' texts. `open` may run in another thread than `advance`, for other slots."""

    def __init__(self, compiler: Compiler, *, fd: int, num_slots: int, words: int, threads: int) -> None:
        """fd: memory of [num_slots, words] int32."""
        self._compiler = compiler
        self._array = np.frombuffer(mmap.mmap(fd, 4 * num_slots * words), np.int32).reshape(num_slots, words)
        self._rows: dict[int, tuple[int, LLMatcher, Structured]] = {}  # by slot: generation, matcher, what it matches
        self._executor = LLExecutor(threads)

    def open(self, slot: int, gen: int, structured: Structured, tokens: Int32) -> None:
        """Begin a row that has these tokens of its text, and write its mask. Raises `GrammarError`."""
        self._rows.pop(slot, None)
        matcher = self._compiler.matcher(structured)
        matcher.consume_tokens(tokens.tolist())
        self._fill([(matcher, slot)])
        check(matcher, structured)
        self._rows[slot] = gen, matcher, structured

    def advance(self, slots: Int32, gens: Int32, tokens: Int32) -> list[str]:
        """Take the rows' new tokens in and write their masks. Returns of each why it failed, or ""."""
        columns = zip(slots.tolist(), gens.tolist(), tokens.tolist(), strict=True)
        found = [(self._rows.get(slot), slot, gen, token) for slot, gen, token in columns]
        rows = [(row[1], slot, token, row[2]) for row, slot, gen, token in found if row is not None and row[0] == gen]
        self._consume([(matcher, token) for matcher, _, token, _ in rows])
        self._fill([(matcher, slot) for matcher, slot, _, _ in rows])
        errors = {slot: _failure(matcher, structured) for matcher, slot, _, structured in rows}
        for slot, error in errors.items():
            if error:
                del self._rows[slot]
        return [errors.get(slot, "the row is not known") for slot in slots.tolist()]

    def _consume(self, rows: Sequence[tuple[LLMatcher, int]]) -> None:
        if len(rows) > FEW_ROWS:
            self._executor.consume_token_par(list(rows))
        else:
            for matcher, token in rows:
                matcher.consume_token(token)

    def _fill(self, rows: Sequence[tuple[LLMatcher, int]]) -> None:
        memory, size = self._array.ctypes.data, 4 * self._array.shape[1]
        if len(rows) > FEW_ROWS:
            self._executor.unsafe_compute_mask_ptr(list(rows), memory, size, len(self._array))
        else:
            for matcher, slot in rows:
                matcher.unsafe_compute_mask_ptr(memory + slot * size, size)


def _failure(matcher: LLMatcher, structured: Structured) -> str:
    try:
        check(matcher, structured)
    except GrammarError as error:
        return error.message
    return ""
