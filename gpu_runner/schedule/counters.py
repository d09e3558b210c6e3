"""What the scheduler has done since its start."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Rows, tokens and preemptions, and how often the cache started over because its bookkeeping was wrong. Gauges have
    the same names."""

    preemptions: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefix_query_tokens: int = 0
    prefix_hit_tokens: int = 0
    finished: int = 0
    aborted: int = 0
    cache_repairs: int = 0
