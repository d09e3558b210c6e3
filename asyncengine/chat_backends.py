"""Who answers in a terminal chat: an engine inside this process, or a server that speaks OpenAI's API."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

import aiohttp
import msgspec

from asyncengine.config import EngineConfig
from asyncengine.engine import AsyncEngine
from asyncengine.errors import EngineError, StartupError
from asyncengine.sampling import SamplingParams
from asyncengine.streams import ChatPrompt
from asyncengine.supervisor import StartupProgress

Message = dict[str, str]


@dataclass(frozen=True)
class ChatOptions:
    """max_tokens: longest answer; None lets it fill the context."""

    system: str | None = None
    temperature: float = 0.7
    max_tokens: int | None = None


@dataclass(frozen=True)
class Piece:
    """New text of an answer, and how many tokens the answer has so far, None where that is not known."""

    text: str
    tokens: int | None


class Backend(Protocol):
    """Whoever answers. All methods run in one event loop."""

    async def open(self) -> str:
        """Get ready; returns the model's name. Raises `StartupError`."""

    def stream(self, messages: list[Message]) -> AsyncIterator[Piece]:
        """The answer to a conversation, as it is written. Raises `EngineError`."""

    async def close(self) -> None: ...


class EngineBackend:
    """An engine inside this process."""

    def __init__(self, config: EngineConfig, options: ChatOptions, progress: StartupProgress) -> None:
        self._starting = AsyncEngine.start(config, progress=progress)
        self._params = SamplingParams(temperature=options.temperature, max_tokens=options.max_tokens)
        self._engine: AsyncEngine | None = None

    async def open(self) -> str:
        self._engine = await self._starting
        return self._engine.info.model

    async def stream(self, messages: list[Message]) -> AsyncIterator[Piece]:
        assert self._engine is not None
        prompt = ChatPrompt(messages=[{**message} for message in messages])
        async with contextlib.aclosing(self._engine.generate(prompt, self._params)) as deltas:
            async for delta in deltas:
                yield Piece(delta.text, delta.completion_tokens)

    async def close(self) -> None:
        if self._engine is not None:
            await self._engine.close()


class _Content(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Content


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Error(msgspec.Struct):
    message: str


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: _Error | None = None


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


class HttpBackend:
    """A server at `url`, with or without its `/v1`."""

    def __init__(self, url: str, options: ChatOptions) -> None:
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1"
        self._options = options
        self._model = ""
        self._session: aiohttp.ClientSession | None = None

    async def open(self) -> str:
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None, connect=10))
        try:
            async with self._session.get(f"{self._url}/models") as response:
                response.raise_for_status()
                self._model = msgspec.json.decode(await response.read(), type=_Models).data[0].id
        except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, IndexError, ValueError) as error:
            await self.close()
            raise StartupError(f"there is no usable server at {self._url}: {error}") from None
        return self._model

    async def stream(self, messages: list[Message]) -> AsyncIterator[Piece]:
        assert self._session is not None
        body: dict[str, object] = {
            "model": self._model,
            "messages": messages,
            "temperature": self._options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._options.max_tokens is not None:
            body["max_tokens"] = self._options.max_tokens
        try:
            async with self._session.post(f"{self._url}/chat/completions", json=body) as response:
                if response.status != 200:
                    raise EngineError(_error_message(await response.read(), response.status))
                async for line in response.content:
                    data = line.strip().removeprefix(b"data:").strip()
                    if not line.startswith(b"data:") or data == b"[DONE]":
                        continue
                    chunk = msgspec.json.decode(data, type=_Chunk)
                    if chunk.error is not None:
                        raise EngineError(chunk.error.message)
                    text = "".join(choice.delta.content or "" for choice in chunk.choices)
                    yield Piece(text, chunk.usage.completion_tokens if chunk.usage else None)
        except (aiohttp.ClientError, msgspec.DecodeError, ValueError) as error:
            raise EngineError(f"the connection to {self._url} failed: {error}") from None

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()


def _error_message(body: bytes, status: int) -> str:
    with contextlib.suppress(msgspec.DecodeError):
        chunk = msgspec.json.decode(body, type=_Chunk)
        if chunk.error is not None:
            return chunk.error.message
    return f"the server answered with status {status}"
