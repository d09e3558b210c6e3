"""What rows have produced and the API process has not been sent: one record a request, however far behind it is."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field
from itertools import accumulate

import msgspec

from asyncengine.wire.answers import Deltas, Marks, Openings, PromptColumns
from asyncengine.wire.base import Finish
from asyncengine.wire.frames import Open
from asyncengine.wire.pipes import Sender
from detokenizer_proc import logprob_columns
from detokenizer_proc.logprob_columns import ShownLogprobs

MAX_DELTAS_BYTES = 4 * 1024 * 1024
"""Text, ids and log-probabilities in one message, a single request's excepted; far below the pipes' limit."""
MARK_BYTES = 16


@dataclass(slots=True, eq=False)
class PendingDelta:
    """New text and ids of one request since its last `Deltas` entry. `queued`: it waits in its outbox. `opened`: its
    `Open`, until the first entry has been sent; and so `prompt`, if it was asked for. `marks`: as in `RowMarks`.
    `shown`: bytes at the beginning of `text`, and of what follows it, that the caller has already and that are not
    sent."""

    rid: int
    prompt_tokens: int
    cached_tokens: int
    shown: int
    opened: Open | None
    prompt: PromptColumns | None = None
    marks: bytes = b""
    text: list[str] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    logprobs: ShownLogprobs | None = None
    finish: int = int(Finish.NONE)
    stop_reason: int = -1
    queued: bool = False


class DeltaOutbox:
    """The way to one API worker. While the pipe is full, deltas merge in place instead of queueing.

    frames      t0  t1  t2  t3
    pipe        |sent|  full   |  free
    record rid  a   b   b+c    b+c+d -> one entry, nothing lost, order kept
    """

    def __init__(self, sender: Sender, *, shard: int) -> None:
        """shard: index of this detokenizer."""
        self.sender = sender
        self._shard = shard
        self._waiting: list[PendingDelta] = []

    @property
    def waiting(self) -> int:
        """Requests with something to send."""
        return len(self._waiting)

    def add(self, delta: PendingDelta) -> None:
        """Have `delta` sent with the next `send`; not for one that is queued already."""
        delta.queued = True
        self._waiting.append(delta)

    def send(self) -> bool:
        """Send what waits; False when the pipe filled up before all was sent."""
        while self._waiting:
            if not self.sender.writable():
                return False
            message, count = _to_wire(self._waiting, self._shard)
            if not self.sender.try_send(message):
                return False
            sent, self._waiting = self._waiting[:count], self._waiting[count:]
            for delta in sent:
                if delta.shown:
                    delta.shown -= min(delta.shown, len("".join(delta.text).encode()))
                delta.text.clear()
                delta.ids.clear()
                delta.logprobs = None
                delta.opened = delta.prompt = None
                delta.marks = b""
                delta.queued = False
        return True

    def check_integrity(self) -> None:
        """Raises AssertionError unless each waiting request waits once and knows it."""
        assert len({delta.rid for delta in self._waiting}) == len(self._waiting)
        assert all(delta.queued for delta in self._waiting)


def _to_wire(waiting: list[PendingDelta], shard: int) -> tuple[Deltas, int]:
    """A message of the first of `waiting`, at least one and as many as fit, and their number."""
    texts: list[bytes] = []
    text_ends: list[int] = []
    ids: list[int] = []
    ids_ends: list[int] = []
    end = logprob_bytes = prompt_bytes = mark_bytes = 0
    for delta in waiting:
        data = "".join(delta.text).encode()
        if delta.shown:
            data = data[delta.shown :]
        if delta.logprobs is not None:
            logprob_bytes += delta.logprobs.nbytes
        if delta.prompt is not None:
            prompt_bytes += len(delta.prompt.token_bytes) + 3 * len(delta.prompt.token_ends)
        if delta.marks:
            mark_bytes += len(delta.marks)
        size = end + len(data) + 4 * (len(ids) + len(delta.ids)) + logprob_bytes + prompt_bytes + mark_bytes
        if texts and size > MAX_DELTAS_BYTES:
            break
        texts.append(data)
        end += len(data)
        text_ends.append(end)
        ids += delta.ids
        ids_ends.append(len(ids))
    batch = waiting[: len(texts)]
    message = Deltas(
        rids=array("Q", [delta.rid for delta in batch]).tobytes(),
        text=b"".join(texts),
        text_ends=array("i", text_ends).tobytes(),
        ids=array("i", ids).tobytes(),
        ids_ends=array("i", ids_ends).tobytes(),
        finish=bytes([delta.finish for delta in batch]),
        stop_reason=array("i", [delta.stop_reason for delta in batch]).tobytes(),
        prompt_tokens=array("i", [delta.prompt_tokens for delta in batch]).tobytes(),
        cached_tokens=array("i", [delta.cached_tokens for delta in batch]).tobytes(),
        logprobs=logprob_columns.to_wire([delta.logprobs for delta in batch]) if logprob_bytes else None,
        openings=_openings(batch),
        prompts=tuple(
            msgspec.structs.replace(delta.prompt, row=row)
            for row, delta in enumerate(batch)
            if delta.prompt is not None
        )
        if prompt_bytes
        else (),
        shard=shard,
        marks=_marks(batch) if mark_bytes else None,
    )
    return message, len(batch)


def _openings(batch: list[PendingDelta]) -> Openings | None:
    opened = [(row, delta.opened) for row, delta in enumerate(batch) if delta.opened is not None]
    if not opened:
        return None
    stamps, sessions = array("q"), array("i")
    for _, first in opened:
        stamps.extend((first.queued_ns, first.started_ns, first.first_token_ns))
        sessions.extend((first.session_tokens, first.session_common))
    known = any(first.session_tokens >= 0 for _, first in opened)
    rows = array("i", [row for row, _ in opened]).tobytes()
    return Openings(rows, stamps.tobytes(), sessions.tobytes() if known else b"")


def _marks(batch: list[PendingDelta]) -> Marks:
    marked = [(row, delta.marks) for row, delta in enumerate(batch) if delta.marks]
    ends = array("i", accumulate(len(marks) // MARK_BYTES for _, marks in marked))
    rows = array("i", [row for row, _ in marked])
    return Marks(rows.tobytes(), ends.tobytes(), b"".join(marks for _, marks in marked))
