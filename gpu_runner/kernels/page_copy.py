"""Copies KV pages between a GPU and pinned host memory, both ways in one launch beside the steps.

    program (0 .. n, 0)   device -> host: stores        a run of a page's words at a time, 16 bytes a thread,
    program (0 .. n, 1)   host -> device: loads         written as soon as read

The bus takes both ways at once. Few programs suffice: what they have under way covers the bus's latency, and the steps
keep the rest of the GPU. The copy engine would need a call for each layer of each page.

A program that stores reads back what it has written before it goes on. Nobody waits for writes to the host, so as many
as there are would queue for the bus, and a step reads its plan and writes its results through the same queue: it would
wait for all of them, which took 4 to 14 times as long as the step itself. A read comes behind the writes before it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from asyncengine.config import PAGE_SIZE
from gpu_runner.kernels.reference_page_copy import HEADER_WORDS, PageIds, PageMemory

PROGRAMS = 4
"""Each way."""
MAX_BLOCK = 4096
WORDS_PER_THREAD = 8
"""Two reads of 16 bytes under way."""


def copy_pages(memory: PageMemory, ids: PageIds, *, programs: int = PROGRAMS) -> None:
    """What `reference_page_copy.copy_pages` does, on the current stream, waiting for nothing.

    memory: its host side pinned or registered with the GPU. ids: on the GPU. Neither counts nor ids are read before
    the kernel runs.
    """
    planes, num_pages, words = memory.kv.shape
    block = min(triton.next_power_of_2(words), MAX_BLOCK)
    _copy_kernel[(programs, 2)](
        ids.buffer,
        memory.kv,
        memory.token_ids,
        _address(memory.host_kv),
        _address(memory.host_token_ids),
        num_pages,
        planes,
        words,
        0,
        MOST=ids.pages.shape[-1],
        HEADER=HEADER_WORDS,
        PAGE=PAGE_SIZE,
        BLOCK_SIZE=block,
        num_warps=max(1, min(16, block // (32 * WORDS_PER_THREAD))),
    )


def _address(host: Tensor) -> int:
    """Where the GPU sees it too. A number: as a tensor of the CPU it would be refused."""
    return host.data_ptr()


@triton.jit
def _copy_kernel(
    ids,
    kv,
    token_ids,
    host_kv_address,
    host_token_ids_address,
    num_pages,
    planes,
    words,
    zero,
    MOST: tl.constexpr,
    HEADER: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):
    host_kv = tl.multiple_of(host_kv_address.to(tl.pointer_type(tl.int32), bitcast=True), 16)
    host_token_ids = tl.multiple_of(host_token_ids_address.to(tl.pointer_type(tl.int32), bitcast=True), 16)
    direction = tl.program_id(1)
    pages = ids + HEADER + direction * 2 * MOST
    blocks = tl.cdiv(words, BLOCK_SIZE)
    blocks_per_page = planes * blocks
    at = tl.arange(0, BLOCK_SIZE)
    token = tl.arange(0, PAGE)
    written = zero  # 0, and known when the run before has reached the host
    for item in range(tl.program_id(0), tl.load(ids + direction) * blocks_per_page, tl.num_programs(0)):
        index, part = item // blocks_per_page, item % blocks_per_page
        plane, word = part // blocks, (part % blocks) * BLOCK_SIZE + at
        page = tl.load(pages + index + written).to(tl.int64)
        host_page = tl.load(pages + MOST + index).to(tl.int64)
        here = kv + (plane.to(tl.int64) * num_pages + page) * words + word
        there = host_kv + (host_page * planes + plane) * words + word
        ids_here, ids_there = token_ids + page * PAGE + token, host_token_ids + host_page * PAGE + token
        mask = word < words
        if direction == 0:
            tl.store(there, tl.load(here, mask=mask), mask=mask)
            if part == 0:
                tl.store(ids_there, tl.load(ids_here))
            run = host_kv + (host_page * planes + plane) * words + (part % blocks) * BLOCK_SIZE
            written = tl.load(run, volatile=True) & zero
        else:
            tl.store(here, tl.load(there, mask=mask), mask=mask)
            if part == 0:
                tl.store(ids_here, tl.load(ids_there))
