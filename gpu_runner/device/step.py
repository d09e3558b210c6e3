"""One step as plain torch operations, from uploaded plan to results, without a single read of the device by the host.

What a CPU runs. `StepPlan.bucket` is for captured graphs, which need fixed sizes: here a step has its true token count.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from asyncengine.config import PAGE_SIZE
from asyncengine.wire.base import Finish
from gpu_runner.device.buffers import PackedStep, RingSlot
from gpu_runner.device.token_masks import TokenMasks
from gpu_runner.device.upload_views import START_SECTIONS, UploadViews
from gpu_runner.kernels import reference_adjust, reference_sampling
from gpu_runner.kernels.device_state import DeviceState
from gpu_runner.kernels.ops import BatchMeta
from gpu_runner.kernels.reference_adjust import AdjustRows, TopLogprobs
from gpu_runner.kernels.reference_page_copy import PageMemory
from gpu_runner.kernels.reference_sampling import SamplingRows
from gpu_runner.kernels.result_layout import Results, Scores, result_words, score_words


class DecoderLike(Protocol):
    """What a step asks of a model; see `gpu_runner.models.decoder.Decoder`."""

    def forward(self, token_ids: Tensor, meta: Any, kv_cache: Tensor) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class Step:
    """Runs packed plans, one after the other, over the state that earlier ones left.

    A row that ended in step N-1 may already be in step N, launched before anyone could know. On the device its `done`
    flag is set by then, so it computes in vain: its key and value go to the dummy page 0, its state stays, and its
    result says token -1.
    """

    def __init__(
        self,
        *,
        decoder: DecoderLike,
        kv_cache: Tensor,
        state: DeviceState,
        max_step_tokens: int,
        upload_words: int,
    ) -> None:
        self._decoder = decoder
        self._kv_cache = kv_cache
        self._state = state
        num_slots = len(state.done)
        device = state.done.device
        # the token id at each place of the KV cache
        self._page_tokens = torch.zeros(kv_cache.shape[2], PAGE_SIZE, dtype=torch.int32, device=device)
        self._inputs = torch.zeros(upload_words, dtype=torch.int32, device=device)
        self._result_words = result_words(num_slots)
        self._results = torch.zeros(self._result_words + score_words(num_slots), dtype=torch.int32, device=device)
        self._parts = Results.of(self._results[: self._result_words])
        self._scores = Scores.of(self._results[self._result_words :])
        # of a GPU the host's clock would tell when work was queued, not when it ran
        self._times = self._parts.times.numpy() if device.type == "cpu" else None
        self._ring: tuple[RingSlot, ...] = ()
        self._masks = torch.empty(0, 0, dtype=torch.int32)
        self._counter = torch.arange(max(max_step_tokens, num_slots), dtype=torch.int64, device=device)

    def connect(self, ring: Sequence[RingSlot], masks: TokenMasks) -> None:
        self._ring, self._masks = tuple(ring), masks.tensor

    def page_memory(self, host: Tensor) -> PageMemory:
        return PageMemory.of(self._kv_cache, self._page_tokens, host)

    @torch.inference_mode()
    def run(self, step: PackedStep) -> None:
        begin = time.monotonic_ns()
        upload = self._ring[step.turn].upload
        self._inputs[: step.words].copy_(upload[: step.words], non_blocking=True)
        inputs = UploadViews(step, upload, self._inputs)
        self._start_rows(step, inputs)
        self._write_page_table(inputs)

        slot = inputs.row_slot.to(torch.int64)
        start, length = self._state.kv_len[slot], inputs.row_len
        was_done = self._state.done[slot]
        token_ids = self._input_tokens(step, inputs, slot)
        meta = self._batch_meta(step, slot, start, length, was_done)
        self._page_tokens.view(-1)[meta.kv_index] = token_ids.to(torch.int32)
        hidden = self._decoder.forward(token_ids, meta, self._kv_cache)

        tokens, finish = self._parts.tokens, self._parts.finish
        tokens.fill_(-1)
        finish.fill_(Finish.NONE)
        self._state.kv_len[slot] = torch.where(was_done, start, start + length)
        row = inputs.sample_row.to(torch.int64)
        if len(row):
            last_hidden = hidden.index_select(0, inputs.sample_token)
            tokens[row], finish[row] = self._next_tokens(step, last_hidden, row, slot[row], was_done[row])
        if len(step.plan.scores):
            self._score(inputs.scores, hidden)
        if self._times is not None:
            self._times[:] = begin, time.monotonic_ns()
        results, words = self._ring[step.turn].results, step.result_words
        results[:words].copy_(self._results[:words], non_blocking=True)
        if len(step.plan.scores):
            scores = slice(self._result_words, None)
            results[scores].copy_(self._results[scores], non_blocking=True)

    def _start_rows(self, step: PackedStep, inputs: UploadViews) -> None:
        state = self._state
        slot = inputs.start_slot.to(torch.int64)
        if len(slot):
            state.done.index_fill_(0, slot, False)
            for name in START_SECTIONS:
                getattr(state, name)[slot] = inputs.start(name)
            cell = inputs.bias_cell.to(torch.int64)
            state.bias_ids.view(-1)[cell] = inputs.bias_id
            state.bias_values.view(-1)[cell] = inputs.bias_value
        # Of prefill rows the host knows the start, cached prefix included; a decode row's is what the device counted.
        prefill_slot = inputs.row_slot[step.plan.num_decode_rows :].to(torch.int64)
        state.kv_len[prefill_slot] = inputs.row_start[step.plan.num_decode_rows :]

    def _write_page_table(self, inputs: UploadViews) -> None:
        if len(slot := inputs.page_slot.to(torch.int64)):
            self._state.page_table[slot, inputs.page_index.to(torch.int64)] = inputs.page_id

    def _input_tokens(self, step: PackedStep, inputs: UploadViews, slot: Tensor) -> Tensor:
        """[T] int64."""
        decoding = self._state.last_token[slot[: step.plan.num_decode_rows]]
        return torch.cat((decoding, inputs.prefill_tokens)).to(torch.int64)

    def _batch_meta(self, step: PackedStep, slot: Tensor, start: Tensor, length: Tensor, was_done: Tensor) -> BatchMeta:
        token = self._counter[: step.plan.num_tokens]
        row = torch.repeat_interleave(self._counter[: len(slot)], length, output_size=step.plan.num_tokens)
        first_token = length.cumsum(0) - length
        position = start[row] + (token - first_token[row])
        table = self._state.page_table
        # A done row's position may lie behind its pages; whatever page is found there is not used.
        page_index = (position // PAGE_SIZE).clamp(max=table.shape[1] - 1)
        page = torch.where(was_done[row], 0, table[slot[row], page_index])
        return BatchMeta(
            num_decode_rows=step.plan.num_decode_rows,
            row_start=step.plan.row_start,
            row_len=step.plan.row_len,
            row_slot=slot,
            positions=position,
            kv_index=page.to(torch.int64) * PAGE_SIZE + position % PAGE_SIZE,
            page_table=table,
        )

    def _next_tokens(
        self, step: PackedStep, hidden: Tensor, row: Tensor, slot: Tensor, was_done: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Sample for N rows and advance their state; `kv_len` already counts this step's tokens.

        hidden: [N, hidden], of each row's last token. row: [N], in the step. Returns tokens and finish values, [N]
        int32 each.
        """
        state = self._state
        index = state.kv_len[slot]  # of the new token in its sequence
        logits = self._decoder.logits(hidden)
        adjusted = logits
        if step.path.adjusts:
            adjusted = self._adjust(step, logits, slot, index)
        elif step.path.logprobs:
            adjusted = logits.clone()
        if step.path.masks:
            masks = self._masks[slot.to(self._masks.device)].to(adjusted.device)
            adjusted = reference_adjust.mask(adjusted, masks, state.constrained[slot] != 0)
        sampled = self._sample(step, adjusted, slot, index).to(torch.int32)
        if step.path.logprobs:
            self._report(logits, sampled, row, slot)
        is_stop = (sampled[:, None] == state.stop_ids[slot]).any(dim=1)
        at_limit = index + 1 >= state.limit[slot]
        finish = torch.where(is_stop, int(Finish.STOP), torch.where(at_limit, int(Finish.LENGTH), int(Finish.NONE)))
        finish = torch.where(was_done, int(Finish.NONE), finish).to(torch.int32)
        state.last_token[slot] = torch.where(was_done, state.last_token[slot], sampled)
        state.done[slot] = was_done | (finish != Finish.NONE)
        return torch.where(was_done, -1, sampled), finish

    def _adjust(self, step: PackedStep, logits: Tensor, slot: Tensor, index: Tensor) -> Tensor:
        """index: [N], tokens of each sequence so far; the last of them is among this step's."""
        state = self._state
        longest = int((step.plan.row_start + step.plan.row_len).max())
        history = self._page_tokens[state.page_table[slot, : -(-longest // PAGE_SIZE)]].flatten(1)
        rows = AdjustRows(
            presence_penalty=state.presence_penalty[slot],
            frequency_penalty=state.frequency_penalty[slot],
            repetition_penalty=state.repetition_penalty[slot],
            num_bias=state.num_bias[slot],
            bias_ids=state.bias_ids[slot],
            bias_values=state.bias_values[slot],
            prompt_len=state.prompt_len[slot],
            length=index,
        )
        return reference_adjust.adjust(logits, history, rows)

    def _report(self, logits: Tensor, sampled: Tensor, row: Tensor, slot: Tensor) -> None:
        """Log-probabilities of every row that samples; the host looks at those that ask."""
        parts = self._parts
        wanted = self._state.logprobs[slot].clamp(min=0)
        tops = self._tops(logits, sampled, wanted)
        parts.logprobs[row], parts.num_tops[row] = tops.chosen, tops.count
        parts.top_ids[row], parts.top_logprobs[row] = tops.ids, tops.values

    def _score(self, scores: Tensor, hidden: Tensor) -> None:
        """scores: [N, SCORE_WORDS], as uploaded. hidden: [T, hidden]."""
        token, target, wanted = scores.unbind(1)
        logits = self._decoder.logits(hidden.index_select(0, token))
        parts, count = self._scores, len(scores)
        tops = self._tops(logits, target, wanted)
        parts.logprobs[:count], parts.num_tops[:count] = tops.chosen, tops.count
        parts.top_ids[:count], parts.top_logprobs[:count] = tops.ids, tops.values
        parts.ranks[:count] = reference_adjust.ranks(logits, target)

    def _sample(self, step: PackedStep, logits: Tensor, slot: Tensor, index: Tensor) -> Tensor:
        state = self._state
        if step.path.bans_stop_ids:
            reference_sampling.ban_ids(logits, state.stop_ids[slot], index < state.min_tokens_until[slot])
        if step.path.greedy:
            return reference_sampling.greedy(logits)
        rows = SamplingRows(
            temperature=state.temperature[slot],
            top_k=state.top_k[slot],
            top_p=state.top_p[slot],
            min_p=state.min_p[slot],
            seed=state.seed[slot],
            position=index,
        )
        return self._draw(logits, rows, filtered=step.path.filtered)

    def _draw(self, logits: Tensor, rows: SamplingRows, *, filtered: bool) -> Tensor:
        return reference_sampling.sample(logits, rows, filtered=filtered)

    def _tops(self, logits: Tensor, chosen: Tensor, wanted: Tensor) -> TopLogprobs:
        return reference_adjust.top_logprobs(logits, chosen, wanted, most=self._parts.top_ids.shape[1])
