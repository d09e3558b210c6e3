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
from pathlib import Path
from typing import Unpack

import msgspec

from asyncengine.accounts import Accounts
from asyncengine.chat_prompt import ChatPrompt
from asyncengine.config import EngineConfig, Role
from asyncengine.delta import Delta
from asyncengine.delta_feed import DeltaFeed
from asyncengine.engine_info import DRAINING, EngineInfo, HealthState
from asyncengine.errors import (
    EngineDeadError,
    EngineError,
    InvalidRequestError,
    OverloadedError,
    QueueFullError,
)
from asyncengine.links import Links, Lives
from asyncengine.metrics import Totals, read_totals
from asyncengine.open_requests import OpenRequest, OpenRequests
from asyncengine.other_workers import OtherWorkers
from asyncengine.prompt_messages import (
    TokenizedPrompt,
    check_params,
    pack_ids,
    prompt_message,
    question_message,
    unpacked,
)
from asyncengine.questions import Questions
from asyncengine.recovery import Recovery
from asyncengine.request_terms import TenantTerms, check_session, resolve_terms
from asyncengine.sampling import SamplingParams
from asyncengine.streams import RequestStream
from asyncengine.tokenizer_links import TokenizerLinks
from asyncengine.wire.answers import Cancel, Cancelled, Crash, Deltas, Detokenized, Encoded, Failed, ToEngine, Tokenized
from asyncengine.wire.engine_pipes import ApiProcess
from asyncengine.wire.pipes import Pipes, Receiver
from asyncengine.wire.requests import Detokenize

logger = logging.getLogger(__name__)

DRAIN_LIMIT = 64
"""Messages read before the event loop's other callbacks get their turn."""
UNREAD_MESSAGES = 2
"""A sender's messages that may wait here unread. A detokenizer that finds no room merges what follows, so that a
process that is behind gets fewer and longer deltas instead of late ones."""
RETRY_SECONDS = 0.01
REFUSALS = {kind.status: kind for kind in (InvalidRequestError, OverloadedError, QueueFullError)}
"""What a `Failed` becomes, by its status; an `EngineError` for any other."""


