"""The engine as a library: starts the sidecars, takes prompts, hands back streams of deltas.

A request's way: `generate` -> tokenizer.{i} -> gpu_runner -> detokenizer -> engine.0 -> `RequestStream` -> caller. One
pipe brings back everything; it is read in a callback of the event loop, and nothing here ever waits on a pipe.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Generator, Mapping, Sequence
from types import TracebackType

import msgspec

from asyncengine.config import API_WORKER_SHIFT, EngineConfig, Role
from asyncengine.engine_info import EngineInfo, Health, HealthState
from asyncengine.errors import EngineDeadError, EngineError, InvalidRequestError, OverloadedError
from asyncengine.prompt_messages import prompt_message
from asyncengine.sampling import SamplingParams
from asyncengine.streams import ChatPrompt, Delta, RequestStream
from asyncengine.supervisor import StartupProgress, Supervisor
from asyncengine.wire.messages import (
    Abort,
    Deltas,
    Encoded,
    Failed,
    RunnerInfo,
    ToEngine,
    TokenizerInfo,
)
from asyncengine.wire.pipes import Receiver, Sender

logger = logging.getLogger(__name__)

API_WORKER = 0
DRAIN_LIMIT = 64
"""Messages read before the event loop's other callbacks get their turn."""
UNREAD_MESSAGES = 2
"""A sender's messages that may wait here unread. A detokenizer that finds no room merges what follows, so that a
process that is behind gets fewer and longer deltas instead of late ones."""
RETRY_SECONDS = 0.01


class _Tokenizer:
    """One tokenizer worker's pipe, and the prompt bytes sent to it that it has not acknowledged."""

    __slots__ = ("sender", "unacked_bytes")

    def __init__(self, sender: Sender) -> None:
        self.sender = sender
        self.unacked_bytes = 0


class _Request:
    """An open request: its stream, its tokenizer, and the bytes of its prompt while they are unacknowledged."""

    __slots__ = ("stream", "tokenizer", "unacked_bytes")

    def __init__(self, stream: RequestStream, tokenizer: _Tokenizer, prompt_bytes: int) -> None:
        self.stream = stream
        self.tokenizer = tokenizer
        self.unacked_bytes = prompt_bytes
        tokenizer.unacked_bytes += prompt_bytes

    def acknowledge(self) -> None:
        self.tokenizer.unacked_bytes -= self.unacked_bytes
        self.unacked_bytes = 0


