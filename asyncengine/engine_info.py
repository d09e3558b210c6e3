"""What an engine says about itself."""

from __future__ import annotations

from typing import Literal

import msgspec

from asyncengine import __version__
from asyncengine.config import (
    DEFAULT_QUEUE_TIMEOUT_SECONDS,
    DEFAULT_REQUEST_TIMEOUT_SECONDS,
    EngineConfig,
    SchedulingPolicy,
    ToolCallFormat,
)
from asyncengine.model_files import ResolvedModel
from asyncengine.wire.reports import RunnerInfo, TokenizerInfo

HealthState = Literal["starting", "ready", "stalled", "recovering", "draining", "failed", "closed"]


class EngineInfo(RunnerInfo, frozen=True, kw_only=True):
    """Facts of a started engine. model: the name it is served under.

    tool_call_format: how the model writes its calls, None if it does not or that is not known. reasoning: whether it
    may think before it answers. tag_tokens: tags of both that are tokens of its vocabulary.
    """

    model: str
    model_path: str
    scheduling_policy: SchedulingPolicy = "fcfs"
    queue_timeout_seconds: float = DEFAULT_QUEUE_TIMEOUT_SECONDS
    request_timeout_seconds: float = DEFAULT_REQUEST_TIMEOUT_SECONDS
    refuse_unknown_fields: bool = False
    has_chat_template: bool
    tool_call_format: ToolCallFormat | None = None
    reasoning: bool = False
    tag_tokens: tuple[str, ...] = ()

    @property
    def fingerprint(self) -> str:
        """What the bits of an answer depend on beside its model and the machine's libraries: version, number type,
        device and mode."""
        mode = "batch-invariant" if self.batch_invariant else "default"
        return f"asyncengine-{__version__}/{self.dtype}/{self.device}/{mode}"


class Health(msgspec.Struct, frozen=True, kw_only=True):
    """state: "ready" is the only one that serves at once. "stalled" may recover (a process has stopped sending
    heartbeats), "recovering" takes requests, which wait until a lost process has been replaced; "draining" goes on with
    those it has and takes no more; "failed" and "closed" end it. detail: one sentence for a person, "" while ready."""

    state: HealthState
    detail: str = ""


DRAINING = Health(state="draining", detail="the server is shutting down")


def describe_engine(
    config: EngineConfig, model: ResolvedModel, runner: RunnerInfo, tokenizer: TokenizerInfo
) -> EngineInfo:
    """The facts out of what the processes said when they were ready."""
    parser = config.tool_call_parser
    return EngineInfo(
        model=config.served_model_name or model.served_name,
        model_path=str(model.path),
        scheduling_policy=config.scheduling_policy,
        queue_timeout_seconds=config.queue_timeout_seconds,
        request_timeout_seconds=config.request_timeout_seconds,
        refuse_unknown_fields=config.refuse_unknown_fields,
        has_chat_template=tokenizer.has_chat_template,
        tool_call_format=tokenizer.tool_call_format if parser == "auto" else None if parser == "none" else parser,
        reasoning=tokenizer.reasoning if config.reasoning_parser == "auto" else config.reasoning_parser == "think",
        tag_tokens=tokenizer.tag_tokens,
        **msgspec.structs.asdict(runner),
    )
