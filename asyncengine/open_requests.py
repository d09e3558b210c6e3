"""The requests of one API process that are somewhere in the ring.

A choice is known to the ring by its rid, and gets a new one whenever it is sent out again because a process was lost;
what still comes for an old rid finds nothing here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from asyncengine.prompt_messages import PromptMessage
from asyncengine.streams import RequestStream
from asyncengine.tokenizer_links import TokenizerLink
from asyncengine.wire.requests import PROVEN_TOKENS

SUSPECT_CRASHES = 2
MAX_TRIAL_TOKENS = 256
"""Whoever comes further before a crash is not tried for it: all others would wait for too long."""


class Attempt:
    """One time that a prompt was sent out: the tokenizer that got it, and its bytes while they are unacknowledged.
    heard: there was news of a choice that went with it, so it has left the tokenizer. refused: it never ran."""

    __slots__ = ("heard", "refused", "tokenizer", "unacked_bytes")

    def __init__(self, tokenizer: TokenizerLink, prompt_bytes: int) -> None:
        self.tokenizer = tokenizer
        self.unacked_bytes = prompt_bytes
        self.heard = False
        self.refused = False
        tokenizer.unacked_bytes += prompt_bytes

    def acknowledge(self) -> None:
        self.tokenizer.unacked_bytes -= self.unacked_bytes
        self.unacked_bytes = 0


class OpenChoice:
    """Choice number `index` under its present rid. shard: the detokenizer that has it, -1 before its first news under
    this rid. repeated: how many of the next tokens the stream has already. old_rids: those before that the same
    gpu_runner knows it by. crashes: of gpu_runner while it had a row, one after the other and each as far from where it
    was sent out, and of which nobody is convicted."""

    __slots__ = (
        *("_crashed_after", "_from", "attempt", "crashes", "index", "old_rids", "repeated", "rid", "shard"),
        "stream",
    )

    def __init__(self, stream: RequestStream, index: int, rid: int, attempt: Attempt, *, repeated: int = 0) -> None:
        self.stream = stream
        self.index = index
        self.rid = rid
        self.attempt = attempt
        self.shard = -1
        self.repeated = repeated
        self.old_rids: tuple[int, ...] = ()
        self.crashes = 0
        self._crashed_after = 0  # `_ran` at the last of them
        self._from = stream.num_tokens(index) - repeated

    def follow(self, old: OpenChoice, *, same_runner: bool) -> None:
        """It takes the place of `old`. same_runner: gpu_runner is still the one that had that."""
        self.crashes, self._crashed_after = old.crashes, old._crashed_after
        if same_runner:
            self.old_rids = (*old.old_rids, old.rid)
            self._from -= old._ran

    @property
    def _ran(self) -> int:
        """How many tokens it has had of the present gpu_runner."""
        return self.stream.num_tokens(self.index) - self.repeated - self._from

    @property
    def trial_tokens(self) -> int:
        """As of `Resume`. Once may be chance, and is worth no trial."""
        return self._crashed_after + PROVEN_TOKENS if self.crashes >= SUSPECT_CRASHES else 0

    def crashed(self) -> None:
        """gpu_runner crashed while it had a row. What crashes it does so at a certain token, and then again at once; or
        after so many tokens, and then again after as many."""
        ran = self._ran
        at_once, as_late = ran <= PROVEN_TOKENS, abs(ran - self._crashed_after) <= PROVEN_TOKENS
        self.crashes = self.crashes + 1 if at_once or (as_late and ran <= MAX_TRIAL_TOKENS) else 1
        self._crashed_after = ran

    def opened(self, shard: int) -> None:
        """Detokenizer `shard` has it: there is news of it."""
        self.shard = shard
        self.attempt.heard = True

    def skip_repeated(self, ids: bytes) -> bytes:
        """What is new of `ids`, an int32 array as bytes."""
        count = min(self.repeated, len(ids) // 4)
        self.repeated -= count
        return ids[4 * count :]


class OpenRequest:
    """An open request: its stream, and its prompt's message and size in case it must be sent again. name: what its
    caller calls it, "" for nothing. choices: by index, once it was added; they do not lead back here, so that all of
    this goes with its last user."""

    __slots__ = ("choices", "message", "name", "prompt_bytes", "stream")

    def __init__(self, stream: RequestStream, message: PromptMessage, prompt_bytes: int, name: str) -> None:
        self.stream = stream
        self.message = message
        self.prompt_bytes = prompt_bytes
        self.name = name
        self.choices: list[OpenChoice] = []

    @property
    def full_name(self) -> tuple[str, str]:
        """Names are each tenant's own."""
        return self.message.terms.tenant, self.name

    def acknowledge(self) -> None:
        """No tokenizer has anything left to do for it."""
        for choice in self.choices:
            choice.attempt.acknowledge()


