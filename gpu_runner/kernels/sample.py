"""The next token of each row, without sorting the vocabulary: the recipe of `reference_sampling` as a few kernels.

A row's token depends on its own logits, parameters, seed and position only: neither its place in the batch, nor the
other rows, nor how the vocabulary is cut into parts, nor which of the functions here is called, if both apply. Bits of
the noise are the reference's; logarithms and exponentials may differ from a CPU's in the last bit, and so may a token
whose lead is that small.

Everything is fixed inside a captured graph but the contents of the tensors: addresses, N and the launches. How many of
the N rows are the step's comes from `meta.counts`; the others cost next to nothing and get id 0. All kernels are
compiled without fused multiply-adds, so that each of them computes the same score.

Penalties and logit bias have their place before these calls, on the logits (`sample_full`); so has a grammar's mask.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from gpu_runner.kernels.sample_argmax import argmax_kernel
from gpu_runner.kernels.sample_filter import (
    NUM_BINS,
    ROW_FACTS,
    best_kernel,
    collect_kernel,
    histogram_kernel,
    thresholds_kernel,
)
from gpu_runner.kernels.sample_finish import finish_kernel
from gpu_runner.kernels.step_meta import SlotState, StepMeta

CANDIDATES = 4096
"""Candidates of a row that have a place; see `sample_filter`."""
FINISH_TILE = 1024
MIN_GROUP = 8
"""Ids that a group must have for `sample_filter` to bound top-k by the groups' best; with fewer there are few rows, or
a small vocabulary, and the bound would cost more than the additions that it spares."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a launch cuts the vocabularies of its rows."""

    block: int  # ids of a tile, a power of two below 2**16
    num_warps: int
    stages: int  # tiles on their way while one is computed
    programs: int  # about how many share the work of all rows


FEW_ROWS = 16
PROGRAMS = 8 * 132
"""What an H200's multiprocessors hold at a time, of 8 warps and few registers."""
FEW_ROWS_TILING = Tiling(block=1024, num_warps=4, stages=1, programs=PROGRAMS)
"""Up to FEW_ROWS: one or few tiles a program; a row of 128256 logits is spread over 126."""
GREEDY_TILING = Tiling(block=2048, num_warps=8, stages=1, programs=2 * PROGRAMS)
"""Two 16-byte loads on their way a thread, of as many threads as there is place for; a second wave evens out the first
one's end."""
SAMPLE_TILING = Tiling(block=1024, num_warps=4, stages=3, programs=2 * PROGRAMS)
"""Small tiles, of which few hold a new best score; what the noise takes in registers leaves the loads to the stages."""
FILTER_TILING = Tiling(block=1024, num_warps=4, stages=3, programs=PROGRAMS)
"""As SAMPLE_TILING; fewer programs, since each of them begins with what is known of its row."""