class AsyncEngine:
    """An engine: `async with AsyncEngine.start(config) as engine`, or `engine = await AsyncEngine.start(config)` and
    `await engine.close()`. Belongs to the event loop it was started in."""

    info: EngineInfo
    """Known once started."""

    def __init__(
        self, config: EngineConfig, *, progress: StartupProgress | None, modules: Mapping[Role, str] | None
    ) -> None:
        self._config = config
        self._supervisor = Supervisor(config, on_failure=self._fail, progress=progress, modules=modules)
        self._state: HealthState = "starting"
        self._detail = "the engine is starting"
        self._begun = False
        self._failed = asyncio.Event()
        self._receiver: Receiver | None = None
        self._fd = -1
        self._control: Sender | None = None
        self._tokenizers: list[_Tokenizer] = []
        self._requests: dict[int, _Request] = {}  # by the rid of every choice
        self._open_streams = 0
        self._retry: asyncio.TimerHandle | None = None
        self._next_rid = API_WORKER << API_WORKER_SHIFT

    @classmethod
    def start(
        cls,
        config: EngineConfig,
        *,
        progress: StartupProgress | None = None,
        modules: Mapping[Role, str] | None = None,
    ) -> AsyncEngine:
        """An engine that starts when awaited or entered; that raises `StartupError` and then leaves nothing behind.

        modules: the module to run for a role in place of the role's own package.
        """
        return cls(config, progress=progress, modules=modules)

    def __await__(self) -> Generator[object, None, AsyncEngine]:
        return self._start().__await__()

    async def __aenter__(self) -> AsyncEngine:
        return await self._start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def generate(
        self,
        prompt: str | Sequence[int] | ChatPrompt,
        params: SamplingParams | None = None,
        *,
        namespace: str = "",
    ) -> AsyncGenerator[Delta, None]:
        """Yield deltas of all `params.n` choices until each has finished (exactly one `finish_reason` each).

        The request is submitted at the first iteration. Leaving early (break, `aclose`, cancellation) aborts it.
        Deltas that arrive while the caller is busy are merged into one per choice. Before the first delta:
        `InvalidRequestError`, `OverloadedError`; at any time `EngineDeadError` (all `EngineError`s).
        """
        request = self._submit(prompt, params or SamplingParams(), namespace)
        try:
            while (delta := await request.stream.next()) is not None:
                yield delta
        finally:
            self._forget(request)

    async def close(self) -> None:
        """Stop everything: open streams raise `EngineDeadError`, no process, socket or file is left. Idempotent."""
        if self._state != "closed":
            self._end_streams("closed", "the engine was closed")
            if self._receiver is not None:
                asyncio.get_running_loop().remove_reader(self._fd)
                self._receiver = None
        await self._supervisor.close()

    def gauges(self) -> dict[str, int]:
        """Latest gauges of gpu_runner (running, waiting, free_pages, cached_pages, total_pages, ...; at most about
        0.25 s old) plus `open_streams` of this process."""
        return self._supervisor.gauges("gpu_runner") | {"open_streams": self._open_streams}

    @property
    def health(self) -> Health:
        if self._state == "ready":
            stalled = self._supervisor.stalled(runner_on_cpu=self.info.device == "cpu")
            if stalled:
                return Health(state="stalled", detail=f"no sign of life from {', '.join(stalled)}")
        return Health(state=self._state, detail=self._detail)

    async def wait_failed(self) -> str:
        """Sleep until a process of the engine is lost, which it cannot recover from; returns what happened."""
        await self._failed.wait()
        return self._detail

    async def _start(self) -> AsyncEngine:
        if self._begun:
            raise EngineError("an AsyncEngine is started once")
        self._begun = True
        try:
            model = await self._supervisor.prepare()
            self._receiver = self._supervisor.pipes.receiver(
                f"engine.{API_WORKER}", ToEngine, high_water_mark=UNREAD_MESSAGES
            )
            self._fd = self._receiver.fd
            asyncio.get_running_loop().add_reader(self._fd, self._read)
            await self._supervisor.launch(model)
            runner = msgspec.convert(self._supervisor.ready_info("gpu_runner"), RunnerInfo)
            tokenizer = msgspec.convert(self._supervisor.ready_info("tokenizer_proc"), TokenizerInfo)
            self.info = EngineInfo(
                model=self._config.served_model_name or model.served_name,
                model_path=str(model.path),
                has_chat_template=tokenizer.has_chat_template,
                **msgspec.structs.asdict(runner),
            )
            pipes = self._supervisor.pipes
            self._control = pipes.sender("runner.control")
            self._tokenizers = [
                _Tokenizer(pipes.sender(f"tokenizer.{i}")) for i in range(self._config.tokenizer_workers)
            ]
        except BaseException:
            await self.close()
            raise
        self._state, self._detail = "ready", ""
        return self

    def _submit(self, prompt: str | Sequence[int] | ChatPrompt, params: SamplingParams, namespace: str) -> _Request:
        if self._state != "ready":
            raise EngineDeadError(self._detail)
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=secrets.randbits(63))
        rid = self._next_rid
        message, size = prompt_message(rid, prompt, params, namespace, info=self.info)
        tokenizer = min(self._tokenizers, key=lambda worker: worker.unacked_bytes)
        if not tokenizer.sender.try_send(message):
            raise OverloadedError("the engine has no room for another prompt now", code="overloaded")
        self._next_rid += params.n
        stream = RequestStream(rid, n=params.n, stop=params.stop, stop_token_ids=params.stop_token_ids)
        request = _Request(stream, tokenizer, size)
        for choice_rid in range(rid, rid + params.n):
            self._requests[choice_rid] = request
        self._open_streams += 1
        return request

    def _forget(self, request: _Request) -> None:
        """Drop a request whose caller has left, and abort what still runs of it."""
        stream, self._open_streams = request.stream, self._open_streams - 1
        request.acknowledge()
        for choice_rid in range(stream.rid, stream.rid + stream.n):
            del self._requests[choice_rid]
        if self._state != "ready" or self._control is None:
            return
        for index in stream.unfinished:
            abort = Abort(stream.rid + index)
            self._control.send(abort)
            request.tokenizer.sender.send(abort)
        if self._retry is None:
            self._flush()

    def _read(self) -> None:
        """Take in what has arrived on the engine's pipe; the descriptor is edge-triggered, so leave nothing unseen."""
        if self._receiver is None:
            return
        for message in self._receiver.drain(DRAIN_LIMIT):
            try:
                self._handle(message)
            except (TypeError, ValueError):
                logger.exception("dropped a frame whose columns contradict each other")
        if self._receiver.pending():
            asyncio.get_running_loop().call_soon(self._read)

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Deltas():
                self._feed(message)
            case Encoded():
                for rid in memoryview(message.rids).cast("Q"):
                    if request := self._requests.get(rid):
                        request.acknowledge()
            case Failed():
                self._refuse(message)

    def _feed(self, deltas: Deltas) -> None:
        """The one loop over requests: hand each its part of a frame."""
        text, ids = memoryview(deltas.text), memoryview(deltas.ids)
        text_start = ids_start = 0
        for rid, text_end, ids_end, finish, stop_reason, prompt_tokens, cached_tokens in zip(
            memoryview(deltas.rids).cast("Q"),
            memoryview(deltas.text_ends).cast("i"),
            memoryview(deltas.ids_ends).cast("i"),
            deltas.finish,
            memoryview(deltas.stop_reason).cast("i"),
            memoryview(deltas.prompt_tokens).cast("i"),
            memoryview(deltas.cached_tokens).cast("i"),
            strict=True,
        ):
            request = self._requests.get(rid)
            if request is not None:
                request.stream.feed(
                    rid - request.stream.rid,
                    text[text_start:text_end],
                    ids[4 * ids_start : 4 * ids_end],
                    finish=finish,
                    stop_reason=stop_reason,
                    prompt_tokens=prompt_tokens,
                    cached_tokens=cached_tokens,
                )
            text_start, ids_start = text_end, ids_end

    def _refuse(self, failed: Failed) -> None:
        request = self._requests.get(failed.rid)
        if request is None:
            return
        request.acknowledge()
        kind = InvalidRequestError if failed.status == 400 else OverloadedError if failed.status == 503 else EngineError
        error = kind(failed.message, code=failed.code or None, param=failed.param)
        request.stream.fail(error, gone=failed.rid - request.stream.rid)

    def _flush(self) -> None:
        """Push on aborts that found a pipe full, now and until none is left."""
        self._retry = None
        if self._state != "ready" or self._control is None:
            return
        flushed = [sender.flush() for sender in (self._control, *(worker.sender for worker in self._tokenizers))]
        if not all(flushed):
            self._retry = asyncio.get_running_loop().call_later(RETRY_SECONDS, self._flush)

    def _fail(self, reason: str) -> None:
        logger.error("the engine has failed: %s", reason)
        self._end_streams("failed", reason)
        self._failed.set()

    def _end_streams(self, state: HealthState, detail: str) -> None:
        self._state, self._detail = state, detail
        for request in set(self._requests.values()):
            request.stream.fail(EngineDeadError(detail, code="engine_dead"))