class OpenRequests:
    """Found by tenant and name, which several may share; `get` finds a choice by its present rid."""

    def __init__(self) -> None:
        self._requests: dict[OpenRequest, None] = {}
        self._by_rid: dict[int, OpenChoice] = {}
        self._by_name: dict[tuple[str, str], dict[OpenRequest, None]] = {}
        self.get = self._by_rid.get

    @property
    def count(self) -> int:
        return len(self._requests)

    @property
    def num_unfinished(self) -> int:
        """Choices that run or wait, as far as this process has heard."""
        return sum(len(request.stream.unfinished) for request in self._requests if not request.stream.ended)

    def __iter__(self) -> Iterator[OpenRequest]:
        """Oldest first. They may change meanwhile."""
        return iter(list(self._requests))

    def named(self, tenant: str, name: str) -> list[OpenRequest]:
        return list(self._by_name.get((tenant, name), ()))

    def add(self, request: OpenRequest, *, num_choices: int, tokenizer: TokenizerLink) -> None:
        """Take in a request that was sent to `tokenizer`."""
        attempt = Attempt(tokenizer, request.prompt_bytes)
        for index in range(num_choices):
            choice = OpenChoice(request.stream, index, request.message.rid + index, attempt)
            request.choices.append(choice)
            self._by_rid[choice.rid] = choice
        self._requests[request] = None
        if request.name:
            self._by_name.setdefault(request.full_name, {})[request] = None

    def move(
        self,
        request: OpenRequest,
        choices: Sequence[OpenChoice],
        *,
        rid: int,
        tokenizer: TokenizerLink,
        repeated: Sequence[int],
        same_runner: bool = False,
    ) -> None:
        """Choices of a request were sent out again, by way of `tokenizer` and as `rid` and those behind it.
        same_runner: to the gpu_runner that had them."""
        attempt = Attempt(tokenizer, request.prompt_bytes)
        for place, (old, count) in enumerate(zip(choices, repeated, strict=True)):
            # where others stay behind, there was news of them: the tokenizer has done its part for all
            old.attempt.acknowledge()
            del self._by_rid[old.rid]
            choice = OpenChoice(request.stream, old.index, rid + place, attempt, repeated=count)
            choice.follow(old, same_runner=same_runner)
            request.choices[old.index] = choice
            self._by_rid[choice.rid] = choice

    def remove(self, request: OpenRequest) -> None:
        request.acknowledge()
        for choice in request.choices:
            del self._by_rid[choice.rid]
        del self._requests[request]
        if request.name:
            same = self._by_name[request.full_name]
            del same[request]
            if not same:
                del self._by_name[request.full_name]

    def check_integrity(self) -> None:
        """Raises AssertionError unless every choice of every request is found by its rid, and nothing else is."""
        choices = {choice.rid: choice for request in self._requests for choice in request.choices}
        assert choices == self._by_rid
        assert all(rid == choice.rid for rid, choice in choices.items())
        assert all(
            choice.index == index and choice.stream is request.stream
            for request in self._requests
            for index, choice in enumerate(request.choices)
        )
