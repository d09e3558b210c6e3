from __future__ import annotations

from pathlib import Path

import pytest
import torch
from device_harness import CONFIG

from asyncengine.config import EngineConfig
from asyncengine.errors import StartupError
from gpu_runner.device.host import available_memory_bytes, usable_cores
from gpu_runner.device.memory import KvSize, allocate_kv_cache, page_bytes, size_kv_cache, wanted_model_len

PAGE = 2 * 2 * 2 * 16 * 8 * 4
"""Bytes of a page of the tiny model: keys and values, layers, KV heads, tokens, head_dim, float32."""


def size(config: EngineConfig, *, memory_bytes: int = 2**40, budget_bytes: int = 2**40) -> KvSize:
    return size_kv_cache(
        config,
        CONFIG,
        torch.float32,
        memory_bytes=memory_bytes,
        budget_bytes=budget_bytes,
        remedy=lambda missing: f"find {missing} bytes",
    )


def test_a_pools_tokens_are_rounded_down_to_pages_and_the_dummy_comes_on_top() -> None:
    assert page_bytes(CONFIG, torch.float32) == PAGE
    assert size(EngineConfig(kv_cache_tokens=112)) == KvSize(num_pages=8, max_model_len=112)
    assert size(EngineConfig(kv_cache_tokens=127)) == KvSize(num_pages=8, max_model_len=112)
    assert size(EngineConfig(kv_cache_tokens=4096)) == KvSize(num_pages=257, max_model_len=256)
    assert size(EngineConfig(kv_cache_tokens=112, max_model_len=100)) == KvSize(num_pages=8, max_model_len=100)


def test_without_a_size_the_budget_decides() -> None:
    assert size(EngineConfig(), budget_bytes=5 * PAGE + 1) == KvSize(num_pages=5, max_model_len=64)
    assert size(EngineConfig(max_model_len=64), budget_bytes=5 * PAGE) == KvSize(num_pages=5, max_model_len=64)


@pytest.mark.parametrize("budget", [-5, 0, PAGE, 2 * PAGE - 1])
def test_memory_for_less_than_one_page_is_refused_with_both_numbers(budget: int) -> None:
    found = rf"too little memory for one page .* 8,192 bytes, and {max(0, budget):,} .* find {2 * PAGE - budget} bytes"
    with pytest.raises(StartupError, match=found):
        size(EngineConfig(), budget_bytes=budget)
    assert size(EngineConfig(), budget_bytes=2 * PAGE) == KvSize(num_pages=2, max_model_len=16)


def test_a_pool_of_less_than_a_page_is_refused() -> None:
    with pytest.raises(StartupError, match="kv_cache_tokens 15 is less than one page of 16 tokens"):
        size(EngineConfig(kv_cache_tokens=15))


def test_a_pool_beyond_memory_is_refused_saying_what_fits() -> None:
    with pytest.raises(StartupError, match=r"takes 36,864 bytes, but only 20,480 are available; 64 tokens would fit"):
        size(EngineConfig(kv_cache_tokens=128), memory_bytes=5 * PAGE)
    assert size(EngineConfig(kv_cache_tokens=64), memory_bytes=5 * PAGE).num_pages == 5


def test_a_context_beyond_the_model_or_the_pool_is_refused_saying_what_fits() -> None:
    with pytest.raises(StartupError, match="max_model_len 257 is beyond the 256 positions"):
        wanted_model_len(EngineConfig(max_model_len=257), CONFIG)
    found = r"max_model_len 250 does not fit .* 112 tokens; lower max_model_len to 112, or raise kv_cache_tokens to 256"
    with pytest.raises(StartupError, match=found):
        size(EngineConfig(max_model_len=250, kv_cache_tokens=112))
    with pytest.raises(StartupError, match=rf"lower max_model_len to 64, or find {12 * PAGE} bytes"):
        size(EngineConfig(max_model_len=256), budget_bytes=5 * PAGE)
    assert wanted_model_len(EngineConfig(max_model_len=256), CONFIG) == 256
    assert wanted_model_len(EngineConfig(), CONFIG) == 256


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_kv_cache_is_zeroed_contiguous_and_of_the_documented_shape(dtype: torch.dtype) -> None:
    cache = allocate_kv_cache(CONFIG, 5, dtype, torch.device("cpu"))
    assert (tuple(cache.shape), cache.dtype) == ((2, 2, 5, 2, 16, 8), dtype)
    assert cache.is_contiguous()
    assert not cache.any()
    assert cache.nbytes == 5 * page_bytes(CONFIG, dtype)
    cache[1, 1, 4, 1, 15, 7] = 2.5
    assert cache[1, 1, 4, 1, 15, 7] == 2.5


def test_a_containers_limits_count(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:       1000 kB\nMemAvailable:    600 kB\n")
    assert available_memory_bytes(meminfo, tmp_path) == 600 * 1024
    cores = usable_cores(tmp_path)
    (tmp_path / "memory.max").write_text("max\n")
    (tmp_path / "memory.current").write_text("100000\n")
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert available_memory_bytes(meminfo, tmp_path) == 600 * 1024
    assert usable_cores(tmp_path) == cores
    (tmp_path / "memory.max").write_text("300000\n")
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    assert available_memory_bytes(meminfo, tmp_path) == 200_000
    assert usable_cores(tmp_path) == 1
    (tmp_path / "memory.stat").write_text("anon 50000\nactive_file 7000\ninactive_file 30000\nslab 500\n")
    assert available_memory_bytes(meminfo, tmp_path) == 237_000