class Sampler:
    """Scratch of one stream's sampling steps, which use it one after the other."""

    def __init__(
        self,
        *,
        max_rows: int,
        vocab: int,
        device: torch.device,
        pdl: bool = True,
        tiling: Tiling | None = None,
        candidates: int = CANDIDATES,
    ) -> None:
        """max_rows: the largest N of any call. tiling: None takes the tables'."""
        self._vocab = vocab
        self._pdl = pdl and device.type != "cpu"
        self._tiling = tiling
        self._candidates = candidates

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        filter_tilings = (tiling,) if tiling else (FEW_ROWS_TILING, FILTER_TILING)
        tilings = (*filter_tilings, GREEDY_TILING, SAMPLE_TILING) if tiling is None else filter_tilings
        # A launch has no more programs than its tiling says, or one for each row.
        parts = max(max_rows, *(choice.programs for choice in tilings))
        self._part_best = empty(parts, dtype=torch.float32)
        self._part_score = empty(parts, dtype=torch.float32)
        self._part_token = empty(parts)
        self._group_best = empty(parts * max(choice.block for choice in filter_tilings), dtype=torch.float32)
        self._arrived = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._bin_count = empty(max_rows, NUM_BINS)
        self._bin_weight = empty(max_rows, NUM_BINS, dtype=torch.int64)
        self._row_facts = empty(max_rows, ROW_FACTS, dtype=torch.int64)
        self._num_candidates = empty(max_rows)
        self._candidate_x = empty(max_rows, candidates, dtype=torch.float32)
        self._candidate_id = empty(max_rows, candidates)

    def greedy(self, logits: Tensor, state: SlotState, meta: StepMeta, out: Tensor, *, bans_stop_ids: bool) -> None:
        """The smallest id with the largest logit, whatever the rows' parameters.

        logits: [N, vocab] float32 or bfloat16, rows contiguous; NaN never wins, all rows get an id below vocab. Row i
        is of the step's row `meta.sample_row[i]`. bans_stop_ids: set the logits of the stop ids of rows below their
        min_tokens to -inf, in place, first; without, they are not looked at. out: [N] int32.
        """
        self._one_pass(logits, state, meta, out, noise=False, bans_stop_ids=bans_stop_ids)

    def sample(
        self, logits: Tensor, state: SlotState, meta: StepMeta, out: Tensor, *, filtered: bool, bans_stop_ids: bool
    ) -> None:
        """A token by each row's temperature, seed and position and, if `filtered`, its top-k, top-p and min-p.

        Greedy rows get what `greedy` gives. filtered: some row may have a filter; without, they are not looked at.
        The rest as in `greedy`.
        """
        if filtered:
            self._filtered(logits, state, meta, out, bans_stop_ids=bans_stop_ids)
        else:
            self._one_pass(logits, state, meta, out, noise=True, bans_stop_ids=bans_stop_ids)

    def _one_pass(
        self, logits: Tensor, state: SlotState, meta: StepMeta, out: Tensor, *, noise: bool, bans_stop_ids: bool
    ) -> None:
        rows, cut, tiling = self._cut(logits, SAMPLE_TILING if noise else GREEDY_TILING)
        argmax_kernel[(cut["parts"], rows)](
            logits,
            *self._rows(meta),
            state.temperature,
            state.seed,
            state.min_tokens_until,
            state.stop_ids,
            self._part_score,
            self._part_token,
            self._arrived,
            out,
            **cut,
            NOISE=noise,
            BANS=bans_stop_ids,
            BLOCK=tiling.block,
            STAGES=tiling.stages,
            **self._options(tiling.num_warps),
        )

    def _filtered(self, logits: Tensor, state: SlotState, meta: StepMeta, out: Tensor, *, bans_stop_ids: bool) -> None:
        rows, cut, tiling = self._cut(logits, FILTER_TILING)
        parts = cut["parts"]
        grouped = self._vocab >= MIN_GROUP * parts * tiling.block
        padded_parts = triton.next_power_of_2(parts)
        filters = (state.temperature, state.top_k, state.top_p, state.min_p)
        options = self._options(tiling.num_warps)
        best_kernel[(parts, rows)](
            logits,
            *self._rows(meta),
            *filters,
            state.min_tokens_until,
            state.stop_ids,
            self._part_best,
            self._group_best,
            self._bin_count,
            self._bin_weight,
            self._num_candidates,
            **cut,
            GROUPS=grouped,
            BANS=bans_stop_ids,
            BLOCK=tiling.block,
            STAGES=tiling.stages,
            **options,
        )
        histogram_kernel[(parts, rows)](
            logits,
            meta.counts,
            meta.sample_row,
            meta.row_slot,
            *filters,
            self._part_best,
            self._group_best,
            self._bin_count,
            self._bin_weight,
            **cut,
            GROUPS=triton.next_power_of_2(parts * tiling.block) if grouped else 0,
            PARTS=padded_parts,
            BLOCK=tiling.block,
            STAGES=tiling.stages,
            **options,
        )
        thresholds_kernel[(rows,)](
            meta.counts,
            meta.sample_row,
            meta.row_slot,
            *filters,
            self._bin_count,
            self._bin_weight,
            self._row_facts,
            vocab=self._vocab,
            **self._options(8),
        )
        collect_kernel[(parts, rows)](
            logits,
            *self._rows(meta),
            *filters,
            state.seed,
            self._part_best,
            self._part_score,
            self._part_token,
            self._row_facts,
            self._num_candidates,
            self._candidate_x,
            self._candidate_id,
            **cut,
            CAPACITY=self._candidates,
            PARTS=padded_parts,
            BLOCK=tiling.block,
            STAGES=tiling.stages,
            **options,
        )
        finish_kernel[(rows,)](
            logits,
            *self._rows(meta),
            *filters,
            state.seed,
            self._part_best,
            self._part_score,
            self._part_token,
            self._row_facts,
            self._num_candidates,
            self._candidate_x,
            self._candidate_id,
            out,
            row_stride=cut["row_stride"],
            vocab=self._vocab,
            parts=parts,
            CAPACITY=self._candidates,
            PARTS=padded_parts,
            T=FINISH_TILE,
            **self._options(4),
        )

    def _cut(self, logits: Tensor, many_rows: Tiling) -> tuple[int, dict[str, int], Tiling]:
        """Rows, how the kernels find a program's part of one, and the tiling."""
        rows, vocab = logits.shape
        if vocab != self._vocab or logits.stride(1) != 1:
            raise ValueError(f"logits must be rows of {self._vocab}, contiguous; got {tuple(logits.shape)}")
        tiling = self._tiling or (FEW_ROWS_TILING if rows <= FEW_ROWS else many_rows)
        tiles = triton.cdiv(vocab, tiling.block)
        tiles_per_part = triton.cdiv(tiles, max(1, tiling.programs // rows))
        cut = {
            "row_stride": logits.stride(0),
            "vocab": vocab,
            "part_size": tiles_per_part * tiling.block,
            "parts": triton.cdiv(tiles, tiles_per_part),
        }
        return rows, cut, tiling

    @staticmethod
    def _rows(meta: StepMeta) -> tuple[Tensor, ...]:
        return meta.counts, meta.sample_row, meta.row_slot, meta.row_start, meta.row_len

    def _options(self, num_warps: int) -> dict[str, Any]:
        return {"PDL": self._pdl, "launch_pdl": self._pdl, "num_warps": num_warps, "enable_fp_fusion": False}
