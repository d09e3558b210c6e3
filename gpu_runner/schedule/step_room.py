"""How many prompt tokens fit in a step, for the rows that decode beside them not to wait longer than they may."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Mapping

from asyncengine.config import ServiceClass
from gpu_runner.schedule.buckets import bucket_for
from gpu_runner.schedule.running import DecodeRows, Running
from gpu_runner.schedule.step_time import StepTime, attended_pairs

PREFILL_SHARE = 1 / 3
"""Of a step's time, to which prefill is entitled even though the step then takes longer than the target: a device
whose steps are slow by themselves would else hardly admit anybody. It is up to twice as much the further decoding alone
misses the target, which nothing keeps then."""
LEAST_TOKENS = 16
LEAST_SHARE = 32
"""A step with prefill has no fewer tokens of it than these, nor than one in so many of the largest step's, in time or
not: a chunk costs a step whatever its size, and a prompt in chunks of a few tokens costs everybody more than it spares
them."""
_MAX_MARGIN = 0.2


class StepRoom:
    """One step while its chunks are placed."""

    def __init__(
        self, step_time: StepTime, buckets: tuple[int, ...], *, limit_ns: float, tokens: int, context: int
    ) -> None:
        """limit_ns: what the step may take. tokens, context: as its decode rows have them."""
        self._step_time = step_time
        self._buckets = buckets
        self._limit_ns = limit_ns
        self._tokens = tokens
        self._context = context
        self._pairs = 0
        self._least = max(LEAST_TOKENS, buckets[-1] // LEAST_SHARE)

    def take(self, position: int, length: int) -> int:
        """How many of the row's next `length` tokens, behind `position` others, the step has room for; it holds them
        then. Fewer than all only where that makes the step a bucket."""
        if self._limit_ns == math.inf:
            return length
        tokens, buckets = self._tokens, self._buckets
        if not self._fits(bucket_for(buckets, tokens + length), position, length):
            first = bisect_right(buckets, tokens)
            last = bisect_left(buckets, tokens + length)
            fits = bisect_left(range(first, last), True, key=lambda i: not self._fits_bucket(i, position)) + first
            room = buckets[fits - 1] - tokens if fits > first else 0
            if room < self._least:
                if self._pairs:
                    return 0
                room = bucket_for(buckets, min(tokens + self._least, buckets[-1])) - tokens
            length = min(length, room)
        self._tokens += length
        self._pairs += attended_pairs(position, length)
        return length

    def _fits_bucket(self, index: int, position: int) -> bool:
        bucket = self._buckets[index]
        return self._fits(bucket, position, bucket - self._tokens)

    def _fits(self, bucket: int, position: int, length: int) -> bool:
        pairs = self._pairs + attended_pairs(position, length)
        return self._step_time.step_ns(bucket, self._context, pairs) <= self._limit_ns


class StepRooms:
    """Makes the room of each step with prefill. gap_ns: the longest step beside a decoding row, by its class; empty =
    no limit."""

    def __init__(
        self,
        step_time: StepTime,
        buckets: tuple[int, ...],
        running: Running,
        gap_ns: Mapping[ServiceClass, int],
    ) -> None:
        self._step_time = step_time
        self._buckets = buckets
        self._running = running
        self._gap_ns = gap_ns

    def beside(self, rows: DecodeRows) -> StepRoom:
        """Of a step in which these rows decode. A row that waits for its mask is a stream all the same."""
        gap_ns: float = math.inf
        if self._gap_ns:
            if rows.any_interactive or self._running.holds_interactive:
                gap_ns = self._gap_ns["interactive"]
            elif len(rows) or self._running.num_held:
                gap_ns = self._gap_ns["background"]
        if gap_ns == math.inf:
            return StepRoom(self._step_time, self._buckets, limit_ns=gap_ns, tokens=len(rows), context=0)
        tokens, context = len(rows), int(rows.start.sum())
        limit_ns = gap_ns * (1.0 - min(self._step_time.error, _MAX_MARGIN))
        if tokens:
            alone_ns = self._step_time.decode_ns(bucket_for(self._buckets, tokens), context)
            late_ns = max(0.0, alone_ns - gap_ns)
            limit_ns = max(limit_ns, (alone_ns + late_ns) / (1.0 - PREFILL_SHARE))
        return StepRoom(self._step_time, self._buckets, limit_ns=limit_ns, tokens=tokens, context=context)
