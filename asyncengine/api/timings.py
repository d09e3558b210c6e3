"""Where a choice's time went, for the client that asks."""

from __future__ import annotations

import time

import msgspec

from asyncengine.timeline import Timeline

PARTS = ("accept", "tokenize", "queue", "prefill", "detokenize", "decode", "write")


class PrefillChunkJson(msgspec.Struct, frozen=True, kw_only=True):
    """`tokens` that were computed in one step. at_ms: from the request's headers to when the step was planned. ms: from
    then until the next chunk was, or the choice had its token."""

    at_ms: float
    ms: float
    tokens: int


class PreemptionJson(msgspec.Struct, frozen=True, kw_only=True):
    """The choice lost its place to others at `at_ms`, and `ms` later had one again."""

    at_ms: float
    ms: float


class TimingsJson(msgspec.Struct, frozen=True, kw_only=True):
    """Milliseconds. The parts follow each other without a gap, so they add up to `total_ms`, which is from the
    request's headers to its answer (of a stream: to the choice's last event):

        accept      the body is read and checked                decode  first token .. last token, both here
        tokenize    waits for the tokenizer, and is tokenized   write   the answer is put together; one that comes as a
        queue       waits for room in the running batch                 whole also waits for its other choices
        prefill     first step .. first token, in gpu_runner
        detokenize  the first token becomes text and gets here

    `preempted_ms` is one more: the time without a place in the running batch since it lost that, which is no part of
    the others. What did not happen has 0, its time being that of the part that it waited in. `first_token_ms` is when
    `decode` began. prefill_chunks: in order, 128 at most between two tokens, the last of which stands for the rest;
    those behind a preemption compute again what was lost.
    """

    accept_ms: float
    tokenize_ms: float
    queue_ms: float
    prefill_ms: float
    detokenize_ms: float
    decode_ms: float
    write_ms: float
    preempted_ms: float
    first_token_ms: float
    total_ms: float
    prefill_chunks: list[PrefillChunkJson]
    preemptions: list[PreemptionJson]


def timings(timeline: Timeline, received_ns: int) -> TimingsJson:
    """Of a choice that has ended and is being written now. received_ns: when its request was, by CLOCK_MONOTONIC."""
    ends = part_ends(timeline, time.monotonic_ns())
    preemptions = timeline.preemptions
    parts, preempted = [], 0
    for begin, end in zip([received_ns, *ends], ends, strict=False):
        without = sum(max(0, min(end, each.end) - max(begin, each.begin)) for each in preemptions)
        parts.append(_ms(end - begin - without))
        preempted += without
    accept, tokenize, queue, prefill, detokenize, decode, write = parts
    return TimingsJson(
        accept_ms=accept,
        tokenize_ms=tokenize,
        queue_ms=queue,
        prefill_ms=prefill,
        detokenize_ms=detokenize,
        decode_ms=decode,
        write_ms=write,
        preempted_ms=_ms(preempted),
        first_token_ms=_ms(ends[4] - received_ns),
        total_ms=_ms(ends[-1] - received_ns),
        prefill_chunks=[
            PrefillChunkJson(at_ms=_ms(each.begin - received_ns), ms=_ms(each.end - each.begin), tokens=each.tokens)
            for each in timeline.chunks
        ],
        preemptions=[
            PreemptionJson(at_ms=_ms(each.begin - received_ns), ms=_ms(each.end - each.begin)) for each in preemptions
        ],
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


def _ms(ns: int) -> float:
    return round(ns / 1e6, 3)
