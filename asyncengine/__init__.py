"""asyncengine: an LLM inference engine in which host-side Python never stalls the GPU.

The public names load when first used, so that `import asyncengine` (which every sidecar and every command does) costs
next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncengine.client import AsyncClient
    from asyncengine.config import EngineConfig
    from asyncengine.engine import AsyncEngine
    from asyncengine.engine_info import EngineInfo, Health
    from asyncengine.errors import (
        EngineDeadError,
        EngineError,
        InvalidRequestError,
        OverloadedError,
        RequestTimeoutError,
        StartupError,
    )
    from asyncengine.llm import LLM
    from asyncengine.logprobs import TokenLogprob, TopLogprob
    from asyncengine.outputs import CompletionOutput, RequestOutput, RequestTimes, collect
    from asyncengine.retries import RetryPolicy
    from asyncengine.sampling import SamplingParams, Structured
    from asyncengine.streams import ChatPrompt, Delta, ToolCallDelta
    from asyncengine.time_limits import Timeouts

__all__ = [
    "LLM",
    "AsyncClient",
    "AsyncEngine",
    "ChatPrompt",
    "CompletionOutput",
    "Delta",
    "EngineConfig",
    "EngineDeadError",
    "EngineError",
    "EngineInfo",
    "Health",
    "InvalidRequestError",
    "OverloadedError",
    "RequestOutput",
    "RequestTimeoutError",
    "RequestTimes",
    "RetryPolicy",
    "SamplingParams",
    "StartupError",
    "Structured",
    "Timeouts",
    "TokenLogprob",
    "ToolCallDelta",
    "TopLogprob",
    "collect",
]

_HOME = {
    "LLM": "llm",
    "AsyncClient": "client",
    "AsyncEngine": "engine",
    "ChatPrompt": "streams",
    "CompletionOutput": "outputs",
    "Delta": "streams",
    "EngineConfig": "config",
    "EngineInfo": "engine_info",
    "Health": "engine_info",
    "RequestOutput": "outputs",
    "RequestTimes": "outputs",
    "RetryPolicy": "retries",
    "SamplingParams": "sampling",
    "Structured": "sampling",
    "TokenLogprob": "logprobs",
    "ToolCallDelta": "streams",
    "TopLogprob": "logprobs",
    "Timeouts": "time_limits",
    "collect": "outputs",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'asyncengine' has no attribute {name!r}")
    value = getattr(import_module(f"asyncengine.{_HOME.get(name, 'errors')}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
