"""Log-probabilities on their way through: read from the columns of a `StepFrame`, written to those of a `Deltas`."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

from asyncengine.wire.answers import LogprobColumns, PromptColumns
from asyncengine.wire.frames import PromptLogprobs, StepFrame


class Entry(NamedTuple):
    """A token's items: itself and the most likely ones, with their bytes."""

    ids: Sequence[int]
    logprobs: Sequence[float]
    tokens: Sequence[bytes]


class ShownLogprobs:
    """Entries that one delta carries; a few arrays, however many entries have merged."""

    __slots__ = ("ids", "item_counts", "logprobs", "text_offsets", "token_bytes", "token_sizes")

    def __init__(self) -> None:
        self.text_offsets = array("i")
        self.item_counts = array("i")
        self.ids = array("i")
        self.logprobs = array("f")
        self.token_bytes = bytearray()
        self.token_sizes = array("i")

    @property
    def num_entries(self) -> int:
        return len(self.text_offsets)

    @property
    def nbytes(self) -> int:
        """Size on the wire."""
        return 8 * len(self.text_offsets) + 12 * len(self.ids) + len(self.token_bytes)

    def add(self, text_offset: int, entry: Entry) -> None:
        self.text_offsets.append(text_offset)
        self.item_counts.append(len(entry.ids))
        self.ids.extend(entry.ids)
        self.logprobs.extend(entry.logprobs)
        self.token_bytes += b"".join(entry.tokens)
        self.token_sizes.extend(map(len, entry.tokens))


def step_logprobs(frame: StepFrame) -> Iterator[tuple[int, list[int], list[float]]]:
    """Rows of `frame` that have log-probabilities, ascending, with their most likely tokens' ids, and their own token's
    log-probability ahead of those tokens'."""
    top_ids, top_logprobs = memoryview(frame.top_ids).cast("i"), memoryview(frame.top_logprobs).cast("f")
    start = 0
    for row, logprob, end in zip(
        memoryview(frame.logprob_rows).cast("i"),
        memoryview(frame.logprobs).cast("f"),
        memoryview(frame.top_ends).cast("i"),
        strict=True,
    ):
        yield row, top_ids[start:end].tolist(), [logprob, *top_logprobs[start:end]]
        start = end


def prompt_columns(prompt: PromptLogprobs, token_bytes: Callable[[int], bytes]) -> PromptColumns:
    """With the items' bytes; of a request whose row is not known yet."""
    pieces = list(map(token_bytes, memoryview(prompt.ids).cast("i")))
    return PromptColumns(0, prompt, b"".join(pieces), _ends(map(len, pieces)))


def to_wire(requests: Sequence[ShownLogprobs | None]) -> LogprobColumns:
    """The columns of all requests of a message, in order."""
    parts = [part for part in requests if part is not None]
    return LogprobColumns(
        ends=_ends([0 if part is None else part.num_entries for part in requests]),
        text_offsets=b"".join([part.text_offsets.tobytes() for part in parts]),
        item_ends=_ends([count for part in parts for count in part.item_counts]),
        ids=b"".join([part.ids.tobytes() for part in parts]),
        logprobs=b"".join([part.logprobs.tobytes() for part in parts]),
        token_bytes=b"".join([part.token_bytes for part in parts]),
        token_ends=_ends([size for part in parts for size in part.token_sizes]),
    )


def _ends(sizes: Iterable[int]) -> bytes:
    return array("i", accumulate(sizes)).tobytes()
