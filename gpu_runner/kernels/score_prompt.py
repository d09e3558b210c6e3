"""Log-probabilities of a prompt's tokens: what the model gives, at positions of prefill rows, the next token.

    residuals -> [unpack: tokens, targets] -> their rows, head -> [parts, merge, rank] -> scores -> host

The kernels of generated tokens do the work: each scored token is a row and a slot of its own, with nothing to adjust.
As in `sample_full`, only the contents of tensors may differ between replays of a graph.
"""

from __future__ import annotations

from copy import copy

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_runner.kernels.device_state import DeviceState
from gpu_runner.kernels.launch import launch_options
from gpu_runner.kernels.result_layout import Scores
from gpu_runner.kernels.sample_full import FullSampling
from gpu_runner.kernels.sample_noise import without_nan
from gpu_runner.kernels.step_meta import new_step_meta
from gpu_runner.kernels.upload_layout import SCORE_WORDS, count_word, offset_word

BLOCK = 4096
NUM_WARPS = 8
_COUNT = tl.constexpr(count_word("num_scores"))
_OFFSET = tl.constexpr(offset_word("scores"))
_WORDS = tl.constexpr(SCORE_WORDS)
_INFINITY = tl.constexpr(float("inf"))


class PromptScorer:
    """Buffers of one stream's steps, which use them one after the other."""

    def __init__(self, full: FullSampling, state: DeviceState, *, max_rows: int) -> None:
        """full: lends its scratch. state: lends tensors of which nothing is read. max_rows: most scores of a step."""
        device = state.logprobs.device

        def zeros(dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(max_rows, dtype=dtype, device=device)

        self.token = zeros()
        """[max_rows]: the scored tokens' indices among the step's, behind them 0."""
        self._target = zeros()
        self._full = full
        # slots that have nothing but tokens to report
        self._slots = slots = copy(state)
        slots.logprobs, slots.prompt_len, slots.num_bias = zeros(), zeros(), zeros()
        slots.presence_penalty, slots.frequency_penalty = zeros(torch.float32), zeros(torch.float32)
        slots.repetition_penalty = torch.ones(max_rows, device=device)
        self._meta = new_step_meta(max_rows=max_rows, max_tokens=1, device=device)
        for tensor in (self._meta.sample_row, self._meta.row_slot):
            tensor.copy_(torch.arange(max_rows, dtype=torch.int32))

    def unpack(self, inputs: Tensor, rows: int) -> Tensor:
        """Find the step's scores in its plan, `inputs`, [words] int32: at most `rows`. Returns `token[:rows]`."""
        _unpack_kernel[(1,)](
            inputs,
            self._meta.counts,
            self.token,
            self._target,
            self._slots.logprobs,
            rows,
            BLOCK=triton.next_power_of_2(rows),
            **launch_options(inputs, 4),
        )
        return self.token[:rows]

    def score(self, logits: Tensor, page_tokens: Tensor, scores: Scores) -> None:
        """logits: [N, vocab] float32 of the unpacked tokens, N at least the step's scores. page_tokens: of the same
        kind as a step's, not read. Places of scores that the step does not have keep what they held."""
        rows, vocab = logits.shape
        target = self._target[:rows]
        self._full.measure(logits, self._slots, self._meta)
        self._full.after(logits, target, self._slots, self._meta, page_tokens, scores)
        _rank_kernel[(rows,)](
            logits, self._meta.counts, target, scores.ranks, vocab, BLOCK=BLOCK, **launch_options(logits, NUM_WARPS)
        )


@triton.jit(do_not_specialize=["rows"])
def _unpack_kernel(inputs, counts, token, target, wanted, rows, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    count = tl.minimum(tl.load(inputs + _COUNT), rows)
    row = tl.arange(0, BLOCK)
    entry = inputs + tl.load(inputs + _OFFSET) + row * _WORDS
    scored = row < count
    tl.store(token + row, tl.load(entry, mask=scored, other=0), mask=row < rows)
    tl.store(target + row, tl.load(entry + 1, mask=scored, other=0), mask=row < rows)
    tl.store(wanted + row, tl.load(entry + 2, mask=scored, other=0), mask=row < rows)
    tl.store(counts + 3, count)


@triton.jit(do_not_specialize=["vocab"])
def _rank_kernel(logits, counts, target, ranks, vocab, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """Program per row: one more than the ids that are likelier than the target, or as likely and smaller."""
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0)
    if row < tl.load(counts + 3):
        id = tl.load(target + row)
        row_logits = logits + row.to(tl.int64) * vocab
        own = without_nan(tl.load(row_logits + id))
        before = tl.zeros([BLOCK], tl.int32)
        for first in range(0, vocab, BLOCK):
            ids = first + tl.arange(0, BLOCK)
            inside = ids < vocab
            x = without_nan(tl.load(row_logits + ids, mask=inside, other=-_INFINITY))
            before += (inside & ((x > own) | ((x == own) & (ids < id)))).to(tl.int32)
        tl.store(ranks + row, tl.sum(before, axis=0) + 1)
