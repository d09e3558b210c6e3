"""The mask of a row's structure, on its logits: what it does not allow becomes -inf.

Masks lie in the host's memory, a row of words for each slot, where the kernel reads them: 19 KB for a vocabulary of
152 thousand, of constrained rows alone. Other rows' programs end after a few loads.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_runner.kernels.logit_adjust import live_sample
from gpu_runner.kernels.step_meta import SlotState, StepMeta

BLOCK = 4096
"""Ids of a program: 128 words, which are asked for at once."""
NUM_WARPS = 8


class MaskAddress:
    """Where the masks lie. 0 until `connect`, and as long no row may be constrained."""

    def __init__(self, device: torch.device) -> None:
        self.tensor = torch.zeros(1, dtype=torch.int64, device=device)

    def connect(self, masks: Tensor) -> None:
        """masks: [num_slots, words] int32 on the host (registered with the device, if that is a GPU), kept alive by the
        caller."""
        self.tensor.fill_(masks.data_ptr())


def mask_logits(
    logits: Tensor, state: SlotState, meta: StepMeta, address: MaskAddress, *, words: int, pdl: bool = True
) -> None:
    """Set logits of constrained rows that their slot's mask does not have to -inf, in place.

    logits: [N, vocab] float32, contiguous; row i is of the step's row `meta.sample_row[i]`. words: of each slot's mask;
    they have a bit for every id. Fixed in a graph: all addresses, N, `words`.
    """
    rows, vocab = logits.shape
    if logits.dtype != torch.float32 or not logits.is_contiguous() or words * 32 < vocab:
        raise ValueError(f"logits must be contiguous float32 rows of up to {words * 32}; got {tuple(logits.shape)}")
    pdl = pdl and logits.device.type != "cpu"
    _mask_kernel[(triton.cdiv(vocab, BLOCK), rows)](
        logits,
        meta.counts,
        meta.sample_row,
        meta.row_slot,
        meta.row_start,
        meta.row_len,
        meta.row_was_done,
        state.constrained,
        address.tensor,
        vocab,
        words,
        BLOCK_SIZE=BLOCK,
        PDL=pdl,
        launch_pdl=pdl,
        num_warps=NUM_WARPS,
    )


@triton.jit
def _mask_kernel(
    logits,
    counts,
    sample_row,
    row_slot,
    row_start,
    row_len,
    row_was_done,
    constrained,
    address,
    vocab,
    words,
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
        masks = tl.load(address).to(tl.pointer_type(tl.int32), bitcast=True) + slot.to(tl.int64) * words
        id = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        inside = id < vocab
        word = tl.load(masks + id // 32, mask=inside, other=-1)
        banned = inside & (((word >> (id % 32)) & 1) == 0)
        place = logits + row.to(tl.int64) * vocab + id
        tl.store(place, tl.full([BLOCK_SIZE], -float("inf"), tl.float32), mask=banned)
