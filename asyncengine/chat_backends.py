"""Who answers in a terminal chat: an engine inside this process, or the one behind a server. Each is there within a
`with`, which says the model's name and gives its `generate`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from asyncengine.chat_prompt import ChatPrompt
from asyncengine.client import AsyncClient, RetryPolicy
from asyncengine.delta import Delta
from asyncengine.engine import AsyncEngine
from asyncengine.errors import EngineError, StartupError
from asyncengine.sampling import SamplingParams

Generate = Callable[[ChatPrompt, SamplingParams], AsyncGenerator[Delta, None]]
Backend = AbstractAsyncContextManager[tuple[str, Generate]]


@asynccontextmanager
async def engine_backend(starting: AsyncEngine) -> AsyncIterator[tuple[str, Generate]]:
    """An engine inside this process. Raises `StartupError`."""
    async with starting as engine:
        yield engine.info.model, engine.generate


@asynccontextmanager
async def server_backend(url: str, api_key: str | None) -> AsyncIterator[tuple[str, Generate]]:
    """The first model of the server at `url`. api_key: for one that wants a key. Raises `StartupError`."""
    async with AsyncClient(url, api_key=api_key, retry=RetryPolicy(attempts=1)) as client:  # a person tries again
        try:
            model = (await client.models())[0]
        except EngineError as error:
            raise StartupError(f"there is no usable server at {url}: {error.message}") from None
        yield model, client.generate
