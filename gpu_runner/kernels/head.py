"""The next token of each row from the head's factors, where nothing needs the logits but the choice itself."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from gpu_runner.kernels.device_state import DeviceState
from gpu_runner.kernels.head_config import HeadConfig
from gpu_runner.kernels.head_kernel import NOTHING, head_argmax_kernel
from gpu_runner.kernels.launch import launch_options
from gpu_runner.kernels.linear_config import NUM_PROGRAMS
from gpu_runner.kernels.step_meta import StepMeta

MIN_TOKENS = 16
"""Rows of a tile, at least."""


class HeadSampler:
    """Scratch of one stream's heads, which use it one after the other. The tokens are those of `Sampler` of the logits
    that the product would be; float32 sums of another order may differ in the last bits, and so may a token whose lead
    is that small. They do not depend on the number of rows, nor on a row's place among them.
    """

    def __init__(self, *, max_rows: int, device: torch.device) -> None:
        """max_rows: the largest S of any call."""
        self._best = torch.full((max_rows,), NOTHING.value, dtype=torch.int64, device=device)
        self._arrived = torch.zeros(triton.cdiv(max_rows, MIN_TOKENS), dtype=torch.int32, device=device)

    def choose(
        self,
        x: Tensor,
        weight: Tensor,
        state: DeviceState,
        meta: StepMeta,
        out: Tensor,
        *,
        noise: bool,
        config: HeadConfig,
    ) -> None:
        """The best id of each row of x @ weight.T, by its temperature, seed and position if `noise`.

        x: [S, K], weight: [V, K], contiguous, of one type, V at least config.ids. Row i is of the step's row
        `meta.sample_row[i]`; rows beyond the step's samples get id 0. out: [S] int32. Filters and min_tokens are not
        looked at. Raises ValueError for a smaller V.
        """
        rows, k = x.shape
        vocab = len(weight)
        if vocab < config.ids:
            raise ValueError(f"a vocabulary of {vocab} is smaller than a tile, {config.ids}")
        token_tiles = triton.cdiv(rows, config.tokens)
        most = triton.cdiv(vocab, config.ids)
        programs = max(1, min(most, NUM_PROGRAMS // token_tiles))
        head_argmax_kernel[(programs * token_tiles,)](
            TensorDescriptor.from_tensor(x, [config.tokens, config.block_k]),
            TensorDescriptor.from_tensor(weight, [config.ids, config.block_k]),
            *meta.samples,
            *(state.temperature, state.seed),
            *(self._best, self._arrived, out, rows),
            V=vocab,
            K=k,
            TOKENS=config.tokens,
            IDS=config.ids,
            BLOCK_K=config.block_k,
            NOISE=noise,
            NOISE_IDS=min(config.noise_ids, config.ids),
            num_stages=config.stages,
            enable_fp_fusion=False,  # a score is that of the sampling kernels, bit for bit
            **launch_options(x, config.num_warps),
        )
