"""What an engine says about itself."""

from __future__ import annotations

from typing import Literal

import msgspec

from asyncengine.config import (
    DEFAULT_QUEUE_TIMEOUT_SECONDS,
    DEFAULT_REQUEST_TIMEOUT_SECONDS,
    SchedulingPolicy,
    ToolCallFormat,
)
from asyncengine.wire.messages import MemoryAccount

HealthState = Literal["starting", "ready", "stalled", "recovering", "failed", "closed"]


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a started engine. model: the name it is served under. max_model_len: tokens, prompt plus answer.

    tool_call_format: how the model writes its calls, None if it does not or that is not known. reasoning: whether it
    may think before it answers. tag_tokens: tags of both that are tokens of its vocabulary.

    The rest is as gpu_runner reports it: see `wire.messages.RunnerInfo`.
    """

    model: str
    model_path: str
    architecture: str
    device: str
    dtype: str
    vocab_size: int
    max_model_len: int
    num_pages: int
    weight_bytes: int
    kv_cache_bytes: int
    memory: MemoryAccount = MemoryAccount()
    scheduling_policy: SchedulingPolicy = "fcfs"
    queue_timeout_seconds: float = DEFAULT_QUEUE_TIMEOUT_SECONDS
    request_timeout_seconds: float = DEFAULT_REQUEST_TIMEOUT_SECONDS
    num_graphs: int = 0
    num_kernels: int = 0
    kernels_compiled: int = 0
    has_chat_template: bool
    tool_call_format: ToolCallFormat | None = None
    reasoning: bool = False
    tag_tokens: tuple[str, ...] = ()


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """state: "ready" is the only one that serves at once. "stalled" may recover (a process has stopped sending
    heartbeats), "recovering" takes requests, which wait until a lost process has been replaced; "failed" and "closed"
    end it. detail: one sentence for a person, "" while ready."""

    state: HealthState
    detail: str = ""
