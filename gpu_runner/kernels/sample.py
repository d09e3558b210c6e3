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

from gpu_runner.kernels.device_state import DeviceState
from gpu_runner.kernels.launch import launch_options
from gpu_runner.kernels.sample_argmax import argmax_kernel
from gpu_runner.kernels.sample_filter import NUM_GROUPS
from gpu_runner.kernels.sample_finish import finish_kernel
from gpu_runner.kernels.sample_propose import propose_again_kernel, propose_kernel
from gpu_runner.kernels.sample_weigh import weigh_again_kernel, weigh_kernel
from gpu_runner.kernels.step_meta import StepMeta

CANDIDATES = 4096
"""Candidates of a row that have a place; see `sample_filter`."""
FEW_CANDIDATES = 1024
"""Most that `finish` searches without reading them again."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a launch cuts the vocabularies of its rows."""

    block: int  # ids of a tile, a power of two below 2**16
    num_warps: int
    stages: int  # tiles on their way while one is computed
    programs: int  # about how many share the work of all rows
    rounds: int = 3  # before what is left is `finish`'s; see `sample_filter`
    groups: int = NUM_GROUPS // 4  # of a part's ids, whose best ones bound top-k; at most one for each id of a tile

    def most_programs(self, max_rows: int) -> int:
        """Of a launch for up to `max_rows` rows: as many as there should be, unless each row has one to itself."""
        return max(self.programs, max_rows)

    def cut(self, rows: int, vocab: int) -> dict[str, int]:
        """How the kernels find a program's part of a row."""
        tiles = triton.cdiv(vocab, self.block)
        tiles_per_part = triton.cdiv(tiles, max(1, self.programs // rows))
        return {"part_size": tiles_per_part * self.block, "parts": triton.cdiv(tiles, tiles_per_part)}


FEW_ROWS = 16
PROGRAMS = 8 * 132
"""What an H200's multiprocessors hold at a time, of 8 warps and few registers; more programs even out the last ones."""
FEW_ROWS_TILING = Tiling(block=1024, num_warps=4, stages=1, programs=PROGRAMS, rounds=2, groups=NUM_GROUPS // 32)
"""Up to FEW_ROWS: one or few tiles a program; a row of 128256 logits is spread over 126. A third round would seldom be
needed, and costs two launches."""
GREEDY_TILING = Tiling(block=2048, num_warps=8, stages=1, programs=2 * PROGRAMS)
"""Two 16-byte loads on their way a thread, of as many threads as there is place for."""
SAMPLE_TILING = Tiling(block=1024, num_warps=4, stages=3, programs=2 * PROGRAMS)
"""Small tiles, of which few hold a new best score; what the noise takes in registers leaves the loads to the stages."""
FINISH_TILING = Tiling(block=1024, num_warps=8, stages=3, programs=1)
"""Of one program for each row."""
FEW_ROWS_FINISH_TILING = Tiling(block=4096, num_warps=16, stages=2, programs=1)
"""Up to FEW_ROWS, which leave multiprocessors to spare."""


class Sampler:
    """Scratch of one stream's sampling steps, which use it one after the other."""

    def __init__(
        self,
        *,
        max_rows: int,
        vocab: int,
        device: torch.device,
        tiling: Tiling | None = None,
        candidates: int = CANDIDATES,
    ) -> None:
        """max_rows: the largest N of any call. tiling: None takes the tables'."""
        self._max_rows = max_rows
        self._vocab = vocab
        self._tiling = tiling
        self._candidates = candidates

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        tilings = (tiling,) if tiling else (FEW_ROWS_TILING, SAMPLE_TILING, GREEDY_TILING)
        parts = max(choice.most_programs(max_rows) for choice in tilings)
        self._part_best = empty(parts, dtype=torch.float32)
        self._part_score = empty(parts, dtype=torch.float32)
        self._part_token = empty(parts)
        self._group_best = empty(parts * max(choice.groups for choice in tilings), dtype=torch.float32)
        self._arrived = torch.zeros(max_rows, dtype=torch.int32, device=device)
        self._row_state = empty(max_rows)
        self._row_token = empty(max_rows)
        self._row_best = empty(max_rows, dtype=torch.float32)
        self._row_x = empty(max_rows, dtype=torch.float32)
        self._row_total = empty(max_rows, dtype=torch.int64)
        self._row_before = empty(max_rows, dtype=torch.int64)
        self._rounds = triton.next_power_of_2(max(choice.rounds for choice in tilings))
        self._open_rows = empty(self._rounds, max_rows)
        self._open_count = empty(self._rounds)
        self._num_candidates = empty(max_rows)
        self._candidate_x = empty(max_rows, candidates, dtype=torch.float32)
        self._candidate_id = empty(max_rows, candidates)

    def greedy(self, logits: Tensor, state: DeviceState, meta: StepMeta, out: Tensor, *, bans_stop_ids: bool) -> None:
        """The smallest id with the largest logit, whatever the rows' parameters.

        logits: [N, vocab] float32 or bfloat16, rows contiguous; NaN never wins, all rows get an id below vocab. Row i
        is of the step's row `meta.sample_row[i]`. bans_stop_ids: set the logits of the stop ids of rows below their
        min_tokens to -inf, in place, first; without, they are not looked at. out: [N] int32.
        """
        self._one_pass(logits, state, meta, out, noise=False, bans_stop_ids=bans_stop_ids)

    def sample(
        self, logits: Tensor, state: DeviceState, meta: StepMeta, out: Tensor, *, filtered: bool, bans_stop_ids: bool
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
        self, logits: Tensor, state: DeviceState, meta: StepMeta, out: Tensor, *, noise: bool, bans_stop_ids: bool
    ) -> None:
        rows, tiling = self._check(logits, SAMPLE_TILING if noise else GREEDY_TILING)
        cut = {"row_stride": logits.stride(0), "vocab": self._vocab, **tiling.cut(rows, self._vocab)}
        argmax_kernel[(cut["parts"], rows)](
            logits,
            *meta.samples,
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
            **self._options(logits, tiling),
        )

    def _filtered(
        self, logits: Tensor, state: DeviceState, meta: StepMeta, out: Tensor, *, bans_stop_ids: bool
    ) -> None:
        rows, tiling = self._check(logits, SAMPLE_TILING)
        cut = {"row_stride": logits.stride(0), "vocab": self._vocab, **tiling.cut(rows, self._vocab)}
        filters = (state.temperature, state.top_k, state.top_p, state.min_p)
        options = self._options(logits, tiling)
        propose_kernel[(cut["parts"], rows)](
            logits,
            *meta.samples,
            *filters,
            state.seed,
            state.min_tokens_until,
            state.stop_ids,
            self._part_best,
            self._part_score,
            self._part_token,
            self._group_best,
            self._arrived,
            self._row_state,
            self._row_token,
            self._row_best,
            self._row_x,
            self._row_total,
            self._row_before,
            self._num_candidates,
            self._open_count,
            out,
            **cut,
            ROUNDS=self._rounds,
            BANS=bans_stop_ids,
            LANES=min(tiling.groups, tiling.block),
            **options,
        )
        of_rows = (self._arrived, self._row_state, self._row_token, self._row_best, self._row_x)
        weights = (self._row_total, self._row_before)
        open_rows = (self._open_rows, self._open_count)
        weigh_kernel[(cut["parts"], rows)](
            logits,
            meta.counts,
            meta.sample_row,
            meta.row_slot,
            *filters,
            *of_rows,
            *weights,
            self._num_candidates,
            self._candidate_x,
            self._candidate_id,
            *open_rows,
            out,
            **cut,
            CAPACITY=self._candidates,
            **options,
        )
        again = {"row_stride": cut["row_stride"], "vocab": self._vocab, "max_rows": self._max_rows}
        programs = min(tiling.most_programs(rows), rows * triton.cdiv(self._vocab, tiling.block))
        for number in range(tiling.rounds - 1):
            propose_again_kernel[(programs,)](
                logits,
                meta.sample_row,
                meta.row_slot,
                meta.row_start,
                meta.row_len,
                *filters,
                state.seed,
                self._part_score,
                self._part_token,
                *of_rows,
                *open_rows,
                out,
                **again,
                round=number,
                **options,
            )
            weigh_again_kernel[(programs,)](
                logits,
                meta.sample_row,
                meta.row_slot,
                *filters,
                *of_rows,
                *weights,
                *open_rows,
                out,
                **again,
                round=number,
                **options,
            )
        finish_kernel[(rows,)](
            logits,
            *meta.samples,
            *filters,
            state.seed,
            self._row_state,
            self._row_best,
            self._row_x,
            self._row_total,
            self._num_candidates,
            self._candidate_x,
            self._candidate_id,
            out,
            row_stride=cut["row_stride"],
            vocab=self._vocab,
            CAPACITY=self._candidates,
            FEW=FEW_CANDIDATES,
            **self._options(logits, FEW_ROWS_FINISH_TILING if rows <= FEW_ROWS else FINISH_TILING),
        )

    def _check(self, logits: Tensor, many_rows: Tiling) -> tuple[int, Tiling]:
        rows, vocab = logits.shape
        if vocab != self._vocab or logits.stride(1) != 1:
            raise ValueError(f"logits must be rows of {self._vocab}, contiguous; got {tuple(logits.shape)}")
        if rows > self._max_rows:
            raise ValueError(f"there is place for {self._max_rows} rows of logits; got {rows}")
        return rows, self._tiling or (FEW_ROWS_TILING if rows <= FEW_ROWS else many_rows)

    @staticmethod
    def _options(logits: Tensor, tiling: Tiling) -> dict[str, Any]:
        return {
            "BLOCK": tiling.block,
            "STAGES": tiling.stages,
            "enable_fp_fusion": False,
            **launch_options(logits, tiling.num_warps),
        }
