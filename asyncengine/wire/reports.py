"""What every sidecar tells the supervisor, and what is in `Ready.info`."""

from __future__ import annotations

from typing import Any

import msgspec

from asyncengine.config import ToolCallFormat
from asyncengine.wire.base import Wire


class Progress(Wire, frozen=True, tag=40):
    """A phase of start-up: `done` of `total` units (bytes while weights load); total 0 = no measure. life: as in
    `SidecarConfig`, here and below: what a dead one said does not count for the one in its place."""

    role: str
    index: int
    phase: str
    done: int
    total: int
    life: int = 0


class Ready(Wire, frozen=True, tag=41):
    """The sidecar serves. `info`: facts for the engine and the start-up report (see `RunnerInfo`, `TokenizerInfo`)."""

    role: str
    index: int
    info: dict[str, Any]
    life: int = 0


class Heartbeat(Wire, frozen=True, tag=42):
    """Sent by the loop that does the work, so a frozen loop is seen. `gauges`: role-specific integers."""

    role: str
    index: int
    gauges: dict[str, int]
    life: int = 0


class Fatal(Wire, frozen=True, tag=43):
    """The sidecar is about to exit; `message` is one sentence for a person. With this a process also says that it is of
    another version than its parent, so its form never changes."""

    role: str
    index: int
    message: str
    life: int = 0


class MemoryAccount(msgspec.Struct, frozen=True, kw_only=True):
    """What gpu_runner takes of its device's memory, measured when it was ready. Bytes.

    total: of the GPU; on a CPU, what was available. limit: the most it may use. used: what it does. workspace: buffers
    of a step. context: what the driver and loaded kernels hold. graphs: captured graphs and what they compute in.
    host_kv: of the host's memory, on top of all that, for KV pages.
    """

    total_bytes: int = 0
    limit_bytes: int = 0
    used_bytes: int = 0
    weight_bytes: int = 0
    workspace_bytes: int = 0
    context_bytes: int = 0
    graph_bytes: int = 0
    kv_cache_bytes: int = 0
    host_kv_bytes: int = 0


class RunnerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`Ready.info` of gpu_runner (convert with `msgspec.convert`).

    max_model_len: tokens, prompt plus answer. num_host_pages: KV pages that host memory has room for, all of them
    usable. num_graphs, num_kernels: captured, and launched by them; 0 on a CPU. kernels_compiled: those that were not
    in the kernel cache. batch_invariant: see `EngineConfig`.
    """

    device: str
    dtype: str
    architecture: str
    vocab_size: int
    max_model_len: int
    num_pages: int
    weight_bytes: int
    kv_cache_bytes: int
    memory: MemoryAccount = MemoryAccount()
    num_host_pages: int = 0
    num_graphs: int = 0
    num_kernels: int = 0
    kernels_compiled: int = 0
    batch_invariant: bool = False


class TokenizerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """`Ready.info` of tokenizer_proc. tool_call_format, reasoning: how answers are written, as far as the chat template
    shows it. tag_tokens: tags of such formats that are tokens of their own."""

    has_chat_template: bool
    tool_call_format: ToolCallFormat | None = None
    reasoning: bool = False
    tag_tokens: tuple[str, ...] = ()


ToSupervisor = Progress | Ready | Heartbeat | Fatal


class _Sender(msgspec.Struct, frozen=True, array_like=True):
    """What all of them begin with."""

    tag: int
    role: str
    index: int


def sender_of(frame: bytes) -> tuple[str, int] | None:
    """Role and index of who sent a report that cannot be read, as far as it begins like one."""
    try:
        sender = msgspec.msgpack.decode(frame, type=_Sender)
    except Exception:  # noqa: BLE001 - it may be anything
        return None
    return sender.role, sender.index
