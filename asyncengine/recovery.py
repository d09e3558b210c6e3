"""What an API process does when another process was lost and replaced: sends its requests out again.

    stream      "The cap" | gpu_runner lost ................ | "ital is"
    rid 7       tokens 1-3 | aborted; what still comes of it is dropped
    rid 9                  | prompt + tokens 1-3, 7 bytes of text are there | tokens 4, 5

A choice sent out again has a new rid, so nothing of the old one can mix with it; it goes on behind the tokens that its
stream has, and only what the stream does not have is told again. Nothing its caller sees shows that it happened.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from asyncengine.config import Role
from asyncengine.errors import EngineError
from asyncengine.links import Links
from asyncengine.open_requests import OpenChoice, OpenRequest, OpenRequests
from asyncengine.streams import RequestStream

logger = logging.getLogger(__name__)


class Recovery:
    def __init__(self, *, links: Links, requests: OpenRequests, mint: Callable[[int], int]) -> None:
        """mint: the first of so many rids that nobody has had."""
        self._links = links
        self._requests = requests
        self._mint = mint

    def relink(self, role: Role, index: int, life: int) -> None:
        """Process `index` of `role` was lost, and number `life` is ready in its place. Idempotent. The owner flushes
        the links afterwards."""
        if not self._links.relink(role, index, life):
            return
        affected = self._affected(role, index)
        choices = sent = 0
        unsendable: list[tuple[RequestStream, EngineError]] = []
        for request in self._requests:
            running = [] if request.stream.ended else request.stream.unfinished
            lost = [choice for choice in map(request.choices.__getitem__, running) if affected(choice)]
            if not lost:
                continue
            try:
                self._resubmit(request, lost)
            except EngineError as error:
                unsendable.append((request.stream, error))
            else:
                choices, sent = choices + len(lost), sent + 1
        if role == "tokenizer_proc":
            self._links.tokenizers[index].ask_again()
        if sent:
            logger.warning("%s %d was replaced: sent %d choices of %d requests again", role, index, choices, sent)
        for stream, reason in unsendable:  # only now: whoever hears it may close other requests
            stream.fail(reason)

    def _affected(self, role: Role, index: int) -> Callable[[OpenChoice], bool]:
        """Whether a choice that has not ended may have been lost with the process."""
        if role == "tokenizer_proc":
            tokenizer = self._links.tokenizers[index]
            return lambda choice: choice.attempt.tokenizer is tokenizer and not choice.attempt.heard
        if role == "detokenizer_proc":
            return lambda choice: choice.shard in (-1, index)
        return lambda _: role == "gpu_runner"

    def _resubmit(self, request: OpenRequest, lost: list[OpenChoice]) -> None:
        """Send choices of one request out again. Raises `EngineError` if the message has become too long for a pipe."""
        logprobs = request.message.params.logprobs is not None
        resumes = [request.stream.resume(choice.index, logprobs=logprobs) for choice in lost]
        rid = self._mint(len(lost))
        for choice in lost:
            self._links.abort(choice.rid, choice.attempt.tokenizer)
        message = msgspec.structs.replace(request.message, rid=rid, resume=tuple(resume for resume, _ in resumes))
        tokenizer = self._links.tokenizers.resend(message)
        self._requests.move(request, lost, rid=rid, tokenizer=tokenizer, repeated=[count for _, count in resumes])
