"""How a step's host data reaches the device in one piece, and its results come back in one.

Every array of a plan is written, one behind the other, into one int32 buffer of the host (`kernels.upload_layout` says
where), whose used part the step copies to the device. Buffers are pinned on CUDA, where the step's own kernels read and
write them (`kernels.host_ring`), and allocated once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from asyncengine.config import MAX_BIAS_IDS, PAGE_SIZE
from gpu_runner.device.sampling_path import SamplingPath
from gpu_runner.device.stream import Mark
from gpu_runner.kernels import upload_layout
from gpu_runner.kernels.result_layout import Results, Scores, result_words, score_words, token_words
from gpu_runner.kernels.upload_layout import Upload
from gpu_runner.schedule.plan import Int32, StartRows, StepLogprobs, StepPlan, StepScores

MAX_IN_FLIGHT = 2
RING_DEPTH = MAX_IN_FLIGHT + 1
"""Buffers of the host that steps use in turn; see `Executor`."""


class PackedStep(NamedTuple):
    """What the host knows of a step in an upload buffer: enough to choose what is run, and how far to copy."""

    turn: int  # index of its ring slot
    words: int  # used part of the upload buffer
    result_words: int  # of the results that the host reads
    path: SamplingPath
    num_samples: int
    plan: StepPlan


@dataclass(frozen=True, slots=True)
class RingSlot:
    """The host buffers of one step in flight. They may be written once `mark`, recorded behind the step, was waited
    for."""

    upload: Tensor  # [upload_words] int32
    results: Tensor  # [result_words + score_words] int32
    upload_array: Int32  # the memory of `upload`
    times: NDArray[np.int64]  # [2] of `results`, as the two below
    tokens: Int32  # [num_slots]
    finish: Int32  # [num_slots]
    logprobs: NDArray[np.float32]  # [num_slots]
    num_tops: Int32  # [num_slots]
    top_ids: Int32  # [num_slots, MAX_TOP_LOGPROBS]
    top_logprobs: NDArray[np.float32]  # [num_slots, MAX_TOP_LOGPROBS]
    scores: Scores  # of `results`
    result_words: int  # of `results` without them
    token_words: int  # of these without log-probabilities
    mark: Mark

    @classmethod
    def allocate(cls, *, upload_words: int, num_slots: int, pinned: bool, mark: Mark) -> RingSlot:
        upload = torch.empty(upload_words, dtype=torch.int32, pin_memory=pinned)
        words = result_words(num_slots)
        results = torch.empty(words + score_words(num_slots), dtype=torch.int32, pin_memory=pinned)
        parts = Results.of(results[:words])
        return cls(
            upload=upload,
            results=results,
            upload_array=upload.numpy(),
            times=parts.times.numpy(),
            tokens=parts.tokens.numpy(),
            finish=parts.finish.numpy(),
            logprobs=parts.logprobs.numpy(),
            num_tops=parts.num_tops.numpy(),
            top_ids=parts.top_ids.numpy(),
            top_logprobs=parts.top_logprobs.numpy(),
            scores=Scores.of(results[words:]),
            result_words=words,
            token_words=token_words(num_slots),
            mark=mark,
        )

    def wanted_words(self, path: SamplingPath) -> int:
        """How much of the results, scores aside, the host reads behind a step of that path."""
        return self.result_words if path.logprobs else self.token_words

    def read_logprobs(self, rows: Int32) -> StepLogprobs:
        """Of those of `rows` that got a token; copies."""
        rows = rows[self.tokens[rows] >= 0]
        counts = self.num_tops[rows]
        most = int(counts.max(initial=0))
        listed = np.arange(most, dtype=np.int32) < counts[:, None]
        return StepLogprobs(
            rows=rows,
            logprobs=self.logprobs[rows],
            top_ends=np.cumsum(counts, dtype=np.int32),
            top_ids=self.top_ids[:, :most][rows][listed],
            top_logprobs=self.top_logprobs[:, :most][rows][listed],
        )

    def read_scores(self, count: int) -> StepScores:
        """Of the step's `count` scored tokens; copies."""
        scores = self.scores
        counts = scores.num_tops[:count].numpy()
        listed = np.arange(scores.top_ids.shape[1], dtype=np.int32) < counts[:, None]
        return StepScores(
            logprobs=scores.logprobs[:count].numpy().copy(),
            ranks=scores.ranks[:count].numpy().copy(),
            top_ends=np.cumsum(counts, dtype=np.int32),
            top_ids=scores.top_ids[:count].numpy()[listed],
            top_logprobs=scores.top_logprobs[:count].numpy()[listed],
        )


