"""What is printed of a started engine's graphs and memory."""

from __future__ import annotations

from typing import Any

import msgspec

from asyncengine.engine_info import EngineInfo
from asyncengine.startup_report import report
from asyncengine.wire.reports import MemoryAccount, Ready, RunnerInfo

GIB = 2**30


def info(memory: MemoryAccount, **graphs: Any) -> EngineInfo:
    return EngineInfo(
        model="m",
        model_path="/m",
        architecture="LlamaForCausalLM",
        device="NVIDIA H200",
        dtype="bfloat16",
        vocab_size=10,
        max_model_len=4096,
        num_pages=1025,
        weight_bytes=memory.weight_bytes,
        kv_cache_bytes=memory.kv_cache_bytes,
        has_chat_template=True,
        memory=memory,
        scheduling_policy="fcfs",
        **graphs,
    )


def test_a_gpus_memory_is_accounted_for_to_the_limit() -> None:
    memory = MemoryAccount(
        total_bytes=140 * GIB,
        limit_bytes=126 * GIB,
        used_bytes=125 * GIB,
        weight_bytes=15 * GIB,
        workspace_bytes=GIB // 2,
        context_bytes=GIB,
        graph_bytes=GIB // 2,
        kv_cache_bytes=108 * GIB,
        host_kv_bytes=64 * GIB,
    )
    assert report(info(memory, num_graphs=124, num_kernels=92, kernels_compiled=2, num_host_pages=2000)) == [
        "graphs               124 of 92 kernels, 90 of them from the cache",
        "memory               125.00 of 140.00 GiB in use, the limit is 126.00",
        "                     weights                 15.00 GiB",
        "                     step workspace           0.50 GiB",
        "                     context and kernels      1.00 GiB",
        "                     graphs                   0.50 GiB",
        "                     KV cache               108.00 GiB",
        "                     unused                   1.00 GiB",
        "KV cache             1,024 pages, 16,384 tokens: 4.0 requests of max_model_len 4,096",
        "KV in host memory    2,000 pages, 32,000 tokens in 64.00 GiB",
    ]


def test_a_runner_without_an_account_has_its_pages_told() -> None:
    assert report(info(MemoryAccount())) == [
        "KV cache             1,024 pages, 16,384 tokens: 4.0 requests of max_model_len 4,096"
    ]


def test_an_account_arrives_as_it_was_sent() -> None:
    sent = RunnerInfo(
        device="cpu",
        dtype="float32",
        architecture="LlamaForCausalLM",
        vocab_size=10,
        max_model_len=64,
        num_pages=5,
        weight_bytes=1,
        kv_cache_bytes=2,
        memory=MemoryAccount(total_bytes=9, limit_bytes=8, used_bytes=7),
        num_graphs=3,
    )
    ready = Ready("gpu_runner", 0, msgspec.structs.asdict(sent))
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(ready), type=Ready)
    assert msgspec.convert(received.info, RunnerInfo) == sent
