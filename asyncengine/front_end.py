"""One API worker's end of the ring: sends prompts out, hands each stream its part of what comes back.

A request's way: `generate` -> tokenizer.{i} -> gpu_runner -> detokenizer -> engine.{w} -> `RequestStream` -> caller.
One pipe brings back everything; it is read in a callback of the event loop, and nothing here ever waits on a pipe.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from functools import partial
from itertools import repeat
from pathlib import Path

import msgspec

from asyncengine.config import API_WORKER_SHIFT
from asyncengine.engine_info import EngineInfo, HealthState
from asyncengine.errors import EngineDeadError, EngineError, InvalidRequestError, OverloadedError, StartupError
from asyncengine.logprobs import TokenLogprob, unpack
from asyncengine.metrics import RequestMetrics, Totals, read_totals
from asyncengine.open_requests import OpenRequest, OpenRequests, TokenizerLink
from asyncengine.prompt_messages import prompt_message
from asyncengine.sampling import SamplingParams
from asyncengine.streams import FINISH_REASONS, ChatPrompt, Delta, RequestStream
from asyncengine.wire.accounting import RingWriter, TurnRecord
from asyncengine.wire.messages import Abort, Deltas, Encoded, Failed, Finish, Openings, ToEngine
from asyncengine.wire.pipes import Pipes, Receiver, Sender

logger = logging.getLogger(__name__)

DRAIN_LIMIT = 64
"""Messages read before the event loop's other callbacks get their turn."""
UNREAD_MESSAGES = 2
"""A sender's messages that may wait here unread. A detokenizer that finds no room merges what follows, so that a
process that is behind gets fewer and longer deltas instead of late ones."""
RETRY_SECONDS = 0.01


