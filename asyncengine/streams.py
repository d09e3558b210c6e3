"""The stream that brings a caller its deltas, and merges them while the caller is busy elsewhere."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from asyncengine.delta import FINISH_REASONS, Delta
from asyncengine.errors import EngineDeadError, EngineError
from asyncengine.logprobs import PromptLogprob, TokenLogprob
from asyncengine.terms import DEFAULT_TERMS, Terms
from asyncengine.timeline import Timeline
from asyncengine.wire.base import Finish
from asyncengine.wire.requests import Resume

ENTRY_BYTES = 150
"""About what a token's log-probability takes here, and each of those beside it."""


@dataclass(slots=True, eq=False)
class _Choice:
    """One choice's news since the caller last looked, and what it has had so far: all its ids, the bytes of its text
    and the number of its log-probabilities, from which it can go on if a process is lost."""

    text: bytearray = field(default_factory=bytearray)
    """UTF-8; every delta ends on a character border, so any concatenation decodes."""
    text_bytes: int = 0
    ids: array[int] = field(default_factory=lambda: array("i"))
    taken: int = 0  # of `ids`: the caller has them
    logprobs: list[TokenLogprob] = field(default_factory=list)
    num_logprobs: int = 0
    prompt_logprobs: list[PromptLogprob] | None = None
    finish: int = 0
    stop_reason: int = -1
    prompt_tokens: int = 0
    cached_tokens: int = 0
    session_tokens: int | None = None  # as in `Delta`, and its `first_differing_token`
    differs_at: int | None = None
    stamps: tuple[int, int, int] = (0, 0, 0)  # gpu_runner's: queued, started, first token
    marks: bytes = b""  # gpu_runner's, as in `RowMarks`
    first_seen: int = 0  # ns
    last_seen: int = 0


