"""What the events of a stream hold. `Shape` writes them by hand, for speed."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from asyncengine.api.chat_messages import DeltaJson
from asyncengine.api.logprobs import ChatLogprobsJson, CompletionLogprobsJson, PromptLogprobsJson
from asyncengine.api.shapes import ChoiceJson
from asyncengine.api.usage import Usage


class CompletionChunkChoiceJson(ChoiceJson, frozen=True, kw_only=True):
    """`text` and the like hold only what is new."""

    text: str
    logprobs: CompletionLogprobsJson | None
    prompt_logprobs: PromptLogprobsJson | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatChunkChoiceJson(ChoiceJson, frozen=True, kw_only=True):
    """`delta` and the like hold only what is new."""

    delta: DeltaJson
    logprobs: ChatLogprobsJson | None


C = TypeVar("C", bound=ChoiceJson)


class ChunkJson(msgspec.Struct, Generic[C], frozen=True, kw_only=True):
    """choices: one, but none in the event with the whole request's usage."""

    id: str
    object: str
    created: int
    model: str
    system_fingerprint: str
    choices: list[C]
    usage: Usage | UnsetType | None = UNSET


class CompletionChunkJson(ChunkJson[CompletionChunkChoiceJson], frozen=True, kw_only=True):
    """News of one choice of a completion."""


class ChatCompletionChunkJson(ChunkJson[ChatChunkChoiceJson], frozen=True, kw_only=True):
    """News of one choice of a chat."""

    prompt_logprobs: PromptLogprobsJson | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET
