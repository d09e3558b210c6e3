"""Who answers in a terminal chat: an engine inside this process, or the one behind a server."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from asyncengine.chat_prompt import ChatPrompt
from asyncengine.client import AsyncClient, RetryPolicy
from asyncengine.delta import Delta
from asyncengine.engine import AsyncEngine
from asyncengine.errors import EngineError, StartupError
from asyncengine.sampling import SamplingParams


class Backend(Protocol):
    """Whoever answers. All methods run in one event loop."""

    async def open(self) -> str:
        """Get ready; returns the model's name. Raises `StartupError`."""

    def generate(self, prompt: ChatPrompt, params: SamplingParams) -> AsyncGenerator[Delta, None]:
        """As `AsyncEngine.generate`."""

    async def close(self) -> None: ...


class EngineBackend:
    """An engine inside this process, which starts when opened."""

    def __init__(self, starting: AsyncEngine) -> None:
        self._starting = starting
        self._engine: AsyncEngine | None = None

    async def open(self) -> str:
        self._engine = await self._starting
        return self._engine.info.model

    def generate(self, prompt: ChatPrompt, params: SamplingParams) -> AsyncGenerator[Delta, None]:
        assert self._engine is not None
        return self._engine.generate(prompt, params)

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()


class ServerBackend:
    """The first model of the server at `url`. api_key: for one that wants a key."""

    def __init__(self, url: str, api_key: str | None) -> None:
        self._url = url
        self._client = AsyncClient(url, api_key=api_key, retry=RetryPolicy(attempts=1))  # a person tries again

    async def open(self) -> str:
        await self._client.__aenter__()
        try:
            return (await self._client.models())[0]
        except EngineError as error:
            await self.close()
            raise StartupError(f"there is no usable server at {self._url}: {error.message}") from None

    def generate(self, prompt: ChatPrompt, params: SamplingParams) -> AsyncGenerator[Delta, None]:
        return self._client.generate(prompt, params)

    async def close(self) -> None:
        await self._client.close()
