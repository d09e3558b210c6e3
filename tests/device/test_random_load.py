"""Random arrivals, aborts and lengths at the edge of the KV pool, on the real executor."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch
from support.device_engine import device_engine, greedy, random_prompts
from support.random_load import RandomLoad
from support.random_model import VOCAB_SIZE, write_config
from support.reference_logits import ReferenceLogits

from asyncengine.config import Device, DType
from asyncengine.sampling import SamplingParams

CONTEXT = 256
POOL_TOKENS = 384
"""One and a half rows of full length, for six rows."""
HOST_GIB = 0.003
"""65 pages of float32: two and a half times what the device has, and too few for all."""
MAX_GAP = 0.05
TIES = 50
"""Of so many requests, 60 tokens each, one may meet two tokens whose float32 logits differ in the last bits only."""


def seconds(duration: float) -> Callable[[int], bool]:
    end = time.monotonic() + duration
    return lambda turn: time.monotonic() < end


def turns(count: int) -> Callable[[int], bool]:
    return lambda turn: turn < count


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("device", "dtype", "size", "check_every", "compared", "host_gib"),
    [
        pytest.param("cpu", "float32", 200, 1, 6, 0.0, id="cpu"),
        pytest.param("cpu", "float32", 200, 1, 6, HOST_GIB, id="cpu-host-tier"),
        pytest.param("cuda", "float32", 3000, 10, 200, 0.0, id="cuda-float32", marks=pytest.mark.gpu),
        pytest.param("cuda", "float32", 3000, 10, 200, HOST_GIB, id="cuda-float32-host-tier", marks=pytest.mark.gpu),
        pytest.param("cuda", "bfloat16", 30.0, 50, 300, 0.0, id="cuda-30-seconds", marks=pytest.mark.gpu),
        pytest.param(
            "cuda", "bfloat16", 30.0, 50, 300, HOST_GIB, id="cuda-30-seconds-host-tier", marks=pytest.mark.gpu
        ),
    ],
)
def test_every_request_ends_with_its_own_tokens_and_no_page_is_lost(
    device: Device,
    dtype: DType,
    size: float,
    check_every: int,
    compared: int,
    host_gib: float,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """size: turns, or as a float seconds. compared: how many requests are run once more, alone and without a host
    tier, or by the reference."""
    model = write_config(tmp_path_factory.mktemp("model"))
    with device_engine(
        model,
        device=device,
        dtype=dtype,
        load_format="dummy",
        kv_cache_tokens=POOL_TOKENS,
        kv_host_memory_gib=host_gib,
        max_model_len=CONTEXT,
    ) as engine:
        load = RandomLoad(engine.core(check=False, host_pages=engine.executor.host_pages), context=CONTEXT, seed=2)
        load.run(seconds(size) if isinstance(size, float) else turns(size), check_every=check_every)
        load.assert_all_ended()
        gauges = load.core.scheduler.gauges()
        assert gauges["preemptions"] > 2
        assert gauges["aborted"] > 0
        assert gauges["prefix_hit_tokens"] > 0
        assert (gauges["kv_loads"] > 4) == (gauges["kv_stores"] > 100) == (host_gib > 0)
        completed = load.completed()
        assert len(completed) > 8

        # every page can still be had
        assert load.core.scheduler.gauges()["total_pages"] * 16 == POOL_TOKENS
        (whole,) = engine.run(random_prompts([CONTEXT - 9], VOCAB_SIZE), [greedy(9)])
        assert len(whole) == 9

        if dtype == "float32":
            moved = [
                rid
                for rid in completed[:compared]
                if engine.run([load.requests[rid][0]], [load.requests[rid][1]]) != [load.core.outputs[rid]]
            ]
            assert len(moved) <= compared // TIES, f"requests {moved} have other tokens alone"
            return
    reference = ReferenceLogits(model, dtype=getattr(torch, dtype), device=torch.device(device))
    chosen_greedily = [rid for rid in completed if is_greedy(load.requests[rid][1])]
    for rid in chosen_greedily[:compared]:
        assert reference.gaps(load.requests[rid][0], load.core.outputs[rid]).max() < MAX_GAP, f"request {rid}"


def is_greedy(params: SamplingParams) -> bool:
    """Chosen freely: below min_tokens the best may be a stop id, which cannot be chosen."""
    return params.temperature == 0.0 and params.min_tokens == 0
