"""What a step does beside choosing tokens when some row asks for a penalty, a logit bias or log-probabilities, or has a
mask.

    logits -> [before: log-probabilities' parts, bias, penalties, mask] -> Sampler
           -> [after: log-probabilities] -> results

Rows that ask for none of them cost a few loads, and their logits stay as they are: they get the tokens that they get
without these calls. As in `sample`, only the contents of tensors may differ between replays of a graph.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from asyncengine.config import MAX_TOP_LOGPROBS
from gpu_runner.kernels.device_state import DeviceState
from gpu_runner.kernels.launch import launch_options
from gpu_runner.kernels.logit_adjust import bias_and_count_kernel, penalise_kernel
from gpu_runner.kernels.logprob_kernels import merge_kernel, parts_kernel
from gpu_runner.kernels.result_layout import Results, Scores
from gpu_runner.kernels.sample import PROGRAMS, Tiling
from gpu_runner.kernels.step_meta import StepMeta
from gpu_runner.kernels.token_mask import RowMasks

HISTORY_BLOCK = 512
"""Tokens of a sequence at a time."""
MOST_HISTORY_PARTS = 16
TILING = Tiling(block=2048, num_warps=8, stages=1, programs=PROGRAMS)
ONE_PART_TILING = replace(TILING, programs=1)
"""Sums of a row in one order, whatever the number of rows."""
LIST_LANES = triton.next_power_of_2(MAX_TOP_LOGPROBS)
FEW_PARTS = 16
"""Up to so many parts of a row are merged by a kernel of their own; to compile one for each number takes too long."""


class FullSampling:
    """Scratch of one stream's steps, which use it one after the other."""

    def __init__(self, *, max_rows: int, vocab: int, device: torch.device, tiling: Tiling = TILING) -> None:
        """max_rows: the largest N of any call. tiling: how log-probabilities cut the vocabulary."""
        self.masks = RowMasks(max_rows=max_rows, vocab=vocab, device=device)
        self._vocab = vocab
        self._tiling = tiling
        self._tiles = triton.cdiv(vocab, tiling.block)
        parts = max(tiling.programs, max_rows)
        self._table = torch.zeros(max_rows, vocab, dtype=torch.int32, device=device)
        self._part_largest = torch.empty(parts, device=device)
        self._part_sum = torch.empty(parts, device=device)
        self._part_x = torch.empty(parts, LIST_LANES, device=device)
        self._part_id = torch.empty(parts, LIST_LANES, dtype=torch.int32, device=device)

    def before(self, logits: Tensor, state: DeviceState, meta: StepMeta, page_tokens: Tensor) -> None:
        """Adjust logits in place. logits: [N, vocab] float32, contiguous; row i is of the step's row
        `meta.sample_row[i]`. page_tokens: as `step_meta` wrote it for this step."""
        if logits.shape[1] != self._vocab or logits.dtype != torch.float32 or not logits.is_contiguous():
            raise ValueError(f"logits must be contiguous float32 rows of {self._vocab}; got {tuple(logits.shape)}")
        rows = len(logits)
        self.measure(logits, state, meta)
        penalties = (state.presence_penalty, state.frequency_penalty, state.repetition_penalty)
        history_parts = min(MOST_HISTORY_PARTS, max(1, PROGRAMS // rows))
        history = {
            "row_stride": self._vocab,
            "vocab": self._vocab,
            "parts": history_parts,
            "PAGES_PER_SEQ": state.page_table.shape[1],
            "BLOCK": HISTORY_BLOCK,
            **self._options(logits, HISTORY_BLOCK // 128),
        }
        bias_and_count_kernel[(history_parts, rows)](
            logits,
            *meta.samples,
            meta.row_was_done,
            state.prompt_len,
            *penalties,
            *self._biases(state),
            state.page_table,
            page_tokens,
            self._table,
            **self._bias_shape(state),
            **history,
        )
        penalise_kernel[(history_parts, rows)](
            logits,
            *meta.samples,
            meta.row_was_done,
            state.prompt_len,
            *penalties,
            state.page_table,
            page_tokens,
            self._table,
            **history,
        )
        self.masks.apply(logits, state, meta)

    def measure(self, logits: Tensor, state: DeviceState, meta: StepMeta) -> None:
        """Take what `after` needs of the model's own logits. logits: as for `before`."""
        rows = len(logits)
        cut = self._tiling.cut(rows, self._vocab)
        parts_kernel[(cut["parts"], rows)](
            logits,
            *meta.samples,
            meta.row_was_done,
            state.logprobs,
            self._part_largest,
            self._part_sum,
            self._part_x,
            self._part_id,
            row_stride=self._vocab,
            vocab=self._vocab,
            **cut,
            K=LIST_LANES,
            BLOCK=self._tiling.block,
            **self._options(logits, self._tiling.num_warps),
        )

    def after(
        self,
        logits: Tensor,
        sampled: Tensor,
        state: DeviceState,
        meta: StepMeta,
        page_tokens: Tensor,
        results: Results | Scores,
    ) -> None:
        """Write the log-probabilities of rows that ask into `results`. logits: as `before` and the sampling left them.
        sampled: [N] int32. Places of other rows, and of most likely tokens beyond `num_tops`, keep what they held."""
        rows = len(logits)
        parts = self._tiling.cut(rows, self._vocab)["parts"]
        merge_kernel[(rows,)](
            logits,
            sampled,
            *meta.samples,
            meta.row_was_done,
            state.logprobs,
            state.prompt_len,
            state.presence_penalty,
            state.frequency_penalty,
            state.repetition_penalty,
            *self._biases(state),
            state.page_table,
            page_tokens,
            self._part_largest,
            self._part_sum,
            self._part_x,
            self._part_id,
            results.logprobs,
            results.num_tops,
            results.top_ids,
            results.top_logprobs,
            row_stride=self._vocab,
            vocab=self._vocab,
            parts=parts,
            OUT_WIDTH=MAX_TOP_LOGPROBS,
            PAGES_PER_SEQ=state.page_table.shape[1],
            **self._bias_shape(state),
            BLOCK=HISTORY_BLOCK,
            K=LIST_LANES,
            PARTS=FEW_PARTS if parts <= FEW_PARTS else triton.next_power_of_2(self._tiles),
            **self._options(logits, 8),
        )

    @staticmethod
    def _biases(state: DeviceState) -> tuple[Tensor, ...]:
        return state.num_bias, state.bias_ids, state.bias_values

    @staticmethod
    def _bias_shape(state: DeviceState) -> dict[str, int]:
        width = state.bias_ids.shape[1]
        return {"BIAS_WIDTH": width, "BIAS_BLOCK": triton.next_power_of_2(width)}

    @staticmethod
    def _options(logits: Tensor, num_warps: int) -> dict[str, Any]:
        return {"enable_fp_fusion": False, **launch_options(logits, num_warps)}