def pages_for(tokens: int) -> int:
    """KV pages that hold `tokens`."""
    return -(-tokens // PAGE_SIZE)


class Packer:
    """Packs the plans of one ring slot. Where the last one held the same rows, all decoding, they lie there still."""

    def __init__(self, buffer: Int32, turn: int) -> None:
        """buffer: the `upload_array` of the ring slot at index `turn`."""
        self._buffer = buffer
        self._turn = turn
        self._plan: StepPlan | None = None  # the last one
        self._packed: PackedStep | None = None

    def pack(self, plan: StepPlan, path: SamplingPath, result_words: int) -> PackedStep:
        """Write `plan` into the buffer; the arguments as of the function `pack`."""
        last, packed = self._plan, self._packed
        if last is None or packed is None or packed.path is not path or not _same_decode_rows(last, plan):
            packed = pack(plan, path, buffer=self._buffer, turn=self._turn, result_words=result_words)
        else:
            words = packed.words
            if len(plan.page_id) or len(last.page_id):
                words = upload_layout.replace_pages(plan.page_slot, plan.page_index, plan.page_id, self._buffer)
            packed = PackedStep(self._turn, words, packed.result_words, path, packed.num_samples, plan)
        self._plan, self._packed = plan, packed
        return packed


def _same_decode_rows(last: StepPlan, plan: StepPlan) -> bool:
    """Whether the plans hold decode rows only, and the same ones: such plans share arrays, which nobody changes."""
    same = plan.row_slot is last.row_slot and plan.row_samples is last.row_samples and plan.row_len is last.row_len
    return same and plan.num_decode_rows == last.num_decode_rows == len(plan.row_slot)


def pack(plan: StepPlan, path: SamplingPath, *, buffer: Int32, turn: int = 0, result_words: int = 0) -> PackedStep:
    """Write `plan` into `buffer`, the `upload_array` of the ring slot at index `turn`. result_words: how much of the
    step's results the host wants."""
    start = plan.start
    row: Int32 = np.arange(plan.num_rows, dtype=np.int32)
    only_decode = plan.num_decode_rows == len(row)
    last_token: Int32 = row if only_decode else np.cumsum(plan.row_len, dtype=np.int32) - 1
    sample_row, sample_token = row, last_token
    if not plan.row_samples.all():
        sample_row, sample_token = row[plan.row_samples], last_token[plan.row_samples]
    upload = Upload(
        num_decode_rows=plan.num_decode_rows,
        row_slot=plan.row_slot,
        row_start=plan.row_start,
        row_len=plan.row_len,
        prefill_tokens=plan.prefill_tokens,
        sample_row=sample_row,
        sample_token=sample_token,
        page_slot=plan.page_slot,
        page_index=plan.page_index,
        page_id=plan.page_id,
        start_slot=start.slot,
        temperature=start.temperature,
        top_k=start.top_k,
        top_p=start.top_p,
        min_p=start.min_p,
        seed=start.seed,
        limit=start.limit,
        min_tokens_until=start.min_tokens_until,
        stop_ids=start.stop_ids,
        prompt_len=start.prompt_len,
        presence_penalty=start.presence_penalty,
        frequency_penalty=start.frequency_penalty,
        repetition_penalty=start.repetition_penalty,
        logprobs=start.logprobs,
        constrained=start.constrained,
        num_bias=start.num_bias,
        bias_cell=_bias_cells(start) if len(start.bias_ids) else start.bias_ids,
        bias_id=start.bias_ids,
        bias_value=start.bias_values,
        scores=plan.scores,
    )
    return PackedStep(
        turn=turn,
        words=upload_layout.pack(upload, buffer, result_words=result_words, turn=turn),
        result_words=result_words,
        path=path,
        num_samples=len(sample_row),
        plan=plan,
    )


def _bias_cells(start: StartRows) -> Int32:
    """Where in the device's bias table, flat, each of the plan's biased ids has its place."""
    first = np.cumsum(start.num_bias, dtype=np.int32) - start.num_bias
    cells: Int32 = np.arange(len(start.bias_ids), dtype=np.int32)
    cells += np.repeat(start.slot * np.int32(MAX_BIAS_IDS) - first, start.num_bias)
    return cells
