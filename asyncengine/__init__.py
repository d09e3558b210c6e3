"""asyncengine: an LLM inference engine in which host-side Python never stalls the GPU.

The public names load when first used, so that `import asyncengine` (which every sidecar and every command does) costs
next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from asyncengine.chat_prompt import ChatPrompt
    from asyncengine.config import EngineConfig
    from asyncengine.delta import Delta, ToolCallDelta
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
    from asyncengine.sampling import SamplingParams, Structured

__version__ = "0.1.0"

__all__ = [
    "LLM",
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
    "SamplingParams",
    "StartupError",
    "Structured",
    "TokenLogprob",
    "ToolCallDelta",
    "TopLogprob",
    "collect",
]

_HOME = {
    "LLM": "llm",
    "AsyncEngine": "engine",
    "ChatPrompt": "chat_prompt",
    "CompletionOutput": "outputs",
    "Delta": "delta",
    "EngineConfig": "config",
    "EngineInfo": "engine_info",
    "Health": "engine_info",
    "RequestOutput": "outputs",
    "RequestTimes": "outputs",
    "SamplingParams": "sampling",
    "Structured": "sampling",
    "TokenLogprob": "logprobs",
    "ToolCallDelta": "delta",
    "TopLogprob": "logprobs",
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
