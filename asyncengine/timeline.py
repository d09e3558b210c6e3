"""When what happened to one choice of a request, as the processes of the ring have stamped it."""

from __future__ import annotations

import msgspec


class Timeline(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """All in ns of CLOCK_MONOTONIC, one clock for all processes of a machine; 0 = it did not come to that.

        arrived   submitted to the engine                        seen      its first delta is in this process
        encoded   left the tokenizer for gpu_runner              finished  so is its last
        queued    gpu_runner took it in                          started   gpu_runner first planned it
        computed  gpu_runner had its first token

    Nearly in this order: arrived, encoded, queued, started, computed, seen, finished. `encoded` and `queued` are
    stamped by two processes within microseconds, and what is told last may be missing at a quick end.
    """

    arrived: int
    encoded: int
    queued: int
    started: int
    computed: int
    seen: int
    finished: int
