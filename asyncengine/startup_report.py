"""What a person reads when an engine has started: what was captured, and where the memory went."""

from __future__ import annotations

from asyncengine.config import PAGE_SIZE
from asyncengine.engine_info import EngineInfo


def report(info: EngineInfo) -> list[str]:
    """Lines of text; the memory's parts add up to what is in use, and with what is unused to the limit."""
    rows: list[tuple[str, str]] = []
    if info.num_graphs:
        from_cache = info.num_kernels - info.kernels_compiled
        rows.append(("graphs", f"{info.num_graphs} of {info.num_kernels} kernels, {from_cache} of them from the cache"))
    memory = info.memory
    if memory.total_bytes:
        in_use = f"{_gib(memory.used_bytes)} of {_gib(memory.total_bytes)} GiB in use"
        rows.append(("memory", f"{in_use}, the limit is {_gib(memory.limit_bytes)}"))
        parts = {
            "weights": memory.weight_bytes,
            "step workspace": memory.workspace_bytes,
            "context and kernels": memory.context_bytes,
            "graphs": memory.graph_bytes,
            "KV cache": memory.kv_cache_bytes,
            "unused": memory.limit_bytes - memory.used_bytes,
        }
        rows += [("", f"{name:<20} {_gib(part):>8} GiB") for name, part in parts.items() if part]
    pages = info.num_pages - 1  # page 0 is no request's
    tokens = pages * PAGE_SIZE
    requests = f"{tokens / info.max_model_len:,.1f} requests of max_model_len {info.max_model_len:,}"
    rows.append(("KV cache", f"{pages:,} pages, {tokens:,} tokens: {requests}"))
    if pages := info.num_host_pages:
        size = _gib(memory.host_kv_bytes)
        rows.append(("KV in host memory", f"{pages:,} pages, {pages * PAGE_SIZE:,} tokens in {size} GiB"))
    return [f"{name:<20} {text}" for name, text in rows]


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f}"
