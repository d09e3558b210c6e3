"""What the HTTP front end needs of an engine: `AsyncEngine` has it, and so does a test's stand-in."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from pathlib import Path
from typing import Protocol, Unpack

from asyncengine.chat_prompt import ChatPrompt
from asyncengine.delta import Delta
from asyncengine.engine_info import EngineInfo, Health
from asyncengine.metrics import Totals
from asyncengine.prompt_messages import TokenizedPrompt
from asyncengine.request_terms import TenantTerms
from asyncengine.sampling import SamplingParams

Prompt = str | Sequence[int] | ChatPrompt


class Subscription(Protocol):
    """See `asyncengine.streams.RequestStream`."""

    @property
    def over(self) -> bool: ...

    @property
    def pending_bytes(self) -> int: ...

    def take(self) -> list[Delta]: ...

    def close(self) -> None: ...


class Backend(Protocol):
    """See `AsyncEngine` for what each member promises."""

    @property
    def info(self) -> EngineInfo: ...

    @property
    def health(self) -> Health: ...

    @property
    def run_dir(self) -> Path | None: ...

    def gauges(self) -> dict[str, int]: ...

    def totals(self) -> Totals: ...

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        namespace: str = "",
        request_id: str = "",
        **terms: Unpack[TenantTerms],
    ) -> AsyncGenerator[Delta, None]: ...

    def subscribe(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        *,
        listener: Callable[[], None],
        namespace: str = "",
        request_id: str = "",
        **terms: Unpack[TenantTerms],
    ) -> Subscription: ...

    async def cancel(self, request_id: str, *, tenant: str = "") -> bool: ...

    async def release_session(self, session: str, *, tenant: str = "") -> None: ...

    async def tokenize(
        self, prompt: str | ChatPrompt, *, add_special_tokens: bool = True, texts: bool = False
    ) -> TokenizedPrompt: ...

    async def detokenize(self, ids: Sequence[int]) -> str: ...
