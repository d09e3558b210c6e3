"""What a device's start-up leaves: a step that can be run, and the facts the engine is told."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from asyncengine.wire.reports import MemoryAccount
from gpu_runner.device.executor import StepRunner
from gpu_runner.device.memory import KvSize
from gpu_runner.device.stream import Stream
from gpu_runner.kernels.reference_page_copy import PageMemory

Progress = Callable[[str, int, int], None]
"""A phase's name, how much of it is done and of how much; total 0 = no measure."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """pages_per_seq: of the step's page table. num_graphs, num_kernels: captured and launched by them, 0 on a CPU.
    kernels_compiled: those that no earlier start had left in the kernel cache. page_memory: the step's
    KV pages, with the host memory given as their other side (see `PageMemory.of`)."""

    step: StepRunner
    page_memory: Callable[[Tensor], PageMemory]
    stream: Stream
    size: KvSize
    pages_per_seq: int
    device_name: str
    memory: MemoryAccount
    num_graphs: int = 0
    num_kernels: int = 0
    kernels_compiled: int = 0
