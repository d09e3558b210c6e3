"""Where weights come from, whatever the file format: named tensors under their Hugging Face names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from gpu_runner.models.config import ModelConfig
from gpu_runner.models.staging import Extent


class Checkpoint(Protocol):
    """An opened model. Opening has read and checked headers; no weight is read before it is asked for."""

    @property
    def source(self) -> str:
        """The file or folder, for error messages."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shape of every tensor."""

    def stored_bytes(self, name: str) -> int:
        """Bytes the tensor takes in its file."""

    def extent(self, name: str) -> Extent | None:
        """Where the file holds the tensor's values as they are; None where `read` must compute them."""

    def read(self, name: str) -> Tensor:
        """A tensor without extent, on the CPU, in a floating-point type. Raises `StartupError`."""
