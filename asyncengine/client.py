"""The engine's `generate` over HTTP: the same calls and deltas, from any machine."""

from __future__ import annotations

import asyncio
import itertools
import random
import re
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Sequence
from datetime import UTC, datetime
from typing import Unpack
from urllib.parse import quote

import aiohttp

from asyncengine.chat_prompt import ChatPrompt
from asyncengine.client_json import delta_of, error_of, events, health_of, models_of, request_body
from asyncengine.delta import Delta
from asyncengine.engine_info import Health
from asyncengine.errors import EngineDeadError, EngineError, InvalidRequestError, RequestTimeoutError
from asyncengine.prompt_messages import check_params
from asyncengine.request_terms import REQUEST_NAME, AskedTerms, check_names, check_session
from asyncengine.retries import RetryPolicy, seconds_of
from asyncengine.sampling import SamplingParams
from asyncengine.time_limits import TimeLimits, Timeouts

__all__ = ["AsyncClient", "RetryPolicy", "Timeouts"]

NO_ROOM = (429, 503)
REQUEST_ID_HEADER = "X-Request-Id"
ID_PREFIXES = ("cmpl", "chatcmpl")
"""The server puts one before a request's name, for completions and for chats."""


class AsyncClient:
    """A server's models, for use as `async with AsyncClient("http://127.0.0.1:8000") as client`.

    base_url: with or without its /v1. model: the name to ask for; None takes the one the server has. api_key: for a
    server that wants one. timeouts, retry: of every request; None takes the defaults. max_connections: requests that
    are at the server at once, others wait for one of them to end; None for any number. sleep, chance: how it waits
    before it asks again, and its random numbers from 0 to below 1.

    One client serves any number of concurrent requests. The server must be this one: deltas need fields that others do
    not send.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeouts: Timeouts | None = None,
        retry: RetryPolicy | None = None,
        max_connections: int | None = None,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        chance: Callable[[], float] = random.random,
    ) -> None:
        if not base_url.startswith(("http://", "https://")):
            raise InvalidRequestError(
                f"base_url must begin with http:// or https://, got {base_url!r}", param="base_url"
            )
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise InvalidRequestError("an API key must be printable ASCII", param="api_key")  # it is not for messages
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._model = model
        self._headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
        self._timeouts = timeouts or Timeouts()
        self._retry = retry or RetryPolicy()
        self._max_connections = max_connections
        self._sleep = sleep
        self._chance = chance
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> AsyncClient:
        # aiohttp's own limits of time are off but for connecting: `TimeLimits` has the others
        self._session = aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=None),
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=self._max_connections or 0),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close all connections, which aborts what they carry. Idempotent."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def models(self) -> list[str]:
        """Names of the server's models, at least one. Raises `EngineError`."""
        return models_of(await self._read("GET", "/v1/models"))

    async def health(self) -> Health:
        """What the server says of itself now; it is asked once. Raises `EngineError` when there is no answer."""
        limits = TimeLimits(self._timeouts)
        try:
            response = await self._send("GET", "/health", limits, retry=RetryPolicy(attempts=1), no_room=())
            async with response, limits.wait("first"):
                return health_of(await response.read(), response.status)
        except aiohttp.ClientError as error:
            raise self._unreachable(error) from error

    async def cancel(self, request_id: str) -> bool:
        """End all requests of this name: their choices that still run end with the finish reason "abort". False when
        there is none. Raises `EngineError`."""
        return any([await self._cancel(f"{kind}-{quote(request_id, safe='')}") for kind in ID_PREFIXES])

    async def release_session(self, session: str) -> None:
        """Have the prefix of a session kept no longer; whether there is one makes no difference. Raises
        `EngineError`."""
        check_session(session)
        await self._read("POST", f"/v1/sessions/{quote(session, safe='')}/release")

    async def generate(
        self,
        prompt: str | Sequence[int] | ChatPrompt,
        params: SamplingParams | None = None,
        *,
        request_id: str = "",
        timeouts: Timeouts | None = None,
        tool_choice: str = "auto",
        parallel_tool_calls: bool = True,
        **terms: Unpack[AskedTerms],
    ) -> AsyncGenerator[Delta, None]:
        """Yield deltas of all `params.n` choices until each has finished, as `AsyncEngine.generate` does.

        Of a conversation's answer the server tells reasoning and tool calls from the text. tool_choice: of a prompt
        with tools, "auto", "none", "required" or the name of the function to call. parallel_tool_calls: more than one
        call in an answer. request_id: a name for it, by which it can be cancelled. timeouts: instead of the client's.
        terms: see `AskedTerms`.

        Leaving early (break, `aclose`, cancellation) closes the connection, which aborts the request. Raises
        `InvalidRequestError`, `OverloadedError`, `EngineDeadError` as the server reports them, `RequestTimeoutError`,
        and `EngineError` when the server cannot be reached.
        """
        params = SamplingParams() if params is None else params
        check_params(params)
        check_names(terms, AskedTerms)
        if request_id and not re.fullmatch(REQUEST_NAME, request_id):
            raise InvalidRequestError(f"request_id must match {REQUEST_NAME}, got {request_id!r}", param="request_id")
        if params.prompt_logprobs is not None or params.max_tokens == 0:
            raise InvalidRequestError(
                "a client's deltas do not have what a request for its prompt alone, or for its prompt's "
                "log-probabilities, is about",
                code="unsupported_parameter",
                param="prompt_logprobs" if params.prompt_logprobs is not None else "max_tokens",
            )
        body = request_body(
            prompt,
            params,
            model=self._model,
            tool_choice=tool_choice,
            parallel_tool_calls=parallel_tool_calls,
            terms=terms,
        )
        path = "/v1/chat/completions" if isinstance(prompt, ChatPrompt) else "/v1/completions"
        limits = TimeLimits(timeouts or self._timeouts)
        unfinished, output_seen = params.n, False
        try:
            response = await self._send("POST", path, limits, body=body, request_id=request_id)
            async with response:
                if response.status != 200:
                    async with limits.wait("first"):
                        raise error_of(await response.read(), response.status)
                answer = events(response)
                while True:
                    async with limits.wait("next" if output_seen else "first"):
                        data = await anext(answer, None)
                    if data is None:
                        break
                    delta = delta_of(data)
                    if delta is not None:
                        output_seen = True
                        unfinished -= delta.finish_reason is not None
                        yield delta
        except aiohttp.ClientError as error:
            raise self._unreachable(error) from error
        if unfinished:
            raise EngineDeadError("the server ended the stream before the answer was complete")

    async def _cancel(self, full_id: str) -> bool:
        try:
            await self._read("POST", f"/v1/requests/{full_id}/cancel")
        except EngineError as error:
            if error.code == "request_not_found":
                return False
            raise
        return True

    async def _read(self, method: str, path: str) -> bytes:
        """The whole answer. Raises `EngineError` for any but a good one."""
        limits = TimeLimits(self._timeouts)
        try:
            response = await self._send(method, path, limits)
            async with response, limits.wait("first"):
                body = await response.read()
        except aiohttp.ClientError as error:
            raise self._unreachable(error) from error
        if response.status != 200:
            raise error_of(body, response.status)
        return body

    async def _send(
        self,
        method: str,
        path: str,
        limits: TimeLimits,
        *,
        body: bytes | None = None,
        request_id: str = "",
        retry: RetryPolicy | None = None,
        no_room: Collection[int] = NO_ROOM,
    ) -> aiohttp.ClientResponse:
        """The beginning of an answer whose status is none of `no_room`; asks again as `retry` says, by default the
        client's. Raises `EngineError` and aiohttp's errors."""
        session = self._session
        if session is None:
            raise EngineError("the client is not open: use it as `async with AsyncClient(url) as client`")
        retry = retry or self._retry
        headers = {"Content-Type": "application/json"} | ({REQUEST_ID_HEADER: request_id} if request_id else {})
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=limits.timeouts.connect)
        for attempt in itertools.count(1):
            limits.begin_attempt()
            retry_after = None
            try:
                async with limits.wait("first"):
                    response = await session.request(
                        method, self._base_url + path, data=body, headers=headers, timeout=timeout
                    )
                    if response.status not in no_room:
                        return response
                    async with response:
                        failure = error_of(await response.read(), response.status)
                        retry_after = seconds_of(response.headers.get("Retry-After"), datetime.now(UTC))
            except aiohttp.ConnectionTimeoutError:
                raise RequestTimeoutError(
                    f"there was no connection to {self._base_url} after {limits.timeouts.connect:g} s",
                    code="connect_timeout",
                ) from None
            except aiohttp.ClientConnectorError as error:
                if not isinstance(error.os_error, ConnectionRefusedError):
                    raise
                failure = self._unreachable(error)
            wait = retry.wait(attempt, retry_after=retry_after, chance=self._chance())
            if wait is None:
                raise failure
            async with limits.wait("pause"):
                await self._sleep(wait)
        raise AssertionError("attempts are counted without an end")

    def _unreachable(self, error: aiohttp.ClientError) -> EngineError:
        return EngineError(f"no answer from {self._base_url}: {error}", code="connection_error")
