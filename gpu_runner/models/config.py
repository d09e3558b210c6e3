"""What a decoder is, as numbers: read from a model's files before any weight is."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from asyncengine.config import MAX_STOP_IDS
from asyncengine.errors import StartupError
from asyncengine.sampling import MAX_STOP_TOKEN_IDS

MAX_LAYERS = 1024
MAX_EOS_IDS = MAX_STOP_IDS - MAX_STOP_TOKEN_IDS


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's stretching of low rotary frequencies; `original_max_position` is the trained context, in tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2021) and how its frequencies are scaled.

    linear: divides all of them. divisors: divides each, one per rotated pair. llama3: by frequency band.
    """

    base: float
    linear: float = 1.0
    divisors: tuple[float, ...] | None = None
    llama3: Llama3Scaling | None = None

    def inv_freq(self, head_dim: int) -> Tensor:
        """Radians per position of each rotated pair, [head_dim / 2] float32, on the CPU."""
        inv_freq = 1.0 / self.base ** (torch.arange(0, head_dim, 2).to(torch.float32) / head_dim)
        inv_freq = inv_freq / self.linear
        if self.divisors is not None:
            inv_freq = inv_freq / torch.tensor(self.divisors)
        if self.llama3 is not None:
            turns = self.llama3.original_max_position * inv_freq / (2 * math.pi)  # within the trained context
            low, high = self.llama3.low_freq_factor, self.llama3.high_freq_factor
            kept = ((turns - low) / (high - low)).clamp(0.0, 1.0)
            inv_freq = inv_freq * (kept + (1.0 - kept) / self.llama3.factor)
        return inv_freq


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer of the Llama shape. Construction raises `StartupError` where numbers do not fit.

    source: the file, for error messages. layer_windows: per layer, how many last positions a token sees (itself
    included), None for all. max_position: the context length in tokens the model was made for. eos_ids: ids that end a
    sequence.
    """

    source: str
    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    layer_windows: tuple[int | None, ...]
    max_position: int
    eos_ids: tuple[int, ...]
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    tied_embeddings: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise StartupError(
                f"{self.source}: {self.num_heads} attention heads cannot share {self.num_kv_heads} key-value heads"
            )
        if self.head_dim % 2:
            raise StartupError(f"{self.source}: the head dimension must be even, got {self.head_dim}")
        if self.rope.divisors is not None and len(self.rope.divisors) != self.head_dim // 2:
            raise StartupError(
                f"{self.source}: {len(self.rope.divisors)} rope factors for head dimension {self.head_dim}"
            )
        if len(self.eos_ids) > MAX_EOS_IDS:
            raise StartupError(
                f"{self.source}: at most {MAX_EOS_IDS} end-of-sequence ids are supported, got {len(self.eos_ids)}"
            )
        beyond = [token for token in self.eos_ids if token >= self.vocab_size]
        if beyond:
            raise StartupError(f"{self.source}: end-of-sequence id {beyond[0]} is outside the {self.vocab_size} tokens")

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes of keys and values that one token takes in all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * dtype.itemsize
