"""A trace as the traffic of many users: copies of it, each shifted in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from simulation.traces import TraceRequest


@dataclass(frozen=True)
class Traffic:
    """n requests in order of time: `requests[source[i]]` of copy `copy[i]` comes at `at_ns[i]`, the first not before 0.

    prefixes: of each of `requests`, names of its blocks, each of all of the prompt up to the block's end: equal names
    are equal prefixes. Those of another copy are other ones, `names` further each, unless copies share theirs (0).
    """

    requests: Sequence[TraceRequest]
    prefixes: Sequence[tuple[int, ...]]
    names: int
    at_ns: NDArray[np.int64]  # [n]
    source: NDArray[np.int32]  # [n]
    copy: NDArray[np.int32]  # [n]

    def __len__(self) -> int:
        return len(self.at_ns)

    def blocks(self, source: int, copy: int) -> tuple[int, ...]:
        blocks, shift = self.prefixes[source], self.names * copy
        return tuple([block + shift for block in blocks]) if shift else blocks


def superposed(
    requests: Sequence[TraceRequest],
    copies: int = 1,
    *,
    seed: int = 0,
    shift_s: float | None = None,
    share: bool = False,
) -> Traffic:
    """The first copy has the trace's times. Each other begins up to `shift_s` later (None: anywhere within the trace),
    drawn from `seed`; what would come behind the trace's end comes at its begin. share: copies have equal prefixes."""
    at = np.array([request.at_ns for request in requests], np.int64)
    duration = int(at[-1]) + 1
    most = duration if shift_s is None else min(duration, round(1e9 * shift_s) + 1)
    offsets = np.random.default_rng((seed, 3)).integers(0, most, copies)
    offsets[0] = 0
    times = ((at + offsets[:, None]) % duration).ravel()
    order = np.argsort(times, kind="stable")
    prefixes, names = _prefixes(requests)
    count = len(requests)
    return Traffic(
        requests=requests,
        prefixes=prefixes,
        names=0 if share else names,
        at_ns=times[order],
        source=(order % count).astype(np.int32),
        copy=(order // count).astype(np.int32),
    )


def _prefixes(requests: Sequence[TraceRequest]) -> tuple[list[tuple[int, ...]], int]:
    """As of `Traffic`, and how many names there are."""
    names: dict[tuple[int, int], int] = {}  # (name of the prefix before it, block) -> name
    prefixes = []
    for request in requests:
        own, name = [], -1
        for block in request.blocks:
            name = names.setdefault((name, block), len(names))
            own.append(name)
        prefixes.append(tuple(own))
    return prefixes, len(names)
