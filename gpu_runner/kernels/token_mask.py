"""The masks of rows within a structure, on their logits: what a mask does not have becomes -inf.

Masks lie in the host's memory, where another process writes them, a row of words for each slot:

    fetch    parts x rows    copies the words of constrained rows over the bus, each once and whole lines at a time
    apply    blocks x rows   spreads them over the ids

That is 19 KB a row for a vocabulary of 152 thousand. Programs of other rows end after a few loads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_runner.kernels.device_state import DeviceState
from gpu_runner.kernels.launch import launch_options
from gpu_runner.kernels.logit_adjust import live_sample
from gpu_runner.kernels.mask_layout import mask_words
from gpu_runner.kernels.step_meta import StepMeta

BLOCK = 4096
"""Ids of a program that applies a mask."""
FETCH_BLOCK = 512
"""Words of a program that fetches one: 16 bytes a thread."""


class RowMasks:
    """Scratch of one stream's steps, which use it one after the other. Until `connect` no row may be constrained."""

    def __init__(self, *, max_rows: int, vocab: int, device: torch.device) -> None:
        """max_rows: the largest N of any call."""
        self._vocab = vocab
        self._address = torch.zeros(1, dtype=torch.int64, device=device)
        self._words = torch.zeros(max_rows, mask_words(vocab), dtype=torch.int32, device=device)

    def connect(self, masks: Tensor) -> None:
        """masks: [num_slots, mask_words(vocab)] int32 on the host (registered with the device, if that is a GPU), at a
        multiple of 16 bytes, kept alive by the caller. Queued on the current stream, which must be that of the
        steps."""
        if masks.shape[1] != self._words.shape[1]:
            raise ValueError(f"masks must have {self._words.shape[1]} words; got {masks.shape[1]}")
        self._address.fill_(masks.data_ptr())

    def apply(self, logits: Tensor, state: DeviceState, meta: StepMeta) -> None:
        """Set logits of constrained rows that their slot's mask does not have to -inf, in place.

        logits: [N, vocab] float32, contiguous; row i is of the step's row `meta.sample_row[i]`. Fixed in a graph: all
        addresses, N.
        """
        rows, words = len(logits), self._words.shape[1]
        step = (*meta.samples, meta.row_was_done, state.constrained)
        _fetch_kernel[(triton.cdiv(words, FETCH_BLOCK), rows)](
            self._address, self._words, *step, words, BLOCK_SIZE=FETCH_BLOCK, **launch_options(logits, 4)
        )
        _apply_kernel[(triton.cdiv(self._vocab, BLOCK), rows)](
            logits, self._words, *step, words, self._vocab, BLOCK_SIZE=BLOCK, **launch_options(logits, 8)
        )


@triton.jit
def _fetch_kernel(
    address,
    fetched,
    counts,
    sample_row,
    row_slot,
    row_start,
    row_len,
    row_was_done,
    constrained,
    words,
    BLOCK_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (part, row)."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1)
    live, _, slot, _ = live_sample(row, counts, sample_row, row_slot, row_start, row_len, row_was_done)
    if not live:
        return
    if tl.load(constrained + slot) != 0:
        masks = tl.multiple_of(tl.load(address).to(tl.pointer_type(tl.int32), bitcast=True), 16)
        at = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        word = tl.load(masks + slot.to(tl.int64) * words + at, mask=at < words, other=0)
        tl.store(fetched + row.to(tl.int64) * words + at, word, mask=at < words)


@triton.jit
def _apply_kernel(
    logits,
    fetched,
    counts,
    sample_row,
    row_slot,
    row_start,
    row_len,
    row_was_done,
    constrained,
    words,
    vocab,
    BLOCK_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Program (block, row)."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(1)
    live, _, slot, _ = live_sample(row, counts, sample_row, row_slot, row_start, row_len, row_was_done)
    if not live:
        return
    if tl.load(constrained + slot) != 0:
        id = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        word = tl.load(fetched + row.to(tl.int64) * words + id // 32, mask=id < vocab, other=-1)
        banned = (id < vocab) & (((word >> (id % 32)) & 1) == 0)
        place = logits + row.to(tl.int64) * vocab + id
        tl.store(place, tl.full([BLOCK_SIZE], -float("inf"), tl.float32), mask=banned)
