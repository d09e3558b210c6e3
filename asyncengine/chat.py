"""A conversation in the terminal, with an engine of its own or with a server that speaks OpenAI's API."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from importlib import import_module
from typing import Protocol

import aiohttp
import msgspec
import uvloop

from asyncengine.config import EngineConfig
from asyncengine.engine import AsyncEngine
from asyncengine.errors import EngineDeadError, EngineError, StartupError
from asyncengine.sampling import SamplingParams
from asyncengine.streams import ChatPrompt
from asyncengine.supervisor import StartupProgress

# What a model writes must not steer the terminal: control characters other than newline and tab are dropped.
CONTROL_CHARACTERS = {code: None for code in (*range(32), *range(0x7F, 0xA0)) if chr(code) not in "\n\t"}
DIM, PLAIN = "\033[2m", "\033[0m"
HELP = "Ctrl-C stops an answer; /clear forgets the conversation; /exit or Ctrl-D leaves."

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


@dataclass
class Answer:
    """What is known of an answer while it is written. Times in seconds of the monotonic clock."""

    started: float = field(default_factory=time.monotonic)
    first: float | None = None
    last: float = 0.0
    tokens: int | None = None
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def add(self, piece: Piece) -> None:
        if piece.text:
            self.last = time.monotonic()
            self.first = self.first or self.last
            self.pieces.append(piece.text)
        self.tokens = piece.tokens or self.tokens

    def summary(self) -> str:
        """How fast it came, as far as that can be said."""
        parts = [] if self.first is None else [f"first token after {self.first - self.started:.2f} s"]
        if self.tokens is not None:
            parts.append(f"{self.tokens} tokens")
            if self.first is not None and self.tokens > 1 and self.last > self.first:
                parts.append(f"{(self.tokens - 1) / (self.last - self.first):.1f} tokens/s")
        return ", ".join(parts)


class Chat:
    """Reads lines, prints answers. The event loop runs only while an answer is awaited, so that the line editor and
    Ctrl-C work as they do in any program."""

    def __init__(self, backend: Backend, options: ChatOptions) -> None:
        self._backend = backend
        self._system = [{"role": "system", "content": options.system}] if options.system else []
        self._messages: list[Message] = [*self._system]

    def run(self) -> int:
        """Converse until the user leaves; returns the exit code. Raises `StartupError`."""
        with contextlib.suppress(ImportError):
            import_module("readline")  # importing it gives `input` line editing and history
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            model = runner.run(self._backend.open())
            try:
                _say_dimly(f"{model}. {HELP}")
                return self._converse(runner)
            finally:
                runner.run(self._backend.close())

    def _converse(self, runner: asyncio.Runner) -> int:
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                return 0
            except KeyboardInterrupt:
                _say_dimly(f"\n{HELP}")
                continue
            match line:
                case "":
                    continue
                case "/exit":
                    return 0
                case "/clear":
                    self._messages = [*self._system]
                    continue
            try:
                self._turn(runner, line)
            except EngineDeadError as error:
                print(f"asyncengine: {error.message}", file=sys.stderr)
                return 1
            except EngineError as error:
                self._messages.pop()
                print(f"asyncengine: {error.message}", file=sys.stderr)

    def _turn(self, runner: asyncio.Runner, line: str) -> None:
        self._messages.append({"role": "user", "content": line})
        answer = Answer()
        stopped = ""
        try:
            runner.run(self._print_answer(answer))
        except KeyboardInterrupt:
            stopped = "stopped; "
        self._messages.append({"role": "assistant", "content": answer.text})
        _say_dimly(f"\n{stopped}{answer.summary()}")

    async def _print_answer(self, answer: Answer) -> None:
        async for piece in self._backend.stream(self._messages):
            answer.add(piece)
            sys.stdout.write(piece.text.translate(CONTROL_CHARACTERS))
            sys.stdout.flush()


def _say_dimly(text: str) -> None:
    print(f"{DIM}{text}{PLAIN}" if sys.stdout.isatty() else text, flush=True)
