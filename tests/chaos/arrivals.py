"""When requests come and how long they are: a recorded stretch of a real service, scaled to a small machine.

The lengths decide what is asked (`cases`), the times when; a long run plays the stretch over and over. Bursts come on
top, at moments drawn from the run's seed.
"""

from __future__ import annotations

import csv
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count
from pathlib import Path

TRACE = Path(__file__).with_name("data") / "azure_conversation.csv"


@dataclass(frozen=True)
class Row:
    """A request of the trace. at: seconds after its first. Lengths in tokens."""

    at: float
    prompt: int
    output: int


def read_trace() -> list[Row]:
    with TRACE.open() as file:
        return [Row(float(at), int(prompt), int(output)) for at, prompt, output in list(csv.reader(file))[1:]]


def trace_times(trace: list[Row], *, rate: float, begin: int = 0) -> Iterator[float]:
    """Seconds from now at which requests come, `rate` a second in the mean, for ever. begin: the row to begin with."""
    period = trace[-1].at * len(trace) / (len(trace) - 1)
    scale = len(trace) / period / rate
    first = trace[begin].at
    for index in count(begin):
        around, row = divmod(index, len(trace))
        yield (around * period + trace[row].at - first) * scale


def burst_times(rng: random.Random, *, every: float) -> Iterator[float]:
    """Seconds from now at which bursts come, `every` so many seconds in the mean, for ever."""
    at = 0.0
    while True:
        at += rng.expovariate(1 / every)
        yield at
