"""Models whose kernels are timed, by the shapes of their layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from bench_device import BYTES_PER_US, DEVICE, DTYPE
from linear_ways import Linear
from torch import Tensor

FLOPS_PER_US = 700e6
"""Of products of long runs on an H200."""
LAYER = ("qkv", "o", "gate_up", "down")


@dataclass(frozen=True)
class Model:
    layers: int  # of the graph: enough that L2 holds none of their weights at the next replay
    hidden: int
    heads: int  # columns of all query heads
    kv_heads: int  # columns of all key heads
    inner: int
    vocab: int
    head_dim: int = 128
    norms_heads: bool = False  # query and key heads, that is

    def floor_us(self, name: str, tokens: int) -> float:
        """Of a linear on an H200."""
        weights = self.linear(name).n * self.linear(name).k
        return max(2 * weights / BYTES_PER_US, 2 * weights * tokens / FLOPS_PER_US)

    def linear(self, name: str) -> Linear:
        shapes = {
            "qkv": (self.heads + 2 * self.kv_heads, self.hidden),
            "o": (self.hidden, self.heads),
            "gate_up": (2 * self.inner, self.hidden),
            "down": (self.hidden, self.inner),
            "head": (self.vocab, self.hidden),
        }
        return Linear(name, *shapes[name])


MODELS = {
    "0.6b": Model(28, 1024, 2048, 1024, 3072, 151936, norms_heads=True),
    "8b": Model(16, 4096, 4096, 1024, 14336, 128256),
    "135m": Model(30, 576, 576, 192, 1536, 49152, head_dim=64),
    "smoke": Model(1, 32, 64, 32, 48, 96, head_dim=32, norms_heads=True),
}


def random_normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=DTYPE, device=DEVICE)