class FrontEnd:
    """The requests of API worker `worker`, whose number is in the top bits of every rid it mints.

    The owner calls `_open`, `_serve` once the engine is ready, and `_shut`. Belongs to the event loop in which it was
    opened.
    """

    info: EngineInfo
    """Known once the engine is ready."""
    _metrics: RequestMetrics
    """There while `_run_dir` is."""

    def __init__(self, *, worker: int) -> None:
        self._worker = worker
        self._state: HealthState = "starting"
        self._detail = "the engine is starting"
        self._receiver: Receiver | None = None
        self._fd = -1
        self._ring: RingWriter[TurnRecord] | None = None
        self._run_dir: Path | None = None
        self._control: Sender | None = None
        self._tokenizers: list[TokenizerLink] = []
        self._requests = OpenRequests()
        self._heard: dict[RequestStream, None] = {}  # those to notify of what has been read
        self._retry: asyncio.TimerHandle | None = None
        self._next_rid = worker << API_WORKER_SHIFT

    async def generate(
        self,
        prompt: str | Sequence[int] | ChatPrompt,
        params: SamplingParams | None = None,
        *,
        namespace: str = "",
        request_id: str = "",
    ) -> AsyncGenerator[Delta, None]:
        """Yield deltas of all `params.n` choices until each has finished (exactly one `finish_reason` each).

        The request is submitted at the first iteration. Leaving early (break, `aclose`, cancellation) aborts it.
        Deltas that arrive while the caller is busy are merged into one per choice. Before the first delta:
        `InvalidRequestError`, `OverloadedError`; at any time `EngineDeadError` (all `EngineError`s).
        request_id: a name for it, by which it can be cancelled; several requests may share one.
        """
        request = self._submit(prompt, params or SamplingParams(), namespace, request_id)
        try:
            while (delta := await request.stream.next()) is not None:
                yield delta
        finally:
            self._forget(request)

    def subscribe(
        self,
        prompt: str | Sequence[int] | ChatPrompt,
        params: SamplingParams | None = None,
        *,
        listener: Callable[[], None],
        namespace: str = "",
        request_id: str = "",
    ) -> RequestStream:
        """Submit a request whose news are taken from within `listener`, which is called whenever there are some.

        It costs a fraction of `generate`, which wakes a task for each delta. Raises as `generate` does. The stream must
        be closed, which aborts what still runs.
        """
        request = self._submit(prompt, params or SamplingParams(), namespace, request_id)
        request.stream.listener = listener
        request.stream.forget = partial(self._forget, request)
        return request.stream

    def totals(self) -> Totals:
        """What all requests of the engine amounted to since its start, those of other API processes included."""
        if self._run_dir is None:
            raise EngineDeadError(self._detail)
        return read_totals(self._run_dir)

    def _open(self, pipes: Pipes, run_dir: Path) -> None:
        """Bind the worker's pipe and read it from now on. Raises `StartupError`."""
        try:
            self._metrics = RequestMetrics(run_dir, self._worker)
            self._ring = RingWriter(run_dir, "engine", self._worker, TurnRecord)
        except OSError as error:
            raise StartupError(f"cannot get memory for the engine's accounts: {error}") from error
        self._run_dir = run_dir
        self._receiver = pipes.receiver(f"engine.{self._worker}", ToEngine, high_water_mark=UNREAD_MESSAGES)
        self._fd = self._receiver.fd
        asyncio.get_running_loop().add_reader(self._fd, self._read)

    def _serve(self, pipes: Pipes, info: EngineInfo, *, tokenizer_workers: int) -> None:
        """Take requests from now on."""
        self.info = info
        self._control = pipes.sender("runner.control")
        self._tokenizers = [TokenizerLink(pipes.sender(f"tokenizer.{i}")) for i in range(tokenizer_workers)]
        self._state, self._detail = "ready", ""

    def _shut(self, detail: str) -> None:
        """End all streams with `detail`, and take no more of anything. Idempotent."""
        if self._state == "closed":
            return
        self._end_streams("closed", detail)
        if self._receiver is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            self._receiver = None
        if self._ring is not None:
            self._ring.close()
            self._ring = None
        if self._run_dir is not None:
            self._metrics.close()
            self._run_dir = None

    def _submit(
        self, prompt: str | Sequence[int] | ChatPrompt, params: SamplingParams, namespace: str, request_id: str = ""
    ) -> OpenRequest:
        arrived = time.monotonic_ns()
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
        stream.arrived = arrived
        self._metrics.submitted(params.n)
        request = OpenRequest(stream, tokenizer, size, request_id)
        self._requests.add(request)
        return request

    def _forget(self, request: OpenRequest) -> None:
        """Drop a request whose caller has left, and abort what still runs of it."""
        stream = request.stream
        request.acknowledge()
        self._requests.remove(request)
        if self._state != "ready" or self._control is None:
            return
        for index in stream.unfinished:
            if not request.refused:
                self._count_end(stream, index, "abort", at_ns=time.monotonic_ns())
            abort = Abort(stream.rid + index)
            self._control.send(abort)
            request.tokenizer.sender.send(abort)
        if self._retry is None:
            self._flush()

    def _read(self) -> None:
        """Take in what has arrived on the engine's pipe; the descriptor is edge-triggered, so leave nothing unseen."""
        if self._receiver is None:
            return
        begin, messages, rows = time.monotonic_ns(), 0, 0
        for message in self._receiver.drain(DRAIN_LIMIT):
            messages += 1
            rows += len(message.rids) // 8 if isinstance(message, Deltas) else 0
            try:
                self._handle(message)
            except (TypeError, ValueError, IndexError):
                logger.exception("dropped a frame whose columns contradict each other")
        middle = time.monotonic_ns()
        # after all frames that had arrived: a stream that is behind gets one longer delta
        heard, self._heard = self._heard, {}
        for stream in heard:
            stream.notify()
        if messages:  # recorded behind the tasks that were woken
            asyncio.get_running_loop().call_soon(self._record, begin, middle, messages, rows)
        if self._receiver is not None and self._receiver.pending():
            asyncio.get_running_loop().call_soon(self._read)

    def _record(self, begin: int, middle: int, messages: int, rows: int) -> None:
        if self._ring is not None:
            self._ring.write((begin, middle, time.monotonic_ns(), messages, rows, self._requests.count, 0))

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Deltas():
                self._feed(message)
            case Encoded():
                for rid in memoryview(message.rids).cast("Q"):
                    if request := self._requests.get(rid):
                        request.acknowledge()
                        self._encoded(request.stream, message.at_ns)
            case Failed():
                self._refuse(message)

    def _feed(self, deltas: Deltas) -> None:
        """The one loop over requests: hand each its part of a frame."""
        now = time.monotonic_ns()
        if deltas.openings is not None:
            self._open_choices(deltas, deltas.openings)
        news: list[int] = []  # when each had news before
        text, ids = memoryview(deltas.text), memoryview(deltas.ids)
        text_start = ids_start = 0
        logprobs: Iterable[Sequence[TokenLogprob]]
        logprobs = repeat((), len(deltas.rids) // 8) if deltas.logprobs is None else unpack(deltas.logprobs)
        for rid, text_end, ids_end, finish, stop_reason, prompt_tokens, cached_tokens, entries in zip(
            memoryview(deltas.rids).cast("Q"),
            memoryview(deltas.text_ends).cast("i"),
            memoryview(deltas.ids_ends).cast("i"),
            deltas.finish,
            memoryview(deltas.stop_reason).cast("i"),
            memoryview(deltas.prompt_tokens).cast("i"),
            memoryview(deltas.cached_tokens).cast("i"),
            logprobs,
            strict=True,
        ):
            request = self._requests.get(rid)
            if request is not None:
                stream = request.stream
                self._heard[stream] = None
                before = stream.feed(
                    rid - stream.rid,
                    text[text_start:text_end],
                    ids[4 * ids_start : 4 * ids_end],
                    finish=finish,
                    stop_reason=stop_reason,
                    prompt_tokens=prompt_tokens,
                    cached_tokens=cached_tokens,
                    logprobs=entries,
                    now=now,
                )
                if before is not None:
                    news.append(before)
                    if finish or not before:
                        self._count_ends(stream, rid - stream.rid, bool(before), finish, now)
            text_start, ids_start = text_end, ids_end
        self._metrics.frame(now, news, tokens=len(deltas.ids) // 4)

    def _open_choices(self, deltas: Deltas, openings: Openings) -> None:
        rids = memoryview(deltas.rids).cast("Q")
        stamps = memoryview(openings.stamps).cast("q")
        for place, row in enumerate(memoryview(openings.rows).cast("i")):
            if request := self._requests.get(rids[row]):
                request.stream.open(rids[row] - request.stream.rid, *stamps[3 * place : 3 * place + 3])

    def _encoded(self, stream: RequestStream, at_ns: int) -> None:
        stream.encoded = at_ns
        if at_ns:
            self._metrics.encoded((at_ns - stream.arrived) / 1e9)

    def _count_ends(self, stream: RequestStream, index: int, begun_before: bool, finish: int, now: int) -> None:
        """Count the first and the last news of a choice."""
        if not begun_before and stream.num_tokens(index):
            self._metrics.begun(stream.timeline(index), prompt_tokens=stream.prompt_tokens(index))
        if finish:
            self._count_end(stream, index, FINISH_REASONS.get(Finish(finish), "error"), at_ns=now)

    def _count_end(self, stream: RequestStream, index: int, reason: str, *, at_ns: int) -> None:
        timeline = msgspec.structs.replace(stream.timeline(index), finished=at_ns)
        self._metrics.ended(reason, timeline, tokens=stream.num_tokens(index))

    def _refuse(self, failed: Failed) -> None:
        request = self._requests.get(failed.rid)
        if request is None:
            return
        request.acknowledge()
        request.refused = True
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

    def _end_streams(self, state: HealthState, detail: str) -> None:
        self._state, self._detail = state, detail
        for request in self._requests:
            request.stream.fail(EngineDeadError(detail, code="engine_dead"))
