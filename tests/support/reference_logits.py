"""What a model of random weights should compute: float32, plain operations, every position at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch
from torch import Tensor

from asyncengine.config import PAGE_SIZE
from gpu_runner.device.memory import allocate_kv_cache
from gpu_runner.kernels.ops import BatchMeta
from gpu_runner.kernels.reference_ops import ReferenceOps
from gpu_runner.models.decoder import Decoder
from gpu_runner.models.registry import read_model_config
from gpu_runner.models.weights import random_weights


class ReferenceLogits:
    """Of the same weights as an engine of random weights has, rounded to its type and then widened."""

    def __init__(self, model: str, *, dtype: torch.dtype, device: torch.device) -> None:
        config = read_model_config(model)
        weights = random_weights(config, device=device, dtype=dtype)
        self._decoder = Decoder(config, widened(weights), ReferenceOps())
        self._device = device

    @torch.inference_mode()
    def __call__(self, tokens: list[int]) -> Tensor:
        """[len(tokens), vocab] float32, on the host."""
        model, length = self._decoder.config, len(tokens)
        pages = -(-length // PAGE_SIZE)
        meta = BatchMeta(
            num_decode_rows=0,
            row_start=np.zeros(1, np.int32),
            row_len=np.full(1, length, np.int32),
            row_slot=torch.zeros(1, dtype=torch.int64, device=self._device),
            positions=torch.arange(length, device=self._device),
            kv_index=torch.arange(length, device=self._device),
            page_table=torch.arange(pages, dtype=torch.int32, device=self._device)[None],
        )
        cache = allocate_kv_cache(model, pages, torch.float32, self._device)
        ids = torch.tensor(tokens, device=self._device)
        return self._decoder.logits(self._decoder.forward(ids, meta, cache)).cpu()

    def gaps(self, prompt: np.ndarray, output: list[int]) -> Tensor:
        """By how much each token's logit is below the best, given the tokens before it; [len(output)]."""
        logits = self([*prompt.tolist(), *output])[len(prompt) - 1 : -1]
        return logits.amax(dim=1) - logits.gather(1, torch.tensor(output)[:, None])[:, 0]


def widened(weights: Any) -> Any:
    """The same dataclasses, tensors in float32."""
    if isinstance(weights, Tensor):
        return weights.float()
    if isinstance(weights, tuple):
        return tuple(widened(part) for part in weights)
    if dataclasses.is_dataclass(weights) and not isinstance(weights, type):
        parts = {field.name: widened(getattr(weights, field.name)) for field in dataclasses.fields(weights)}
        return dataclasses.replace(weights, **parts)
    return weights
