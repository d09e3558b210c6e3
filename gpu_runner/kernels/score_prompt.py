"""Log-probabilities of a prompt's tokens: what the model gave, at positions of prefill rows, for the token that follows.

    residuals -> [gather: the scored tokens' rows; targets] -> norm, head -> [parts, merge, rank] -> scores -> host

The kernels of generated tokens do the work, over rows that have no penalty, bias or mask: each scored token is a row, and
a slot, of its own. As in `sample_full`, only the contents of tensors may differ between replays of a graph.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import triton
import triton.language as tl
from torch import Tensor

from gpu_runner.kernels.result_layout import Scores
from gpu_runner.kernels.sample_full import FullSampling, ReportRows
from gpu_runner.kernels.sample_noise import NO_TOKEN, without_nan
from gpu_runner.kernels.step_meta import SlotState
from gpu_runner.kernels.upload_layout import SCORE_WORDS, count_word, offset_word

HIDDEN_BLOCK = 1024
RANK_BLOCK = 4096
NUM_WARPS = 4
RANK_WARPS = 8
_COUNT = tl.constexpr(count_word("num_scores"))
_OFFSET = tl.constexpr(offset_word("scores"))
_WORDS = tl.constexpr(SCORE_WORDS)


class PromptScoring:
    """Buffers of one stream's steps, which use them one after the other. `full` lends its scratch."""

    def __init__(
        self, full: FullSampling, *, max_rows: int, hidden_size: int, dtype: torch.dtype, device: torch.device, pdl: bool
    ) -> None:
        """max_rows: the most tokens that a step scores."""

        def zeros(size: int, dtype: torch.dtype = torch.int32) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        self.hidden = torch.zeros(max_rows, hidden_size, dtype=dtype, device=device)
        self._full = full
        self._pdl = pdl and device.type != "cpu"
        self._counts = zeros(4)
        self._target = zeros(max_rows)
        self._wanted = zeros(max_rows)
        own = torch.arange(max_rows, dtype=torch.int32, device=device)
        self._rows = SimpleNamespace(
            counts=self._counts,
            sample_row=own,
            row_slot=own,
            row_start=zeros(max_rows),
            row_len=zeros(max_rows),
            row_was_done=zeros(max_rows),
        )
        self._none = zeros(max_rows)
        self._no_penalty = zeros(max_rows, torch.float32)
        self._no_repetition = torch.ones(max_rows, device=device)
