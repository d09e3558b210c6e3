"""The arrays of an uploaded step as tensors on the device, for code that works with whole arrays."""

from __future__ import annotations

import torch
from torch import Tensor

from asyncengine.config import MAX_STOP_IDS
from gpu_runner.device.buffers import PackedStep
from gpu_runner.kernels.upload_layout import SCORE_WORDS, count_word, offset_word

START_SECTIONS = (
    *("temperature", "top_k", "top_p", "min_p", "seed", "limit", "min_tokens_until", "stop_ids", "prompt_len"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "constrained", "num_bias"),
)
"""Each is named after the state of a slot that it sets."""
DTYPES = {
    **dict.fromkeys(("temperature", "top_p", "min_p"), torch.float32),
    **dict.fromkeys(("presence_penalty", "frequency_penalty", "repetition_penalty"), torch.float32),
    "seed": torch.int64,
}


class UploadViews:
    """Views of `device`, the copy of the host's upload buffer, whose header says where each array lies."""

    def __init__(self, step: PackedStep, host: Tensor, device: Tensor) -> None:
        header = host.numpy()
        self._device = device
        self._header = header
        self._starts = int(header[count_word("num_starts")])
        self._pages = int(header[count_word("num_page_writes")])
        self._biases = int(header[count_word("num_bias_writes")])
        self._step = step
        self._plan = step.plan

    @property
    def row_slot(self) -> Tensor:
        return self._words("row_slot", self._plan.num_rows)

    @property
    def row_start(self) -> Tensor:
        return self._words("row_start", self._plan.num_rows)

    @property
    def row_len(self) -> Tensor:
        return self._words("row_len", self._plan.num_rows)

    @property
    def prefill_tokens(self) -> Tensor:
        return self._words("prefill_tokens", self._plan.num_tokens - self._plan.num_decode_rows)

    @property
    def sample_row(self) -> Tensor:
        return self._words("sample_row", self._step.num_samples)

    @property
    def sample_token(self) -> Tensor:
        return self._words("sample_token", self._step.num_samples)

    @property
    def page_slot(self) -> Tensor:
        return self._words("page_slot", self._pages)

    @property
    def page_index(self) -> Tensor:
        return self._words("page_index", self._pages)

    @property
    def page_id(self) -> Tensor:
        return self._words("page_id", self._pages)

    @property
    def start_slot(self) -> Tensor:
        return self._words("start_slot", self._starts)

    @property
    def bias_cell(self) -> Tensor:
        return self._words("bias_cell", self._biases)

    @property
    def bias_id(self) -> Tensor:
        return self._words("bias_id", self._biases)

    @property
    def bias_value(self) -> Tensor:
        return self._words("bias_value", self._biases).view(torch.float32)

    @property
    def scores(self) -> Tensor:
        """[N, SCORE_WORDS]"""
        return self._words("scores", len(self._plan.scores) * SCORE_WORDS).view(-1, SCORE_WORDS)

    def start(self, name: str) -> Tensor:
        """One of `START_SECTIONS`, a row for each starting slot."""
        dtype = DTYPES.get(name, torch.int32)
        width = MAX_STOP_IDS if name == "stop_ids" else dtype.itemsize // 4
        values = self._words(name, self._starts * width).view(dtype)
        return values.view(self._starts, MAX_STOP_IDS) if name == "stop_ids" else values

    def _words(self, name: str, count: int) -> Tensor:
        first = int(self._header[offset_word(name)])
        return self._device[first : first + count]