class FrontEnd:
    """The requests of one API worker's process, which every rid names that it mints.

    The owner calls `_open`, `_serve` once the engine is ready, and `_shut`. Belongs to the event loop in which it was
    opened.
    """

    info: EngineInfo
    """Known once the engine is ready."""
    _pipes: Pipes
    _feed: DeltaFeed
    _loop: asyncio.AbstractEventLoop
    """These three are there once opened."""
    _links: Links
    _tokenizers: TokenizerLinks
    _recovery: Recovery
    _others: OtherWorkers
    """And these four once the engine is ready."""

    def __init__(self, config: EngineConfig, *, worker: int, workers: int = 1, life: int = 0) -> None:
        """workers: how many there are. life: how many were lost in this one's place. Raises `StartupError`."""
        self._config = config
        self._process = ApiProcess(worker, life)
        self._workers = workers
        self._state: HealthState = "starting"
        self._detail = "the engine is starting"
        self._receiver: Receiver | None = None
        self._fd = -1
        self._accounts: Accounts | None = None
        self._lives: Lives = {}
        self._requests = OpenRequests()
        self._questions = Questions()
        self._retry: asyncio.TimerHandle | None = None
        self._next_rid = self._process.first_rid
        self._draining = False

    @property
    def run_dir(self) -> Path | None:
        """Where the engine's processes keep accounts of themselves; None unless it runs."""
        return self._accounts.run_dir if self._accounts is not None else None

    async def generate(
        self,
        prompt: str | Sequence[int] | ChatPrompt,
        params: SamplingParams | None = None,
        *,
        namespace: str = "",
        request_id: str = "",
        **terms: Unpack[TenantTerms],
    ) -> AsyncGenerator[Delta, None]:
        """Yield deltas of all `params.n` choices until each has finished (exactly one `finish_reason` each).

        The request is submitted at the first iteration. Leaving early (break, `aclose`, cancellation) aborts it.
        Deltas that arrive while the caller is busy are merged into one per choice. Before the first delta:
        `InvalidRequestError`, `OverloadedError`; at any time `EngineDeadError` (all `EngineError`s).
        request_id: a name for it, by which it can be cancelled; several requests may share one. terms: see
        `TenantTerms`.
        """
        request = self._submit(prompt, SamplingParams() if params is None else params, namespace, request_id, terms)
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
        **terms: Unpack[TenantTerms],
    ) -> RequestStream:
        """Submit a request whose news are taken from within `listener`, which is called whenever there are some.

        It costs a fraction of `generate`, which wakes a task for each delta. Raises as `generate` does. The stream must
        be closed, which aborts what still runs.
        """
        request = self._submit(prompt, SamplingParams() if params is None else params, namespace, request_id, terms)
        request.stream.listener = listener
        request.stream.forget = partial(self._forget, request)
        return request.stream

    async def cancel(self, request_id: str, *, tenant: str = "") -> bool:
        """End all of the tenant's requests of this name, whichever API process has them: their choices that still run
        end with the finish reason "abort". False when there is none. Raises `EngineError`."""
        self._check_ready()
        if self._cancel_here(tenant, request_id):
            return True
        answers = self._others.cancel(tenant, request_id)
        self._push_on()
        found = await asyncio.gather(*answers, return_exceptions=True)
        silent = [error for error in found if isinstance(error, BaseException)]
        if silent and True not in found:
            raise silent[0]
        return True in found

    async def release_session(self, session: str, *, tenant: str = "") -> None:
        """Keep the prefix of the tenant's session no longer; whether there is such a session makes no difference. A
        request of it that still runs has it kept anew when it ends. Raises `EngineError`."""
        self._check_ready()
        check_session(session)
        self._links.release_session(tenant, session)
        self._push_on()

    async def tokenize(
        self, prompt: str | ChatPrompt, *, add_special_tokens: bool = True, texts: bool = False
    ) -> TokenizedPrompt:
        """The tokens that `prompt` would be run as. add_special_tokens: those that the tokenizer puts round a text;
        conversations have their template's. texts: each token's own text too. Raises `EngineError`."""
        self._check_ready()
        message, size = question_message(
            self._mint(1), prompt, add_special_tokens=add_special_tokens, texts=texts, info=self.info
        )
        answer: Tokenized = await self._tokenizers.ask(message, size)
        return TokenizedPrompt(memoryview(answer.ids).cast("i").tolist(), list(answer.texts) if texts else None)

    async def detokenize(self, ids: Sequence[int]) -> str:
        """The text of `ids`, special tokens included. Raises `EngineError`."""
        self._check_ready()
        ids = unpacked(ids)
        if isinstance(ids, list | tuple) and not ids:
            return ""
        packed = pack_ids(ids, self.info.vocab_size, name="tokens")
        answer: Detokenized = await self._tokenizers.ask(Detokenize(self._mint(1), packed), len(packed))
        return answer.text

    def totals(self) -> Totals:
        """What all requests of the engine amounted to since its start, those of other API processes included."""
        if self._accounts is None:
            raise EngineDeadError(self._detail)
        return read_totals(self._accounts.run_dir)

    def _open(self, pipes: Pipes, run_dir: Path, *, metrics_fd: int | None = None) -> None:
        """Bind the worker's pipe and read it from now on. metrics_fd: as in `SidecarConfig`. Raises `StartupError`."""
        self._accounts = Accounts(run_dir, self._process.worker, self._config, metrics_fd=metrics_fd)
        self._feed = DeltaFeed(self._requests, self._accounts.metrics)
        self._pipes = pipes
        self._receiver = pipes.receiver(self._process.pipe, ToEngine, high_water_mark=UNREAD_MESSAGES)
        self._fd = self._receiver.fd
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._fd, self._read)

    def _serve(self, info: EngineInfo, *, tokenizer_workers: int) -> None:
        """Take requests from now on."""
        self.info = info
        self._links = Links(
            self._pipes, tokenizer_workers=tokenizer_workers, lives=self._lives, questions=self._questions
        )
        self._tokenizers = self._links.tokenizers
        self._recovery = Recovery(
            links=self._links, requests=self._requests, mint=self._mint, count_end=self._feed.count_end
        )
        self._others = OtherWorkers(
            self._pipes,
            worker=self._process.worker,
            workers=self._workers,
            questions=self._questions,
            mint=partial(self._mint, 1),
        )
        for (role, index), life in self._lives.items():
            if role == "api_worker":
                self._others.relink(index, life)
        self._state, self._detail = "ready", ""

    def _relink(self, role: Role, index: int, life: int, crash: Crash | None = None) -> None:
        """Process `index` of `role` was lost, and number `life` is ready in its place: what was lost with it is sent
        out again. Idempotent. crash: gpu_runner's latest."""
        if self._state == "ready":
            if role == "api_worker":
                self._others.relink(index, life)
            self._recovery.relink(role, index, life, crash)
            self._push_on()
        else:
            self._lives[role, index] = life

    def _shut(self, detail: str) -> None:
        """End all streams with `detail`, and take no more of anything. Idempotent."""
        if self._state == "closed":
            return
        self._end_streams("closed", detail)
        if self._receiver is not None:
            asyncio.get_running_loop().remove_reader(self._fd)
            self._receiver = None
        if self._accounts is not None:
            self._accounts.close()
            self._accounts = None

    def _check_ready(self) -> None:
        if self._state != "ready":
            raise EngineDeadError(self._detail)
        if asyncio.get_running_loop() is not self._loop:
            raise EngineError("an engine is used in the event loop that it was started in", code="wrong_event_loop")

    def _submit(
        self,
        prompt: str | Sequence[int] | ChatPrompt,
        params: SamplingParams,
        namespace: str,
        request_id: str,
        asked: TenantTerms,
    ) -> OpenRequest:
        arrived = time.monotonic_ns()
        self._check_ready()
        if self._draining:
            raise OverloadedError(DRAINING.detail, code="shutting_down")
        check_params(params)
        if params.seed is None:
            params = msgspec.structs.replace(params, seed=secrets.randbits(63))
        terms = resolve_terms(asked, default_class=self._config.default_service_class)
        rid = self._mint(params.n)
        message, size = prompt_message(rid, prompt, params, namespace, terms, info=self.info)
        tokenizer = self._tokenizers.send(message)
        stream = RequestStream(n=params.n, stop=params.stop, stop_token_ids=params.stop_token_ids, terms=terms)
        stream.arrived = arrived
        self._feed.metrics.submitted(params.n)
        request = OpenRequest(stream, message, size, request_id)
        self._requests.add(request, num_choices=params.n, tokenizer=tokenizer)
        return request

    def _forget(self, request: OpenRequest) -> None:
        """Drop a request whose caller has left, and abort what still runs of it."""
        self._requests.remove(request)
        if self._state == "ready":
            self._abort(request, request.stream.unfinished)

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
        heard, self._feed.heard = self._feed.heard, {}
        for stream in heard:
            stream.notify()
        if self._feed.strays:
            self._abort_strays()
        if messages:  # recorded behind the tasks that were woken
            asyncio.get_running_loop().call_soon(self._record, begin, middle, messages, rows)
        if self._receiver is not None and self._receiver.pending():
            asyncio.get_running_loop().call_soon(self._read)

    def _record(self, begin: int, middle: int, messages: int, rows: int) -> None:
        if self._accounts is not None:
            self._accounts.turn(begin, middle, messages=messages, rows=rows, requests=self._requests.count)

    def _handle(self, message: ToEngine) -> None:
        match message:
            case Deltas():
                self._feed.deltas(message)
            case Encoded():
                self._feed.encoded(message)
            case Failed():
                self._refuse(message)
            case Tokenized() | Detokenized():
                self._questions.answer(message.rid, message)
            case Cancel():
                if self._state == "ready":
                    self._others.tell(message, found=self._cancel_here(message.tenant, message.request_id))
                    self._push_on()
            case Cancelled():
                self._questions.answer(message.call, message.found)

    def _refuse(self, failed: Failed) -> None:
        error = REFUSALS.get(failed.status, EngineError)(failed.message, code=failed.code or None, param=failed.param)
        choice = self._requests.get(failed.rid)
        if choice is None:
            self._questions.fail(failed.rid, error)
            return
        choice.attempt.acknowledge()
        stream = choice.stream
        if not stream.begun:
            choice.attempt.refused = True
        elif choice.index in stream.unfinished:
            self._feed.count_end(stream, choice.index, "error", at_ns=time.monotonic_ns())
        stream.fail(error, gone=(choice.index,))

    def _cancel_here(self, tenant: str, request_id: str) -> bool:
        """Cancel what runs under this name in this process; whether there was something."""
        found = False
        for request in self._requests.named(tenant, request_id):
            cancelled = request.stream.cancel(time.monotonic_ns())
            self._abort(request, cancelled)
            found = found or bool(cancelled)
        return found

    def _abort(self, request: OpenRequest, choices: Iterable[int]) -> None:
        """Have `choices` of a request end wherever they are."""
        for choice in map(request.choices.__getitem__, choices):
            if not choice.attempt.refused:
                self._feed.count_end(choice.stream, choice.index, "abort", at_ns=time.monotonic_ns())
            self._links.abort(choice.rid, choice.attempt.tokenizer)
        self._push_on()

    def _abort_strays(self) -> None:
        """Have rows end that run for nobody, as after a loss that took their abort along."""
        strays, self._feed.strays = self._feed.strays, []
        if self._state == "ready":
            for rid in strays:
                self._links.abort_stray(rid)
            self._push_on()

    def _push_on(self) -> None:
        """Have what was just sent leave, now or as soon as there is room."""
        if self._retry is None:
            self._flush()

    def _mint(self, count: int) -> int:
        """The first of `count` rids that nobody has had."""
        rid = self._next_rid
        self._next_rid += count
        return rid

    def _flush(self) -> None:
        """Push on what found a pipe full, now and until nothing is left."""
        self._retry = None
        if self._state != "ready":
            return
        flushed = [self._links.flush(), self._others.flush()]
        if not all(flushed):
            self._retry = asyncio.get_running_loop().call_later(RETRY_SECONDS, self._flush)

    def _end_streams(self, state: HealthState, detail: str) -> None:
        self._state, self._detail = state, detail
        error = EngineDeadError(detail, code="engine_dead")
        for request in self._requests:
            request.stream.fail(error)
        self._questions.fail_all(error)
