"""What a person reads when an engine has started: what was captured, and where the memory went."""

from __future__ import annotations

from asyncengine.config import PAGE_SIZE
from asyncengine.engine_info import EngineInfo


def report(info: EngineInfo) -> list[str]:
    """Lines of text; the memory's parts add up to what is in use, and with what is unused to the limit."""
    lines = []
    if info.num_graphs:
        from_cache = info.num_kernels - info.kernels_compiled
        lines.append(
            _line("graphs", f"{info.num_graphs} of {info.num_kernels} kernels, {from_cache} of them from the cache")
        )
    memory = info.memory
    if memory.total_bytes:
        lines.append(
            _line(
                "memory",
                f"{_gib(memory.used_bytes)} of {_gib(memory.total_bytes)} GiB in use, the limit is "
                f"{_gib(memory.limit_bytes)}",
            )
        )
        parts = {
            "weights": memory.weight_bytes,
            "step workspace": memory.workspace_bytes,
            "context and kernels": memory.context_bytes,
            "graphs": memory.graph_bytes,
            "KV cache": memory.kv_cache_bytes,
            "unused": memory.limit_bytes - memory.used_bytes,
        }
        lines.extend(_line("", f"{name:<20} {_gib(part):>8} GiB") for name, part in parts.items() if part)
    pages = info.num_pages - 1  # page 0 is no request's
    tokens = pages * PAGE_SIZE
    lines.append(
        _line(
            "KV cache",
            f"{pages:,} pages, {tokens:,} tokens: {tokens / info.max_model_len:,.1f} requests of max_model_len "
            f"{info.max_model_len:,}",
        )
    )
    if info.num_host_pages:
        lines.append(
            _line(
                "KV in host memory",
                f"{info.num_host_pages:,} pages, {info.num_host_pages * PAGE_SIZE:,} tokens in "
                f"{_gib(memory.host_kv_bytes)} GiB",
            )
        )
    return lines


def _line(name: str, text: str) -> str:
    return f"{name:<20} {text}"


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:.2f}"
