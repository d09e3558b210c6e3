"""What an API process does when another process was lost and replaced: sends its requests out again.

    stream      "The cap" | gpu_runner lost ................ | "ital is"
    rid 7       tokens 1-3 | aborted; what still comes of it is dropped
    rid 9                  | prompt + tokens 1-3, 7 bytes of text are there | tokens 4, 5

A choice sent out again has a new rid, so nothing of the old one can mix with it; it goes on behind the tokens that its
stream has, and only what the stream does not have is told again. Nothing its caller sees shows that it happened; unless
it turned out to be what crashes gpu_runner (`crashes`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import msgspec

from asyncengine.config import Role
from asyncengine.errors import CrashingRequestError, EngineError
from asyncengine.links import Links
from asyncengine.open_requests import OpenChoice, OpenRequest, OpenRequests
from asyncengine.streams import RequestStream
from asyncengine.wire.answers import Crash

logger = logging.getLogger(__name__)


CRASHES_US = "the engine crashes each time that it computes this request, so it has given it up"


class CountEnd(Protocol):
    """As `DeltaFeed.count_end`."""

    def __call__(self, stream: RequestStream, index: int, reason: str, *, at_ns: int) -> None: ...


class Recovery:
    def __init__(
        self, *, links: Links, requests: OpenRequests, mint: Callable[[int], int], count_end: CountEnd
    ) -> None:
        """mint: the first of so many rids that nobody has had."""
        self._links = links
        self._requests = requests
        self._mint = mint
        self._count_end = count_end

    def relink(self, role: Role, index: int, life: int, crash: Crash | None = None) -> None:
        """Process `index` of `role` was lost, and number `life` is ready in its place. Idempotent. crash:
        gpu_runner's latest, if there was one. The owner flushes the links afterwards."""
        before = self._links.life(role, index)
        if not self._links.relink(role, index, life):
            return
        affected = self._affected(role, index)
        convicted: set[RequestStream] = set()
        if role == "gpu_runner" and crash is not None and crash.life > before:
            convicted = self._blame(crash)
        again: list[tuple[OpenRequest, list[OpenChoice]]] = []
        failed: list[Callable[[], None]] = []
        for request in self._requests:
            running = [] if request.stream.ended else request.stream.unfinished
            if request.stream in convicted and running:
                failed.append(partial(self._convict, request, running))
            elif lost := [choice for choice in map(request.choices.__getitem__, running) if affected(choice)]:
                again.append((request, lost))
        choices = sent = 0
        # suspects first: while gpu_runner has some, it keeps what comes behind them waiting
        for request, lost in sorted(again, key=lambda each: not any(choice.trial_tokens for choice in each[1])):
            try:
                self._resubmit(request, lost, same_runner=role != "gpu_runner")
            except EngineError as error:
                failed.append(partial(request.stream.fail, error))
            else:
                choices, sent = choices + len(lost), sent + 1
        if role == "tokenizer_proc":
            self._links.tokenizers[index].ask_again()
        if sent:
            logger.warning("%s %d was replaced: sent %d choices of %d requests again", role, index, choices, sent)
        for fail in failed:  # only now: whoever hears it may close other requests
            fail()

    def _blame(self, crash: Crash) -> set[RequestStream]:
        """Note whom `crash` casts suspicion on; returns the one that is convicted, if it is of this process. That one
        explains the crashes before, too: nobody else is a suspect any longer."""
        noted = set(crash.convicts or memoryview(crash.rids).cast("q"))
        choices = [choice for request in self._requests for choice in request.choices]
        found = [choice for choice in choices if not noted.isdisjoint((choice.rid, *choice.old_rids))]
        if not crash.convicts:
            for choice in found:
                choice.crashed()
            return set()
        for choice in choices:
            choice.crashes = 0
        return {choice.stream for choice in found}

    def _convict(self, request: OpenRequest, running: list[int]) -> None:
        logger.error(
            "gpu_runner crashes each time it runs request %s, which has been ended", request.name or "(unnamed)"
        )
        now = time.monotonic_ns()
        for index in running:
            self._count_end(request.stream, index, "error", at_ns=now)
        request.stream.fail(CrashingRequestError(CRASHES_US, code="request_crashes_engine"), gone=running)

    def _affected(self, role: Role, index: int) -> Callable[[OpenChoice], bool]:
        """Whether a choice that has not ended may have been lost with the process."""
        if role == "tokenizer_proc":
            tokenizer = self._links.tokenizers[index]
            return lambda choice: choice.attempt.tokenizer is tokenizer and not choice.attempt.heard
        if role == "detokenizer_proc":
            return lambda choice: choice.shard in (-1, index)
        return lambda _: role == "gpu_runner"

    def _resubmit(self, request: OpenRequest, lost: list[OpenChoice], *, same_runner: bool) -> None:
        """Send choices of one request out again. Raises `EngineError` if the message has become too long for a pipe.
        same_runner: as of `OpenRequests.move`."""
        logprobs = request.message.params.logprobs is not None
        resumes = [request.stream.resume(choice.index, logprobs=logprobs) for choice in lost]
        rid = self._mint(len(lost))
        for choice in lost:
            self._links.abort(choice.rid, choice.attempt.tokenizer)
        resume = tuple(
            msgspec.structs.replace(resume, trial_tokens=choice.trial_tokens)
            for choice, (resume, _) in zip(lost, resumes, strict=True)
        )
        message = msgspec.structs.replace(request.message, rid=rid, resume=resume)
        tokenizer = self._links.tokenizers.resend(message)
        repeated = [count for _, count in resumes]
        self._requests.move(request, lost, rid=rid, tokenizer=tokenizer, repeated=repeated, same_runner=same_runner)
