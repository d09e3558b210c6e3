"""How a step's plan reaches the device, and its results the host: kernels that read and write the host's own memory.

Copies by the copy engine would stand between a step's graphs, and each change from one to the other lets the GPU idle
for some microseconds. So the first kernel of a step reads the plan from pinned memory, and the last writes results
there. Where the plan is small, and where results are tokens only, `step_meta` and `post_update` do so themselves. Which
of the host's buffers are the step's, the kernels find without being told: the host uses them in turn, its plans say
whose turn it is, and the last kernel of a step notes where the next step's plan will be.

    step         N                   N + 1               N + 2               N + 3
    buffers      0                   1                   2                   0
    device       fetch .. deliver    fetch .. deliver    fetch .. deliver    fetch ..
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_runner.kernels.launch import launch_options
from gpu_runner.kernels.upload_layout import RESULT_WORDS_WORD, TURN_WORD, USED_WORDS_WORD

BLOCK = 512
NUM_WARPS = 4
MAX_PROGRAMS = 32
"""Reads over the bus take a microsecond or two, however few: what a step usually needs is asked for at once."""
WORDS_PER_TOKEN = 8
"""What a plan has for each token, if it has little else: five words of a decode row, and three of a new page."""


@dataclass(frozen=True, slots=True)
class HostRing:
    """Where the host's buffers lie. Zero until `connect`, and as long nothing is read or written there."""

    uploads: Tensor  # [depth] int64, addresses
    results: Tensor  # [depth] int64
    next_upload: Tensor  # [1] int64, the address of the next step's plan

    @classmethod
    def allocate(cls, depth: int, device: torch.device) -> HostRing:
        def zeros(size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.int64, device=device)

        return cls(uploads=zeros(depth), results=zeros(depth), next_upload=zeros(1))

    def connect(self, buffers: Sequence[tuple[Tensor, Tensor]]) -> None:
        """buffers: upload and results of each turn, int32 on the host (pinned, if the device is a GPU), at multiples of
        16 bytes, and kept alive by the caller. The next step takes the first. Queued on the current stream, which must
        be that of the steps."""
        for table, tensors in zip((self.uploads, self.results), zip(*buffers, strict=True), strict=True):
            table.copy_(torch.tensor([tensor.data_ptr() for tensor in tensors], dtype=torch.int64))
        self.next_upload.copy_(self.uploads[:1])


def fetch(ring: HostRing, inputs: Tensor, *, num_tokens: int) -> None:
    """Copy the turn's plan, packed as `upload_layout` says, into `inputs`, [words] int32.

    num_tokens: the graph's bucket. Fixed in a graph: all addresses.
    """
    programs = triton.cdiv(num_tokens * WORDS_PER_TOKEN, BLOCK)
    _fetch_kernel[(min(programs, MAX_PROGRAMS),)](
        ring.next_upload,
        inputs,
        len(inputs),
        USED_WORD=USED_WORDS_WORD,
        BLOCK_SIZE=BLOCK,
        **launch_options(inputs, NUM_WARPS),
    )


def deliver(ring: HostRing, inputs: Tensor, results: Tensor) -> None:
    """Write as many of `results`, [words] int32, to the turn's buffer as the plan in `inputs` asks for; then the next
    turn begins. Once the graph has ended, the host may read them. Fixed in a graph: all addresses."""
    _deliver(ring, inputs, results, first_word=0, ends_step=True)


def deliver_scores(ring: HostRing, inputs: Tensor, scores: Tensor, *, first_word: int) -> None:
    """Write `scores`, [words] int32, to the turn's buffer of results from `first_word` on; the turn goes on."""
    _deliver(ring, inputs, scores, first_word=first_word, ends_step=False)


def _deliver(ring: HostRing, inputs: Tensor, results: Tensor, *, first_word: int, ends_step: bool) -> None:
    _deliver_kernel[(min(triton.cdiv(len(results), BLOCK), MAX_PROGRAMS),)](
        ring.uploads,
        ring.results,
        ring.next_upload,
        inputs,
        results,
        len(results),
        first_word,
        RESULT_WORD=RESULT_WORDS_WORD,
        TURN=TURN_WORD,
        DEPTH=len(ring.results),
        ENDS_STEP=ends_step,
        BLOCK_SIZE=BLOCK,
        **launch_options(inputs, NUM_WARPS),
    )


@triton.jit
def _fetch_kernel(next_upload, inputs, capacity, USED_WORD: tl.constexpr, BLOCK_SIZE: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    own = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    together = tl.num_programs(0) * BLOCK_SIZE
    copy_plan(next_upload, inputs, own, together, capacity, together, USED_WORD)


@triton.jit
def copy_plan(next_upload, inputs, own, ahead, capacity, step, USED_WORD: tl.constexpr):
    """Copy the caller's share of the turn's plan: words `own`, of those before `ahead`, whether the plan uses them or
    not, then of those it uses behind them `own` again, `step` at a time."""
    address = tl.load(next_upload)
    if address != 0:
        source = tl.multiple_of(address.to(tl.pointer_type(tl.int32), bitcast=True), 16)
        # Both are asked for before either is there: more than the plan may be copied, which nobody reads.
        asked = (own < ahead) & (own < capacity)
        words = tl.load(source + own, mask=asked, other=0)
        used = tl.load(source + USED_WORD)
        tl.store(inputs + own, words, mask=asked)
        for first in range(ahead, used, step):
            word = first + own
            words = tl.load(source + word, mask=word < used, other=0)
            tl.store(inputs + word, words, mask=word < used)


@triton.jit
def _deliver_kernel(
    uploads,
    addresses,
    next_upload,
    inputs,
    results,
    capacity,
    first_word,
    RESULT_WORD: tl.constexpr,
    TURN: tl.constexpr,
    DEPTH: tl.constexpr,
    ENDS_STEP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    turn = tl.load(inputs + TURN)
    address = tl.load(addresses + turn)
    if address != 0:
        target = tl.multiple_of(address.to(tl.pointer_type(tl.int32), bitcast=True), 16) + first_word
        wanted = capacity
        if ENDS_STEP:
            wanted = tl.minimum(tl.load(inputs + RESULT_WORD), capacity)
        own = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
        for first in range(0, wanted, tl.num_programs(0) * BLOCK_SIZE):
            word = first + own
            tl.store(target + word, tl.load(results + word, mask=word < wanted, other=0), mask=word < wanted)
        if (tl.program_id(0) == 0) & ENDS_STEP:
            tl.store(next_upload, tl.load(uploads + (turn + 1) % DEPTH))
