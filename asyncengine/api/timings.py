"""Where a choice's time went, for the client that asks."""

from __future__ import annotations

import time

import msgspec

from asyncengine.timeline import Timeline

PARTS = ("accept", "tokenize", "queue", "prefill", "detokenize", "decode", "write")


class TimingsJson(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds. The parts follow each other without a gap, so they add up to `total_ms`, which is from the
    request's headers to its answer (of a stream: to the choice's last event):

        accept      the body is read and checked                decode  first token .. last token, both here
        tokenize    waits for the tokenizer, and is tokenized   write   the answer is put together; one that comes as a
        queue       waits for room in the running batch                 whole also waits for its other choices
        prefill     first step .. first token, in gpu_runner
        detokenize  the first token becomes text and gets here

    What did not happen has 0, its time being that of the part that it waited in. `first_token_ms` is the sum of the
    parts before `decode`.
    """

    accept_ms: float
    tokenize_ms: float
    queue_ms: float
    prefill_ms: float
    detokenize_ms: float
    decode_ms: float
    write_ms: float
    first_token_ms: float
    total_ms: float


def timings(timeline: Timeline, received_ns: int) -> TimingsJson:
    """Of a choice that has ended and is being written now. received_ns: when its request was, by CLOCK_MONOTONIC."""
    ends = part_ends(timeline, time.monotonic_ns())
    milliseconds = [round((end - begin) / 1e6, 3) for begin, end in zip([received_ns, *ends], ends, strict=False)]
    accept, tokenize, queue, prefill, detokenize, decode, write = milliseconds
    return TimingsJson(
        accept_ms=accept,
        tokenize_ms=tokenize,
        queue_ms=queue,
        prefill_ms=prefill,
        detokenize_ms=detokenize,
        decode_ms=decode,
        write_ms=write,
        first_token_ms=round((ends[4] - received_ns) / 1e6, 3),
        total_ms=round((ends[-1] - received_ns) / 1e6, 3),
    )


def part_ends(timeline: Timeline, written_ns: int) -> list[int]:
    """When each of `PARTS` ended (ns), which is when the next began."""
    ends = [
        timeline.arrived,
        timeline.encoded,
        timeline.started,
        timeline.computed,
        timeline.seen,
        timeline.finished,
        written_ns,
    ]
    for place in reversed(range(len(ends) - 1)):
        # what never came ended with what came next; and stamps of two processes may cross by microseconds
        ends[place] = min(ends[place] or ends[place + 1], ends[place + 1])
    return ends