class RequestStream:
    """The receiving end of one request: at most one pending delta per choice, however far behind its caller is.

        event loop     feed(0,"a")   feed(0,"b")   feed(0,"c")               feed(0,"d")
        caller      next() -> "a" | busy ................... | next() -> "bc" | next() sleeps -> "d"

    One caller at a time may wait in `next`. One that would rather be called sets `listener`, which is called after each
    batch of news and when the stream fails, and then may `take`; it must not raise. Everything runs in one event loop.
    """

    __slots__ = (
        "_choices",
        "_error",
        "_pending",
        "_stop",
        "_stop_token_ids",
        "_unfinished",
        "_waiter",
        "arrived",
        "encoded",
        "forget",
        "listener",
        "terms",
    )

    def __init__(
        self, *, n: int, stop: tuple[str, ...], stop_token_ids: tuple[int, ...], terms: Terms = DEFAULT_TERMS
    ) -> None:
        self.terms = terms
        self._stop = stop
        self._stop_token_ids = stop_token_ids
        self._choices = [_Choice() for _ in range(n)]
        self._pending: dict[int, None] = {}  # choices with news, oldest news first
        self._unfinished = set(range(n))
        self._error: EngineError | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.listener: Callable[[], None] | None = None
        self.forget: Callable[[], None] | None = None
        self.arrived = 0  # when it was submitted, ns; 0 for a stream that keeps no timelines
        self.encoded = 0

    @property
    def unfinished(self) -> list[int]:
        """Choices that still run as far as this process has heard."""
        return sorted(self._unfinished)

    @property
    def begun(self) -> bool:
        """There was news of a choice."""
        return any(choice.first_seen for choice in self._choices)

    def open(
        self, index: int, queued: int, started: int, computed: int, session_tokens: int = -1, session_common: int = 0
    ) -> None:
        """Take in when gpu_runner got choice `index`, planned it and had its first token, and what it knew of its
        session, as in `Open`. That happens again to one that was lost, and then is ignored if there was news of it."""
        choice = self._choices[index]
        if not choice.first_seen:
            choice.stamps = (queued, started, computed)
            choice.session_tokens = session_tokens if session_tokens >= 0 else None
            choice.differs_at = session_common if session_common < session_tokens else None

    def mark(self, index: int, marks: bytes) -> None:
        """Take in what else gpu_runner has done for choice `index`: more of `Timeline.marks`."""
        self._choices[index].marks += marks

    def take_prompt(self, index: int, entries: list[PromptLogprob]) -> None:
        """Take in the prompt of choice `index`, before its first news; ignored after that."""
        choice = self._choices[index]
        if not choice.first_seen:
            choice.prompt_logprobs = entries

    def resume(self, index: int, *, logprobs: bool) -> tuple[Resume, int]:
        """Where choice `index` goes on that was lost, and how many tokens will be told again that are here. logprobs:
        its tokens have log-probabilities; only tokens whose own are here need not be computed again."""
        choice = self._choices[index]
        count = self.num_tokens(index)
        known = choice.num_logprobs if logprobs else count
        return Resume(index, choice.ids[:known].tobytes(), choice.text_bytes), count - known

    def timeline(self, index: int) -> Timeline:
        """Of choice `index`, as far as it has come."""
        choice = self._choices[index]
        queued, started, computed = choice.stamps
        return Timeline(
            arrived=self.arrived,
            encoded=self.encoded or queued,
            queued=queued,
            started=started,
            computed=computed,
            seen=choice.first_seen,
            finished=choice.last_seen,
            marks=choice.marks,
        )

    def num_tokens(self, index: int) -> int:
        """Tokens of choice `index` so far."""
        return len(self._choices[index].ids)

    def prompt_tokens(self, index: int) -> int:
        """Tokens of choice `index`'s prompt; 0 before its first news."""
        return self._choices[index].prompt_tokens

    def feed(
        self,
        index: int,
        text: bytes | memoryview,
        ids: bytes | memoryview,
        *,
        finish: int,
        stop_reason: int,
        prompt_tokens: int,
        cached_tokens: int,
        logprobs: Sequence[TokenLogprob] = (),
        now: int = 0,
    ) -> int | None:
        """Add news of choice `index`: `text` in UTF-8, `ids` an int32 array as bytes, the rest as in `Deltas`; `now`:
        when they came, ns. Returns when it had news before, 0 for its first, None if it has ended already."""
        if index not in self._unfinished:
            return None
        choice = self._choices[index]
        before, choice.last_seen = choice.last_seen, now
        if not before:
            choice.first_seen = now
            choice.prompt_tokens = prompt_tokens
            choice.cached_tokens = cached_tokens
        if finish:
            if finish == Finish.ERROR:
                message = f"the model produced token id {stop_reason}, which is outside its tokenizer's vocabulary"
                self.fail(EngineError(message, code="invalid_output_token"), gone=(index,))
                return before
            if finish == Finish.ABORT:  # of an abort that came from here, nothing more would be heard
                error = EngineDeadError("the engine stopped before the answer was complete", code="aborted")
                self.fail(error, gone=(index,))
                return before
            choice.finish = finish
            choice.stop_reason = stop_reason
            self._unfinished.discard(index)
        choice.text += text
        choice.text_bytes += len(text)
        choice.ids.frombytes(ids)
        if logprobs:
            choice.logprobs += logprobs
            choice.num_logprobs += len(logprobs)
        self._pending[index] = None
        if self._waiter is not None:
            self._wake()
        return before

    def fail(self, error: EngineError, *, gone: Iterable[int] = ()) -> None:
        """End the stream with `error` once pending news has been taken; choices `gone` are known to run no longer."""
        self._unfinished.difference_update(gone)
        if self._error is None:
            self._error = error
            self._wake()
            self.notify()

    def cancel(self, now: int) -> list[int]:
        """End every choice that still runs with "abort", behind what it has produced, at `now` (ns). Returns these
        choices; none of a stream that has failed."""
        if self._error is not None:
            return []
        cancelled = self.unfinished
        for index in cancelled:
            self._choices[index].finish = Finish.ABORT
            self._choices[index].last_seen = now
            self._pending[index] = None
        self._unfinished.clear()
        self._wake()
        self.notify()
        return cancelled

    def notify(self) -> None:
        """Call the listener, if there is one."""
        if self.listener is not None:
            self.listener()

    @property
    def ended(self) -> bool:
        """Nothing more will come: every choice has ended, or the stream has failed."""
        return not self._unfinished or self._error is not None

    @property
    def over(self) -> bool:
        """Nothing is left to take, and nothing will come but perhaps what `take` raises."""
        return not self._pending and self.ended

    @property
    def pending_bytes(self) -> int:
        """About how much memory the news takes that nobody has taken."""
        size = 0
        for index in self._pending:
            choice = self._choices[index]
            size += len(choice.text) + 4 * (len(choice.ids) - choice.taken)
            if choice.logprobs:
                size += len(choice.logprobs) * ENTRY_BYTES * (1 + len(choice.logprobs[-1].top))
        return size

    def take(self) -> list[Delta]:
        """All news, oldest first, without waiting. Raises what `fail` was given when no news is left."""
        if not self._pending and self._error is not None:
            raise self._error
        deltas = [self._take(index) for index in self._pending]
        self._pending.clear()
        return deltas

    def close(self) -> None:
        """The listener is not called again, and what still runs is aborted if there is somebody to `forget` it.
        Idempotent."""
        self.listener = None
        forget, self.forget = self.forget, None
        if forget is not None:
            forget()

    async def next(self) -> Delta | None:
        """The oldest news of a choice, waiting for some; None when all have ended. Raises what `fail` was given."""
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self._unfinished:
                return None
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        index = next(iter(self._pending))
        del self._pending[index]
        return self._take(index)

    def _take(self, index: int) -> Delta:
        choice = self._choices[index]
        text, ids, logprobs = choice.text, choice.ids[choice.taken :], choice.logprobs
        choice.text, choice.taken, choice.logprobs = bytearray(), len(choice.ids), []
        prompt_logprobs, choice.prompt_logprobs = choice.prompt_logprobs, None
        ends = choice.finish != 0
        return Delta(
            index=index,
            text=text.decode("utf-8", "replace"),
            token_ids=ids.tolist(),
            prompt_tokens=choice.prompt_tokens,
            cached_tokens=choice.cached_tokens,
            session_tokens=choice.session_tokens,
            first_differing_token=choice.differs_at,
            completion_tokens=choice.taken,
            finish_reason=FINISH_REASONS[Finish(choice.finish)] if ends else None,
            stop_reason=self._stop_reason(choice) if ends else None,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            timeline=self.timeline(index) if ends and self.arrived else None,
        )

    def _stop_reason(self, choice: _Choice) -> int | str | None:
        if choice.finish == Finish.STOP_STRING and 0 <= choice.stop_reason < len(self._stop):
            return self._stop[choice.stop_reason]
        if choice.finish == Finish.STOP and choice.stop_reason in self._stop_token_ids:
            return choice.stop_reason
        return None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
