"""How many KV pages fit, and how long a request may be with them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from asyncengine.config import PAGE_SIZE, EngineConfig
from asyncengine.errors import StartupError
from gpu_runner.models.config import ModelConfig

TOKEN_ID_BYTES = 4 * PAGE_SIZE
"""Of each page, beside its keys and values: the ids of its tokens."""
HOST_SHARE = 4
"""Without `kv_cache_tokens`, the KV cache of a CPU takes one part in this many of the memory that is available, at most
what `max_num_seqs` full-length rows need."""


@dataclass(frozen=True, slots=True)
class KvSize:
    """num_pages: with the dummy page 0. max_model_len: tokens, resolved."""

    num_pages: int
    max_model_len: int


def page_bytes(model: ModelConfig, dtype: torch.dtype) -> int:
    """Bytes of one page in all layers."""
    return PAGE_SIZE * model.kv_bytes_per_token(dtype)


def wanted_model_len(config: EngineConfig, model: ModelConfig) -> int:
    """Context length before memory is looked at. Raises `StartupError` for one beyond the model's positions."""
    if config.max_model_len is None:
        return model.max_position
    if config.max_model_len > model.max_position:
        raise StartupError(
            f"max_model_len {config.max_model_len} is beyond the {model.max_position} positions the model was made for"
        )
    return config.max_model_len


def size_kv_cache(
    config: EngineConfig,
    model: ModelConfig,
    dtype: torch.dtype,
    *,
    memory_bytes: int,
    budget_bytes: int,
    remedy: Callable[[int], str],
) -> KvSize:
    """Pages by `config.kv_cache_tokens`, which must fit in `memory_bytes`, or else as many as `budget_bytes` holds.

    remedy: a clause that says how to give the cache so many bytes more than the budget.

    Raises `StartupError` when not one page beside the dummy fits, or not one request of the `max_model_len` asked for.
    """
    size = page_bytes(model, dtype)
    wanted_len = wanted_model_len(config, model)
    if config.kv_cache_tokens is not None:
        usable = config.kv_cache_tokens // PAGE_SIZE
        if usable < 1:
            raise StartupError(f"kv_cache_tokens {config.kv_cache_tokens} is less than one page of {PAGE_SIZE} tokens")
        if (usable + 1) * size > memory_bytes:
            raise StartupError(
                f"kv_cache_tokens {config.kv_cache_tokens} takes {(usable + 1) * size:,} bytes, but only "
                f"{memory_bytes:,} are available; {max(0, memory_bytes // size - 1) * PAGE_SIZE} tokens would fit"
            )
    else:
        usable = budget_bytes // size - 1
        if usable < 1:
            raise StartupError(
                f"too little memory for one page of KV cache: the page of {PAGE_SIZE} tokens and the dummy page take "
                f"{2 * size:,} bytes, and {max(0, budget_bytes):,} bytes are available for them; "
                f"{_more_tokens(config, size, budget_bytes, remedy)}"
            )
    usable_tokens = usable * PAGE_SIZE
    if config.max_model_len is not None and usable_tokens < config.max_model_len:
        raise StartupError(
            f"max_model_len {config.max_model_len} does not fit the KV cache, which holds {usable_tokens} tokens; "
            f"lower max_model_len to {usable_tokens}, or {_more_tokens(config, size, budget_bytes, remedy)}"
        )
    return KvSize(num_pages=usable + 1, max_model_len=min(wanted_len, usable_tokens))


def _more_tokens(config: EngineConfig, page: int, budget_bytes: int, remedy: Callable[[int], str]) -> str:
    """What would let the cache hold one request of the `max_model_len` asked for, or else one page."""
    pages = -(-(config.max_model_len or PAGE_SIZE) // PAGE_SIZE)
    if config.kv_cache_tokens is not None:
        return f"raise kv_cache_tokens to {pages * PAGE_SIZE}"
    return remedy((pages + 1) * page - budget_bytes)


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f} GiB"


def allocate_kv_cache(model: ModelConfig, num_pages: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[num_layers, 2, num_pages, num_kv_heads, PAGE_SIZE, head_dim], zeroed: masked attention over a page never written
    multiplies what it holds by 0, which must not be NaN."""
    shape = (model.num_layers, 2, num_pages, model.num_kv_heads, PAGE_SIZE, model.head_dim)
    if device.type == "cpu":
        # numpy's zeroed memory is the kernel's: a page takes none until it is first written.
        return torch.from_numpy(np.zeros(num_pages * page_bytes(model, dtype), dtype=np.uint8)).view(dtype).view(shape)
    return torch.zeros(shape, dtype=dtype, device=device)
