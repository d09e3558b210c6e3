"""How a GPU's memory is shared out, on a GPU of made-up numbers."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from device_harness import CONFIG
from torch import Tensor

from asyncengine.config import EngineConfig
from asyncengine.errors import StartupError
from gpu_runner.device import build_gpu
from gpu_runner.device.build_gpu import GpuBuild
from gpu_runner.device.memory import TOKEN_ID_BYTES, KvSize, page_bytes
from gpu_runner.device.stream import WorkerStream

CPU = torch.device("cpu")
PAGE = page_bytes(CONFIG, torch.float32) + TOKEN_ID_BYTES
FIXED = 300_000
"""Taken before there is a cache: context, weights, buffers."""
GRAPHS = 100_000
TOTAL = 1_000_000


class MadeUpGpu:
    """A step that takes GRAPHS while it has graphs, and the memory it takes them from."""

    def __init__(self, device: torch.device, *, utilization: float) -> None:
        self.total = TOTAL
        self.limit = int(utilization * TOTAL)
        self.captures = 0
        self.has_graphs = False
        self.kv_cache = torch.empty(0)

    @property
    def own(self) -> int:
        token_ids = self.kv_cache.shape[2] * TOKEN_ID_BYTES if self.kv_cache.numel() else 0
        return FIXED + self.kv_cache.nbytes + token_ids + self.has_graphs * GRAPHS

    @property
    def free(self) -> int:
        return self.total - self.own

    def settle(self) -> None:
        pass

    def capture(self, progress: Callable[[int, int], None]) -> None:
        assert not self.has_graphs
        self.captures += 1
        self.has_graphs = True

    def drop_graphs(self) -> None:
        self.has_graphs = False


check_supported = build_gpu._check_supported


@pytest.fixture(autouse=True)
def made_up_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build_gpu, "GpuMemory", MadeUpGpu)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(build_gpu, "_check_supported", lambda model, device: None)
    monkeypatch.setattr(build_gpu, "MARGIN_BYTES", 0)


def fill(config: EngineConfig, *, graph_bytes: int = GRAPHS) -> tuple[KvSize, Any]:
    build = GpuBuild(
        config,
        CONFIG,
        device=CPU,
        dtype=torch.float32,
        num_slots=4,
        progress=lambda phase, done, total: None,
        graphs=True,
    )
    gpu: Any = build._memory
    stream = WorkerStream(prepare=lambda: None)
    try:
        size = build._fill(stream, gpu, weight_bytes=200_000, graph_bytes=graph_bytes, step_bytes=50_000)
    finally:
        stream.close()
    return size, gpu


def test_the_cache_takes_what_weights_and_graphs_leave_of_the_limit() -> None:
    size, gpu = fill(EngineConfig(gpu_memory_utilization=0.8))
    assert (size.num_pages, gpu.captures) == ((800_000 - FIXED - 105_000) // PAGE, 1)
    assert gpu.own <= gpu.limit


@pytest.mark.parametrize("estimate", [0, 50_000, 90_000])
def test_graphs_that_take_more_than_estimated_are_captured_again_over_a_smaller_cache(estimate: int) -> None:
    size, gpu = fill(EngineConfig(gpu_memory_utilization=0.8), graph_bytes=estimate)
    assert gpu.captures == 2
    assert gpu.limit - 2 * PAGE < gpu.own <= gpu.limit
    assert size.num_pages == gpu.kv_cache.shape[2]


def test_a_cache_of_an_asked_size_is_not_made_smaller() -> None:
    size, gpu = fill(EngineConfig(gpu_memory_utilization=0.4, kv_cache_tokens=160), graph_bytes=0)
    assert (size.num_pages, gpu.captures) == (11, 1)


def test_a_step_has_room_beside_the_graphs_though_the_limit_be_all_of_the_gpu() -> None:
    _, gpu = fill(EngineConfig(gpu_memory_utilization=1.0))
    assert gpu.free >= 50_000


def test_memory_that_another_process_takes_in_the_last_moment_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("tried to allocate")

    monkeypatch.setattr(build_gpu, "allocate_kv_cache", full)
    with pytest.raises(StartupError, match="another process took GPU memory that was free a moment ago"):
        fill(EngineConfig(gpu_memory_utilization=0.8))


@pytest.mark.parametrize("utilization", [0.42, 0.45, 0.47])
def test_a_request_that_does_not_fit_is_refused_with_what_would(utilization: float) -> None:
    with pytest.raises(StartupError) as refused:
        fill(EngineConfig(gpu_memory_utilization=utilization, max_model_len=250))
    message = refused.value.message
    assert message.endswith("the weights take 0.00 GiB of the GPU's 0.00 GiB")
    shorter = re.search(
        r"lower max_model_len to (\d+), or raise gpu_memory_utilization from [.\d]+ to ([.\d]+):", message
    )
    assert shorter is not None
    size, _ = fill(EngineConfig(gpu_memory_utilization=utilization, max_model_len=int(shorter[1])))
    assert size.max_model_len == int(shorter[1])
    size, _ = fill(EngineConfig(gpu_memory_utilization=float(shorter[2]), max_model_len=250))
    assert size.max_model_len == 250


def test_where_not_one_page_fits_what_the_whole_request_takes_is_told() -> None:
    with pytest.raises(StartupError, match=r"too little memory for one page") as refused:
        fill(EngineConfig(gpu_memory_utilization=0.3, max_model_len=250))
    enough = re.search(r"raise gpu_memory_utilization from 0.3 to ([.\d]+):", refused.value.message)
    assert enough is not None
    assert fill(EngineConfig(gpu_memory_utilization=float(enough[1]), max_model_len=250))[0].max_model_len == 250


def test_a_gpu_that_is_too_small_whatever_the_limit_is_named_as_such() -> None:
    with pytest.raises(StartupError, match=r"free GPU memory: .* at any gpu_memory_utilization 0\.00 GiB are left"):
        fill(EngineConfig(gpu_memory_utilization=0.42), graph_bytes=700_000)


def test_an_error_of_the_stream_is_raised_where_it_is_waited_for() -> None:
    stream = WorkerStream(prepare=lambda: None)

    def fail() -> None:
        raise torch.OutOfMemoryError("full")

    with pytest.raises(torch.OutOfMemoryError, match="full"):
        build_gpu._run(stream, fail)
    stream.close()


def test_the_made_up_pages_hold_token_ids_too() -> None:
    cache: Tensor = build_gpu.allocate_kv_cache(CONFIG, 3, torch.float32, CPU)
    assert cache.nbytes + 3 * TOKEN_ID_BYTES == 3 * PAGE


@pytest.mark.parametrize("head_dim", [8, 96, 512])
def test_heads_that_the_kernels_do_not_take_are_refused(head_dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    check_supported(replace(CONFIG, head_dim=256), CPU)
    with pytest.raises(StartupError, match=f"heads of {head_dim} dimensions .* only of 16, 32, 64, 128, 256"):
        check_supported(replace(CONFIG, head_dim=head_dim), CPU)
